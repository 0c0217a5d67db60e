"""Attacks on updates of a network. References: closed forms, numbers by hand, SciPy, and the
images that the updates were made from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import mannwhitneyu
from torch.nn import functional as F

from fedlens.audit.attack import Evidence, Probe, lucky_share, nearest, summed, two_errors
from fedlens.audit.audit import costs, run_attack
from fedlens.audit.evidence import Messages, replay
from fedlens.audit.gradient import GradientInversion
from fedlens.audit.labels import LabelCounts, shares_of
from fedlens.audit.linear import LinearInversion, find_inputs, invert_linear
from fedlens.audit.membership import (
    Membership,
    as_many_of_each,
    auc,
    found_at,
    ratio,
    relabelled,
    roc,
    stand_in,
)
from fedlens.audit.noise import clip_and_blur
from fedlens.audit.probe import Few, catch, compare_best, pixel_range, without_message, working
from fedlens.audit.properties import ClassCounts, Resolution, movement, ridge
from fedlens.audit.protections import TRAINING
from fedlens.config import recipe as recipes
from fedlens.core.answer import answer
from fedlens.core.memory import Memory
from fedlens.core.message import Message
from fedlens.data.images.tensors import Tensors
from fedlens.engines.recorder import Exchange
from fedlens.runs.setup import Setup, make_setup

SMALL = {
    "task.model": "cnn",
    "task.size": 12,
    "data.size": 12,
    "clients": 4,
    "cohort": 4,
    "epochs": 1,
    "images": 120,
    "test_images": 120,
}


WORST = Probe(1, 1)  # one image, one local step


@pytest.fixture(scope="module")
def demo() -> tuple[Setup, list[Exchange]]:
    """One round of the demo on 12 x 12 images: four clients, a small convolutional network."""
    setup = make_setup(recipes.read("demo", SMALL))
    return setup, list(replay(setup, 1).exchanges)


def test_a_linear_layers_input_is_exact() -> None:
    """One example, any loss: autograd's own gradients give the input back."""
    torch.manual_seed(0)
    x = torch.rand(1, 17, dtype=torch.float64)
    layer = torch.nn.Linear(17, 5).double()
    loss = F.cross_entropy(torch.tanh(layer(x)), torch.tensor([3]))
    weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias])
    assert torch.allclose(invert_linear(weight, bias), x[0].float(), atol=1e-6)


def test_label_counts_by_hand() -> None:
    """Four images, labels 0 0 1 2, all predictions alike (1/3): the mean gradient of the bias is
    1/3 - (2, 1, 1) / 4, one step with lr 0.1 moves it by -0.1 times that."""
    prediction = torch.full((3,), 1 / 3, dtype=torch.float64)
    wanted = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    moved = -0.1 * (prediction - wanted)
    assert torch.allclose(shares_of(moved, prediction, 0.1), wanted)


def test_a_sum_keeps_counts_as_counts() -> None:
    """Weights 1 and 3: (1 + 3 * 5) / 4 = 4; BatchNorm's counter of batches stays a whole number."""
    sent = [
        Message({"delta": {"w": torch.tensor([v]), "seen": torch.tensor(7)}}).weigh("delta", n)
        for v, n in ((1.0, 1.0), (5.0, 3.0))
    ]
    (both,) = summed([Exchange(Message({}), dict(enumerate(sent)))])
    for reply in both.replies.values():
        assert float(reply.trees["delta"]["w"]) == 4.0
        assert torch.equal(reply.trees["delta"]["seen"], torch.tensor(7))


def test_label_counts_of_real_replies(demo: Any) -> None:
    setup, exchanges = demo
    found = LabelCounts().run(Evidence(setup, exchanges, [0, 1, 2, 3]))
    assert found.leaks and found.score < 0.3 * found.baseline
    hidden = LabelCounts().run(Evidence(setup, summed(exchanges), [0, 1, 2, 3]))
    assert hidden.score > found.score


