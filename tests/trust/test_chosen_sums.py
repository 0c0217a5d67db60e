"""A server that keeps to every list and every key, and chooses by something else what is in a sum:
by the weight that it allows, by the model, by the trip that it names, by keys that are two clients'
at once. Real vaults, and sites that hold it to their recipe.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy import Toy, toy_federation
from vaults import Sites, make_vaults

from fedlens import Federation, Message, run, stack
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import SiteSettings
from fedlens.core.memory import Memory
from fedlens.core.message import Header
from fedlens.core.replies import Lost
from fedlens.core.rounds import Stalled
from fedlens.data.images.tensors import Tensors
from fedlens.engines.worker import Job, Worker
from fedlens.trust import SecureSum
from fedlens.trust.masking import Tampered
from fedlens.trust.roster import Deal, Roster, SumTerms, b64, deal, from_b64
from fedlens.trust.server_memory import WORK, put_fields
from fedlens.trust.signing import make_signing_key
from fedlens.trust.vault import Declined, read_peers

N = 3
AGREED = Header(rounds=2, population=N, cohort=N)


def secured(**options: Any) -> SecureSum:
    made = stack(FedAvg(Toy(), batch=8), SecureSum(**options))
    assert isinstance(made, SecureSum)
    return made


def sites_of(folder: Path, agreed: Header = AGREED) -> Sites:
    vaults = make_vaults(folder, N)
    for vault in vaults:
        vault.agreed = SiteSettings({}, recipe="0" * 64, clients=N, asked=agreed)
    return Sites(secured(), toy_federation(N), vaults)


def refusals(sites: Sites) -> set[str]:
    return {r.reason for _, _, r in sites.sent if isinstance(r, Lost)}


# -- by weight -------------------------------------------------------------------------------------


def test_a_weight_that_only_the_smallest_client_has(tmp_path: Path) -> None:
    """Clients have 20, 23 and 26 examples. A client beyond `max_weight` adds nothing, which nobody
    sees: with 21 the sum is client 0's alone. The recipe says what it is."""
    sites = sites_of(tmp_path)
    sizes = [len(sites.workers[0].federation.holdings[i]) for i in range(N)]
    assert sizes[0] < 21 < min(sizes[1:])
    with pytest.raises(Stalled):
        run(secured(), sites, 2, max_weight=21.0)
    (why,) = refusals(sites)
    assert "max_weight = 21" in why and "that this site agreed to" in why


@pytest.mark.parametrize(
    "odd", [{"seed": 7}, {"rounds": 3}, {"population": 4}, {"cohort": 4}, {"rehearsal": True}]
)
def test_whatever_the_header_says_is_the_recipes(tmp_path: Path, odd: dict[str, Any]) -> None:
    vault = sites_of(tmp_path).workers[0].algorithm._vault  # type: ignore[attr-defined]
    vault.check_agreed(replace(AGREED, round=1))
    vault.check_agreed(replace(AGREED, round=1, cohort=0, evaluate=True, stop=True))
    (name,) = odd
    with pytest.raises(Declined, match=f"{name} = .*that this site agreed to"):
        vault.check_agreed(replace(AGREED, **odd))
    for number in (-1, AGREED.rounds):
        with pytest.raises(Declined, match=f"round {number} is none of the {AGREED.rounds}"):
            vault.check_agreed(replace(AGREED, round=number))


# -- by the model ----------------------------------------------------------------------------------

CUTS, PIXELS = 1000, 64


class Bins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(PIXELS, CUTS), nn.Linear(CUTS, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x).relu())
        return out


class BinTask(Toy):
    def model(self) -> nn.Module:
        return Bins()


class Crafted(FedAvg):
    """Row k of the first layer answers to examples that are brighter than the k-th cut."""

    def init(self) -> Message:
        made = {
            "a.weight": torch.full((CUTS, PIXELS), 1 / PIXELS),
            "a.bias": -torch.linspace(0.3, 0.7, CUTS),
            "b.weight": torch.tensor([[1e-3], [0.0], [-1e-3]]).repeat(1, CUTS),
            "b.bias": torch.zeros(3),
        }
        return super().init().put(model=made)


