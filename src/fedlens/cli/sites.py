"""`fedlens keys`, `serve` and `join`: what the operators of a server and of its sites type."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.cli.options import UsageError, examples
from fedlens.core.extras import require

app = typer.Typer()

RECIPE_OR_TRUST = (
    "what may this site do? --recipe FILE is its own copy of what was agreed, and nothing else is"
    " ever done here; --trust-server instead does whatever the server's recipe says"
)
TRUSTED = (
    "--trust-server: whoever runs the server now decides what is computed on this site's data and"
    " what is sent back. It cannot send code, but a recipe of its own may be made to reveal the"
    " data. With --recipe this site does only what you have read"
)


MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        help="Answer /health and /metrics (Prometheus) at this address, such as 127.0.0.1:9100.",
        show_default=False,
    ),
]
JsonLogOption = Annotated[
    bool, typer.Option("--json-log", help="Every line of the log as one JSON object.")
]


def log(text: str) -> None:
    from fedlens.sites.logs import log_line

    log_line(text)


@app.command(
    epilog=examples(
        "fedlens keys 0 1 --host fl.example.org",
        "fedlens keys 2",
        "fedlens keys --certify site-3.pub",
    )
)
def keys(
    site: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SITE]...",
            help="Sites that get a key, by client number or name.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for certificates and keys.")
    ] = Path("keys"),
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="Name or address sites will use for the server; may be repeated.",
            show_default=False,
        ),
    ] = None,
    certify: Annotated[
        list[Path] | None,
        typer.Option(
            "--certify",
            help="Public key that a site made itself; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make certificates for a server, keys and certificates for its sites.

    SITE is the number of a client (0, 1, ...), whose key is then called site-0, or a name of your
    own. A site that made its key itself sends you its .pub, and gets the .crt that --certify makes.
    """
    from fedlens.sites.keys import (
        LOCAL_HOSTS,
        check_host,
        check_name,
        make_authority,
        make_server_certificate,
        make_site_certificate,
        make_site_key,
        site_public_key,
    )

    sites, hosts = site or [], host or []
    for text in hosts:
        check_host(text)
    for name in sites:
        check_name(name)
    for public in certify or []:
        site_public_key(public)
    if (
        sites
        and not certify
        and not hosts
        and (out / "ca.crt").exists()
        and not (out / "ca.key").exists()
    ):
        log(
            f"{out}/ca.crt has no ca.key beside it, so no server certificate is made, only keys of"
            " sites"
        )
    elif hosts or not (out / "server.pem").exists():
        make_authority(out)
        make_server_certificate(out, hosts)
        valid_for = ", ".join(dict.fromkeys([*hosts, *LOCAL_HOSTS]))
        log(f"{out}/ca.crt      goes to every site: it proves that they talk to this server")
        log(f"{out}/ca.key      stays here: whoever has it can pose as the server")
        log(f"{out}/server.pem  and server.key are for `fedlens serve`, valid for {valid_for}")
    for name in sites:
        private, public = make_site_key(out / (f"site-{name}" if name.isdigit() else name))
        certificate = ""
        if (out / "ca.key").exists():
            certificate = f", with {make_site_certificate(out, public).name}"
        log(
            f"{private}  goes to that site and nowhere else{certificate}; {public.name} is for"
            " `fedlens serve --site`"
        )
    for public in certify or []:
        log(f"{make_site_certificate(out, public)}  goes to the site that sent {public}")


