"""Local steps with noise (DP-SGD, Abadi et al., 2016), in the one training loop.

A batch: each example is in it by itself with probability B / n (Poisson). A step:
g = (sum_i g_i min(1, C / |g_i|) + N(0, (z C)^2)) / B, where g_i is the gradient of example i alone,
over all weights that learn, and B is the batch that is expected, never the one that came. What the
optimiser makes of g (momentum, Adam, weight decay) costs no privacy.

Gradients of single examples come from `torch.func` (vmap of grad), a microbatch at a time; where an
operator does not know it, one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlens.core.client import Batch, Data, NoisySteps
from fedlens.core.noise import draw_chosen, draw_normal

BatchLoss = Callable[[Batch], Tensor]
Gradients = tuple[dict[str, Tensor], Tensor]  # by parameter, one row an example; and the losses


def chosen(data: Data, size: int, steps: int, noisy: NoisySteps, rng: Generator) -> Iterator[Batch]:
    """Batches of `size` examples on average; an empty one has nothing in it. rng: of whatever
    changes an example."""
    rate = min(1.0, size / max(1, len(data)))
    for _ in range(steps):
        index = draw_chosen(len(data), rate, noisy.rng)
        yield data.batch(index, rng) if len(index) else {}


def noisy_gradients(
    model: nn.Module, loss: BatchLoss, noisy: NoisySteps, size: int
) -> Callable[[Batch], Tensor]:
    """What fills in `grad` of the model's parameters for a batch, and gives its mean loss."""
    single = ExampleGradients(model, loss)

    def differentiate(batch: Batch) -> Tensor:
        learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
        flat = torch.contiguous_format
        total = {n: torch.zeros_like(p, memory_format=flat) for n, p in learning.items()}
        losses = []
        for part in _pieces(batch, noisy.microbatch):
            gradients, each = single(part)
            _add_clipped(total, gradients, noisy.clip)
            losses.append(each)
        counts = [p.numel() for p in learning.values()]
        drawn = torch.split(draw_normal(sum(counts), noisy.noise * noisy.clip, noisy.rng), counts)
        for (n, p), noise in zip(learning.items(), drawn, strict=True):
            p.grad = total[n].add_(noise.view(p.shape).to(p)).div_(size)
        return torch.cat(losses).mean() if losses else torch.zeros(())

    return differentiate


class ExampleGradients:
    """Gradients of each example of a batch by itself, of the parameters that learn."""

    def __init__(self, model: nn.Module, loss: BatchLoss) -> None:
        self.model = model
        self.holder = _Holder(model, loss)
        self.by_vmap = True

    def __call__(self, batch: Batch) -> Gradients:
        learning = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.by_vmap:
            try:
                return self._together(learning, batch)
            except RuntimeError:  # an operator that vmap does not know; a real error comes again
                self.by_vmap = False
        return self._one_by_one(learning, batch)

    def _together(self, learning: Mapping[str, nn.Parameter], batch: Batch) -> Gradients:
        def alone(weights: dict[str, Tensor], example: Batch) -> Tensor:
            return self._alone(weights, {k: v[None] for k, v in example.items()})

        weights = {n: p.detach() for n, p in learning.items()}
        made = vmap(grad_and_value(alone), in_dims=(None, 0), randomness="different")
        with sdpa_kernel(SDPBackend.MATH):  # the attention that vmap knows
            gradients, losses = made(weights, batch)
        return gradients, losses.detach()

    def _alone(self, weights: Mapping[str, Tensor], example: Batch) -> Tensor:
        """The loss of one. What a network remembers of it (its buffers) has no noise: it is
        written to copies, and forgotten."""
        kept = {n: t.clone() for n, t in self.model.named_buffers()}
        named = {f"model.{n}": t for n, t in {**kept, **weights}.items()}
        found: Tensor = functional_call(self.holder, named, (example,))
        return found

    def _one_by_one(self, learning: Mapping[str, nn.Parameter], batch: Batch) -> Gradients:
        rows: dict[str, list[Tensor]] = {n: [] for n in learning}
        losses = []
        for example in _pieces(batch, 1):
            loss = self._alone(learning, example)
            found = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
            for (n, p), g in zip(learning.items(), found, strict=True):
                rows[n].append(torch.zeros_like(p) if g is None else g)
            losses.append(loss.detach())
        return {n: torch.stack(r) for n, r in rows.items()}, torch.stack(losses)


class _Holder(nn.Module):
    """A loss as a module, so that `functional_call` can put other weights into the model."""

    def __init__(self, model: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


def _pieces(batch: Batch, size: int) -> Iterator[Batch]:
    count = len(next(iter(batch.values()))) if batch else 0
    for low in range(0, count, size):
        yield {k: v[low : low + size] for k, v in batch.items()}


def _add_clipped(total: Mapping[str, Tensor], gradients: Mapping[str, Tensor], clip: float) -> None:
    flat = {n: g.flatten(1) for n, g in gradients.items()}
    lengths = torch.stack([g.norm(dim=1) for g in flat.values()]).norm(dim=0)
    factors = clip / lengths.clamp_min(clip)
    # one that is not finite would show itself by spoiling the sum: it is left out
    if not bool((fine := lengths.isfinite()).all()):
        flat, factors = {n: g[fine] for n, g in flat.items()}, factors[fine]
    for n, g in flat.items():
        total[n].view(-1).addmv_(g.T, factors.to(g.dtype))
