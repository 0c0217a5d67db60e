"""`fedlens board`: a local web page over run folders."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.options import examples

app = typer.Typer()


@app.command(epilog=examples("fedlens board", "fedlens board experiments --port 9000 --open"))
def board(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where the run folders are.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is this machine only.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes any free one.", min=0, max=65535)
    ] = 8600,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """A local web page over all run folders: list, compare, follow live. It only reads."""
    if not folder.is_dir():
        raise ValueError(
            f"There is no folder {folder}: name the one that holds your runs, as in `fedlens board"
            " runs`."
        )
    serve_board(folder, host, port, browser)


def serve_board(
    folder: Path, host: str = "127.0.0.1", port: int = 8600, browser: bool = False
) -> None:
    """Serve until interrupted."""
    try:
        import uvicorn

        from fedlens.report.board.app import make_app
    except ImportError as error:
        raise ValueError(
            f'The board needs a web server ({error.name} is missing): pip install "fedlens[board]"'
        ) from error
    listener = listen_at(host, port)
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    address = f"http://{reached}:{listener.getsockname()[1]}/"
    local = ("127.0.0.1", "localhost")
    config = uvicorn.Config(
        make_app(folder, local if host in local else ("*",)),
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    print(f"The board over {folder} is at {address}  (Ctrl-C ends it)", flush=True)
    if browser:
        import webbrowser

        webbrowser.open(address)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def listen_at(host: str, port: int) -> socket.socket:
    """A bound socket, made here so that a port in use is refused before the server starts."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"The board cannot listen on {host}:{port} ({error.strerror}): choose another with"
            " --port."
        ) from error
    return listener
