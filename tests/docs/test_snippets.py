"""Every command and program on the pages below is run, in the order of its page, in an empty folder
of that page's own.

What a fenced block is, by its language:

- `bash` is run by bash, and has to end well. `fedlens` and `python` are those of this environment.
- `python` and `toml` whose first line is `# NAME` are written to that file; other `python` is run.
- `text` is what the block before it printed: these lines occur in its output in this order, and
  `...` stands for anything.

`<!-- setup: NAME -->` brings data that the reader of the page calls their own (`own_data.py`), and
`<!-- no-run: REASON -->` before a block leaves it out. What is left out is listed here.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import own_data
import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST = ["docs/install.md"]
TUTORIALS = [p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("docs/tutorials/*.md"))]
SLOW = ["README.md", "docs/index.md", "docs/first_picture.md", *TUTORIALS]
NOT_RUN = {
    "README.md": ["sets up an environment of its own"],
    "docs/install.md": ["installs packages", "installs packages"],
}
SETUPS: dict[str, Callable[[Path], None]] = {
    "photos": own_data.photos,
    "people": own_data.people,
    "views": own_data.views,
    "film.mp4": own_data.film,
    "flower_app": own_data.flower_app,
}
PATIENCE = 280  # seconds; whoever waits longer has found a hang
FENCE = re.compile(
    r"^<!-- (?P<word>setup|no-run): (?P<value>.*?) -->$"
    r"|^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"# ([\w./-]+\.\w+)\n")


class Block(NamedTuple):
    """kind: what is done with it. name: of the file that it is, if it is one."""

    kind: str
    text: str
    name: str = ""


def blocks(markdown: str) -> Iterator[Block]:
    reason = ""
    for found in FENCE.finditer(markdown):
        if found["word"] == "no-run":
            reason = found["value"]
            continue
        yield block_of(found, reason)
        reason = ""


def block_of(found: re.Match[str], reason: str) -> Block:
    if found["word"]:
        return Block("setup", found["value"])
    kind, body = found["kind"], found["body"]
    if reason:
        return Block("left out", reason)
    if kind in ("python", "toml") and (named := NAME.match(body)):
        return Block("file", body, named[1])
    if kind in ("bash", "python", "text"):
        return Block(kind, body)
    raise ValueError(f"a block of the language {kind!r} is neither run nor written: {body[:60]!r}")


def missing_lines(expected: str, output: str) -> list[str]:
    """Lines of an expected output that do not occur in it, each below the one before."""
    rest = re.sub(r"[ \t]+", " ", output)
    for line in expected.splitlines():
        if line.strip() in ("", "..."):
            continue
        wanted = re.escape(re.sub(r"[ \t]+", " ", line.strip())).replace(r"\.\.\.", ".*")
        found = re.search(wanted, rest)
        if found is None:
            return [line]
        rest = rest[found.end() :]
    return []


def programs(folder: Path) -> Path:
    """A folder with `fedlens` and `python` as the pages call them."""
    folder.mkdir()
    for name, words in (
        ("fedlens", "-m fedlens.cli.main"),
        ("python", ""),
        ("pytest", "-m pytest"),
    ):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    return folder


def run_block(block: Block, folder: Path, path: Path) -> str:
    """Run it in this folder; what it printed."""
    if block.kind == "bash":
        words = ["bash", "-euo", "pipefail", "-c", block.text]
    else:
        words = [sys.executable, "-c", block.text]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FEDLENS_", "PYTEST_"))}
    env |= {"PATH": f"{path}:{env['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}"
    return done.stdout


def follow(markdown: str, folder: Path, path: Path) -> Counter[str]:
    """Do what a page says; how many blocks of each kind there were."""
    counted: Counter[str] = Counter()
    output = ""
    for block in blocks(markdown):
        counted[block.kind] += 1
        if block.kind == "setup":
            place = folder if block.text == "flower_app" else folder / block.text
            SETUPS[block.text](place)
        elif block.kind == "file":
            (folder / block.name).write_text(block.text)
        elif block.kind == "text":
            missing = missing_lines(block.text, output)
            assert not missing, f"not in the output: {missing[0]}\n{output}"
        elif block.kind != "left out":
            output = run_block(block, folder, path)
    return counted


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in (*FAST, *SLOW)
    ],
)
def test_what_a_page_says_works(page: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    counted = follow((ROOT / page).read_text(), tmp_path / "here", programs(tmp_path / "bin"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\n{page}: {dict(counted)}, {seconds:.1f} s of CPU")


def test_what_is_not_run_is_listed_here() -> None:
    total: Counter[str] = Counter()
    left_out: dict[str, list[str]] = {}
    for page in (*FAST, *SLOW):
        found = list(blocks((ROOT / page).read_text()))
        total.update(block.kind for block in found)
        if reasons := [block.text for block in found if block.kind == "left out"]:
            left_out[page] = reasons
    print(f"\nblocks on {len(FAST) + len(SLOW)} pages: {dict(total)}")
    assert left_out == NOT_RUN
    assert total["bash"] + total["python"] > 20


def test_a_page_that_fails_is_seen(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin")
    with pytest.raises(AssertionError, match="false"):
        follow("```bash\necho so far\nfalse\n```\n", tmp_path, path)
    with pytest.raises(AssertionError, match="not in the output: two"):
        follow("```bash\necho one; echo three\n```\n\n```text\none\ntwo\n```\n", tmp_path, path)
    with pytest.raises(ValueError, match="neither run nor written"):
        list(blocks("```\nfedlens run\n```\n"))


def test_files_outputs_and_reasons_are_read() -> None:
    page = """
<!-- setup: photos -->
```toml
# a.toml
x = 1
```

<!-- no-run: takes an hour -->
```bash
sleep 3600
```

```python
print(1)
```
"""
    assert [(b.kind, b.name or b.text.strip()) for b in blocks(page)] == [
        ("setup", "photos"),
        ("file", "a.toml"),
        ("left out", "takes an hour"),
        ("python", "print(1)"),
    ]
    assert missing_lines("a ... c\n...\nd", "a  b c\nx\nd e") == []
    assert missing_lines("d\na", "a\nd") == ["a"]
