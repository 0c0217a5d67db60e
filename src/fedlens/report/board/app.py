"""A small read-only server over run folders.

It answers GET and nothing else, reads nothing outside its directory (links included), keeps no
state but a cache, and takes what a running job is writing as it finds it. Pages hear of changes by
server-sent events: the server looks at times and sizes of files five times a second, which needs no
cooperation from the job and works on every file system.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from fedlens.data.suffixes import BROWSER_SUFFIXES
from fedlens.report import html as report
from fedlens.report import page_data as views
from fedlens.report import reading as folders

LOOK = 0.2  # seconds between two looks at the files
BEAT = 10.0  # seconds after which an idle stream says that it is alive
ABSENT = "There is no such run."
NO_PICTURE = "There is no such picture."
MOST = 24  # runs that one page compares
STATIC = {"page.css": "text/css", **dict.fromkeys((*report.SCRIPTS, "board.js"), "text/javascript")}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; frame-ancestors 'none'"
)


class Board:
    """What the routes share: the directory, and the list as last seen."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._cards: dict[str, tuple[Any, dict[str, Any]]] = {}

    def cards(self) -> dict[str, dict[str, Any]]:
        """The list. Only folders that changed are read again; a running one always, because time
        alone can make it a stopped one, and a broken one, because the reason may lie outside its
        files."""
        found = folders.find_runs(self.root)
        seen = {}
        for name, path in found.items():
            mark = folders.folder_signature(path)
            old = self._cards.get(name)
            fresh = old is None or old[0] != mark or old[1]["status"] in ("running", "broken")
            seen[name] = (mark, _card(path, name)) if fresh or old is None else old
        self._cards = seen
        return {card["name"]: card for _, card in seen.values()}

    def folder(self, name: str) -> Path:
        """The folder of that name, if it lies below the directory."""
        try:
            path = (self.root / name).resolve()
            allowed = bool(name) and path.is_relative_to(self.root) and path.is_dir()
        except (OSError, ValueError):
            allowed = False
        if not allowed:
            raise HTTPException(404, ABSENT)
        return path

    def view(self, name: str) -> dict[str, Any]:
        path = self.folder(name)

        def address(image: Path) -> str:
            return "/picture?" + urlencode(
                {"run": name, "file": image.name, "v": folders.image_digest(image)}
            )

        return {
            **views.run_view(folders.read_run(path), address),
            "name": name if name != "." else folders.printable(path.name),
        }

    def views(self, names: Sequence[str]) -> dict[str, Any]:
        """Those that are there, and the names of those that are not: a deleted run must not end a
        comparison of the others.
        """
        there = self.there(names)
        return {
            "views": [self.view(name) for name in there],
            "gone": [name for name in names if name not in there],
        }

    def there(self, names: Sequence[str]) -> dict[str, Path]:
        found = {}
        for name in names:
            with suppress(HTTPException):
                found[name] = self.folder(name)
        if not found:
            raise HTTPException(404, ABSENT)
        return found