def test_labels_of_noise_and_of_another_client_say_nothing(demo: Any) -> None:
    """Replies that are noise of the same size, and replies of the next client, give no more than
    the flat guess."""
    setup, exchanges = demo
    rng = torch.Generator().manual_seed(0)

    def noise(reply: Message) -> Message:
        delta = {
            n: t.std() * torch.randn(t.shape, generator=rng) if t.numel() > 1 else t
            for n, t in reply.trees["delta"].items()
        }
        return reply.put(delta=delta)

    first = exchanges[0]
    noisy = [replace(first, replies={k: noise(r) for k, r in first.replies.items()})]
    turned = [replace(first, replies={k: first.replies[(k + 1) % 4] for k in first.replies})]
    honest = LabelCounts().run(Evidence(setup, exchanges, [0, 1, 2, 3]))
    for what in (noisy, turned):
        found = LabelCounts().run(Evidence(setup, what, [0, 1, 2, 3]))
        assert found.score > honest.score + 0.5 * (honest.baseline - honest.score)


def test_rows_of_one_example_tell_a_batch_apart() -> None:
    """Three examples behind a ReLU. Rows 0 and 1 let only the first through, 2 and 3 only the
    second, 4 all of them: two inputs come back exactly, the mixture is no candidate."""
    x = torch.tensor([[1.0, 2, 0, 1], [0, 1, 3, 1], [2, 0, 1, 4]]).double()
    slopes = torch.tensor([[0.5, 0, 0], [-2, 0, 0], [0, 1, 0], [0, 3, 0], [1, 1, 1]]).double()
    found = find_inputs(slopes @ x, slopes.sum(1))
    assert len(found) == 2
    for example in x[:2]:
        assert min(float((f - example).norm()) for f in found) < 1e-6


def test_all_rows_together_have_less_noise_than_one() -> None:
    rng = torch.Generator().manual_seed(0)
    x, slopes = torch.rand(50, generator=rng).double(), torch.randn(200, generator=rng).double()
    weight = slopes[:, None] * x
    weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=rng).double()
    row = int(slopes.abs().argmax())
    together = float((find_inputs(weight, slopes)[0] - x).norm())
    assert together < 0.4 * float((weight[row] / slopes[row] - x).norm())


def test_the_image_behind_a_fully_connected_layer(demo: Any) -> None:
    """Of one image; of a batch of four, of which some come back exactly; of the sum over four
    clients with one image each, which is such a batch."""
    setup, exchanges = demo
    evidence = Evidence(setup, exchanges, [0])
    found = LinearInversion().run(replace(evidence, probe=WORST))
    assert float(found.numbers["relative error of the features"]) < 1e-3
    assert found.leaks and found.score > found.baseline + 8
    for probe in (Probe(4, 1), Probe(1, 1, together=True)):
        several = LinearInversion().run(replace(evidence, probe=probe))
        assert float(several.numbers["relative error of the features"]) < 1e-3
        assert several.leaks and several.numbers["images whose features came back"][0] in "1234"
    plain = LinearInversion().run(evidence)  # thirty images, an epoch
    assert not plain.leaks


def test_what_can_be_shown_without_a_message(demo: Any) -> None:
    """A flat image is its own mean colour; of any other, nobody's is better than the nearest."""
    setup, _ = demo
    grey = torch.full((3, 12, 12), 0.3)
    assert torch.allclose(without_message(setup, grey), grey)
    image = setup.federation.test.batch(torch.tensor([0]))["x"][0]
    assert torch.equal(without_message(setup, image), image)


def test_an_image_by_matching_its_gradient(demo: Any) -> None:
    setup, exchanges = demo
    evidence = Evidence(setup, exchanges, [0], minutes=1.0, probe=WORST)
    attack = GradientInversion(iterations=250)
    found = attack.run(evidence)
    assert found.leaks and found.score > found.baseline + 3
    assert float(found.numbers["cosine reached"]) > 0.95


