"""FedDeblur with noise: what a camera sends is held near the common image and blurred by chance.

w_k becomes x + min(1, B / |w_k - x|) (w_k - x) + N(0, sigma^2) on every pixel, |.| the root mean
square over the pixels of all scenes. The dual stays as it is with the client, so the mean over n
cameras is off by sigma / sqrt n a pixel in each round, which the server's prior smooths.

No epsilon goes with it: duals add up what pixels say over all rounds, and nobody has bounded how
much one pixel, or one photo, moves them. It makes the equations of `fedlens audit` noisy, and how
much that helps is measured (experiments/privacy), not proven.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import ClassVar

from fedlens.core.algorithm import Algorithm, Layer, StackError, Stage
from fedlens.core.client import Client, generator
from fedlens.core.limits import NotNegative, Positive
from fedlens.core.message import Message
from fedlens.core.noise import draw_normal
from fedlens.core.tree import Tree
from fedlens.deblur import spectrum
from fedlens.deblur.feddeblur import FedDeblur

_STREAM = 0xDB


@dataclass
class NoisyViews(Layer):
    """
    Args:
        sigma: deviation of the noise on each pixel, in grey levels.
        bound: B, the largest root mean square of w_k - x, in grey levels; None does not clip.
    """

    sigma: NotNegative = 5.0
    bound: Positive | None = None
    stage: ClassVar[Stage] = "merge"
    _real: bool = field(default=False, init=False, repr=False, compare=False)

    def check(self, inner: Algorithm) -> None:
        base = inner.base
        if not isinstance(base, FedDeblur):
            raise StackError(
                f"NoisyViews blurs what FedDeblur's cameras send, {type(base).__name__} has none:"
                " PrivateMean or DPSGD are for what is trained"
            )
        if base.masks or base.recall:
            raise StackError(
                "NoisyViews works on whole images of every round: set masks=false and recall=false"
            )

    def client_step(self, message: Message, client: Client) -> Message:
        reply = self.inner.client_step(message, client)
        if "w" not in reply.trees:
            raise ValueError("NoisyViews needs everybody in every round: set no cohort")
        x = message.trees["x"]
        widths = {n: client.data[n].width for n in x}
        gap = {n: w - x[n] for n, w in reply.trees["w"].items()}
        factor = self._factor(gap, widths)
        seeded = generator(message.header.seed, message.round, client.id, _STREAM)
        rng = None if self._real else seeded
        sent: Tree = {}
        for name, d in gap.items():
            shape = (d.shape[0], d.shape[1], widths[name])
            noise = draw_normal(math.prod(shape), self.sigma, rng).view(shape).to(d.dtype)
            sent[name] = x[name] + factor * d + spectrum.forward(noise)
        return reply.put(w=sent)

    def _factor(self, gap: Tree, widths: dict[str, int]) -> float:
        if self.bound is None:
            return 1.0
        squares = sum(spectrum.image_norm(d, widths[n]) ** 2 for n, d in gap.items())
        pixels = sum(d.shape[0] * d.shape[1] * widths[n] for n, d in gap.items())
        return min(1.0, self.bound / max(math.sqrt(squares / pixels), 1e-12))

    def deployed(self) -> Algorithm:
        layer = copy.copy(self)
        layer.inner, layer._real = self.inner.deployed(), True
        return layer
