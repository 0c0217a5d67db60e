"""The figures of the documentation, drawn from here: the round, the stack, a site with its policy.

    python docs/figures/draw.py        writes round.svg, stack.svg and site.svg beside this file

A figure is a list of SVG elements; places are in pixels of the figure.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
INK, QUIET, PAPER = "#1f2933", "#52606d", "#ffffff"
SERVER, CLIENT, KEPT = "#d9f2ee", "#fdf0d5", "#fbe3e0"
FONT = "font-family='system-ui, sans-serif'"


def text(
    x: float, y: float, words: str, size: int = 14, bold: bool = False, at: str = "middle"
) -> str:
    weight = " font-weight='600'" if bold else ""
    place = f"x='{x:g}' y='{y:g}' text-anchor='{at}' font-size='{size}'"
    return f"<text {place} fill='{INK}'{weight}>{escape(words)}</text>"


def box(x: float, y: float, w: float, h: float, fill: str, title: str, *lines: str) -> list[str]:
    """A box with a title and lines below it."""
    frame = f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='8'"
    found = [f"{frame} fill='{fill}' stroke='{QUIET}'/>"]
    found.append(text(x + w / 2, y + 24, title, 15, bold=True))
    return found + [text(x + w / 2, y + 46 + 19 * k, line, 13) for k, line in enumerate(lines)]


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "", dy: float = -8) -> list[str]:
    ends = f"x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}'"
    line = f"<line {ends} stroke='{INK}' stroke-width='1.6' marker-end='url(#tip)'/>"
    return [line, *([text((x1 + x2) / 2, (y1 + y2) / 2 + dy, label, 13)] if label else [])]


def figure(width: int, height: int, about: str, *parts: list[str]) -> str:
    tip = "<path d='M0 0L8 4L0 8z' fill='" + INK + "'/>"
    marker = "<marker id='tip' markerWidth='8' markerHeight='8' refX='7' refY='4' orient='auto'>"
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>"
    )
    ground = f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
    inside = [f"<title>{escape(about)}</title>", f"<defs>{marker}{tip}</marker></defs>", ground]
    return "\n".join([head, *inside, *(e for part in parts for e in part), "</svg>"]) + "\n"


def draw_round() -> str:
    parts: list[str] = []
    for k in range(3):
        top = 20 + 120 * k
        says = ("client_step on its own images", "images and memory stay here")
        parts += box(520, top, 260, 100, CLIENT, f"client {k}", *says)
        parts += arrow(260, top + 35, 512, top + 35, "2  message: the model" if k == 0 else "")
        parts += arrow(520, top + 65, 268, top + 65, "3  reply: an update" if k == 0 else "", 20)
    says = ("1  broadcast: a message", "4  sum, in a fixed order", "5  server_step: new state")
    return figure(
        800,
        380,
        "A round: the server sends a message, clients reply, the replies are summed",
        box(20, 20, 240, 340, SERVER, "server", *says),
        parts,
    )


def draw_stack() -> str:
    layers = [
        ("SecureSum", "what goes on the wire: replies under masks", 20),
        ("LossAware", "how replies are merged: by their loss", 70),
        ("HighFrequency", "what is learned: one more term in the loss", 120),
        ("FedAvg(task)", "the base: train, send the update, take the mean", 170),
    ]
    parts: list[str] = []
    for k, (name, says, inset) in enumerate(layers):
        fill = SERVER if k < 3 else CLIENT
        parts += box(
            inset, 60 + 62 * k, 800 - 2 * inset, 330 - 62 * k - inset / 2, fill, name, says
        )
    return figure(
        800,
        400,
        "A stack: layers around a base algorithm",
        [
            text(
                400,
                34,
                "stack(FedAvg(task), HighFrequency(), LossAware(), SecureSum())",
                15,
                bold=True,
            )
        ],
        parts,
    )


def draw_site() -> str:
    asks = ("recipe allowed?", "request allowed?", "bytes allowed?")
    notes = ("a signed line", "for all bytes,", "before they leave")
    return figure(
        800,
        400,
        "A site: its data, its own recipe and policy, the ledger before the way out",
        box(20, 20, 540, 360, PAPER, "a site: code that its own operator installed"),
        box(45, 70, 150, 130, KEPT, "data", "images, labels", "memory of methods", "never leave"),
        box(45, 225, 150, 130, CLIENT, "its own copies", "recipe", "policy.toml", "key"),
        box(235, 70, 140, 130, CLIENT, "worker", "client_step", "by its own recipe"),
        box(235, 225, 140, 130, CLIENT, "policy", *asks),
        box(410, 145, 130, 130, CLIENT, "ledger", *notes),
        box(640, 145, 140, 130, SERVER, "server", "sums over", "three or more", "(SecureSum)"),
        arrow(195, 135, 229, 135),
        arrow(195, 290, 229, 290),
        arrow(305, 219, 305, 206),
        arrow(375, 135, 404, 185),
        arrow(375, 290, 404, 235),
        arrow(540, 196, 634, 196, "a reply"),
        arrow(640, 235, 546, 235, "a message", 20),
    )  # fmt: skip


FIGURES = {"round.svg": draw_round, "stack.svg": draw_stack, "site.svg": draw_site}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw())