def test_gradients_of_noise_or_of_somebody_else_give_no_image(demo: Any) -> None:
    setup, exchanges = demo
    attack = GradientInversion(iterations=120)
    caught = catch(Evidence(setup, exchanges, [0], probe=WORST), 0)
    rng = torch.Generator().manual_seed(0)
    noise = {
        n: t.std() * torch.randn(t.shape, generator=rng) if t.numel() > 1 else t
        for n, t in caught.delta.items()
    }
    other = catch(Evidence(setup, exchanges, [1], probe=WORST), 1)
    for delta in (noise, other.delta):
        made, _ = attack.reconstruct(setup, replace(caught, delta=delta), 30)
        row = compare_best(setup, 0, made["x"], caught.truth["x"])
        assert row.scores["psnr"] < row.baseline["psnr"] + 1


def test_a_network_without_second_derivatives_is_refused_with_a_sentence() -> None:
    """CtP pools regions with roi_align: an audit of FedVSSL ended in a traceback."""
    setup = make_setup(recipes.read("fedvssl", {"videos": 20, "tests": 8}))
    assert "roi_align" in GradientInversion().applies(setup)


def test_five_local_steps_are_followed(demo: Any) -> None:
    """The simulated local work equals the real one, to rounding: five steps of SGD with momentum
    and weight decay on the very images."""
    from fedlens.audit.gradient import local_work
    from fedlens.audit.probe import fedavg_of, working

    setup, exchanges = demo
    plain = replace(setup, algorithm=working(setup.algorithm, momentum=0.8, weight_decay=0.01))
    caught = catch(Evidence(plain, exchanges, [2], probe=Probe(2, 5)), 2)
    base = fedavg_of(plain)
    assert base is not None
    moved = local_work(base, caught)(caught.truth)
    for name, t in moved.items():
        assert torch.allclose(t, caught.delta[name], atol=1e-5)


def test_clipping_and_noise_by_hand() -> None:
    """(3, 4) has norm 5; clipped to 1 it is (0.6, 0.8). Noise of 50 % of the root mean square,
    1 / sqrt(2), over many draws; statistics pass."""
    rng = torch.Generator().manual_seed(0)
    sent = {"w": torch.tensor([3.0, 4.0]), "mean": torch.tensor([9.0])}
    clipped = clip_and_blur(sent, 1.0, 0.0, rng, {"w"})
    assert torch.allclose(clipped["w"], torch.tensor([0.6, 0.8])) and clipped["mean"] == 9
    drawn = torch.stack([clip_and_blur(sent, 1.0, 0.5, rng, {"w"})["w"] for _ in range(4000)])
    assert torch.allclose(drawn.mean(0), clipped["w"], atol=0.03)
    assert float((drawn - clipped["w"]).std()) == pytest.approx(0.5 / 2**0.5, rel=0.05)


def test_a_row_for_each_protection_and_what_it_costs(demo: Any) -> None:
    """Labels from replies with larger batches, more steps, noise and from the sum: the setup under
    attack is the changed one, and the whole run is made again under it."""
    setup, exchanges = demo
    few = replace(setup, settings=replace(setup.settings, rounds=2))
    source = Messages(exchanges, False)
    rows = run_attack(LabelCounts(), Evidence(few, exchanges, [0, 1]), source, True, lambda _: None)
    plain, batches, steps, low, high, together = [r.finding for r in rows]
    assert [r.protection for r in rows] == ["plain", *(p.name for p in TRAINING)]
    assert plain.leaks and len(plain.histograms) == 2
    assert plain.score < high.score and plain.score < together.score
    assert len({f.score for f in (plain, batches, steps, low)}) == 4
    spent = costs(few, source, [r.protection for r in rows], 1.0)
    assert spent["plain"] == spent["SecureSum"] and "accuracy" in spent["plain"]
    assert spent["clipping, noise 100 %"] != spent["plain"]
    assert set(costs(few, source, ["plain"], 1e-9).values()) == {
        "not run again: it takes longer than the budget"
    }


