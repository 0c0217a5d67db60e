"""Damaged and hostile bytes, by the thousand, into everything that reads what somebody else wrote.

    python tests/fuzz.py                        # 100,000 cases: `make fuzz`
    python tests/fuzz.py --cases 2000 --only replies,videos
    python tests/fuzz.py --only replies --from 1234 --cases 1      # one case again, in this process

Each case is a pure function of target, seed and number. Cases run in a child process: one that dies
(a decoder may) or takes longer than SECONDS is reported like one that raised something else than
the error it should. Ends by printing one JSON object; the exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))

import torch
from films import shaded
from PIL import Image
from toy import Toy, same_bits, toy_federation

from fedlens.algorithms import FedAvg
from fedlens.config.files import shipped_recipes
from fedlens.config.recipe import ConfigError, read
from fedlens.core.algorithm import stack
from fedlens.core.limits import MOST_WEIGHT
from fedlens.core.memory import Memory, Record
from fedlens.core.message import BadMessage, Header, Message
from fedlens.core.replies import LONGEST, Lost, Weightless, gather
from fedlens.core.rounds import Progress, unusable
from fedlens.data.images.reading import read_image
from fedlens.data.source import DataError
from fedlens.data.video.files import open_frames
from fedlens.engines.worker import Worker
from fedlens.layers import LossAware, Scaffold
from fedlens.runs.checkpoint import Checkpoint, CheckpointError, _seal

SECONDS = 60  # that a case may take before it hangs
DIGEST = slice(35, 99)  # where a message has it: tests/core/test_message.py

ODD: Sequence[Any] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 1.5, -0.0, 1e308, 1e-320,
    math.inf, -math.inf, math.nan, "", "0", "x" * 3000, "\x1b[2J\x00\r\n", "é\u202e", [], [[]],
    [0] * 1000, {}, {"a": {"b": {}}}, [None], ["x"], {"": 0}, "F32", [0, 40],
)  # fmt: skip


# -- mutations -------------------------------------------------------------------------------------


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flipped, overwritten, cut, lengthened, moved: what a disk, a network or a child would do."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 50))):
        at = rng.randrange(max(1, len(out)))
        kind = rng.randrange(7)
        if kind <= 1 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            del out[at : at + rng.choice((1, 4, 100, len(out)))]
        elif kind == 4:
            out[at:at] = rng.choice((b"\0" * 8, b"\xff" * 8, rng.randbytes(20), bytes(out[:50])))
        elif kind == 5:
            other = rng.randrange(max(1, len(out)))
            out[at : at + 16] = out[other : other + 16]
        else:
            for old in (b"0", b'"', b"[", b"1", b"e"):
                if rng.random() < 0.2 and old in out:
                    out = out.replace(old, rng.choice((b"9", b"-1", b"]", b"NaN", b"")), 1)
    return bytes(out)


def altered(value: Any, rng: random.Random, chance: float = 0.15) -> Any:
    """A JSON value of which some part is replaced, dropped, doubled or renamed."""
    if rng.random() < chance / 3:
        return rng.choice(ODD)
    if isinstance(value, dict):
        out = {}
        for key, inner in value.items():
            draw = rng.random()
            if draw < chance / 5:
                continue
            name = key if draw > chance / 3 else rng.choice((key + "x", key[:-1], "", "\x1b[31m"))
            out[name] = altered(inner, rng, chance)
        if rng.random() < chance / 5:
            out[rng.choice(("delta", "mean", "x", "__proto__"))] = rng.choice(ODD)
        return out
    if isinstance(value, list):
        out_list = [altered(v, rng, chance) for v in value if rng.random() > chance / 10]
        return out_list * 2 if rng.random() < chance / 20 else out_list
    if isinstance(value, bool) or value is None:
        return rng.choice(ODD) if rng.random() < chance else value
    if isinstance(value, int | float) and rng.random() < chance:
        return rng.choice((-value, value + 1, value * 1e30, value - 1, 0, rng.choice(ODD)))
    if isinstance(value, str) and rng.random() < chance:
        return damaged(value.encode(), rng).decode(errors="replace")
    return value


def sealed(data: bytes) -> bytes:
    """The same bytes with the digest that belongs to them, as a hostile client would send them."""
    digest = hashlib.sha256(data[: DIGEST.start] + data[DIGEST.stop :]).hexdigest().encode()
    return data[: DIGEST.start] + digest + data[DIGEST.stop :]


def resealed(data: bytes, rng: random.Random) -> bytes:
    """A message whose header or payload somebody changed on purpose, under a right digest."""
    length = int.from_bytes(data[:8], "little")
    index, payload = json.loads(data[8 : 8 + length]), data[8 + length :]
    meta = json.loads(index["__metadata__"]["message"])
    kind = rng.randrange(4)
    if kind == 0:
        meta = altered(meta, rng)
    elif kind == 1:
        arrays = {k: v for k, v in index.items() if k != "__metadata__"}
        found = altered(arrays, rng, 0.05)
        if isinstance(found, dict):
            index = {"__metadata__": index["__metadata__"], **found}
    elif kind == 2:
        payload = damaged(payload, rng)
    else:
        at = rng.randrange(max(1, len(payload) // 4)) * 4
        value = rng.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e20, 1e-45, 0.0))
        payload = payload[:at] + torch.tensor([value]).numpy().tobytes() + payload[at + 4 :]
    index["__metadata__"] = {"digest": "0" * 64, "message": json.dumps(meta)}
    text = json.dumps(index, separators=(",", ":")).encode()
    if rng.random() < 0.05:
        text = damaged(text, rng)
    text += b" " * (-len(text) % 8)
    return sealed(len(text).to_bytes(8, "little") + text + payload)


# -- targets ---------------------------------------------------------------------------------------


class Target(ABC):
    """One kind of thing that is read. share: of all cases."""

    share: ClassVar[float]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def case(self, rng: random.Random) -> bool:
        """One case; was it refused? Raises, where something that must not be happens."""


class Messages(Target):
    """Any change of any byte is refused."""

    share = 0.5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = {"w": torch.randn(3, 4), "n": torch.tensor(5), "c": torch.zeros(2).cfloat()}
        whole = Message({"model": model, "delta": {"w": torch.ones(40)}}, {"loss": 0.5}, sender=3)
        self.data = bytes(whole.weigh("delta", 2.0).to_bytes())

    def case(self, rng: random.Random) -> bool:
        found = damaged(self.data, rng)
        if found == self.data:
            return True
        try:
            Message.from_bytes(found, copy=rng.random() < 0.5)
        except BadMessage:
            return True
        raise AssertionError("damaged bytes were read as a message")


class Replies(Target):
    """Under a right digest anything may come: what is accepted has the names, shapes, types and
    sender that were expected, and weights within the bound; and the server can use it."""

    share = 0.2

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.federation = toy_federation(3)
        layers = (Scaffold(), LossAware(tau=0.0))
        self.algorithm = stack(FedAvg(Toy(), batch=8), *layers)
        self.state = self.algorithm.init().with_header(Header(0, 2, population=3))
        message = self.algorithm.broadcast(self.state)
        self.message = message.with_header(self.state.header, cohort=3)
        self.honest = [self.reply(i) for i in range(3)]
        self.data = bytes(self.honest[2].to_bytes())

    def reply(self, sender: int) -> Message:
        """As a client would send it: small numbers of the expected form."""
        rng = torch.Generator().manual_seed(sender)
        trees = {
            tree: {
                n: (torch.rand(t.shape, generator=rng) / 100).to(t.dtype) for n, t in like.items()
            }
            for tree, like in self.algorithm.expects(self.message).items()
        }
        weights = {"delta": {"uniform": 1.0, "loss": 0.5}, "control": {"mean": 1.0}}
        return Message(trees, {"loss": 2.0, "examples": 20.0}, weights, sender)

    def case(self, rng: random.Random) -> bool:
        try:
            reply = Message.from_bytes(resealed(self.data, rng), copy=True)
        except BadMessage:
            return True
        if reply.sender != 2 or reply.round != 0:
            return True  # as `Flower._read` has it
        worker = Worker(self.algorithm, self.federation, Memory())
        worker.begin(self.message, True)
        checked = worker.check(reply)
        if isinstance(checked, Lost):
            assert checked.refused and checked.reason.isprintable()
            return True
        self.inspect(checked)
        outcomes = [worker.admit(i, m) for i, m in enumerate([*self.honest[:2], reply])]
        assert not any(isinstance(x, Lost) for x in outcomes)
        replies, _ = gather([*outcomes, worker.finish()], range(3))
        with contextlib.suppress(Weightless):
            limited = replies.limited_to(self.algorithm.needs, self.algorithm.declared())
            assert not unusable(self.algorithm.server_step(self.state, limited), self.state)
        return False

    def inspect(self, reply: Message) -> None:
        expected = self.algorithm.expects(self.message)
        assert list(reply.trees) == list(expected)
        for tree, like in expected.items():
            assert list(reply.trees[tree]) == list(like)
            for n, t in like.items():
                assert reply.trees[tree][n].shape == t.shape
                found = reply.trees[tree][n]
                if found.is_floating_point():
                    assert float(found.double().norm()) <= LONGEST * 1.001
        for named in reply.weights.values():
            assert all(0 <= w <= MOST_WEIGHT for w in named.values())


def small(like: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return (torch.rand(like.shape, generator=rng) / 100).to(like.dtype)


class Greetings(Target):
    """What a site says of itself, and what a server asks of one: refused in a printable sentence or
    in a reason from the site's list. No client's number is taken by a key that is not its own."""

    share = 0.1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from fedlens.engines.flower.engine import Flower
        from fedlens.engines.flower.site import REASONS, Site, answer_request, federation_of_one

        self.flower, self.reasons, self.answer_request = Flower, REASONS, answer_request
        self.algorithm = FedAvg(Toy(), batch=8)
        data = toy_federation(1).holdings[0]
        self.site = Site(1, self.algorithm, federation_of_one(1, data), folder / "site", "recipe")

    def case(self, rng: random.Random) -> bool:
        return self.greet(rng) if rng.random() < 0.5 else self.ask(rng)

    def greet(self, rng: random.Random) -> bool:
        engine = self.flower(None, self.algorithm, 3, bindings={1: b"own key"}, log=str)
        engine._online = {7: b"own key", 8: b"another"}
        fields = altered({"client": 1, "examples": 20, "classes": "cat, dog"}, rng, 0.6)
        node = rng.choice((7, 8))
        why = engine._objection(node, fields if isinstance(fields, dict) else {})
        if why is not None:
            assert why.isprintable()
            return True
        assert node == 7 and fields["client"] == 1 and type(fields["examples"]) is int
        return False

    def ask(self, rng: random.Random) -> bool:
        import fedlens

        request = {
            "version": fedlens.__version__, "recipe": "recipe", "job": "j" * 8, "heard": -1,
            "forgive": False, "text": "[task]\nname = 1",
        }  # fmt: skip
        header = {"kind": rng.choice(("query", "train")), "asker": "x", "request": request}
        changed = altered(header, rng, 0.4)
        changed = changed if isinstance(changed, dict) else {}
        changed.setdefault("kind", "train")
        fields, pieces = self.answer_request(
            changed, [rng.randbytes(200)], {}, lambda node, request: self.site, str
        )
        if "lost" in fields:
            assert fields["lost"] in self.reasons and not pieces
            return True
        assert fields["client"] == 1 and not pieces  # a greeting: random bytes are no message
        return False


class Recipes(Target):
    """A ConfigError or a config, nothing else."""

    share = 0.05

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = ("demo", "deblur", "fedvsr", "raf", "fedvssl")
        self.texts = [shipped_recipes()[n].read_bytes() for n in names]
        self.path = folder / "recipe.toml"

    def case(self, rng: random.Random) -> bool:
        self.path.write_bytes(damaged(rng.choice(self.texts), rng))
        keys = ("rounds", "lr", "federation.threads", "data.alpha", "task.name", "clients")
        key = rng.choice(keys)
        value = str(rng.choice(ODD))
        try:
            read(self.path, [f"{key}={value}"] if rng.random() < 0.3 else [])
        except ConfigError as e:
            assert len(str(e)) < 20_000
            return True
        return False


class Checkpoints(Target):
    """Damage to any file, or a manifest that somebody changed and sealed: what is loaded is one of
    the two states that were saved, or nothing."""

    share = 0.05

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.place = folder / "checkpoint"
        keeper = Checkpoint(self.place)
        memory = Memory(folder / "memory", durable=True)
        self.states = [Message({"model": {"w": torch.full((4,), float(k))}}) for k in (1, 2)]
        for done, state in enumerate(self.states, 1):
            memory.save(0, Record({"control": {"w": torch.full((2,), float(done))}}, {}, 0))
            keeper.save(Progress(state, done, {0: 0}), {0: memory.path(0)})
        self.files = {p: p.read_bytes() for p in sorted(self.place.iterdir())}

    def case(self, rng: random.Random) -> bool:
        for path, data in self.files.items():
            path.write_bytes(data)
        path = rng.choice(list(self.files))
        data = self.files[path]
        if path.suffix == ".json" and rng.random() < 0.7:
            body = {k: v for k, v in json.loads(data).items() if k != "seal"}
            body = altered(body, rng, 0.4)
            if isinstance(body, dict):
                body["format"] = 3
                data = json.dumps({**body, "seal": _seal(body)}).encode()
        else:
            data = damaged(data, rng)
        path.write_bytes(data)
        try:
            found = Checkpoint(self.place).load()
        except CheckpointError:
            return True
        if found is None:
            return True
        assert any(same_bits(found[0].state, state) for state in self.states)
        assert all(p.parent == self.place for p in found[1].values())
        return found[0].done == 1  # the damaged one was left out


class Images(Target):
    """A picture or a DataError."""

    share = 0.08

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pixels = torch.randint(0, 255, (20, 30, 3), generator=torch.Generator().manual_seed(0))
        picture = Image.fromarray(pixels.byte().numpy())
        for suffix in ("png", "jpg", "bmp", "tif", "webp", "gif"):
            picture.save(folder / f"whole.{suffix}")
        self.whole = {p: p.read_bytes() for p in sorted(folder.glob("whole.*"))}

    def case(self, rng: random.Random) -> bool:
        path = rng.choice(sorted(self.whole))
        target = self.folder / f"damaged{path.suffix}"
        target.write_bytes(damaged(self.whole[path], rng))
        try:
            found = read_image(target)
        except DataError as e:
            assert len(str(e)) < 2000
            return True
        assert found.dim() == 3 and bool(torch.isfinite(found).all())
        return False


class Videos(Target):
    """Frames or a DataError."""

    share = 0.02

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        files = [shaded(folder / f"whole.{suffix}") for suffix in ("mp4", "mkv", "avi")]
        self.whole = {p: p.read_bytes() for p in files}

    def case(self, rng: random.Random) -> bool:
        path = rng.choice(sorted(self.whole))
        target = self.folder / f"damaged-{rng.randrange(10**9)}{path.suffix}"
        target.write_bytes(damaged(self.whole[path], rng))
        try:
            frames = open_frames(target)
            count = len(frames)
            found = frames.read(0, min(3, count))
            assert found.dim() == 4
        except DataError:
            return True
        finally:
            target.unlink()
        return False


TARGETS: dict[str, type[Target]] = {
    kind.__name__.lower(): kind
    for kind in (Messages, Replies, Greetings, Recipes, Checkpoints, Images, Videos)
}


# -- running ---------------------------------------------------------------------------------------


def run_cases(name: str, seed: int, first: int, last: int, at: Any, found: Any, out: Any) -> None:
    """In the child: cases first ... last - 1. `at` says where it is and since when."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders have much to say
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[name](Path(folder))
        for number in range(first, last):
            at[0], at[1] = number, time.monotonic()
            try:
                found[0] += bool(target.case(random.Random(f"{name} {seed} {number}")))
            except Exception:
                lines = traceback.format_exc().strip().splitlines()
                out.put((number, lines[-1][:300], lines[-4:-1]))
    at[0] = last


