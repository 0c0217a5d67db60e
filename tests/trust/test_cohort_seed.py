"""Who is asked in a round over real sites follows from the server's secret alone."""

from __future__ import annotations

import json
from pathlib import Path

from stacks import VECTORS
from toy import Toy

from fedlens import Message, run
from fedlens.algorithms import FedAvg
from fedlens.core.rounds import sample
from fedlens.engines.loopback import Loopback
from fedlens.sites.server import own_facts

CLIENTS = range(len(VECTORS))


def test_the_server_keeps_its_secret_with_the_run_and_to_itself(tmp_path: Path) -> None:
    first = own_facts(tmp_path)
    assert own_facts(tmp_path) == first  # a resumed run asks the same clients
    assert (tmp_path / "flower.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    other = own_facts(tmp_path / "other")
    assert first["cohort_seed"] != other["cohort_seed"] and first["job"] != other["job"]
    assert max(first["cohort_seed"], other["cohort_seed"]) > 1 << 100
    (tmp_path / "flower.json").write_text(json.dumps({"job": "of before"}))
    assert own_facts(tmp_path)["job"] == "of before" and "cohort_seed" in own_facts(tmp_path)


def test_every_bit_of_the_secret_counts() -> None:
    """Two secrets that differ in one high bit alone draw different cohorts in some round; a seed of
    32 bits draws as it always did."""
    for bit in (0, 33, 64, 100, 127):
        a, b = 1 << 127 | 5, (1 << 127 | 5) ^ (1 << bit)
        drawn = [[sample(CLIENTS, 3, s, k) for k in range(20)] for s in (a, b)]
        assert drawn[0] != drawn[1], bit
    assert sample(range(10), 4, 3, 1) == sample(range(10), 4, 3, 1)


class Watched(Loopback):
    def exchange(self, message, ids, heard):  # type: ignore[no-untyped-def]
        self.asked = [*getattr(self, "asked", []), list(ids)]
        self.seen = [*getattr(self, "seen", []), bytes(Message.to_bytes(message))]
        return super().exchange(message, ids, heard)


def test_the_secret_decides_and_does_not_travel() -> None:
    secret = 0x1234_5678_9ABC_DEF0_1234_5678_9ABC_DEF1
    asked = {}
    for name, cohort_seed in (("public", None), ("secret", secret)):
        algorithm = FedAvg(Toy(), batch=8)
        engine = Watched(algorithm, VECTORS)
        run(algorithm, engine, 6, cohort=3, seed=7, cohort_seed=cohort_seed)
        asked[name] = engine.asked
        assert not any(str(secret).encode() in data for data in engine.seen)
    guess = [sample(CLIENTS, 3, 7, k) for k in range(6)]  # what a site can work out
    assert asked["public"] == guess and asked["secret"] != guess
    assert asked["secret"] == [sample(CLIENTS, 3, secret, k) for k in range(6)]
