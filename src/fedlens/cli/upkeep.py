"""`fedlens rotate`, `revoke`, `forget` and `status`: keys come and go, what was kept is deleted for
good, and how a server or a site is doing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.cli.options import UsageError, examples
from fedlens.runs.text import console, plain, size

if TYPE_CHECKING:
    from fedlens.trust.retention import Kept

app = typer.Typer()


@app.command(epilog=examples("fedlens rotate site-0", "fedlens rotate site-0 --folder /srv/site"))
def rotate(
    key: Annotated[
        Path, typer.Argument(help="This site's private key, as `fedlens keys` made it.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="The site's folder. [dim]default: sites/KEY[/]", show_default=False
        ),
    ] = None,
) -> None:
    """Replace a site's key by a new one; its ledger says so, signed with the old one.

    The old pair is kept as KEY.old and KEY.old.pub until you delete it: the ledger up to here is
    verified with it, and `fedlens forget KEY.old` deletes the private one for good. Send KEY.pub to
    the server's operator, who starts `fedlens serve` with it in place of the old one, and to the
    other sites, whose operators put it into their folder of --peers in place of the old one.
    """
    from fedlens.core.files import lock_folder, write_atomically
    from fedlens.trust.ledger import LEDGER_FILE, Ledger
    from fedlens.trust.signing import make_signing_key, read_signing_key

    home = folder or Path("sites") / key.name
    old = read_signing_key(key)
    for taken in (key.with_name(f"{key.name}.old"), key.with_name(f"{key.name}.new")):
        if taken.exists():
            raise UsageError(f"{taken} exists: an earlier rotation was not finished with it")
    with lock_folder(home, "`fedlens join` is running with {folder}: end it first"):
        fresh = key.with_name(f"{key.name}.new")
        made = make_signing_key(fresh)
        if (home / LEDGER_FILE).exists():
            Ledger(home / LEDGER_FILE, old).rotate(made)
        public, spare = key.with_name(f"{key.name}.pub"), key.with_name(f"{key.name}.old")
        private_copy(key, spare)
        if public.exists():
            write_atomically(spare.with_name(f"{spare.name}.pub"), public.read_text())
        private_copy(fresh, key)
        write_atomically(public, fresh.with_name(f"{fresh.name}.pub").read_text())
        fresh.unlink()
        fresh.with_name(f"{fresh.name}.pub").unlink()
    console().print(
        f"{key} is new; send {public} to the server's operator, who revokes the old one by"
        " starting `fedlens serve` with the new one, and to the other sites, which under SecureSum"
        f" know this one by it. {spare} is void from the next line of the ledger on.",
        soft_wrap=True,
    )


def private_copy(source: Path, target: Path) -> None:
    """Written whole, readable for its owner only."""
    from fedlens.core.files import atomic_path

    with atomic_path(target) as part:
        part.touch(mode=0o600)
        part.write_bytes(source.read_bytes())


@app.command(
    epilog=examples(
        "fedlens forget sites/site-0",
        "fedlens forget sites/site-0 --job 5f2c09aa11bb22cc",
        "fedlens forget sites/site-0 --expired --policy policy.toml",
        "fedlens forget sites/site-0 --everything",
    )
)
def forget(
    folder: Annotated[
        Path,
        typer.Argument(help="A site's folder, or one file such as an old key.", show_default=False),
    ],
    job: Annotated[
        str | None,
        typer.Option("--job", help="The memory of this job.", show_default=False),
    ] = None,
    expired: Annotated[
        bool,
        typer.Option("--expired", help="What is older than keep_days of the policy allows."),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option("--everything", help="All of it, the ledger too: this site leaves."),
    ] = False,
    policy: Annotated[
        Path, typer.Option("--policy", help="With --expired: the site's policy.")
    ] = Path("policy.toml"),
    yes: Annotated[bool, typer.Option("--yes", help="Without asking.")] = False,
) -> None:
    """Say what a site keeps; with --job, --expired or --everything, delete it for good.

    Deleted means overwritten and removed. A job that still runs then finds this site without
    memory. A ledger is deleted with --everything, or with --expired when its last line is too old.
    """
    from fedlens.trust.retention import kept_in

    if not folder.exists():
        raise UsageError(f"there is no {folder}")
    if folder.is_file():
        delete([one_file(folder)], yes)
        return
    kept = kept_in(folder)
    if job is not None:
        kept = [k for k in kept if k.kind == "memory" and k.path.name == job]
        if not kept:
            raise UsageError(f"{folder} holds no memory of a job {job}")
    elif expired:
        days = days_kept(policy)
        kept = [k for k in kept if k.days > days]
    elif not everything:
        print_kept(folder, kept)
        return
    from fedlens.core.files import lock_folder

    with lock_folder(folder, "`fedlens join` is running with {folder}: end it first"):
        delete(kept, yes)


def one_file(path: Path) -> Kept:
    from fedlens.trust.retention import Kept

    stat = path.lstat()
    return Kept(path, "file", stat.st_size, stat.st_mtime)


def days_kept(policy: Path) -> int:
    from fedlens.trust.policy import read_policy

    days = read_policy(policy).keep_days
    if days is None:
        raise UsageError(f"{policy} does not say how long: add keep_days = 365")
    return days


def print_kept(folder: Path, kept: list[Kept]) -> None:
    out = console()
    for k in kept:
        out.print(f"{k.kind:8} {k.path.name:24} {size(k.bytes):>9}   {k.days:.0f} days old")
    out.print(f"{len(kept)} things in {folder}; nothing was deleted")


def delete(kept: list[Kept], yes: bool) -> None:
    from fedlens.trust.retention import delete_for_good

    names = ", ".join(str(k.path) for k in kept)
    if not kept:
        console().print("nothing to delete")
        return
    if not yes:
        typer.confirm(f"Delete for good: {names}?", abort=True)
    total = sum(delete_for_good(k.path) for k in kept)
    console().print(f"overwrote and deleted {size(total)}: {names}", soft_wrap=True)


@app.command(epilog=examples("fedlens revoke keys/site-0.pub"))
def revoke(
    public: Annotated[Path, typer.Argument(help="A site's public key.", show_default=False)],
    state: Annotated[Path, typer.Option("--state", help="The folder of `fedlens serve`.")] = Path(
        "superlink"
    ),
) -> None:
    """Let nobody in with this key any more, from the next connection on; `serve` may be running."""
    from fedlens.sites.serve import revoke_key

    if not state.is_dir():
        raise UsageError(f"there is no {state}: --state is the folder of `fedlens serve`")
    revoke_key(state, public)
    console().print(
        f"{public} is revoked. Nothing of that site's is at the server but sums; its number can be"
        " given to another key with `fedlens serve --site`.",
        soft_wrap=True,
    )


@app.command(
    epilog=examples(
        "fedlens status 127.0.0.1:9100",
        "fedlens status fl.example.org:9100 --ca keys/ca.crt --key keys/site-0",
    )
)
def status(
    address: Annotated[
        str, typer.Argument(help="What --metrics of serve or join names.", show_default=False)
    ],
    ca: Annotated[
        Path | None,
        typer.Option("--ca", help="For another machine: the CA certificate.", show_default=False),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="With --ca: a key with its KEY.crt.", show_default=False),
    ] = None,
) -> None:
    """Show how a server or a site is doing."""
    import json

    from fedlens.sites import network

    network.split_address(address)
    if (ca is None) != (key is None):
        raise UsageError("--ca and --key go together")
    tls = network.site_tls(ca, key.with_name(f"{key.name}.crt"), key) if ca and key else None
    page = fetch_page(address, "/health", tls)
    try:
        health = dict(json.loads(page))
    except (ValueError, TypeError, RecursionError) as e:
        raise UsageError(f"{address} is no endpoint of FedLens: /health is no JSON table") from e
    out = console()
    out.print(plain("  ".join(f"{k} {v}" for k, v in health.items())))
    for line in fetch_page(address, "/metrics", tls).splitlines():
        if line and not line.startswith("#"):
            out.print(plain(line.removeprefix("fedlens_")))


def fetch_page(address: str, path: str, tls: Any) -> str:
    import http.client
    import urllib.error
    import urllib.request

    url = f"{'https' if tls else 'http'}://{address}{path}"
    try:
        with urllib.request.urlopen(url, timeout=20, context=tls) as answer:
            text: str = answer.read(1 << 22).decode(errors="replace")
            return text
    except (OSError, http.client.HTTPException) as e:
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        raise UsageError(f"{address} does not answer: {plain(str(reason))}") from e
