"""A trained network as a file for other programs: ONNX, or torch.export's .pt2.

What was written is read back and held against the network on the run's own data at two sizes,
before anybody gets it: pictures of another height and width where the network takes them, else
another number of pictures. Beside the file lies a JSON with what a program must know: shapes,
classes, the differences that were measured.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.config import recipe as recipes
from fedlens.config.recipe import Config, ConfigError
from fedlens.core.client import Data
from fedlens.core.files import atomic_files, write_atomically
from fedlens.core.task import LearningTask
from fedlens.core.weights import Misfit, check_fit, read_weights
from fedlens.runs.setup import load_federation

ExportFormat = Literal["onnx", "torch-export"]
SUFFIX: dict[ExportFormat, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = 1e-5  # of the largest output, or of 1 where that is smaller
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """input: its shape, None where any number will do. differences: the largest one at each size
    that was tried. note: why the height and width are fixed, where they could not be left open.
    """

    file: Path
    network: str
    input: tuple[int | None, ...]
    output: tuple[int, ...]
    differences: dict[str, float]
    classes: tuple[str, ...] = ()
    note: str = ""


def export_run(folder: Path, kind: ExportFormat, target: Path | None = None) -> Exported:
    """folder: a finished run. target: the file; RUN/export/model.onnx or model.pt2 by default."""
    if kind == "onnx":
        _require_onnx()
    config = recipes.read(folder)
    task = config.build_task()
    if not isinstance(task, LearningTask):
        raise ConfigError(f"{folder} holds no network: {type(task).__name__} has none to export")
    network, name = _trained(task, folder)
    target = target or folder / "export" / f"model{SUFFIX[kind]}"
    if target.suffix != SUFFIX[kind]:
        raise ConfigError(f"{kind} files end in {SUFFIX[kind]}, not {target.name}")
    first = _real_input(config, task)
    target.parent.mkdir(parents=True, exist_ok=True)
    done = _write(network, first, _other_size(network, first, task.multiple), kind, target)
    done = Exported(**{**asdict(done), "network": name, "classes": _classes(folder)})
    write_atomically(target.with_suffix(".json"), json.dumps(asdict(done), indent=1, default=str))
    return done


def _require_onnx() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError('ONNX files need: pip install "fedlens[export]"') from None


def _trained(task: LearningTask, folder: Path) -> tuple[nn.Module, str]:
    """The network of a run; of one that shares its backbone only, the backbone."""
    path = folder / "model.safetensors"
    weights, model = read_weights(path), task.model().eval()
    parts = {n.split(".")[0] for n in weights}
    alone = next(iter(parts)) if len(parts) == 1 else ""
    whole = model.state_dict().keys() == weights.keys()
    part = getattr(model, alone, None) if alone and not whole else None
    if isinstance(part, nn.Module):
        inside = {n.removeprefix(f"{alone}."): t for n, t in weights.items()}
        with contextlib.suppress(Misfit):
            part.load_state_dict(check_fit(inside, part, path))
            return part, f"the {alone} of {type(model).__name__}"
    model.load_state_dict(check_fit(weights, model, path))
    return model, type(model).__name__


def _real_input(config: Config, task: LearningTask) -> Tensor:
    """Two examples of the data that the run was tested or trained on."""
    federation = task.admit(load_federation(config))
    for data in (federation.test, *federation.held_out, *federation.holdings):
        if isinstance(data, Data) and len(data) > 1 and "x" in (b := data.batch(torch.arange(2))):
            return b["x"].float()
    raise ConfigError(f"{config.data.name} has no inputs here to check an export with")


def _other_size(network: nn.Module, x: Tensor, multiple: int) -> Tensor | None:
    """The same inputs cut to about three quarters, if the network takes them so."""
    if x.dim() < 4:
        return None
    step = max(multiple, 4)
    sides = [max(step, int(n * 0.75) // step * step) for n in x.shape[-2:]]
    cut = x[..., : sides[0], : sides[1]]
    if cut.shape == x.shape:
        return None
    try:
        with torch.no_grad():
            network(cut)
    except (RuntimeError, ValueError, AssertionError):
        return None
    return cut


def _write(
    network: nn.Module, first: Tensor, other: Tensor | None, kind: ExportFormat, target: Path
) -> Exported:
    """With open height and width, then with open number of inputs only, then not at all."""
    sides = {first.dim() - 2, first.dim() - 1}
    fewer, note = first[:1], ""
    tries = [({0} | sides, (first, other[:1]))] if other is not None else []
    for free, inputs in [*tries, ({0}, (first, fewer)), (set[int](), (first,))]:
        try:
            differences = _attempt(network, inputs, free, kind, target)
        except Exception as e:  # of an exporter, anything may come
            note = note or _in_words(e)
            continue
        shape = tuple(None if k in free else n for k, n in enumerate(first.shape))
        with torch.no_grad():
            out = tuple(network(first).shape)
        fixed = other is not None and not sides <= free
        return Exported(target, "", shape, out, differences, note=note if fixed or not free else "")
    raise ConfigError(f"{type(network).__name__} cannot be exported to {kind}: {note}")


def _attempt(
    network: nn.Module, inputs: tuple[Tensor, ...], free: set[int], kind: ExportFormat, target: Path
) -> dict[str, float]:
    """Export, read back, compare; only then is the file where it is wanted."""
    example = inputs[0]
    dims = (dict.fromkeys(sorted(free), torch.export.Dim.AUTO),)
    with atomic_files(target.parent) as part, _quiet():
        file = part / target.name
        if kind == "onnx":
            made: Any = torch.onnx.export(
                network, (example,), None, dynamo=True, dynamic_shapes=dims, verbose=False,
                input_names=["input"], output_names=["output"],
            )  # fmt: skip
            made.save(str(file), external_data=False)
        else:
            with torch.no_grad():
                program = torch.export.export(network, (example,), dynamic_shapes=dims)
            torch.export.save(program, str(file))
        run = _reader(file, kind)
        return {"x".join(map(str, x.shape)): _difference(network, run, x) for x in inputs}


def _reader(file: Path, kind: ExportFormat) -> Run:
    if kind == "torch-export":
        module = torch.export.load(str(file)).module()
        return lambda x: module(x)  # type: ignore[no-any-return]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.contiguous().numpy()})[0])


def _difference(network: nn.Module, run: Run, x: Tensor) -> float:
    with torch.no_grad():
        expected, found = network(x), run(x)
    if not isinstance(expected, Tensor) or found.shape != expected.shape:
        raise ConfigError("it gives something of another shape than the network")
    gap = float((found - expected).abs().max())
    if not gap <= TOLERANCE * max(1.0, float(expected.abs().max())):
        shape = "x".join(map(str, x.shape))
        raise ConfigError(f"at {shape} it differs from the network by {gap:.1e}")
    return gap


def _in_words(error: Exception) -> str:
    """The innermost reason, in a line; an operator by its name, where one is what is missing."""
    text = str(error)
    while (inner := error.__cause__ or error.__context__) is not None and inner is not error:
        error = inner  # type: ignore[assignment]
        text = f"{error}\n{text}"
    if found := re.search(r"No ONNX function found for <OpOverload\(op='([\w:.]+)'", text):
        return f"the operator {found.group(1)} has no form in it"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"\x1b\[\d+m", "", first)[:200] or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell how they get on; only the end of it is of interest here."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        facts = json.loads((folder / "federation.json").read_text())["facts"]
        return tuple(facts.get("classes", ()))
    except (OSError, ValueError, KeyError):
        return ()
