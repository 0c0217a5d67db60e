"""One validation style: what an argument can be is said by its annotation (`lr: Positive`), which
`core/limits.py` and `config/convert.py` hold it to; constructors compare no argument with a number.

Looked at are `__init__`, `__post_init__` and `check` of every class, outside `models/`: networks
are torch's, and no metaclass of ours makes them. What depends on two arguments at once, or on
something read elsewhere, no annotation can say; it stays in the constructor. Not seen: a comparison
inside a function that a constructor calls, or with a named constant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "fedlens"
CHECKS = ("__init__", "__post_init__", "check")
# Refused before a cluster is started; an annotation is looked at when the object is made.
EXEMPT = {"models", "engines/ray.py"}
ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def limits_by_hand(source: str) -> list[int]:
    """Lines of constructors that refuse one argument for its size."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            for method in (m for m in methods if m.name in CHECKS):
                found += [test.lineno for test in refusals(method) if is_limit(test, method)]
    return found


def refusals(method: ast.FunctionDef) -> Iterator[ast.expr]:
    """The single reasons for which it raises: each side of an `or` is one."""
    for node in ast.walk(method):
        if isinstance(node, ast.If) and any(isinstance(s, ast.Raise) for s in node.body):
            yield from alternatives(node.test)
        elif isinstance(node, ast.Assert):
            yield from alternatives(node.test, negated=True)


def alternatives(test: ast.expr, negated: bool = False) -> Iterator[ast.expr]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from alternatives(test.operand, not negated)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if negated else ast.Or):
        for value in test.values:
            yield from alternatives(value, negated)
    else:
        yield test


def is_limit(test: ast.expr, method: ast.FunctionDef) -> bool:
    """Does it hold one argument, or each of several in a loop, against a number?"""
    inside = list(ast.walk(test))
    loops = [node for node in inside if isinstance(node, ast.comprehension)]
    each = {n.id for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    arguments = {a.arg for a in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    read = {name for node in inside if (name := argument(node, arguments))}
    compared = {sized(node) for node in inside if isinstance(node, ast.Compare)} - {""}
    return bool(compared & each) or (len(read) == 1 and bool(compared & read))


def argument(node: ast.AST, arguments: set[str]) -> str:
    """The name of an argument that is read: `lr`, or `self.lr`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else ""
    return node.id if isinstance(node, ast.Name) and node.id in arguments else ""


def sized(compare: ast.Compare) -> str:
    """What is plainly compared with numbers: "lr" of `0 < self.lr <= 1`."""
    if not any(isinstance(op, ORDERINGS) for op in compare.ops):
        return ""
    sides = [side for side in (compare.left, *compare.comparators) if not is_number(side)]
    if len(sides) != 1:
        return ""
    side = sides[0]
    return side.id if isinstance(side, ast.Name) else argument(side, set())


def is_number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def test_limits_are_annotations() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if not {place, place.split("/")[0]} & EXEMPT:
            found += [f"{place}:{line}" for line in limits_by_hand(path.read_text())]
    assert not found, "annotate the argument with a limit of core/limits.py instead"


@pytest.mark.parametrize(
    "test",
    [
        "self.lr < 0",
        "not self.lr > 0",
        "0 >= lr",
        "not 0 < self.lr <= 1",
        "self.lr < -1.5 or self.mode == 'b'",
        "self.size is not None and self.size != 0 and self.size < 16",
        "not (lr > 0 and self.mode)",
        "not all(0 <= p <= 1 for p in (lr, self.mode))",
        "any(factor <= 0 for _, factor in self.factors)",
        "bad := [p for p, factor in self.factors if not factor > 0]",
    ],
)
@pytest.mark.parametrize("method", ["__init__(self, lr)", "__post_init__(self, lr)"])
def test_the_rule_sees_a_limit_by_hand(test: str, method: str) -> None:
    written = f"class A:\n  def {method}:\n    if {test}:\n      raise ValueError\n"
    assert limits_by_hand(written) == [3]


def test_the_rule_sees_an_assertion() -> None:
    written = "class A:\n  def check(self, inner):\n    assert self.lr > 0 and self.batch > 1"
    assert limits_by_hand(written) == [3, 3]


@pytest.mark.parametrize(
    "test",
    [
        "self.eta * self.lam > 1",
        "self.mode == 'client' and self.bound == 0",
        "self.decay < 1 and self.mode != 'pnp'",
        "len(self.sizes) < 2",
        "self.low > self.high",
        "inner.least > 3",
    ],
)
def test_the_rule_lets_pass_what_no_annotation_can_say(test: str) -> None:
    written = f"class A:\n  def check(self, inner):\n    if {test}:\n      raise ValueError\n"
    assert limits_by_hand(written) == []
