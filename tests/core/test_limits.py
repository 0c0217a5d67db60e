"""Objects made in Python are held to the limits of their annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import Mock

import pytest

from fedlens.core.limits import Fraction, Limited, Positive, Several
from fedlens.deblur.scenes import Scene
from fedlens.engines.flaky import Flaky


@dataclass
class Part(metaclass=Limited):
    rate: Positive = 1.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    factors: tuple[tuple[str, Positive], ...] = ()
    size: Several | Literal[0] | None = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 0}, "Part: rate is 0, but it must be above 0"),
        ({"betas": (0.9, 1.0)}, "Part: betas is .*, but it must be of at least 0 and below 1 in"),
        ({"factors": (("a", 1), ("b", -1.0))}, "factors is .*, but it must be above 0 in every"),
        ({"factors": [["a", float("nan")]]}, "it must be above 0 in every entry$"),
        ({"size": 1}, "size is 1, but it must be of at least 2"),
    ],
)
def test_what_breaks_a_limit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Part(**given)


@pytest.mark.parametrize(
    "given",
    [{"size": None}, {"size": 0}, {"size": 2}, {"factors": (("a", 0.5),)}, {"betas": (0, 0)}],
)
def test_what_keeps_them_is_made(given: dict[str, Any]) -> None:
    made = Part(**given)
    assert all(getattr(made, name) == value for name, value in given.items())


def test_a_scene_has_sixteen_pixels_or_its_own_size() -> None:
    assert [Scene(size=size).size for size in (None, 0, 16)] == [None, 0, 16]
    with pytest.raises(ValueError, match="size is 15, but it must be of at least 16"):
        Scene(size=15)


@pytest.mark.parametrize("share", ["before", "after", "delay"])
def test_a_bad_network_loses_shares(share: str) -> None:
    with pytest.raises(ValueError, match=f"{share} is 1.5, but it must be of at least 0 and at"):
        Flaky(Mock(), **{share: 1.5})
