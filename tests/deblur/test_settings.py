"""What eta, rho and sigma are when nobody says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import small_federation

from fedlens.deblur import FedDeblur
from fedlens.deblur.observation import SceneFacts
from fedlens.deblur.settings import published, published_alone


def test_defaults_come_from_the_published_settings() -> None:
    federation = small_federation(False)
    algorithm = FedDeblur().given(replace(federation.facts, clients=10))
    assert (algorithm.eta, algorithm.rho) == (0.025, 0.0005)
    assert published("tv", "complete", True, 3, 1.0) == (0.075, 0.02)
    assert published("tv", "motion", False, 9, None) == (0.015, 0.005)
    assert published("tv", "complete", False, 10, 2.0) == pytest.approx((0.075, 0.0005))
    eta, rho = published("pnp", "complete", False, 10, 1.0)
    assert (eta / (10 * rho)) ** 0.5 == pytest.approx(5.0)  # sigma
    partial = replace(small_federation(True).facts, clients=9, blur="motion")
    split = FedDeblur(prior="pnp").given(partial)
    assert split.split and (split.eta / split.rho) ** 0.5 == pytest.approx(7.0)  # z = x
    theirs = FedDeblur(prior="pnp", masks=True).given(partial)
    assert (
        not theirs.split
        and (theirs.eta / (9 * theirs.rho)) ** 0.5 == pytest.approx(25.0)
        and theirs.rho == 0.02
    )
    told = FedDeblur(prior="pnp", sigma=8.0, rho=0.01).given(replace(federation.facts, clients=4))
    assert (told.eta / (4 * told.rho)) ** 0.5 == pytest.approx(8.0)


def test_whoever_restores_alone_has_settings_of_its_own() -> None:
    """Published for noise 1; eta is proportional to the noise, but never below a twentieth."""
    assert published_alone("tv", False, SceneFacts()) == (0.01, 0.0015)
    assert published_alone("tv", True, SceneFacts(observe="partial")) == (3.0, 0.01)
    assert published_alone("tv", False, SceneFacts(noise=2.0)) == (0.02, 0.0015)
    assert published_alone("tv", False, SceneFacts(noise=0.0)) == (0.0005, 0.0015)
