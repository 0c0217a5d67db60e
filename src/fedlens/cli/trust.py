"""`fedlens ledger`: what left a client, and whether its ledger is as it was written. `fedlens
policy`: what a site allows, and whether a recipe keeps to it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedlens.cli.options import (
    OverridesArgument,
    RecipeArgument,
    UsageError,
    examples,
    loading,
    read_config,
)
from fedlens.runs.text import console, few, size

if TYPE_CHECKING:
    from fedlens.trust.departures import Departures, Item
    from fedlens.trust.ledger import Head, Verdict
    from fedlens.trust.policy import Policy, Terms

MOST_CLIENTS = 20  # in a table of the terminal; the report has them all

READABLE = (
    "[bold]Protection: none.[/] {readable} of {replies} replies left in a form that the server can"
    " read one by one. In the worst case single training examples can be reconstructed from such a"
    " reply; `fedlens audit` shows what can be seen in it."
)
HIDDEN = (
    "[bold]Protection: {layers}.[/] No single reply can be read by the server, only their sum; the"
    " numbers listed above are what left beside it or inside it."
)

app = typer.Typer()
policies = typer.Typer(
    help="What a site allows, whatever a recipe or a server asks for: write it, try it.",
    no_args_is_help=True,
)
app.add_typer(policies, name="policy")


@app.command(
    "ledger",
    epilog=examples(
        "fedlens ledger sites/site-0",
        "fedlens ledger sites/site-0 --verify --key keys/site-0.pub",
        "fedlens run demo --ledger && fedlens ledger runs/demo --verify",
    ),
)
def show_ledger(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A site's folder, a run folder with --ledger, or a ledger itself.",
            show_default=False,
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every signature and the whole chain.")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            help="With --verify: the site's public key. [dim]default: the one the ledger names[/]",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        Path | None,
        typer.Option(
            "--server",
            help="With --verify: the server's certificate, for what it has countersigned.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            "--heads",
            help="With --verify: the run folder on the server, which kept the heads it saw.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say on one screen what left a client: names, sizes, rounds, first and last time.

    Exit code 1 if --verify finds that a line was changed, deleted, inserted or moved.
    """
    from fedlens.trust.departures import find_ledgers, read_departures

    if not folder.exists():
        raise UsageError(f"there is no {folder}")
    ledgers = find_ledgers(folder)
    if not ledgers:
        raise UsageError(
            f"there is no ledger in {folder}: a site has one in its own folder, a simulation with"
            " --ledger in its run folder"
        )
    whole = None
    for path in ledgers.values():
        whole = read_departures(path, whole)
    assert whole is not None
    out = console()
    print_departures(folder, whole)
    if len(ledgers) > 1:
        out.print(client_table(ledgers))
    if not verify:
        out.print("[dim]Not verified; --verify checks every signature and the chain.[/]")
        return
    broken = 0
    for name, path in ledgers.items():
        beside = path.parent / "keys" / f"{path.stem}.pub"  # of a simulated client
        own = key or (beside if beside.is_file() else None)
        broken += not print_verdict(name, path, own, server, heads, len(ledgers) == 1)
    if len(ledgers) > 1:
        out.print(f"{len(ledgers) - broken} of {len(ledgers)} ledgers are intact")
    if broken:
        raise typer.Exit(1)


# -- what left -------------------------------------------------------------------------------------


def print_departures(folder: Path, left: Departures) -> None:
    out = console()
    whole = left.whole
    if left.odd:
        out.print(f"[red]{left.odd} lines are not a ledger's and are left out; see --verify[/]")
    if not whole.times:
        out.print("Nothing has left.")
        return
    between = f"between {moment(whole.began)} and {moment(whole.ended)} UTC"
    out.print(
        f"[bold]What left {escape(str(folder))}[/]: {size(whole.bytes)} in {whole.times} messages,"
        f" {between}"
    )
    for job, recipe in left.jobs.items():
        out.print(f"[dim]job {plain(job)}, recipe {plain(recipe[:16])}[/]")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "", "times", "size", "rounds", "first", "last"):
        table.add_column(name, justify="right" if name in ("times", "size") else "left")
    for kind, item in left.kinds.items():
        table.add_row("message", plain(kind), *columns(item))
    for name, item in left.trees.items():
        label = f"{plain(name)} [dim]({item.arrays} arrays)[/]"
        table.add_row("tree", label, *columns(item))
    for name, item in left.scalars.items():
        table.add_row("number", plain(name), *columns(item))
    for name, item in left.said.items():
        table.add_row("beside", plain(name), *columns(item))
    if left.overhead.times:
        table.add_row("overhead", "requests: heartbeats, headers", *columns(left.overhead))
    out.print(table)
    replies = sum(left.kinds[k].times for k in left.kinds if k == "reply")
    if left.readable:
        out.print(READABLE.format(readable=left.readable, replies=replies))
    elif left.protection:
        out.print(HIDDEN.format(layers=plain(few(sorted(left.protection)))))


