"""The numbers of docs/raf_theory.md: where RAF's equations 8, 11 and 18 differ, and what holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


def eq8(a: Tensor, b: Tensor, w: Tensor, teacher: Tensor) -> Tensor:
    return (b @ teacher - a @ w).square().sum()


def eq11(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return w @ a.T @ (b - a) @ w


def eq18(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return 2 * a.T @ (a - b) @ w


def slope(value: Tensor, w: Tensor) -> Tensor:
    return torch.autograd.grad(value, w)[0]


def test_the_three_equations_with_numbers() -> None:
    """A = 1, B = 3, w = 1: (3 - 1)^2 = 4 and 2 (1 - 3) = -4; 1 (3 - 1) = 2 and 2 (3 - 1) = 4."""
    a, b, w = torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.tensor([1.0], requires_grad=True)
    first, second = eq8(a, b, w, w.detach()), eq11(a, b, w)
    assert (first.item(), second.item()) == (4.0, 2.0)
    assert (slope(first, w).item(), slope(second, w).item()) == (-4.0, 4.0)
    assert eq18(a, b, w).item() == -4.0


def test_the_step_is_no_gradient() -> None:
    """With the sign repaired, 11's gradient is 18 only where A^T B is symmetric: A = [1, 0], B =
    [0, 1] has A^T (A - B) = [[1, -1], [0, 0]]."""
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    matrix = a.T @ (a - b)
    assert matrix.tolist() == [[1.0, -1.0], [0.0, 0.0]]
    assert slope(-eq11(a, b, w), w).tolist() == [0.0, -1.0]  # (2w1 - w2, -w1)
    assert eq18(a, b, w).tolist() == [-2.0, 0.0]
    assert torch.equal(slope(eq8(a, b, w, w.detach()), w), eq18(a, b, w))


def test_more_distillation_makes_the_surrogate_concave() -> None:
    """A = 1, B = 2: the repaired 11 is -w^2; the second derivative of 4 w^2 - alpha w^2 + gamma / 2
    w^2 is 8 - 2 alpha + gamma."""
    a, b, gamma = torch.tensor([[1.0]]), torch.tensor([[2.0]]), 0.5

    def whole(alpha: float, w: Tensor) -> Tensor:
        return 4 * w @ w - alpha * eq11(a, b, w) + gamma / 2 * w @ w

    for alpha in (4.0, 4.25, 4.5):
        bend = torch.autograd.functional.hessian(
            lambda w, alpha=alpha: whole(alpha, w), torch.ones(1)
        )
        assert bend.item() == pytest.approx(8 - 2 * alpha + gamma)


def field(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """M of F(w) = M w - b, without gamma."""
    return 2 * b.T @ b + 2 * alpha * a.T @ (a - b)


def test_one_level_is_monotone_up_to_alpha_2() -> None:
    torch.manual_seed(0)
    for _ in range(300):
        n = int(torch.randint(1, 8, ()))
        b, a = torch.randn(n, 5, dtype=torch.float64), 3 * torch.randn(n, 5, dtype=torch.float64)
        a = a * torch.rand((), dtype=torch.float64)
        for alpha in (0.5, 1.0, 2.0):
            m = field(a, b, alpha)
            parts = (2 - alpha) * b.T @ b + alpha * (a.T @ a + (a - b).T @ (a - b))
            assert torch.allclose((m + m.T) / 2, parts)
            assert torch.linalg.eigvalsh(parts).min() > -1e-9


def test_beyond_alpha_4_steps_run_away() -> None:
    """A = B / 2: M = 2 B^2 (1 - alpha / 4); B = 1."""
    a, b = torch.tensor([[0.5]]), torch.tensor([[1.0]])
    for alpha, ends in ((1.0, 0.0), (3.9, 0.6), (5.0, 12.0)):
        w = torch.ones(1)
        for _ in range(50):
            w = w - 0.1 * field(a, b, alpha) @ w
        assert w.item() == pytest.approx((1 - 0.2 * (1 - alpha / 4)) ** 50, rel=1e-4)
        assert w.item() == pytest.approx(ends, abs=0.7)


def test_bilinear_enlargement_shrinks_the_finest_patterns() -> None:
    for low, high, least in (((8, 6), (16, 12), 0.58), ((48, 36), (64, 48), 0.41)):
        factor = 1.0
        for small, large in zip(low, high, strict=True):
            one = F.interpolate(torch.eye(small)[:, None], size=large, mode="linear")[:, 0]
            factor *= float(torch.linalg.svdvals(one).min())
        assert factor == pytest.approx(least, abs=0.005)
