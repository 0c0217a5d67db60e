"""Lines for operators: plain, or one JSON object each where FEDLENS_LOG=json (`--json-log`), also
in the processes that a command starts.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime

VARIABLE = "FEDLENS_LOG"


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