def columns(item: Item) -> tuple[str, ...]:
    rounds = "" if item.first is None else f"{item.first}"
    rounds += f" to {item.last}" if item.last != item.first else ""
    shown = size(item.bytes) if item.bytes else ""
    return str(item.times), shown, rounds, moment(item.began), moment(item.ended)


def client_table(ledgers: dict[str, Path]) -> Table:
    from fedlens.trust.departures import read_departures

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("client", "times", "size", "rounds", "first", "last"):
        table.add_column(name, justify="right" if name in ("times", "size") else "left")
    for name, path in list(ledgers.items())[:MOST_CLIENTS]:
        table.add_row(plain(name), *columns(read_departures(path).whole))
    if len(ledgers) > MOST_CLIENTS:
        table.add_row(f"and {len(ledgers) - MOST_CLIENTS} more")
    return table


def moment(time: str) -> str:
    """2026-11-17T23:07:23.892+00:00 as 2026-11-17 23:07:23."""
    return plain(time[:19].replace("T", " "))


def plain(text: str) -> str:
    """Somebody else's words: no markup, nothing that a terminal would obey."""
    return escape("".join(c if c.isprintable() else "?" for c in text))


# -- is it true ------------------------------------------------------------------------------------


def print_verdict(
    name: str,
    path: Path,
    key: Path | None,
    server: Path | None,
    heads: Path | None,
    alone: bool,
) -> bool:
    from fedlens.trust.ledger import verify
    from fedlens.trust.signing import parse_public_key, read_certificate_key

    found = verify(
        path,
        parse_public_key(key.read_text(errors="replace"), str(key)) if key else None,
        read_certificate_key(server) if server else None,
        known_head(path, heads) if heads else None,
    )
    out = console()
    if found.intact and alone:
        out.print(
            f"{plain(name)}: [green]intact[/], {found.lines} lines{trust_remarks(found, key)}"
        )
    for fault in found.faults:
        out.print(f"{plain(name)}: [red]{plain(fault)}[/]", soft_wrap=True)
    return found.intact


def known_head(path: Path, run: Path) -> Head | None:
    """The head of this ledger that the server kept in its run folder."""
    from fedlens.trust.departures import read_departures
    from fedlens.trust.receipts import read_heads

    heads = read_heads(run)
    found = [heads[i] for i in read_departures(path).clients if i in heads]
    if not found:
        raise UsageError(f"the server of {run} has kept no head of {path}")
    return found[0]


def trust_remarks(found: Verdict, key: Path | None) -> str:
    text = f", countersigned by the server up to line {found.countersigned}"
    text = text if found.countersigned else ""
    if key is None:
        text += "; signed with the key that it names itself (--key compares it with the site's)"
    return text


# -- what is allowed -------------------------------------------------------------------------------

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
    work = (
        f"{terms.steps} steps" if terms.steps else f"{terms.epochs} epochs" if terms.epochs else ""
    )
    work = f", {work} of training in each" if work else ""
    trees = [f"{name} ({size(n)})" for name, n in terms.trees.items()]
    evaluation = "metrics on this site's own held-out data" if terms.evaluates else ""
    leaves = [f"a reply of about {size(terms.reply_bytes)}: the arrays {few(trees)}"]
    if terms.scalars:
        leaves[0] += f"; the numbers {few(terms.scalars)}"
    if evaluation:
        leaves.append(f"{evaluation}, as numbers")
    if terms.protection:
        shield = f"{few(terms.protection)}: the server can read sums, no single reply"
    else:
        shield = (
            "none: the server can read each reply by itself; in the worst case single examples can"
            " be reconstructed from it (`fedlens audit` shows what can be seen)"
        )
    if terms.epsilon is not None:
        shield += f"; differential privacy with epsilon {terms.epsilon:g}"
    runs = ["a generator of images"] if terms.generates else []
    runs += [f"code of {module}" for module in terms.modules]
    total = terms.rounds * terms.reply_bytes
    return [
        ("recipe", f"{terms.name}, hash {terms.digest[:16]}"),
        ("asked", f"{terms.rounds} rounds among {terms.cohort} clients each{work}"),
        ("method", " + ".join(terms.stack)),
        ("leaves once", "the number of examples and the names of the classes"),
        *(("leaves each round", line) for line in leaves),
        ("leaves in all", f"about {size(total)}"),
        ("stays", "images, files, their names, error messages"),
        ("protection", shield),
        ("also runs here", few(runs) if runs else "nothing else"),
    ]


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