def test_a_crafted_model_shows_examples_in_the_sum(tmp_path: Path) -> None:
    """What is not stopped (Fowl et al., 2022), so that the threat model has it right: neighbouring
    rows differ by the examples between their cuts, most of which are one client's one. All 60 of
    three clients come back from one sum."""
    rng = torch.Generator().manual_seed(5)
    x, y = torch.rand(N, 20, PIXELS, generator=rng), torch.randint(3, (N, 20), generator=rng)
    held = [Tensors({"x": x[i], "y": y[i]}) for i in range(N)]
    algorithm = stack(Crafted(BinTask(), batch=20, lr=0.1), SecureSum())
    sites = Sites(algorithm, Federation(held, held), make_vaults(tmp_path, N))  # type: ignore[arg-type]
    before, after = algorithm.init().trees["model"], run(algorithm, sites, 1).trees["model"]
    rows, bias = (-(after[n] - before[n]).diff(dim=0) for n in ("a.weight", "a.bias"))
    seen = bias.abs() > 1e-9
    found = rows[seen] / bias[seen, None]
    error = torch.cdist(x.reshape(-1, PIXELS), found).min(1).values / PIXELS**0.5
    assert float(error.median()) < 0.01  # of the range of a pixel


# -- by trip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trip", [4, 7, -1])
def test_a_trip_that_there_is_not(tmp_path: Path, trip: int) -> None:
    """What is no work costs no privacy by a site's ledger, and memory has no part in it: work under
    such a number would be neither charged nor remembered."""
    sites = sites_of(tmp_path)
    work = masked_work(sites, honest_deals(sites))
    outcome = sites.ask(0, work.with_header(trip=trip))
    assert isinstance(outcome, Lost) and f"{trip} is no trip" in outcome.reason
    assert isinstance(sites.ask(0, work), Message)


# -- by keys ---------------------------------------------------------------------------------------

TERMS = SumTerms("job", 0, "train", tuple(range(N)), 0)


def vaults_of(sites: Sites) -> list[Any]:
    return [worker.algorithm._vault for worker in sites.workers]  # type: ignore[attr-defined]


def honest_deals(sites: Sites) -> dict[int, Deal]:
    return {i: deal(vault, i, TERMS, {}) for i, vault in enumerate(vaults_of(sites))}


def masked_work(sites: Sites, deals: dict[int, Deal]) -> Message:
    header = replace(AGREED, trip=WORK)
    message = secured().inner.broadcast(secured().init())
    roster = Roster(TERMS, deals).table()
    return put_fields(message, roster=roster, clients=N, bounds={}).with_header(header)


def other_bytes(key: str) -> str:
    """X25519 ignores the highest bit."""
    raw = bytearray(from_b64(key))
    raw[31] ^= 0x80
    return b64(bytes(raw))


def other_text(key: str) -> str:
    """The last letter before the "=" has two bits that base64 ignores."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return f"{key[:-2]}{letters[letters.index(key[-2]) ^ 1]}="


def plain_reply(message: Message, client: int) -> Message:
    worker = Worker(secured(masks=False), toy_federation(N), Memory())
    worker.begin(message, sums=False)
    (reply,) = worker.work([Job(0, client, -1)])
    assert isinstance(reply, Message)
    return reply


@pytest.mark.parametrize("twin", [other_bytes, other_text])
def test_a_site_that_calls_anothers_key_its_own(tmp_path: Path, twin: Any) -> None:
    """Client 2 signs client 0's mask key in another spelling. Client 1 would subtract its mask with
    client 0 and add the same one for client 2: its reply would leave in the clear."""
    sites = sites_of(tmp_path)
    deals = honest_deals(sites)
    stolen = replace(deals[2], mask=twin(deals[0].mask))
    signature = vaults_of(sites)[2].sign(stolen.statement(TERMS))
    work = masked_work(sites, {**deals, 2: replace(stolen, signature=signature)})
    outcome = sites.ask(1, work)
    if isinstance(outcome, Message):
        bare = plain_reply(work, 1).trees["masked"]
        for name, array in outcome.trees["masked"].items():
            assert not torch.equal(array, bare[name])


def test_bytes_have_one_text() -> None:
    key = b64(bytes(range(32)))
    assert from_b64(key) == bytes(range(32))
    with pytest.raises(Tampered, match="not base64"):
        from_b64(other_text(key))


def test_one_key_for_two_clients(tmp_path: Path) -> None:
    """Whoever holds it would be two of those among whom a site hides."""
    for i in range(N):
        make_signing_key(tmp_path / f"site-{i}")
    assert sorted(read_peers(tmp_path)) == [0, 1, 2]
    text = (tmp_path / "site-1.pub").read_text().split()[:2]
    (tmp_path / "site-2.pub").write_text(" ".join([*text, "another comment\n"]))
    with pytest.raises(Declined, match="clients 1 and 2 have the same public key"):
        read_peers(tmp_path)


def test_the_agreed_header_is_that_of_a_run(tmp_path: Path) -> None:
    """Rounds and an evaluation with what `run` writes into headers: nothing is declined."""
    sites = sites_of(tmp_path)
    run(secured(), sites, 2, evaluate_every=1, personal=True)
    assert not refusals(sites)