def fuzz(name: str, cases: int, seed: int = 0, first: int = 0) -> dict[str, Any]:
    """So many cases of one target, in a child that is replaced when it dies or hangs."""
    context = mp.get_context("fork")
    began, faults, refused, last = time.monotonic(), [], 0, first + cases
    while first < last:
        at, found = context.Array("d", [-1, time.monotonic()]), context.Array("d", [0])
        out: Any = context.SimpleQueue()
        child = context.Process(target=run_cases, args=(name, seed, first, last, at, found, out))
        child.start()
        while child.is_alive() and time.monotonic() - at[1] < SECONDS:
            while not out.empty():
                faults.append(out.get())
            child.join(0.2)
        number = int(at[0])
        if number < 0:
            child.kill()
            raise RuntimeError(f"{name}: not even the first case was reached")
        if child.is_alive():
            child.kill()
            faults.append((number, f"hangs: longer than {SECONDS} s", []))
        elif child.exitcode:
            code = child.exitcode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            faults.append((number, f"its process died: {how}", []))
        child.join()
        while not out.empty():
            faults.append(out.get())
        refused += int(found[0])
        first = number + 1 if number < last else last
    seconds = time.monotonic() - began
    return {"cases": cases, "refused": refused, "faults": faults, "seconds": round(seconds, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="over all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(TARGETS), help="targets, joined by commas")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first case's number")
    chosen = parser.parse_args(arguments)
    names = chosen.only.split(",")
    whole = sum(TARGETS[n].share for n in names)
    results = {}
    for name in names:
        cases = max(1, round(chosen.cases * TARGETS[name].share / whole))
        results[name] = fuzz(name, cases, chosen.seed, chosen.first)
        for number, what, where in results[name]["faults"][:5]:
            print(f"{name} {number}: {what}", *where, sep="\n  ", file=sys.stderr)
    faults = sum(len(r["faults"]) for r in results.values())
    summary = {n: {**r, "faults": len(r["faults"])} for n, r in results.items()}
    total = sum(r["cases"] for r in results.values())
    print(json.dumps({"seed": chosen.seed, "cases": total, "faults": faults, "targets": summary}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