def test_the_area_against_scipy() -> None:
    rng = torch.Generator().manual_seed(1)
    inside = (torch.randn(300, generator=rng) + 0.5).round(decimals=1).double()
    outside = torch.randn(400, generator=rng).round(decimals=1).double()  # with ties
    wanted = mannwhitneyu(inside.numpy(), outside.numpy()).statistic / (300 * 400)
    assert auc(inside, outside) == pytest.approx(wanted)
    assert auc(outside, inside) == pytest.approx(1 - wanted)  # members and others swapped


def test_the_rate_at_one_percent_by_hand() -> None:
    """100 others, 0 to 99: one false alarm allowed, so the limit is 98. Of the members 97, 98, 99
    and 120 two lie above it."""
    others = torch.arange(100).double()
    assert found_at(torch.tensor([97.0, 98.0, 99.0, 120.0]).double(), others) == 0.5


def test_random_relabelling_gives_a_coin() -> None:
    """Scores that do differ, dealt out at random: 0.5 lies within the interval."""
    rng = torch.Generator().manual_seed(2)
    scores = torch.cat([torch.randn(200, generator=rng) + 2, torch.randn(200, generator=rng)])
    dealt = scores[torch.randperm(400, generator=rng)].double()
    rates = roc(dealt[:200], dealt[200:])
    assert rates.auc_low < 0.5 < rates.auc_high
    assert rates.tpr_low <= 0.01 + 0.03
    again = relabelled(scores[:200].double(), scores[200:].double())
    assert abs(float(again.mean()) - 0.5) < 0.01 and auc(scores[:200], scores[200:]) > again.max()


def learned_by_heart(setup: Setup, first: Exchange, client: int, data: Few) -> Evidence:
    """What the server holds of a client that has learned this data for 40 epochs."""
    algorithm = working(setup.algorithm, epochs=40, batch=10)
    holdings = list(setup.federation.holdings)
    holdings[client] = data
    federation = replace(setup.federation, holdings=holdings)
    sent = {client: answer(algorithm, first.down, client, federation, Memory())}
    learned = replace(setup, federation=federation, algorithm=algorithm)
    return Evidence(learned, [Exchange(first.down, sent)], [client], minutes=0.5)


def test_a_model_that_learned_by_heart_is_found_out(demo: Any) -> None:
    """Trained for 40 epochs on the images of the largest client, its members stand out."""
    setup, exchanges = demo
    sizes = [len(h) for h in setup.federation.holdings]
    client = sizes.index(max(sizes))
    few = Few(setup.federation.holdings[client], torch.arange(max(sizes)))
    found = Membership().run(learned_by_heart(setup, exchanges[0], client, few))
    assert found.leaks and found.score > 0.6


def test_a_client_of_one_class_is_no_member_by_its_class(demo: Any) -> None:
    """A model that learned by heart other images of the same two classes prefers these classes and
    knows none of the images: members and others have the same classes, so that it is a coin."""
    setup, exchanges = demo
    test = setup.federation.test
    y = test.batch(torch.arange(len(test)))["y"]
    places = (y < 2).nonzero()[:, 0]
    learned = Few(test, places[::2])
    evidence = learned_by_heart(setup, exchanges[0], 0, learned)
    claimed = Few(test, places[1::2])
    holdings = [claimed, *evidence.setup.federation.holdings[1:]]
    unseen = Tensors(others_of(setup))
    federation = replace(evidence.setup.federation, holdings=holdings, test=unseen)
    asked = replace(evidence, setup=replace(evidence.setup, federation=federation))
    found = Membership().run(asked)
    assert not found.leaks


def others_of(setup: Setup) -> dict[str, Any]:
    """Images that nobody above has seen."""
    more = make_setup(recipes.read("demo", {**SMALL, "seed": 7})).federation.test
    return more.batch(torch.arange(len(more)))


def test_as_many_of_each_class() -> None:
    a, b = as_many_of_each(torch.tensor([0, 0, 1, 2]), torch.tensor([1, 0, 1, 0, 0]))
    assert a.tolist() == [0, 1, 2] and b.tolist() == [1, 3, 0]


