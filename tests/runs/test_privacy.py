"""A run with differential privacy: what it writes down, where it stops, what a kill costs; and what
`fedlens privacy` says before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy import same_bits
from toy_job import RECIPE, write_recipe

import fedlens
from fedlens.cli import main as cli
from fedlens.config.recipe import ConfigError
from fedlens.core.privacy import Mechanism
from fedlens.report.html import write_report
from fedlens.report.page_data import run_view
from fedlens.report.reading import read_run
from fedlens.runs import job
from fedlens.runs.progress import closing_lines
from fedlens.trust.accounting import epsilon_of

pytest.importorskip("dp_accounting")

DPSGD = RECIPE.replace("toy_job:Slow", "toy_job:Noisy").replace("Scaffold", "DPSGD")
MEAN = DPSGD.replace("DPSGD", "PrivateMean")


def smallest(noise: float = 1.0) -> Mechanism:
    """Of the toy's first client: 20 examples, batches of 8, three steps."""
    return Mechanism("example", noise, 8 / 20, "poisson", 3, 1e-5)


def spent(rounds: int) -> float:
    return epsilon_of([(smallest(), rounds)], 1e-5)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, DPSGD)


def test_the_statement_is_everywhere(recipe: Path, tmp_path: Path) -> None:
    """metrics.jsonl, checkpoint, summary, report; of the site with the fewest examples, which pays
    most."""
    out = tmp_path / "run"
    done = fedlens.experiment(recipe, out=out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["state"]["epsilon"] for r in lines] == [spent(n) for n in (1, 2, 3, 4)]
    assert all(r["loss"] is None for r in lines)
    assert all("delta 1e-05 for single examples" in r["privacy"] for r in lines)
    assert run_view(read_run(out), str)["references"] == [
        f"Differential privacy: {done.summary['privacy']['sentence']}"
    ]
    (out / "summary.json").rename(tmp_path / "summary.json")  # as while it runs
    assert "protects nobody" in run_view(read_run(out), str)["references"][0]
    (tmp_path / "summary.json").rename(out / "summary.json")
    assert closing_lines(done.summary)[1].startswith("Differential privacy: epsilon")
    assert done.state.scalars["epsilon"] == spent(4)
    told = json.loads((out / "summary.json").read_text())["privacy"]
    assert told["epsilon"] == spent(4) and told["by_site"]["0"] == spent(4)
    assert told["by_site"]["5"] < spent(4)
    write_report(out)
    page = (out / "report.html").read_text()
    for word in ("delta 1e-05", "add or remove one example", "q = 0.4", "PLD", "protects nobody"):
        assert word in told["sentence"] and word in page


def test_a_run_stops_before_its_budget_is_overdrawn(recipe: Path, tmp_path: Path) -> None:
    """Enough for two rounds of four. It ends well, with figures, and says why; and resuming it
    does not go on either."""
    limit = (spent(2) + spent(3)) / 2
    said: list[str] = []

    class Ears(job.Listener):
        def log(self, text: str) -> None:
            said.append(text)

    more: dict[str, Any] = {"DPSGD.max_epsilon": limit, "evaluate_every": 4}
    out = tmp_path / "run"
    done = fedlens.experiment(recipe, out=out, listener=Ears(), **more)
    assert len(done.rounds) == 2 and done.summary["rounds"] == 2
    assert "stopped after round 2: another round would cost epsilon" in done.summary["stopped"]
    assert done.summary["stopped"] in said and done.metrics["accuracy"] >= 0
    assert done.summary["privacy"]["epsilon"] == spent(2) <= limit
    again = fedlens.experiment(recipe, out=out, resume=True, **more)
    assert same_bits(done.state, again.state) and len(again.rounds) == 2


def test_a_budget_too_small_for_one_round_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not even one round"):
        fedlens.experiment(recipe, out=tmp_path / "run", **{"DPSGD.max_epsilon": 0.01})


