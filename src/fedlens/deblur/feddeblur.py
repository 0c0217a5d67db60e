r"""FedDeblur: one sharp scene from private, blurred, partial views, by consensus ADMM (Algorithms 1
and 6 of the paper).

    min_x  1/n sum_k |m_k (h_k * x - y_k)|^2 + eta R(W x)                      Eqs. 1 and 2

State: "image" (x), "x" (its half-spectrum) and, for split priors, "q". Broadcast: "x", and the
scalar rho. Reply: "w" alone.

Clients keep the scaled dual u = lambda_k / rho and never send it, x_k, y_k, h_k or m_k. Everything
below is a half-spectrum.

Complete views (Eq. 6), with A and B = rho / (2/n |H|^2 + rho) fixed:
    v = x - u,   x_k = A + B v,   u' = x_k - v,   w = x_k + u'
so that three passes over the spectrum do, and no Fourier transform:
    u' = A + (B - 1) v,   w = v + 2 u'
Partial views (lines 17-19): r_k and, outside the view, beta_k follow from the rest, so neither is
kept. With b = beta_k / rho on the view, c = rho / (2/n + rho), and d zero outside the view:
    d = (1 - c) (y + b - h * x_k),   r + y + b = h * x_k + d
    x_k' = x_k + (v - x_k + conj(H) F d) / (|H|^2 + 1)
    b' = h * x_k + d - h * x_k'
One transform each way; y stays a patch. A view whose pixels count differently, sum_p m_p (h * x -
y)_p^2 with m in [0, 1], has c = rho / (2 m / n + rho) a pixel and nothing else changes: m = 0 is
outside. A blur that differs across the photo has A in place of h * (`varying.py`) and takes a step
towards x_k' (`VaryingFit`).

Over-relaxed (relax > 1; not in the paper), x is replaced at the client by relax x + (1 - relax) x_k
of the round before, which is v' = v + relax (x - x_k): the same fixed point, and with a rho that
suits it about half the rounds (experiments/feddeblur, Acceleration).

Server, split priors (Eqs. 7-9): with q = z + mu / rho made ready in the round before, and the prox
that of eta/rho R,
    x = (n w + W^T q) / (n + W^T W),   z' = prox(2 W x - q)
    q' = z' + q - W x = W x + (1 - prox)(q - 2 W x)
which holds because R is even; mu and z need no arrays of their own (for a denoiser, which is not
odd: `Prior.add_rest`). Server, others (Eq. 5): x = prox_{eta/(n rho)}(w).

A denoiser and partial views. A fixed point of Eq. 5 is x = D(x - grad F(x) / (n rho)), D with
sigma^2 = eta / (n rho), F the misfit of Eq. 1. Where m of the n clients see a pixel, the step of
grad F is m / n as long as if all did, so that the same sigma weighs n / m times as much: at the
published sigma = 25, rho = 0.02 eta is 112, where complete views have 0.25. The same eta would take
sigma near 1, at which a network does hardly anything (it is no prox). Three ways out: a smaller
rho, which oscillates; the public code's: average by pixel over those who saw it, which takes the
masks to the server, and let sigma decay; or, the default here, the denoiser as option 2 with W = I
(z = x, sigma^2 = eta / rho): the same optimum, the same messages, and sigma is sqrt(n) times as
large.

Deviations: clients begin at the broadcast x^0, not at y_k, since otherwise the first w_k is the
observation itself; the first server step (a prox of the arbitrary x^0) is left out; when part of
the clients takes part, the others count with the w they last sent (why: `consensus.py`;
recall=False is Algorithm 6); x^0 is flat grey unless start="random"; n stays the population when
only part of it takes part (Algorithm 6 says "same as Algorithm 1"). The public code relaxes the
duals by 1.05, updates clients first and averages with masks when a denoiser meets partial views; of
that only the masks are offered (masks=True). The relative change that stops a run is the largest
over the scenes. eta, rho and sigma left at None are the published settings nearest to (views,
channels, n, noise), except for a denoiser with partial views: `settings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from fedlens.core.algorithm import Algorithm, StackError
from fedlens.core.client import Client, generator
from fedlens.core.facts import Facts
from fedlens.core.limits import Natural, NotNegative, Positive, PositiveShare
from fedlens.core.message import Message
from fedlens.core.replies import LOSS, Replies, Scalar
from fedlens.core.task import LearningTask, Task
from fedlens.core.tree import Tree
from fedlens.deblur import consensus, spectrum
from fedlens.deblur.denoisers import DenoiserName
from fedlens.deblur.fits import ClientFit, CroppedFit, fit_of, is_small_view
from fedlens.deblur.observation import Observation, SceneFacts, without_rim
from fedlens.deblur.priors import Prior, PriorName, make_prior
from fedlens.deblur.settings import RELAXED, published

Relaxation = Annotated[float, Ge(1), Lt(2)]
# rounds between two images that `still` compares
STILL_ROUNDS = 20


@dataclass
class FedDeblur(Algorithm):
    """Consensus ADMM: clients fit their own views, the server holds the prior, only w_k = x_k +
    lambda_k / rho travels up.

    Args:
        task: how results are measured and shown.
        prior: tv, wavelet, ridge, box or pnp (a denoiser).
        eta: strength of the prior.
        rho: penalty.
        sigma: noise level given to a denoiser, in grey levels (stands in for eta).
        denoiser: of the prior pnp: auto, ffdnet, drunet, dncnn, tv or bm3d.
        weights: a file with the denoiser's weights.
        split: whether a denoiser enters by z = x (eta = rho sigma^2) or acts on the mean of w as in
            Eq. 5 (eta = n rho sigma^2); None: the first for partial views.
        decay: sigma is multiplied by it every round.
        masks: average each pixel over those who saw it, as the public code does for denoisers;
            clients then send their masks.
        tol: relative change of the image in a round that ends a run; 0 never does.
        still: the run also ends when the image moved by less than this, in grey levels (root mean
            square), in the last STILL_ROUNDS: a change that swings back and forth never falls below
            tol, although nothing improves any more. 0 never does.
        start: what the server begins with.
        relax: over-relaxation; 1 is the paper's algorithm, 1.6 saves rounds.
        crop: a client whose view is a small part of the scene works on that part alone: quicker,
            but without SecureSum its field of view is then plain to see in what it sends.
        recall: when not everyone answers, count the others with the last w they sent (None: when
            only part of them is asked).
        measure_every: rounds between two measurements of objective, consensus error and change of
            w, 0 for none (they cost as much as a round, each client then also sends two scalars).
        double: float64.
    """

    task: Task | None = None
    prior: PriorName = "tv"
    eta: NotNegative | None = None
    rho: Positive | None = None
    sigma: Positive | None = None
    denoiser: DenoiserName = "auto"
    weights: str | None = None
    split: bool | None = None
    decay: PositiveShare = 1.0
    masks: bool = False
    tol: NotNegative = 1e-5
    still: NotNegative = 0.0
    relax: Relaxation = 1.0
    crop: bool = False
    start: Literal["grey", "random"] = "grey"
    recall: bool | None = None
    measure_every: Natural = 0
    double: bool = False
    _scenes: dict[str, tuple[int, int, int]] = field(default_factory=dict, init=False, repr=False)
    _pad: int = field(default=0, init=False, repr=False)
    _made: dict[tuple[int, str], tuple[Observation, tuple[float, ...], Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _last: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False, compare=False)
    _prior: Prior | None = field(default=None, init=False, repr=False, compare=False)
    _gram: dict[tuple[int, int, float], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    draws: ClassVar[bool] = False
    # what it is compared with does neither
    relaxes: ClassVar[bool] = True
    varies: ClassVar[bool] = True  # takes a grid of kernels in a view
    loss_name: ClassVar[str] = "misfit"
    reports: ClassVar[Mapping[str, Scalar]] = {
        LOSS: Scalar("mean", record=True),
        "squared_gap": Scalar("mean"),
        "first": Scalar("sum"),
    }

    def __post_init__(self) -> None:
        if isinstance(self.task, LearningTask):
            raise ValueError(
                f"it restores images and trains nothing, but the task {type(self.task).__name__} is"
                " to learn a network"
            )
        if self.sigma is not None and (self.prior != "pnp" or self.eta is not None):
            raise ValueError(
                "sigma is the noise level of a denoiser: it needs prior=pnp, and stands in for eta"
            )
        if self.decay < 1 and self.prior != "pnp":
            raise ValueError(
                "decay lets the noise level of a denoiser fall from round to round: it needs"
                " prior=pnp"
            )
        if self.masks and self.recall:
            raise ValueError(
                "masks=true averages over those who answered: it does not go with recall=true"
            )

    # -- what is known before the first round ------------------------------------------------------

    def given(self, facts: Facts) -> FedDeblur:
        """The scenes' sizes, and the published eta and rho where none were chosen."""
        if not isinstance(facts, SceneFacts):
            raise StackError(
                f"{type(self).__name__} restores scenes from blurred views, but this data has none:"
                " use data.name=Scene"
            )
        if facts.varying and not self.varies:
            raise StackError(
                f"{type(self).__name__} takes one kernel a photo, but a photo here has a grid of"
                " them: FedDeblur takes it"
            )
        solver = replace(self)
        solver._scenes = dict(facts.scenes)
        solver._pad = facts.pad
        n = facts.clients
        if self.split is None:
            solver.split = (facts.partial or facts.coverage is not None) and not self.masks
        for channels in {shape[0] for shape in solver._scenes.values()}:
            solver.regulariser.check(channels)
        eta, rho = solver.suggested(facts, n)
        solver.rho = self.rho if self.rho is not None else rho
        solver.eta = self.eta if self.eta is not None else eta
        if self.sigma is not None:
            solver.eta, solver.sigma = (1 if solver.split else n) * solver.rho * self.sigma**2, None
        return solver

    def suggested(self, facts: SceneFacts, n: int) -> tuple[float, float]:
        """(eta, rho) for this federation."""
        colour = any(c > 1 for c, _, _ in self._scenes.values() or facts.scenes.values())
        views = facts.blur if facts.partial else "complete"
        eta, rho = published(
            self.prior, views, colour, n, facts.noise, self.rho, bool(self.split), facts.coverage
        )
        in_spectrum = views == "complete" and facts.coverage is None
        quick = self.relaxes and self.relax > 1 and self.prior == "tv" and in_spectrum
        return eta, RELAXED if quick else rho

    # -- both ends ---------------------------------------------------------------------------------

    def init(self) -> Message:
        if not self._scenes or self.eta is None or self.rho is None:
            raise ValueError(
                f"{type(self).__name__} does not know its scene yet: use"
                " algorithm.given(federation.facts)"
            )
        images: Tree = {}
        for name, shape in self._scenes.items():
            if self.start == "random":
                images[name] = (
                    torch.rand(shape, generator=generator(0, *name.encode())).to(self.dtype) * 255
                )
            else:
                images[name] = torch.full(shape, 127.5, dtype=self.dtype)
        return self.begin(images)

    def begin(self, images: Tree) -> Message:
        assert self.eta is not None and self.rho is not None
        state = Message({"image": images, "x": {n: spectrum.forward(x) for n, x in images.items()}})
        state = state.note(eta=self.eta, rho=self.rho, pad=self._pad)
        prior = self.regulariser
        if prior.split:
            state = state.put(
                q={
                    n: prior.prox(prior.transform(x), self.eta / self.rho)
                    for n, x in images.items()
                }
            )
        return state

    def broadcast(self, state: Message) -> Message:
        return Message(
            {"x": state.trees["x"]},
            {"rho": state.scalars["rho"], "measure": float(self._measures(state.round))},
        )

    def expects(self, message: Message) -> Mapping[str, Tree]:
        x = message.trees["x"]
        if self.masks:
            return {
                "w": x,
                "seen": {
                    n: torch.empty(1, h, w, dtype=self.dtype)
                    for n, (_, h, w) in self._scenes.items()
                },
            }
        return {"dw" if self._recalls(message) else "w": x}

    def client_step(self, message: Message, client: Client) -> Message:
        received, n, rho = message.trees["x"], message.header.population, message.scalars["rho"]
        sent: Tree = {}
        misfit = gap = 0.0
        for name, x in received.items():
            fit = self._client_fit(client, name, n, rho)
            kept = client.memory.get(name)
            sent[name], client.memory[name] = fit.step(x, kept)
            if message.scalars["measure"]:
                seen: Observation = client.data[name]
                misfit += seen.misfit(x)
                moved = client.memory[name]["u"] - (kept["u"] if kept else 0)  # u' - u = x_k - x
                gap += spectrum.image_norm(moved, fit.width) ** 2
        reply = Message({"w": sent})
        if self.masks:
            reply = consensus.in_view(sent, client.data)
        elif self._recalls(message):
            reply = consensus.since_last(sent, client)
        return reply.note(loss=misfit, squared_gap=gap) if message.scalars["measure"] else reply

    def _recalls(self, message: Message) -> bool:
        if self.masks:
            return False
        if self.recall is not None:
            return self.recall
        return 0 < message.header.cohort < message.header.population

    def server_step(self, state: Message, replies: Replies) -> Message:
        n, rho, eta = state.header.population, state.scalars["rho"], self._strength(state)
        state, mean = self._mean(state, replies)
        prior = self.regulariser
        images: Tree = {}
        spectra: Tree = {}
        ready: Tree = {}
        for name, w in mean.items():
            old = state.trees["image"][name]
            width = old.shape[-1]
            if prior.split:
                q = state.trees["q"][name]
                s = (
                    spectrum.forward(prior.adjoint(q))
                    .add_(w, alpha=n)
                    .mul_(self._inverse(prior, n, old.shape[-2:]))
                )
                x = spectrum.backward(s, width)
                ready[name] = prior.next_q(x, q, eta / rho)
            else:
                x = prior.prox(spectrum.backward(w, width), eta / (n * rho))
                s = spectrum.forward(x)
            images[name], spectra[name] = x, s
        trees = {"image": images, "x": spectra, **({"q": ready} if ready else {})}
        return self.measured_state(state, trees, replies, mean if self.measure_every else {})

    def _mean(self, state: Message, replies: Replies) -> tuple[Message, Tree]:
        if "seen" in replies.trees():
            return state, consensus.mean_in_view(state, replies)
        return (
            consensus.mean_of_last(state, replies)
            if "dw" in replies.trees()
            else (state, replies.mean("w"))
        )

    # -- the server's other duties -----------------------------------------------------------------

    def measured_state(
        self, state: Message, trees: dict[str, Tree], replies: Replies, mean: Tree
    ) -> Message:
        """The new state with what is known about the step: its relative change, whether to stop,
        the measurements of this round.
        """
        change = max(relative_change(x, state.trees["image"][n]) for n, x in trees["image"].items())
        notes = {"change_x": change}
        stop = bool(self.tol) and change < self.tol
        if self.still and (state.round + 1) % STILL_ROUNDS == 0:
            if "earlier" in state.trees:
                notes["moved"] = max(
                    float(torch.dist(x, state.trees["earlier"][n])) / math.sqrt(x.numel())
                    for n, x in trees["image"].items()
                )
                stop = stop or notes["moved"] < self.still
            trees["earlier"] = trees["image"]
        if mean:  # w itself is kept, to see how far the next one is from it
            trees["w"] = mean
            if "w" in state.trees and self._measures(state.round):
                notes["change_w"] = max(
                    relative_change(w, state.trees["w"][n]) for n, w in mean.items()
                )
        if (gap := replies.average("squared_gap")) is not None:
            # a square, as long as everybody tells the truth
            notes["consensus"] = math.sqrt(max(0.0, gap))
        if (misfit := replies.average(LOSS)) is not None:
            # the image the clients measured
            values = [self.regulariser.value(x) for x in state.trees["image"].values()]
            if None not in values:
                notes["objective"] = misfit + state.scalars["eta"] * sum(
                    v for v in values if v is not None
                )
        # of an earlier measurement
        old = {
            k: v
            for k, v in state.scalars.items()
            if k not in ("change_w", "consensus", "objective")
        }
        return Message({**state.trees, **trees}, {**old, **notes}).with_header(stop=stop)

    def evaluate(self, message: Message, data: Any, memory: Mapping[str, Tree]) -> dict[str, float]:
        if self.task is None:
            return {}
        return self.task.evaluate(
            {n: without_rim(x, self._pad) for n, x in self.images(message).items()}, data
        )

    def images(self, message: Message) -> Tree:
        """What was broadcast, as images."""
        return {n: spectrum.backward(s, self._scenes[n][2]) for n, s in message.trees["x"].items()}

    def result(self, state: Message) -> Tree:
        """The restored scenes, (C, H, W) in [0, 255], neither clamped nor rounded."""
        return restored(state)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def regulariser(self) -> Prior:
        if self._prior is None:
            self._prior = make_prior(self.prior, self.denoiser, self.weights, bool(self.split))
        return self._prior

    def _strength(self, state: Message) -> float:
        """eta of this round: sigma falls by `decay` a round, eta with its square."""
        return state.scalars["eta"] * self.decay ** (2 * state.round)

    def _measures(self, number: int) -> bool:
        return bool(self.measure_every) and number % self.measure_every == 0

    def _client_fit(self, client: Client, scene: str, n: float, rho: float) -> ClientFit:
        fit: ClientFit = self._once(
            client,
            scene,
            lambda seen: self._new_fit(seen, n, rho),
            n,
            rho,
        )
        return fit

    def _new_fit(self, seen: Observation, n: float, rho: float) -> ClientFit:
        if self.crop and is_small_view(seen):
            return CroppedFit(seen, n, rho, self.dtype, self.relax, self._as_image)
        return fit_of(seen, n, rho, self.dtype, self.relax)

    def _as_image(self, x: Tensor, width: int) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = (x, spectrum.backward(x, width))
        return self._last[1]

    def _once(
        self, client: Client, scene: str, make: Callable[[Observation], Any], *settings: float
    ) -> Any:
        """What follows from a client's data and `settings` alone, made once per process. It is as
        private as the data: never sent, never pickled."""
        seen: Observation = client.data[scene]
        found = self._made.get((client.id, scene))
        if found is None or found[0] is not seen or found[1] != settings:
            found = self._made[client.id, scene] = (seen, settings, make(seen))
        return found[2]

    def _inverse(self, prior: Prior, n: float, size: torch.Size) -> Tensor:
        """1 / (n + W^T W), each entry twice."""
        key = (int(size[0]), int(size[1]), n)
        if key not in self._gram:
            inverse = 1 / (n + prior.gram(*key[:2], self.dtype))
            self._gram[key] = spectrum.twice(inverse)
        return self._gram[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}, "_last": None, "_prior": None, "_gram": {}}


def restored(state: Message) -> Tree:
    """The scenes without the rim beyond the photo's edges that was solved for as well
    (boundary="unknown").
    """
    return {
        n: without_rim(x, int(state.scalars.get("pad", 0))) for n, x in state.trees["image"].items()
    }


def relative_change(new: Tensor, old: Tensor) -> float:
    # divided as float64: a liar's 1e15 over the zero of a first image must stay finite
    return float(torch.dist(new, old)) / max(float(torch.linalg.vector_norm(old)), 1e-12)
