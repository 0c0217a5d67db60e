"""`fedlens ledger`: what left a client, and whether its ledger is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedlens.cli.options import UsageError, examples
from fedlens.runs.text import console, few, plain, size

if TYPE_CHECKING:
    from fedlens.trust.departures import Departures, Item
    from fedlens.trust.ledger import Head
    from fedlens.trust.verify import Verdict

_MOST_CLIENTS = 20  # in a table of the terminal; the report has them all

_READABLE = (
    "[bold]Protection: none.[/] {readable} of {replies} replies left in a form that the server can"
    " read one by one. In the worst case single training examples can be reconstructed from such a"
    " reply; `fedlens audit` shows what can be seen in it."
)
HIDDEN = (
    "[bold]Protection: {layers}.[/] Of the trees the server can read the sum over all clients, no"
    " single reply; numbers, and what went beside, left in the clear."
)

app = typer.Typer()


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
        f"[bold]What left {plain(str(folder))}[/]: {size(whole.bytes)} in {whole.times} messages,"
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
        out.print(_READABLE.format(readable=left.readable, replies=replies))
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
    for name, path in list(ledgers.items())[:_MOST_CLIENTS]:
        table.add_row(plain(name), *columns(read_departures(path).whole))
    if len(ledgers) > _MOST_CLIENTS:
        table.add_row(f"and {len(ledgers) - _MOST_CLIENTS} more")
    return table


def moment(time: str) -> str:
    """2026-11-17T23:07:23.892+00:00 as 2026-11-17 23:07:23."""
    return plain(time[:19].replace("T", " "))


# -- is it true ------------------------------------------------------------------------------------


def print_verdict(
    name: str,
    path: Path,
    key: Path | None,
    server: Path | None,
    heads: Path | None,
    alone: bool,
) -> bool:
    from fedlens.trust.signing import parse_public_key, read_certificate_key
    from fedlens.trust.verify import verify

    found = verify(
        path,
        parse_public_key(key.read_text(errors="replace"), str(key)) if key else None,
        read_certificate_key(server) if server else None,
        known_head(path, heads) if heads else None,
    )
    out = console()
    if found.intact and alone:
        remarks = trust_remarks(found, key, heads)
        out.print(f"{plain(name)}: [green]intact[/], {found.lines} lines{remarks}", soft_wrap=True)
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


def trust_remarks(found: Verdict, key: Path | None, heads: Path | None) -> str:
    text = f", countersigned by the server up to line {found.countersigned}"
    text = text if found.countersigned else ""
    if key is None:
        text += "; signed with the key that it names itself (--key compares it with the site's)"
    if heads is None:
        text += "; whether lines are missing at its end, only --heads of a run can tell"
    return text
