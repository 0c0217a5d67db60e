"""Numbers an argument can take, said where it is declared: `lr: Positive = 0.1`. `config.convert`
refuses others in one sentence.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Fraction = Annotated[float, Ge(0), Lt(1)]  # never the whole
PositiveShare = Annotated[float, Gt(0), Le(1)]  # never nothing
ProperShare = Annotated[float, Gt(0), Lt(1)]  # neither
Several = Annotated[int, Ge(2)]  # classes to be told apart
