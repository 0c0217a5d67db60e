"""FedDeblur's messages, attacked. References: the client's own memory, the kernels and photos that
made the observations, and a kernel whose autocorrelation numpy computed.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scenes import make, small_federation

from fedlens import run
from fedlens.audit.attack import Evidence, summed
from fedlens.audit.complete_views import fit_power, play, sent_by
from fedlens.audit.duals import follow
from fedlens.audit.feddeblur import CuriousDeblurring
from fedlens.audit.noise import ClipAndNoise
from fedlens.audit.partial_views import find_view, overlap
from fedlens.audit.phase_retrieval import retrieve_kernel
from fedlens.core.algorithm import stack
from fedlens.deblur import FedDeblur, spectrum
from fedlens.deblur.scenes import Scene
from fedlens.deblur.task import Deblurring
from fedlens.engines.loopback import Loopback
from fedlens.engines.recorder import Exchange, Recorder


def listened(algorithm: Any, federation: Any, rounds: int, **keys: Any) -> Recorder:
    recorder = Recorder(Loopback(algorithm, federation))
    run(algorithm, recorder, rounds, **keys)
    return recorder


def as_evidence(algorithm: Any, federation: Any, exchanges: Any, clients: list[int]) -> Evidence:
    setup: Any = SimpleNamespace(algorithm=algorithm, federation=federation)
    return Evidence(setup, exchanges, clients)


@pytest.fixture(scope="module")
def cameras() -> tuple[Any, Any, list[Exchange]]:
    """Ten cameras of the paper's Table 3 look at the camera man, 96 x 96, for twelve rounds."""
    federation = Scene(image="camera", size=96).federation(10, 0)
    algorithm = FedDeblur(Deblurring()).given(federation.facts)
    return algorithm, federation, listened(algorithm, federation, 12).exchanges


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("relax", [1.0, 1.6])
@pytest.mark.parametrize("cohort", [None, 2])
def test_duals_and_local_estimates_are_exact(
    partial: bool, cohort: int | None, relax: float
) -> None:
    """The client's memory holds u; with a cohort of two of three, only differences dw travel and
    clients miss rounds."""
    federation = small_federation(partial)
    algorithm = make(federation, relax=relax)
    recorder = listened(algorithm, federation, 7, cohort=cohort)
    for client in range(3):
        last = follow(recorder.exchanges, client, "scene", relax)[-1]
        record = recorder.worker.memory.load(client)
        kept = {**record.kept, **record.draft}["scene"]
        assert torch.allclose(last.u, kept["u"], rtol=0, atol=1e-8)
        if partial:
            assert torch.allclose(last.local, kept["x"], rtol=0, atol=1e-8)


@pytest.mark.parametrize("relax", [1.0, 1.6])
def test_playing_a_clients_steps_gives_power_and_photo_of_every_frequency(relax: float) -> None:
    federation = small_federation(partial=False)
    algorithm = make(federation, relax=relax)
    exchanges = listened(algorithm, federation, 6).exchanges
    for client, held in enumerate(federation.holdings):
        seen = held["scene"]
        sent = sent_by(follow(exchanges, client, "scene", relax), 3, 0.3, relax)
        h, y = seen.otf(torch.float64), torch.fft.rfft2(seen.pixels)
        found = fit_power(sent)
        certain = h.abs().square() > 1e-4
        assert torch.allclose(found.power[certain], h.abs().square()[certain], atol=1e-6)
        power = h.abs().square()
        product = 3 / 2 * play(sent, power).height * (2 / 3 * power + 0.3)
        wanted = h.conj() * y
        assert float((product - wanted).norm() / wanted.norm()) < 1e-6


def test_a_lopsided_kernel_comes_back_from_its_autocorrelation() -> None:
    """Up to mirroring, which no autocorrelation can tell; numpy makes the autocorrelation."""
    kernel = np.zeros((9, 7))
    kernel[np.arange(9), [0, 0, 1, 2, 2, 3, 5, 6, 6]] = [1, 2, 4, 3, 2, 2, 1, 1, 0.5]
    kernel /= kernel.sum()
    power = np.abs(np.fft.fft2(kernel, (48, 40))) ** 2
    found, error = retrieve_kernel(torch.from_numpy(np.fft.ifft2(power).real))
    assert found.shape == (9, 7) and error < 1e-4
    off = min(np.abs(found.numpy() - k).max() for k in (kernel, kernel[::-1, ::-1]))
    assert off < 2e-3


def test_the_photos_of_complete_views(cameras: Any) -> None:
    """The issue's bound: above 45 dB in 12 rounds; x_k to 1e-3 grey levels."""
    algorithm, federation, exchanges = cameras
    found = CuriousDeblurring().run(as_evidence(algorithm, federation, exchanges, [0, 2, 3]))
    assert len(found.comparisons) == 3 and found.leaks
    for row in found.comparisons:
        assert row.scores["psnr"] > 45 > row.baseline["psnr"] + 10
    attack = CuriousDeblurring()
    error = attack.local_error(as_evidence(algorithm, federation, exchanges, [0]), 0, "camera")
    assert error is not None and error < 1e-3


