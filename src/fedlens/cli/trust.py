"""`fedlens policy`: what a site allows, and whether a recipe keeps to it; and the page on which an
operator agrees before joining.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedlens.cli.options import (
    ModuleOption,
    OverridesArgument,
    RecipeArgument,
    UsageError,
    examples,
    loading,
    read_config,
)
from fedlens.runs.text import console, few, plain, size

if TYPE_CHECKING:
    from fedlens.trust.policy import Policy, Terms

app = typer.Typer()
policies = typer.Typer(
    help="What a site allows, whatever a recipe or a server asks for: write it, try it.",
    no_args_is_help=True,
)
app.add_typer(policies, name="policy")


DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="This site's data. [dim]default: what the recipe names[/]",
        show_default=False,
    ),
]


@policies.command(
    "init", epilog=examples("fedlens policy init study.toml", "fedlens policy init demo -o p.toml")
)
def init_policy(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    data: DataOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file; never overwritten.")] = Path(
        "policy.toml"
    ),
    module: ModuleOption = None,
) -> None:
    """Write a strict policy: this recipe, what it sends, and nothing else."""
    from fedlens.trust.policy import policy_text, strict_policy

    if out.exists():
        raise UsageError(f"{out} exists already: a policy is never overwritten")
    with loading():
        terms = recipe_terms(recipe, overrides, data, None)
    about = (
        f"What this site allows. Written by `fedlens policy init` for {terms.name}, hash\n"
        f"{terms.digest}.\nYours to change; an entry left out sets no limit."
    )
    out.write_text(policy_text(strict_policy(terms), about))
    print_terms(terms, None)
    console().print(f"{out} allows this and no more; `fedlens join --policy {out}` holds to it")


@policies.command(
    "check",
    epilog=examples(
        "fedlens policy check study.toml", "fedlens policy check study.toml --policy strict.toml"
    ),
)
def check_policy(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    data: DataOption = None,
    policy: Annotated[Path, typer.Option("--policy", help="The policy.")] = Path("policy.toml"),
    module: ModuleOption = None,
) -> None:
    """Say whether a site with this policy would take part, and why not; no server is needed.

    Exit code 1 if it would not.
    """
    from fedlens.trust.policy import read_policy

    allowed = read_policy(policy)
    with loading():
        terms = recipe_terms(recipe, overrides, data, allowed)
    if not print_terms(terms, allowed, str(policy)):
        raise typer.Exit(1)


def recipe_terms(
    recipe: str, overrides: list[str] | None, data: Path | None, policy: Policy | None
) -> Terms:
    """What a recipe asks of a client. With a policy, modules that it does not list are not even
    imported to find out."""
    from fedlens.config.files import find_recipe, load_tables
    from fedlens.data.source import DataError
    from fedlens.runs.setup import make_setup
    from fedlens.sites.agreement import secured
    from fedlens.sites.site import with_data_at
    from fedlens.trust.policy import check_modules, terms_of

    if policy is not None:
        check_modules(policy, load_tables(find_recipe(recipe)))
    config, _ = secured(read_config(recipe, overrides))  # as real sites run it
    if data is not None:
        config = with_data_at(config, str(data))
    try:
        algorithm = make_setup(config).algorithm
    except DataError:
        if data is not None:
            raise
        algorithm = config.build_algorithm(config.build_task())
    return terms_of(config, algorithm)


def print_terms(terms: Terms, policy: Policy | None, where: str = "") -> bool:
    """The page before joining: what is asked, what leaves, under which protection, and whether the
    policy allows it.
    """
    out = console()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for key, value in describe_terms(terms):
        grid.add_row(key, plain(value))
    out.print(grid)
    if policy is None:
        return True
    objections = policy.objections(terms)
    for objection in objections:
        out.print(f"[red]no[/]: {plain(str(objection))} ({objection.entry} in {plain(where)})")
    if not objections:
        out.print(f"[green]yes[/]: {plain(where)} allows it")
    return not objections


def describe_terms(terms: Terms) -> list[tuple[str, str]]:
    work = amount(terms.steps, "step") if terms.steps else amount(terms.epochs, "epoch")
    work = f", {work} of training in each" if terms.steps or terms.epochs else ""
    trees = [f"{name} ({size(n)})" for name, n in terms.trees.items()]
    evaluation = "metrics on this site's own held-out data" if terms.evaluates else ""
    leaves = [f"a reply of about {size(terms.reply_bytes)}: the arrays {few(trees)}"]
    if terms.scalars:
        masked = "under the same masks " if terms.protection else ""
        leaves[0] += f"; {masked}the numbers {few(terms.scalars)}"
    if evaluation:
        how = "under masks too" if terms.protection else "as numbers"
        leaves.append(f"{evaluation}, {how}")
    if terms.protection:
        shield = f"{few(terms.protection)}: the server can read sums, no single reply"
    else:
        shield = (
            "none: the server can read each reply by itself; in the worst case single examples can"
            " be reconstructed from it (`fedlens audit` shows what can be seen)"
        )
    if terms.epsilon is not None:
        shield += (
            f"; differential privacy with epsilon {terms.epsilon:g} at most, at delta"
            f" {terms.delta:g}"
        )
    size_told = "the number of examples and " if terms.tells_size else ""
    runs = ["a generator of images"] if terms.generates else []
    runs += [f"code of {module}" for module in terms.modules]
    total = terms.rounds * terms.reply_bytes
    return [
        ("recipe", f"{terms.name}, hash {terms.digest[:16]}"),
        ("asked", f"{amount(terms.rounds, 'round')} among {terms.cohort} clients each{work}"),
        ("method", " + ".join(terms.stack)),
        ("leaves once", f"{size_told}the names of the classes"),
        *(("leaves each round", line) for line in leaves),
        ("leaves in all", f"about {size(total)}"),
        ("stays", "images, files, their names, error messages"),
        ("protection", shield),
        ("also runs here", few(runs) if runs else "nothing else"),
    ]


def amount(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def ask_operator(told: Mapping[str, Any], policy: Path | None, yes: bool) -> None:
    """The page before joining, and the question; raises where the answer is no."""
    from fedlens.config.convert import ConfigError
    from fedlens.sites.logs import log_line
    from fedlens.trust.policy import Policy, Terms, read_policy

    allowed = read_policy(policy) if policy else Policy()
    if told.get("terms"):
        terms = Terms(**{**told["terms"], "modules": ()})  # the worker has checked them
        if not print_terms(terms, allowed if policy else None, str(policy)):
            raise ConfigError(f"this site does not take part: {policy} does not allow it")
    if policy is None:
        log_line(
            "no --policy: this site sends whatever the recipe makes; `fedlens policy init` writes"
            " a strict one"
        )
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to agree: read the page above, then add --yes")
    typer.confirm("Take part?", abort=True)