def test_a_stand_in_has_the_same_classes(demo: Any) -> None:
    setup, _ = demo
    held = setup.federation.holdings[1]
    few = stand_in(held, setup.federation.test, torch.Generator().manual_seed(0))
    wanted, got = (d.batch(torch.arange(len(d)))["y"] for d in (held, few))
    assert torch.equal(wanted, got)


def test_what_luck_may_bring_by_hand() -> None:
    """Six guesses of chance 1/3: four or more are right in 10 %, five or more in 1.8 % of all
    cases. Gains of 1 and 3: a standard deviation of sqrt(2), so twice sqrt(2) / sqrt(2)."""
    assert lucky_share(6, 1 / 3) == pytest.approx(4 / 6)
    assert two_errors([1.0, 3.0]) == pytest.approx(2.0)
    assert two_errors([5.0]) == 0.0


def test_ratio_by_hand() -> None:
    """p = 0.9 where others give 0.5: 0.9 / ((1.3 * 0.5 + 0.7) / 2)."""
    p, out = torch.tensor([0.9]), torch.tensor([0.5])
    assert float(ratio(p, out)) == pytest.approx(0.9 / 0.675)


def test_ridge_finds_a_line() -> None:
    x = torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
    guess = ridge(x, 3 * x[:, 0] + 1, torch.tensor([[0.5]], dtype=torch.float64))
    assert float(guess) == pytest.approx(2.5, abs=0.05)


def test_resolutions_by_how_messages_moved(demo: Any) -> None:
    """Two clients whose first layer moves three times as far as the others'."""
    setup, exchanges = demo
    facts = replace(setup.federation.facts, resolutions=((8, 8), (8, 8), (16, 16), (16, 16)))
    sized = replace(setup, federation=replace(setup.federation, facts=facts))
    assert Resolution().applies(setup) and not Resolution().applies(sized)
    base = exchanges[0].replies[0]

    def like(client: int) -> Message:
        delta = dict(base.trees["delta"])
        first = next(iter(delta))
        delta[first] = delta[first] * (3 if client > 1 else 1) * (1 + 0.01 * client)
        return replace(base, trees={"delta": delta}, sender=client)

    shown = [Exchange(exchanges[0].down, {c: like(c) for c in range(4)})]
    found = Resolution().run(Evidence(sized, shown, [0, 1, 2, 3]))
    assert found.score == 1.0 and found.baseline == 0.5
    assert torch.allclose(movement(like(0)).mean(), torch.tensor(0.0, dtype=torch.float64))


def test_resolutions_by_stand_ins_of_the_servers_own() -> None:
    """Three clients, each the only one with its resolution: nobody else could be compared with."""
    small = {"people": 60, "tests": 30, "rounds": 1, "evaluate_every": 0}
    setup = make_setup(recipes.read("raf", small))
    evidence = Evidence(setup, list(replay(setup, 1).exchanges), [0, 1, 2])
    found = Resolution().run(evidence)
    assert found.score == 1.0 and found.baseline == pytest.approx(1 / 3)
    low, high = pixel_range(setup)  # people are normalised before the network sees them
    assert low.shape == (3, 1, 1) and float(low.max()) < 0 and float(high.min()) > 1
    truth = setup.federation.holdings[0].batch(torch.arange(1))["x"]
    row = compare_best(setup, 0, [truth[0]], truth)
    assert float(row.truth.min()) >= 0 and float(row.truth.max()) <= 1
    assert row.scores["psnr"] > 60 > row.baseline["psnr"] > 5
    together = catch(replace(evidence, probe=Probe(1, 1, together=True)), 0)
    assert len(together.truth["x"]) == 1  # images of other sizes are in the sum, not in a batch


def test_counts_are_asked_only_behind_balancing(demo: Any) -> None:
    setup, _ = demo
    assert "balances" in ClassCounts().applies(setup)


def test_the_nearest_image() -> None:
    images = torch.stack([torch.full((1, 2, 2), v) for v in (0.0, 0.4, 1.0)])
    assert float(nearest(torch.full((1, 2, 2), 0.5), images)[0, 0, 0]) == pytest.approx(0.4)