def test_honest_about_noise_other_clients_and_sums(cameras: Any) -> None:
    """Somebody who has noise, somebody else's messages or only the sum scores no more than the
    published scene gives."""
    algorithm, federation, exchanges = cameras
    rng = torch.Generator().manual_seed(0)

    def noise(e: Exchange) -> Exchange:
        x = e.down.trees["x"]["camera"]
        w = {"camera": x + x.std() * torch.randn(x.shape, generator=rng)}
        return replace(e, replies={0: e.replies[0].put(w=w)})

    swapped = [replace(e, replies={0: e.replies[2]}) for e in exchanges]
    for what in ([noise(e) for e in exchanges], swapped, summed(exchanges)):
        found = CuriousDeblurring().run(as_evidence(algorithm, federation, what, [0]))
        assert found.score < found.baseline + 1


def test_noise_of_a_hundredth_does_not_hide_a_photo(cameras: Any) -> None:
    """The client's own steps have no noise, and a kernel has few pixels: both average it away. A
    line through what the messages tell came to 29 dB here."""
    _, federation, _ = cameras
    base = FedDeblur(Deblurring()).given(federation.facts)
    scores = []
    for noise in (0.01, 1.0):
        algorithm = stack(base, ClipAndNoise(noise=noise))
        exchanges = listened(algorithm, federation, 12).exchanges
        found = CuriousDeblurring().run(as_evidence(algorithm, federation, exchanges, [0]))
        scores.append(found.score)
        assert found.leaks == (noise < 1)
    assert scores[0] > 45 > scores[1] + 10


def test_a_client_that_was_heard_once_is_left_alone(cameras: Any) -> None:
    algorithm, federation, exchanges = cameras
    found = CuriousDeblurring().run(as_evidence(algorithm, federation, exchanges[:1], [0]))
    assert not found.comparisons and not found.leaks
    assert found.numbers["heard too seldom"] == "1"


def test_a_partial_view_gives_its_place_its_kernel_and_its_photo() -> None:
    """Field of view from the first round alone, roughly; exactly, with kernel and photo, from
    twelve rounds."""
    federation = Scene(image="camera", size=256, observe="partial").federation(9, 0)
    algorithm = FedDeblur(Deblurring()).given(federation.facts)
    exchanges = listened(algorithm, federation, 12).exchanges
    seen = federation.holdings[1]["camera"]
    assert seen.top is not None and seen.left is not None
    box = (seen.top, seen.left, 100, 100)
    assert overlap(find_view(follow(exchanges, 1, "camera")[0].u, 256), box) > 0.8
    (loot,) = CuriousDeblurring().attack(
        as_evidence(algorithm, federation, exchanges, [1]), 1, "camera"
    ) or [None]
    assert loot is not None and loot.box is not None and loot.kernel is not None
    assert overlap(loot.box, box) > 0.95
    assert loot.kernel.shape == seen.kernel.shape
    found = CuriousDeblurring().run(as_evidence(algorithm, federation, exchanges, [1]))
    assert found.score > 40 > found.baseline + 5


def test_partial_views_tell_a_kernel_from_its_mirror_image() -> None:
    """Camera shake is lopsided. With the wrong one something is left outside the view."""
    scene = Scene(image="camera", size=160, observe="partial", blur="synthesis", kernel_size=7)
    federation = replace(scene, patch=(80, 80)).federation(9, 0)
    algorithm = FedDeblur(Deblurring()).given(federation.facts)
    exchanges = listened(algorithm, federation, 12).exchanges
    seen = federation.holdings[4]["camera"]
    (loot,) = CuriousDeblurring().attack(
        as_evidence(algorithm, federation, exchanges, [4]), 4, "camera"
    ) or [None]
    assert loot is not None and loot.kernel is not None
    tight = seen.kernel[seen.kernel.sum(1) > 1e-3][:, seen.kernel.sum(0) > 1e-3]
    found = loot.kernel[loot.kernel.sum(1) > 1e-3][:, loot.kernel.sum(0) > 1e-3]
    assert found.shape == tight.shape
    assert float((found - tight).abs().max()) < 0.01 < float((found.flip(0, 1) - tight).abs().max())


def test_overlap_by_hand() -> None:
    """Two 4 x 4 boxes that share 2 x 4 pixels: 8 of 24."""
    assert overlap((0, 0, 4, 4), (2, 0, 4, 4)) == pytest.approx(8 / 24)
    assert overlap((0, 0, 4, 4), (9, 9, 4, 4)) == 0


def test_a_rectangle_in_a_spectrum_is_found() -> None:
    image = torch.full((1, 40, 50), 0.01, dtype=torch.float64)
    image[:, 7:21, 11:33] = 1.0
    assert find_view(spectrum.forward(image), 50) == (7, 11, 14, 22)
