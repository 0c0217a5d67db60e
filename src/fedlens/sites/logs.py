"""Lines for operators: plain, or one JSON object each where FEDLENS_LOG=json (`--json-log`), also
in the processes that a command starts.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime

VARIABLE = "FEDLENS_LOG"
# Said by whoever can count the sites: `serve`, `join` and the run.
TOO_FEW = (
    "SecureSum hides a site among three or more: the server sees what each site sends; and of two"
    " sites, each can subtract its own update from the common one and has the other's"
)


def log_line(text: str, prefix: str = "") -> None:
    """To standard error, at once; without control characters, whoever's words are quoted."""
    if os.environ.get(VARIABLE) == "json":
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        text = json.dumps({"time": now, "process": os.getpid(), "message": text.strip()})
    else:
        text = prefix + "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    print(text, file=sys.stderr, flush=True)


def log_as_json() -> None:
    """From here on, and in all child processes."""
    os.environ[VARIABLE] = "json"
