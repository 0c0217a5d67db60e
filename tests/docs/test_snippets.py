"""Every command and program on the pages of the site is run, in the order of its page, in an empty
folder of that page's own.

What a fenced block is, by its language:

- `bash` is run by bash, and has to end well. `fedlens` and `python` are those of this environment.
- `python` and `toml` whose first line is `# NAME` are written to that file; other `python` is run.
- `text` is what the block before it printed: these lines occur in its output in this order, and
  `...` stands for anything.

`<!-- setup: NAME -->` brings data that the reader of the page calls their own (`own_data.py`).
`<!-- small: WORDS -->` before a block: here these words are added to each of its runs, comparisons,
sweeps and audits, so that it takes seconds; they can also put made-up data in place of a dataset.
`<!-- no-run: REASON -->` before a block leaves it out; the reasons are listed here, and
`test_commands.py` holds such commands to the command line.
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
FAST = {"docs/install.md"}
# whose blocks another test runs
ELSEWHERE = {
    "docs/first_hour.md": "tests/test_newcomers.py",
    "docs/sites.md": "tests/engines/flower/test_sites.py",
}
PAGES = [
    page
    for pattern in ("README.md", "docs/*.md", "docs/tutorials/*.md")
    for page in sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern))
    if page not in ELSEWHERE
]
NOT_RUN = {
    "README.md": ["sets up an environment of its own"],
    "docs/architecture.md": ["core/rounds.py, abridged", "no program"],
    "docs/balancing.md": [
        "needs Stable Diffusion, some gigabytes",
        "needs a server and its keys",
    ],
    "docs/install.md": ["installs packages", "installs packages", "needs a GPU"],
    "docs/looking.md": ["both serve until Ctrl-C"],
    "docs/models.md": ["needs a checkpoint of 120 MB, and minutes for a second of film"],
    "docs/policy.md": ["needs a site; docs/sites.md shows the same command, run by its test"],
    "docs/pretrained.md": ["downloads weights", "downloads weights"],
    "docs/running.md": ["needs a GPU"],
}
SETUPS: dict[str, Callable[[Path], None]] = {
    "photos": own_data.photos,
    "people": own_data.people,
    "views": own_data.views,
    "film.mp4": own_data.film,
    "flower_app": own_data.flower_app,
    "my_videos": own_data.my_videos,
    "hands": own_data.hands,
    "scans": own_data.scans,
    "rlfn_ntire_x4.pth": own_data.rlfn,
    "fastestdet_280.pth": own_data.detector,
    "vitpose-s.pth": own_data.vitpose,
    "efficientnet-lite0.pth": own_data.efficientnet,
}
PATIENCE = 280  # seconds; whoever waits longer has found a hang
FENCE = re.compile(
    r"^<!-- (?P<word>setup|small|no-run): (?P<value>.*?) -->$"
    r"|^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
LARGE = re.compile(r"^fedlens (?:run|compare|sweep|audit) [^#\n]*[^#\s]", re.MULTILINE)


class Block(NamedTuple):
    """kind: what is done with it. name: of the file that it is, if it is one."""

    kind: str
    text: str
    name: str = ""


def blocks(markdown: str) -> Iterator[Block]:
    words: dict[str, str] = {}
    for found in FENCE.finditer(markdown):
        if found["word"] in ("small", "no-run"):
            words[found["word"]] = found["value"]
            continue
        yield block_of(found, words)
        words = {}


def block_of(found: re.Match[str], words: dict[str, str]) -> Block:
    if found["word"]:
        return Block("setup", found["value"])
    kind, body = found["kind"], found["body"]
    if "no-run" in words:
        return Block("left out", words["no-run"])
    if kind in ("python", "toml") and (named := NAME.match(body)):
        return Block("file", body, named[1])
    if kind in ("bash", "python", "text"):
        return Block(kind, made_small(body, words.get("small", "")))
    raise ValueError(f"a block of the language {kind!r} is neither run nor written: {body[:60]!r}")


def made_small(commands: str, words: str) -> str:
    return LARGE.sub(lambda command: f"{command[0]} {words}".rstrip(), commands)


def commands_in(block: Block) -> int:
    """How many commands a block runs; a program is one."""
    if block.kind != "bash":
        return 1
    lines = [line.strip() for line in block.text.splitlines()]
    return len([line for line in lines if line and not line.startswith("#")])


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


def runs_something(page: str) -> bool:
    return any(b.kind in ("bash", "python") for b in blocks((ROOT / page).read_text()))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in FAST else [pytest.mark.slow])
        for page in PAGES
        if runs_something(page)
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
    for page in PAGES:
        found = list(blocks((ROOT / page).read_text()))
        total.update(block.kind for block in found)
        total["commands"] += sum(commands_in(b) for b in found if b.kind in ("bash", "python"))
        if reasons := [block.text for block in found if block.kind == "left out"]:
            left_out[page] = reasons
    print(f"\nblocks on {len(PAGES)} pages: {dict(total)}; run elsewhere: {', '.join(ELSEWHERE)}")
    assert left_out == NOT_RUN
    assert total["commands"] > 60


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
    small = "<!-- small: rounds=1 -->\n```bash\nfedlens run demo  # long\nfedlens list\n```\n"
    assert next(blocks(small)).text == "fedlens run demo rounds=1  # long\nfedlens list\n"
    assert missing_lines("a ... c\n...\nd", "a  b c\nx\nd e") == []
    assert missing_lines("d\na", "a\nd") == ["a"]