@app.command(
    "serve",
    epilog=examples(
        "fedlens serve --site keys/site-0.pub --site keys/site-1.pub",
        "fedlens serve --host 0.0.0.0 --port 8443 --site 0=keys/clinic.pub",
    ),
)
def serve_sites(
    site: Annotated[
        list[str] | None,
        typer.Option(
            "--site",
            help=(
                "Public key of a site that may join, as N=FILE for client N; may be repeated."
                " [dim]default of N: the number in the file's name[/]"
            ),
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port to listen at.", min=1, max=65535)
    ] = 8000,
    control_port: Annotated[
        int | None,
        typer.Option(
            "--control-port",
            help="Port of the SuperLink, on this machine only. [dim]default: the next one[/]",
            show_default=False,
            min=1,
            max=65535,
        ),
    ] = None,
    keys: Annotated[
        Path, typer.Option("--keys", help="Folder with ca.crt, server.pem and server.key.")
    ] = Path("keys"),
    state: Annotated[
        Path, typer.Option("--state", help="Folder of the SuperLink's database.")
    ] = Path("superlink"),
    metrics: MetricsOption = None,
    json_log: JsonLogOption = False,
) -> None:
    """Let sites in: a SuperLink on this machine alone, and a door before it for sites with keys.

    Others can reach nothing but what a site needs. Runs are started on this machine, with `fedlens
    run RECIPE --engine flower` in the same folder.
    """
    require("flwr")
    from fedlens.sites import monitor, network, serve
    from fedlens.sites.logs import log_as_json

    if json_log:
        log_as_json()
    bindings = bound_keys(site or [])
    inner = control_port or (port + 1 if port < 65535 else port - 1)
    for where, number in ((host, port), ("127.0.0.1", inner)):
        network.require_free_port(where, number)
    with contextlib.ExitStack() as stack:
        if metrics:
            tls = network.front_tls(keys) if (keys / "server.pem").exists() else None
            runs = monitor.RunMetrics(lambda: monitor.noted_runs(state))
            about, revoked = {"server": f"{host}:{port}"}, partial(serve.revoked_keys, state)
            stack.enter_context(monitor.Monitor(metrics, about, runs, tls, revoked))
        serve.open_door(host, port, inner, keys, state, bindings, log)


def bound_keys(sites: list[str]) -> dict[int, Path]:
    """N=FILE or FILE: which public key belongs to which client."""
    from fedlens.sites.keys import site_public_key

    bindings: dict[int, Path] = {}
    for text in sites:
        number, equals, file = text.partition("=")
        if not equals or not (number.isascii() and number.isdigit()):
            number, file = "", text
        path = Path(file)
        site_public_key(path)
        client = int(number) if number else client_number(path)
        if client in bindings:
            raise UsageError(f"client {client} has two keys: {bindings[client]} and {path}")
        bindings[client] = path
    return bindings


@app.command(
    epilog=examples(
        "fedlens join 127.0.0.1:8000 --recipe study.toml --data scans --key site-0 --ca ca.crt"
    )
)
def join(
    address: Annotated[str, typer.Argument(help="The server, as host:port.", show_default=False)],
    key: Annotated[
        Path, typer.Option("--key", help="This site's private key.", show_default=False)
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="What this site decides for itself: the site options of the recipe's layers.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="What this site agreed to do.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="This site's data. [dim]default: its part of what the recipe names[/]",
            show_default=False,
        ),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            "--client",
            help="Its number. [dim]default: the one in the key's name[/]",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(
            "--module",
            help="A module of yours that the recipe may import; may be repeated.",
            show_default=False,
        ),
    ] = None,
    trust_server: Annotated[
        bool,
        typer.Option(
            "--trust-server", help="Without --recipe: do whatever the server's recipe says."
        ),
    ] = False,
    ca: Annotated[Path, typer.Option("--ca", help="The federation's CA certificate.")] = Path(
        "keys/ca.crt"
    ),
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            help="Of this site's key, from the server's operator. [dim]default: KEY.crt[/]",
            show_default=False,
        ),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            help=(
                "Folder with the public keys (.pub) of all sites, by which SecureSum knows them."
                " [dim]default: the folder of --key[/]"
            ),
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Where this site keeps its memory. [dim]default: sites/KEY[/]",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            help="What this site allows, see `fedlens policy init`.",
            show_default=False,
        ),
    ] = None,
    metrics: MetricsOption = None,
    json_log: JsonLogOption = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Join without asking: the page was read before.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds to keep trying at the beginning.")
    ] = 60.0,
) -> None:
    """Take part with this site's data, by this site's own copy of the recipe.

    ADDRESS is the server's, as host:port. KEY=VALUE chooses what a layer leaves to its sites
    (`fedlens list layers NAME` shows its options). Recipe, options and data are read and checked
    before the server is asked for work, and one page says what leaves. No code ever comes from the
    server. Everything that leaves is in FOLDER/ledger.jsonl; `fedlens ledger FOLDER` shows it.
    """
    require("flwr")
    from fedlens.cli.trust import ask_operator
    from fedlens.config.files import find_recipe
    from fedlens.sites import join as joining
    from fedlens.sites import monitor, network
    from fedlens.sites.logs import log_as_json

    if json_log:
        log_as_json()
    network.split_address(address)
    for path, what in ((key, "private key"), (ca, "CA certificate"), (policy, "policy")):
        if path is not None and not path.is_file():
            raise UsageError(f"there is no {what} {path}")
    number = client if client is not None else client_number(key)
    if data is not None and not data.exists():
        raise UsageError(f"there is no data at {data}")
    if (recipe is None) != trust_server:
        raise UsageError(RECIPE_OR_TRUST)
    home = (folder or Path("sites") / key.name).absolute()
    node: dict[str, Any] = {
        "client": number,
        "folder": str(home),
        "peers": str((peers or key.parent).absolute()),
        "data": str(data.absolute()) if data else "",
        "recipe": str(find_recipe(recipe).absolute()) if recipe else "",
        "trust-server": trust_server,
        "modules": module or [],
        "key": str(key.absolute()),
        "policy": str(policy.absolute()) if policy else "",
        "ca": str(ca.absolute()),
        **site_options(options or []),
    }
    if trust_server:
        log(TRUSTED)
    tls = network.site_tls(ca, certificate or key.with_name(f"{key.name}.crt"), key)
    agree = partial(ask_operator, policy=policy, yes=yes)
    with contextlib.ExitStack() as stack:
        if metrics:
            numbers = monitor.SiteMetrics(home)
            stack.enter_context(monitor.Monitor(metrics, {"client": number}, numbers))
        joining.take_part(address, tls, key, node, wait, log, agree=agree)


def client_number(key: Path) -> int:
    found = re.findall(r"\d+", key.name)
    if len(found) != 1:
        raise UsageError(
            f"which client is this site? {key.name} does not say: add --client N, or write"
            f" --site N={key} at the server"
        )
    return int(found[0])


def site_options(options: list[str]) -> dict[str, str]:
    """KEY=VALUE arguments as keys of a node config."""
    from fedlens.config.overrides import parse_overrides
    from fedlens.sites.site import OPTION

    chosen = {}
    for name, value in parse_overrides(options):
        if not name.isascii() or not name.isidentifier() or not value:
            raise UsageError(f"{name}={value} is no site option: write NAME=VALUE")
        chosen[OPTION + name] = str(value)
    return chosen