def make_app(root: Path, hosts: tuple[str, ...] = ("127.0.0.1", "localhost")) -> Starlette:
    """The application. `hosts` are the names a browser may use for it: another page must not reach
    it under a name of its own.
    """
    board = Board(root)

    async def page(request: Request) -> Response:
        return HTMLResponse(
            (report.PAGE / "board.html").read_text(), headers={"Content-Security-Policy": POLICY}
        )

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise HTTPException(404, "There is no such file.")
        return FileResponse(
            report.PAGE / name, media_type=STATIC[name], headers={"Cache-Control": "no-cache"}
        )

    async def runs(request: Request) -> Response:
        return _json(
            {
                "root": folders.printable(board.root.name),
                "runs": list((await _aside(board.cards)).values()),
            }
        )

    async def one(request: Request) -> Response:
        names = request.query_params.getlist("name")
        return _json({**await _aside(board.views, names[:MOST]), "left_out": len(names[MOST:])})

    async def picture(request: Request) -> Response:
        inside = board.folder(request.query_params.get("run", "")) / "pictures"
        try:
            path = (inside / request.query_params.get("file", "")).resolve()
            allowed = (
                path.parent == inside.resolve()
                and inside.resolve().is_relative_to(board.root)
                and path.is_file()
            )
        except (OSError, ValueError):
            allowed = False
        if not allowed or path.suffix.lower() not in BROWSER_SUFFIXES:
            raise HTTPException(404, NO_PICTURE)
        try:
            content = await _aside(path.read_bytes)
        except OSError:  # deleted since
            raise HTTPException(404, NO_PICTURE) from None
        return Response(
            content,
            media_type=mimetypes.guess_type(path.name)[0],
            headers={
                "Cache-Control": "max-age=31536000, immutable",
                "X-Content-Type-Options": "nosniff",
            },
        )

    async def save(request: Request) -> Response:
        """The self-contained report, made on the spot: nothing is written."""
        path = board.folder(request.query_params.get("run", ""))
        text = await _aside(lambda: report.render_page([folders.read_run(path)]))
        return HTMLResponse(
            text,
            headers={"Content-Disposition": f'attachment; filename="{_plain(path.name)}.html"'},
        )

    async def events(request: Request) -> Response:
        names = request.query_params.getlist("run")[:MOST]
        look = _poll_runs(board, names) if names else _poll_list(board)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _stream(request, look), media_type="text/event-stream", headers=headers
        )

    routes = {
        "/": page,
        "/static/{name}": static,
        "/api/runs": runs,
        "/api/run": one,
        "/picture": picture,
        "/report": save,
        "/events": events,
    }
    return Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={HTTPException: _refuse, Exception: _apologise},
    )


def _card(path: Path, name: str) -> dict[str, Any]:
    """One run that cannot be read, for whatever reason, must not take the list with it."""
    if (shown := folders.printable(name)) != name:  # an address is UTF-8, so none leads there
        return views.broken_card(
            path, shown, "The name of this folder is not UTF-8. Rename it to open it here."
        )
    try:
        return views.run_card(path, name)
    except Exception as error:
        return views.broken_card(
            path, name, f"This folder could not be read ({type(error).__name__})."
        )


async def _stream(request: Request, look: Callable[[], Any]) -> AsyncIterator[str]:
    """Whatever `look` finds changed, as an event; a comment now and then, so that a dead connection
    is noticed.
    """
    spoke = time.monotonic()
    yield ": hello\n\n"
    while not await request.is_disconnected():
        news = await _aside(look)
        if news is not None:
            yield f"event: change\ndata: {json.dumps(news, separators=(',', ':'))}\n\n"
            spoke = time.monotonic()
        elif time.monotonic() - spoke > BEAT:
            yield ": alive\n\n"
            spoke = time.monotonic()
        await asyncio.sleep(LOOK)


def _poll_runs(board: Board, names: list[str]) -> Callable[[], Any]:
    paths = board.there(names)

    def mark(path: Path) -> Any:
        # a folder that loses its files and one that is gone have the same signature
        return os.path.isdir(path), folders.folder_signature(path)

    def marks() -> dict[str, Any]:
        return {name: mark(path) for name, path in paths.items()}

    before = marks()

    def look() -> Any:
        nonlocal before
        now = marks()
        changed = [name for name in paths if now[name] != before[name]]
        before = now
        return {"runs": changed} if changed else None

    return look


def _poll_list(board: Board) -> Callable[[], Any]:
    before = board.cards()

    def look() -> Any:
        nonlocal before
        now = board.cards()
        changed = [card for name, card in now.items() if before.get(name) != card]
        gone = [name for name in before if name not in now]
        before = now
        return {"cards": changed, "gone": gone} if changed or gone else None

    return look


async def _aside(work: Callable[..., Any], *args: Any) -> Any:
    """Reading files must not hold up other readers."""
    return await asyncio.to_thread(work, *args)


def _json(value: Any) -> Response:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(
        text,
        media_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )


def _plain(name: str) -> str:
    return (
        "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name) or "report"
    )


async def _refuse(request: Request, error: Exception) -> Response:
    status, text = (
        (error.status_code, error.detail)
        if isinstance(error, HTTPException)
        else (400, "That cannot be done.")
    )
    return JSONResponse({"error": text}, status)


async def _apologise(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"This could not be read ({type(error).__name__})."}, 500)
