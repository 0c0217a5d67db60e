"""`fedlens keys`, `serve` and `join`: thin wrappers over Flower's own programs, with secure
defaults. Each prints what it runs.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import click
import typer

Keys = Annotated[
    Path, typer.Option("--keys", help="Folder with ca.crt, server.pem and server.key.")
]
Ca = Annotated[Path, typer.Option("--ca", help="The federation's CA certificate.")]
EXPOSED = (
    "{host} can be reached from other machines. Flower's control API shares this port with the"
    " sites: node keys keep strangers from joining, but whoever can connect and holds the CA file"
    " can register keys and start runs, which means code on your sites. Put something in front that"
    " lets only the sites in (a firewall, a VPN, a proxy that asks for client certificates), then"
    " add --expose"
)


def say(text: str) -> None:
    click.echo(text, err=True)


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
) -> None:
    """Make certificates for a server and keys for its sites.

    SITE is the number of a client (0, 1, ...), whose key is then called site-0, or a name of your
    own.
    """
    from fedlens.sites import keys as make

    for text in host or []:
        make.check_host(text)
    for name in site or []:
        make.check_name(name)
    if site and not host and (out / "ca.crt").exists() and not (out / "ca.key").exists():
        say(
            f"{out}/ca.crt has no ca.key beside it, so no server certificate is made, only keys of"
            " sites"
        )
    elif host or not (out / "server.pem").exists():
        make.authority(out)
        make.server(out, host or [])
        say(f"{out}/ca.crt      goes to every site: it proves that they talk to this server")
        say(f"{out}/ca.key      stays here: whoever has it can pose as the server")
        say(
            f"{out}/server.pem  and server.key are for `fedlens serve`, valid for"
            f" {', '.join(dict.fromkeys([*(host or []), *make.HERE]))}"
        )
    for name in site or []:
        private, public = make.site(out / (f"site-{name}" if name.isdigit() else name))
        say(
            f"{private}  goes to that site and nowhere else; {public.name} is for `fedlens serve"
            " --site`"
        )


def serve(
    site: Annotated[
        list[Path] | None,
        typer.Option(
            "--site",
            help="Public key of a site that may join; may be repeated.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port to listen at.", min=1, max=65535)
    ] = 8000,
    keys: Keys = Path("keys"),
    state: Annotated[
        Path, typer.Option("--state", help="Folder of the SuperLink's database.")
    ] = Path("superlink"),
    expose: Annotated[
        bool,
        typer.Option(
            "--expose",
            help="Listen at an address that other machines can reach. Read the warning first.",
        ),
    ] = False,
) -> None:
    """Start a SuperLink: TLS and node authentication on, state on disk."""
    from fedlens.sites import keys as make
    from fedlens.sites import programs

    if not programs.loopback(host) and not expose:
        raise click.UsageError(EXPOSED.format(host=host))
    for public in site or []:
        if not public.is_file() or not public.read_text(errors="replace").startswith("ecdsa-"):
            raise click.UsageError(
                f"{public} is not a site's public key: `fedlens keys 0` makes one and calls it"
                " site-0.pub"
            )
    programs.claim(host, port)
    if not (keys / "server.pem").exists():
        make.authority(keys)
        make.server(keys, [] if host in ("0.0.0.0", "::") else [host])
        say(f"made certificates in {keys}; sites need {keys / 'ca.crt'}")
    database = programs.private_file(state / "superlink.db")
    home = programs.flower_home()
    with programs.Crew(say, home) as crew:
        link = crew.start(
            "flower-superlink", "--host", host, "--port", str(port), "--database", str(database),
            "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem"),
            "--ssl-keyfile", str(keys / "server.key"),
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        )  # fmt: skip
        reached = "127.0.0.1" if programs.loopback(host) or host in ("0.0.0.0", "::") else host
        programs.await_port(reached, port, keys / "ca.crt", crew)
        name = programs.connection(home, f"{reached}:{port}", keys / "ca.crt")
        for public in site or []:
            told = crew.call(
                "flwr",
                "supernode",
                "register",
                str(public),
                name,
                "--name",
                public.stem,
                check=False,
            )
            known = "already in use" in told  # a restart finds its sites registered
            if link.poll() is not None:
                break
            if "rror" in told and not known:
                raise click.ClickException(
                    f"{public} could not be registered: {' '.join(told.split())[:300]}"
                )
            say(f"{public.stem} may join" + (" (known from before)" if known else ""))
        else:
            say(f"serving at {host}:{port}; end with Ctrl-C")
        code = link.wait()
        raise click.ClickException(
            f"the SuperLink ended by itself (exit code {code}): its own words are above"
        )


def join(
    address: Annotated[str, typer.Argument(help="The server, as host:port.", show_default=False)],
    key: Annotated[
        Path, typer.Option("--key", help="This site's private key.", show_default=False)
    ],
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
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Answer only this recipe. [dim]default: whatever the server runs[/]",
            show_default=False,
        ),
    ] = None,
    ca: Ca = Path("keys/ca.crt"),
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Where this site keeps its memory. [dim]default: sites/KEY[/]",
            show_default=False,
        ),
    ] = None,
    generate: Annotated[
        str,
        typer.Option(
            "--generate",
            help=(
                "With FBL: constrained, unconstrained or no, as this machine can. [dim]default: a"
                " draw by the recipe's shares[/]"
            ),
            show_default=False,
        ),
    ] = "",
    patience: Annotated[
        float, typer.Option("--patience", help="Seconds to keep trying at the beginning.")
    ] = 60.0,
) -> None:
    """Take part: a SuperNode for this site, and a worker that keeps its data loaded.

    ADDRESS is the server's, as host:port. With --recipe the data is read before anything is
    started.
    """
    from fedlens.config.files import find_recipe
    from fedlens.layers.balance import ROLES
    from fedlens.sites import programs
    from fedlens.sites import study as sites

    programs.split_address(address)
    for path, what in ((key, "private key"), (ca, "CA certificate")):
        if not path.is_file():
            raise click.UsageError(f"there is no {what} {path}")
    number = client if client is not None else _number(key)
    if data is not None and not data.exists():
        raise click.UsageError(f"there is no data at {data}")
    if recipe is not None:
        recipe = str(find_recipe(recipe).absolute())
    if generate and generate not in ROLES:
        raise click.UsageError(f"--generate says one of {', '.join(ROLES)}, not {generate}")
    programs.trusting(ca)
    home = (folder or Path("sites") / key.name).absolute()
    place = str(data.absolute()) if data else ""
    facts = {
        "client": number,
        "folder": str(home),
        "data": place,
        "recipe": recipe or "",
        "generate": generate,
    }
    if recipe is not None:
        site = sites.make_site(facts, {})
        for line in (f"client {number} has {site.examples} examples", *site.remarks):
            say(line)
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    # A socket's name may have a hundred characters, a hospital's folder more.
    with (
        tempfile.TemporaryDirectory(prefix="fedlens-") as private,
        programs.Crew(say, home) as crew,
    ):
        socket = facts["worker"] = str(Path(private) / "worker")
        node_command = (
            "flower-supernode",
            "--superlink",
            address,
            "--root-certificates",
            str(ca),
            "--auth-supernode-private-key",
            str(key),
            "--host",
            "127.0.0.1",
            "--port",
            str(programs.free_port()),
            "--node-config",
            programs.node_config(facts),
        )
        code = _keep(
            crew, ("python", "-m", "fedlens.engines.flower.site", socket), node_command, patience
        )
    if code:
        raise click.ClickException(
            "the SuperNode ended, its own words are above; if it is the key, the server's operator"
            f" has to add --site {key.name}.pub; if it is the certificate, --ca must be the"
            f" server's ca.crt, and {ca} may be one that `fedlens keys` made here"
        )


def _keep(
    crew: Any, worker_command: tuple[str, ...], node_command: tuple[str, ...], patience: float
) -> int:
    """Until the SuperNode ends by itself. At the beginning it is tried again: the server may not be
    up yet, or not know the key yet.
    """
    began = time.monotonic()
    worker, node = crew.start(*worker_command), crew.start(*node_command)
    while True:
        time.sleep(0.5)
        if (
            worker.poll() is not None
        ):  # out of memory, a broken driver: the next message finds a new one
            time.sleep(1)
            worker = crew.again(worker)
        if node.poll() is not None:
            if not node.returncode or time.monotonic() - began > patience:
                return int(node.returncode)
            time.sleep(3)
            node = crew.again(node)


def _number(key: Path) -> int:
    found = re.findall(r"\d+", key.name)
    if len(found) != 1:
        raise click.UsageError(
            f"which client is this site? {key.name} does not say: add --client N"
        )
    return int(found[0])


def register(app: Any) -> None:
    examples = {
        keys: ("fedlens keys 0 1 --host fl.example.org", "fedlens keys 2"),
        serve: ("fedlens serve --site keys/site-0.pub --site keys/site-1.pub",),
        join: ("fedlens join 127.0.0.1:8000 --data scans --key site-0 --ca ca.crt",),
    }
    for command, text in examples.items():
        app.command(epilog="[bold]Examples[/]\n\n" + "\n\n".join(f"  {line}" for line in text))(
            command
        )