def test_a_round_is_charged_before_anybody_is_asked(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while round 2 is out: it is in the journal. In a simulation the resumed run sends the
    same bytes again, which is no second cost, and ends in the same bits."""
    whole = fedlens.experiment(recipe, out=tmp_path / "whole")
    calls = []

    def die(self: Any, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise SystemExit

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(job._Job, "_after_round", die)
        with pytest.raises(SystemExit):
            fedlens.experiment(recipe, out=out)
    asked = [json.loads(x) for x in (out / "privacy.jsonl").read_text().split("\n") if x]
    assert [line["round"] for line in asked] == [0, 1]
    assert asked[0]["asked"] == list(range(6))
    again = fedlens.experiment(recipe, out=out, resume=True)
    assert same_bits(whole.state, again.state)
    assert again.summary["privacy"]["epsilon"] == spent(4)


def test_a_journal_that_is_gone_is_missed(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fedlens.experiment(recipe, out=out, rounds=2, checkpoint_every=1)
    (out / "privacy.jsonl").rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"privacy\.jsonl says nothing of round 0"):
        fedlens.experiment(recipe, out=out, rounds=3, checkpoint_every=1, resume=True)


def test_what_a_site_had_before_counts_where_it_costs_more(recipe: Path, tmp_path: Path) -> None:
    """Client 5 has 45 examples; when it was asked first it had 16. Whoever has gone is not
    forgotten either: its size is in the journal."""
    out = tmp_path / "run"
    first = fedlens.experiment(recipe, out=out, rounds=2, checkpoint_every=1)
    path = out / "privacy.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    had = lines[0]["examples"]["5"]
    lines[0]["examples"]["5"] = 16
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = fedlens.experiment(recipe, out=out, rounds=3, checkpoint_every=1, resume=True)
    dearer = Mechanism("example", 1.0, 8 / 16, "poisson", 2, 1e-5)
    assert done.summary["privacy"]["by_site"]["5"] == epsilon_of([(dearer, 3)], 1e-5)
    assert had > 16 and first.summary["privacy"]["by_site"]["5"] < epsilon_of([(dearer, 2)], 1e-5)


def test_metrics_without_noise_are_named_beside_epsilon(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, MEAN)
    quiet = fedlens.experiment(recipe, out=tmp_path / "quiet", rounds=1)
    assert "metrics" not in quiet.summary["privacy"]["sentence"]
    loud = fedlens.experiment(recipe, out=tmp_path / "loud", rounds=1, personal=True)
    assert (
        "leave without noise: this epsilon is of the model alone"
        in (loud.summary["privacy"]["sentence"])
    )


def test_clients_pay_for_the_rounds_they_are_asked_in(tmp_path: Path) -> None:
    """Cohorts of three of six are known, so q = 1: whoever was asked most often decides."""
    recipe = write_recipe(tmp_path, MEAN)
    done = fedlens.experiment(recipe, out=tmp_path / "run", cohort=3, rounds=6)
    lines = (tmp_path / "run" / "privacy.jsonl").read_text().split("\n")
    asked = [i for line in lines if line for i in json.loads(line)["asked"]]
    most = max(asked.count(i) for i in range(6))
    one = Mechanism("client", 1.0, 1.0, "none", 1, 1e-5)
    assert done.summary["privacy"]["epsilon"] == epsilon_of([(one, most)], 1e-5)
    assert "q = 1" in done.summary["privacy"]["sentence"]


# -- fedlens privacy -------------------------------------------------------------------------------


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = cli.invoke(["privacy", *argv])
    told = capsys.readouterr()
    return code, " ".join((told.out + told.err).split())


def test_before_training_it_says_what_a_recipe_costs(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ask(capsys, str(recipe), "--plot", str(tmp_path / "e.png"))
    assert code == 0
    assert f"epsilon {spent(4):.3g} at delta 1e-05 for single examples" in text
    for word in ("add or remove one example", "Poisson with q = 0.4", "PLD of dp-accounting"):
        assert word in text
    assert (tmp_path / "e.png").stat().st_size > 5000


def test_it_finds_the_noise_for_a_wanted_epsilon(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ask(capsys, str(recipe), "--epsilon", "3")
    assert code == 0 and "for epsilon 3: noise = " in text
    noise = float(text.split("for epsilon 3: noise = ")[1].split(";")[0])
    assert 2.9 < epsilon_of([(smallest(noise), 4)], 1e-5) <= 3  # as it is printed


def test_it_says_when_a_run_will_end_and_refuses_what_has_no_noise(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = (spent(2) + spent(3)) / 2
    _, text = ask(capsys, str(recipe), f"DPSGD.max_epsilon={limit}")
    assert "the run will end after 2 of 4 rounds" in text
    (tmp_path / "plain").mkdir()
    plain = write_recipe(tmp_path / "plain")
    code, text = ask(capsys, str(plain))
    assert code == 2 and "adds no noise, so there is no epsilon" in text
    code, text = ask(capsys, str(recipe), "--epsilon", "0")
    assert code == 2 and "--epsilon must be above 0" in text
    code, text = ask(capsys, str(recipe), "data.broken=true")
    assert code == 2 and "--examples N" in text
    code, text = ask(capsys, str(recipe), "data.broken=true", "--examples", "20")
    assert code == 0 and f"epsilon {spent(4):.3g}" in text
