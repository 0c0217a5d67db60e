"""What a killed simulator leaves in shared memory is cleared away by the next one, and a living
one's is not.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fedlens.engines.simulator import make_scratch


def test_the_dead_are_swept_and_the_living_are_not(tmp_path: Path) -> None:
    mine, lock = make_scratch(tmp_path)
    child = os.fork()
    if child == 0:
        theirs, held = make_scratch(tmp_path)
        (theirs / "inbox").write_bytes(b"x")
        time.sleep(60)
        held.close()
        os._exit(0)
    while len(found := list(tmp_path.glob("fedlens-*/inbox"))) < 1:
        time.sleep(0.01)
    make_scratch(tmp_path)[1].close()
    assert found[0].exists() and mine.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    make_scratch(tmp_path)[1].close()
    assert not found[0].parent.exists() and mine.exists()
    lock.close()
