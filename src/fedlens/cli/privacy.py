"""`fedlens privacy`: what a recipe costs in differential privacy, before any training."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from fedlens.cli.options import (
    OverridesArgument,
    RecipeArgument,
    UsageError,
    examples,
    loading,
    read_config,
)
from fedlens.cli.partition import picture_file
from fedlens.runs.text import ACCENT, console, plain

if TYPE_CHECKING:
    from fedlens.config.recipe import Config
    from fedlens.core.privacy import Mechanism
    from fedlens.trust.accounting import Account, Statement

app = typer.Typer()
_POINTS = 10  # rounds in the table
CURVE = 40  # rounds in the picture


@app.command(
    epilog=examples(
        "fedlens privacy demo-private",
        "fedlens privacy demo-private --epsilon 8",
        "fedlens privacy demo-private DPSGD.noise=2 rounds=50 --plot epsilon.png",
    )
)
def privacy(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    epsilon: Annotated[
        float | None,
        typer.Option("--epsilon", help="Say how much noise this needs.", show_default=False),
    ] = None,
    examples_: Annotated[
        int | None,
        typer.Option(
            "--examples",
            help="Of each site, where the data is not here.",
            show_default=False,
            min=1,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Picture: epsilon against rounds.", show_default=False),
    ] = None,
) -> None:
    """What a recipe costs in differential privacy, and the noise for a wanted epsilon.

    Nothing is trained. If clients are asked in every round; fewer rounds cost less.
    """
    from fedlens.trust.accounting import noise_for, planned, spent_by_round, statement_of

    if epsilon is not None and not epsilon > 0:
        raise UsageError(f"--epsilon must be above 0, not {epsilon:g}")
    picture = picture_file(plot, "--plot") if plot else None
    config = read_config(recipe, overrides)
    with loading():
        account = account_of(config, examples_)
    rounds = config.settings.rounds
    worst = planned(account, rounds).costliest()
    assert worst is not None
    mechanism = worst[0]
    out = console()
    out.print(
        plain(
            f"{config.name}, {rounds} rounds: {statement_of(*worst, account.personal).sentence()}"
        )
    )
    print_sites(account, rounds)
    steps = sorted({max(1, rounds * k // _POINTS) for k in range(1, _POINTS + 1)})
    print_rounds(steps, spent_by_round(mechanism, steps))
    if mechanism.max_epsilon is not None:
        out.print(_ends(mechanism, rounds))
    if epsilon is not None:
        noise = _rounded_up(noise_for(epsilon, mechanism, rounds))
        told = statement_of(replace(mechanism, noise=noise), rounds, account.personal)
        out.print(plain(f"for epsilon {epsilon:g}: noise = {noise:g}; then {told.sentence()}"))
    if picture:
        draw_rounds(statement_of(*worst, account.personal), mechanism, rounds, picture, config.name)
        out.print(f"Picture: {picture}", soft_wrap=True)


def _rounded_up(noise: float) -> float:
    """To four digits: what is typed in from here must be enough."""
    unit = Decimal(1).scaleb(Decimal(noise).adjusted() - 3)
    return float(Decimal(noise).quantize(unit, ROUND_CEILING))


def account_of(config: Config, examples: int | None) -> Account:
    """With the sizes of the data, or with those that the user gives. What a run would refuse is
    refused here too, as far as the data is here."""
    from fedlens.data.source import DataError
    from fedlens.runs.setup import make_setup, try_one_example
    from fedlens.trust.accounting import open_account

    settings = config.settings
    clients = settings.clients
    if examples is not None:
        algorithm = config.build_algorithm(config.build_task())
        sizes = dict.fromkeys(range(clients), examples)
    else:
        try:
            setup = make_setup(config)
        except DataError as e:
            raise UsageError(f"{e}; or say how many examples a site has: --examples N") from e
        try_one_example(setup)
        algorithm, held = setup.algorithm, setup.federation.holdings
        sizes = {i: len(h) for i, h in enumerate(held) if hasattr(h, "__len__")}
        clients = len(held)
    account = open_account(algorithm, clients, settings.cohort, sizes.get, settings.personal)
    if account is None:
        stack = " + ".join(type(p).__name__ for p in algorithm.parts())
        raise UsageError(
            f"{config.name} ({stack}) adds no noise, so there is no epsilon: put DPSGD (single"
            " examples) or PrivateMean (whole clients) into its stack"
        )
    return account


def print_sites(account: Account, rounds: int) -> None:
    """Sites of different sizes pay differently; those alike share a line."""
    from fedlens.trust.accounting import planned, spent_by_round

    after = planned(account, rounds)
    sizes: dict[int, list[int]] = {}
    for client in range(account.population):
        if (size := account.sizes(client)) is not None:
            sizes.setdefault(size, []).append(client)
    first = after.mechanism(0)
    if first is None or first.unit == "client" or len(sizes) < 2:
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for name in ("examples", "sites", "q", "steps a round", "epsilon"):
        table.add_column(name, justify="right", style=ACCENT if name == "epsilon" else "")
    for size, clients in sorted(sizes.items())[:_POINTS]:
        cost = after.mechanism(clients[0])
        assert cost is not None
        spent = spent_by_round(cost, [rounds])[0]
        table.add_row(
            str(size), str(len(clients)), f"{cost.rate:.4g}", str(cost.steps), f"{spent:.3g}"
        )
    console().print(table)


def print_rounds(rounds: list[int], spent: list[float]) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column("rounds", justify="right")
    table.add_column("epsilon", justify="right", style=ACCENT)
    table.add_column("", no_wrap=True)
    top = max(spent) or 1.0
    for number, value in zip(rounds, spent, strict=True):
        table.add_row(str(number), f"{value:.3g}", "▇" * max(1, round(40 * value / top)))
    console().print(table)


def _ends(mechanism: Mechanism, rounds: int) -> str:
    from fedlens.trust.accounting import affordable

    most = affordable(mechanism, rounds)
    limit = f"max_epsilon = {mechanism.max_epsilon:g}"
    if most >= rounds:
        return f"all {rounds} rounds stay within {limit}"
    return f"[yellow]the run will end after {most} of {rounds} rounds: {limit}[/]"


def draw_rounds(
    told: Statement, mechanism: Mechanism, rounds: int, picture: Path, title: str
) -> None:
    import matplotlib

    from fedlens.trust.accounting import spent_by_round

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = sorted({max(1, rounds * k // CURVE) for k in range(1, CURVE + 1)})
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    axes.plot(steps, spent_by_round(mechanism, steps))
    if mechanism.max_epsilon is not None:
        axes.axhline(mechanism.max_epsilon, linestyle="--", linewidth=0.8, label="max_epsilon")
        axes.legend(loc="lower right", fontsize=8, frameon=False)
    axes.set(xlabel="rounds", ylabel=f"epsilon at delta {told.delta:g}", ylim=(0, None))
    axes.set_title(f"{title}: single {told.unit}s, noise {told.noise:g} x clip", fontsize=10)
    lines = (told.relation, told.sampling, told.accountant, told.randomness, told.outside)
    figure.text(0.01, 0.01, "\n".join(filter(None, lines)), fontsize=6, va="bottom")
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
