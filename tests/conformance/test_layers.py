"""What every layer must do, whatever its idea."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from stacks import SCENES, STACKS
from toy import flat, same_bits

import fedlens.layers
from fedlens import Layer, Message, Progress, Round, run
from fedlens.engines.loopback import Loopback
from fedlens.engines.worker import Job


def test_every_exported_layer_is_in_the_suite() -> None:
    used = {type(p).__name__ for case in STACKS.values() for p in case.make().parts()}
    exported = {n for n in fedlens.layers.__all__ if issubclass(getattr(fedlens.layers, n), Layer)}
    assert exported <= used, f"add to tests/stacks.py: {sorted(exported - used)}"


@pytest.mark.parametrize("name", STACKS)
def test_deterministic_finite_and_different_by_seed(name: str) -> None:
    def once(seed: int) -> Message:
        algorithm, federation = STACKS[name].make(), STACKS[name].federation
        return run(algorithm, Loopback(algorithm, federation), 2, seed=seed)

    a = once(0)
    assert same_bits(a, once(0))
    # what does not train may have no randomness to seed
    assert not STACKS[name].make().trains or not same_bits(a, once(1))
    assert all(bool(torch.isfinite(t).all()) for t in flat(a).values())


@pytest.mark.parametrize("name", STACKS)
def test_what_is_sought_keeps_its_names_shapes_and_types_and_moves(name: str) -> None:
    """The broadcast: a model, or an image."""
    algorithm, federation = STACKS[name].make(), STACKS[name].federation
    start = algorithm.init()
    end = run(algorithm, Loopback(algorithm, federation), 2)
    before, after = (algorithm.broadcast(m.with_header(population=7)) for m in (start, end))
    before, after = flat(before), flat(after)
    assert before.keys() <= after.keys()
    assert all(after[n].shape == t.shape and after[n].dtype == t.dtype for n, t in before.items())
    assert any(not torch.equal(after[n], t) for n, t in before.items())


@pytest.mark.parametrize("name", [*STACKS, *SCENES])
def test_who_looks_at_the_number_of_rounds_says_so(name: str) -> None:
    """Two rounds of two and two rounds of seven differ only where a part is `paced_by` their
    number: such a run cannot be extended.
    """

    def two_of(rounds: int) -> dict[str, torch.Tensor]:
        here = Progress(algorithm.init())

        def enough(progress: Progress, _: Round) -> None:
            if progress.done == 2:
                raise TimeoutError

        with contextlib.suppress(TimeoutError):
            run(
                algorithm,
                Loopback(algorithm, case.federation),
                rounds,
                progress=here,
                after_round=enough,
            )
        assert here.done == 2
        return flat(here.state)

    case = (STACKS | SCENES)[name]
    algorithm = case.make()
    few, many = two_of(2), two_of(7)
    paced = any(getattr(part, "paced_by", None) for part in algorithm.parts())
    assert paced != all(torch.equal(t, many[n]) for n, t in few.items())


@pytest.mark.parametrize("name", [*STACKS, *SCENES])
def test_neither_half_changes_what_it_was_given(name: str) -> None:
    """State and message are shared with checkpoints and other clients: nobody may write into
    them.
    """
    case = (STACKS | SCENES)[name]
    algorithm, federation = case.make(), case.federation
    state = algorithm.init().with_header(round=0, rounds=2, seed=0, population=7)
    message = algorithm.broadcast(state).with_header(
        round=0, rounds=2, seed=0, population=7, cohort=7
    )
    kept_state, kept_message = copy.deepcopy(flat(state)), copy.deepcopy(flat(message))
    run(algorithm, Loopback(algorithm, federation), 1)
    engine = Loopback(algorithm, federation)
    from fedlens.core.replies import gather

    engine.worker.begin(message, False)
    replies, _ = gather(engine.worker.work([Job(p, p) for p in range(7)]), range(7))
    algorithm.server_step(state, replies)
    assert all(torch.equal(t, flat(state)[n]) for n, t in kept_state.items())
    assert all(torch.equal(t, flat(message)[n]) for n, t in kept_message.items())


@pytest.mark.parametrize("name", [*STACKS, *SCENES])
def test_what_comes_up_is_what_was_announced(name: str) -> None:
    """`expects` names every tree of a reply: nothing else travels, and private parts do not."""
    case = (STACKS | SCENES)[name]
    algorithm, federation = case.make(), case.federation
    engine = Loopback(algorithm, federation)
    run(algorithm, engine, 1)
    down, *up = [Message.from_bytes(b) for b in engine.traffic]
    for reply in up:
        assert reply.trees.keys() == algorithm.expects(down).keys()
    if "private" in name or name == "fedvssl":
        assert not any(
            n.startswith("head") for m in (down, *up) for tree in m.trees.values() for n in tree
        )


@pytest.mark.parametrize("name", [*STACKS, *SCENES])
def test_a_stack_survives_being_sent_to_a_spawned_worker(name: str) -> None:
    case = (STACKS | SCENES)[name]
    algorithm, federation = case.make(), case.federation
    algorithm.init()
    twin = pickle.loads(pickle.dumps(algorithm))
    assert same_bits(
        run(algorithm, Loopback(algorithm, federation), 1), run(twin, Loopback(twin, federation), 1)
    )
