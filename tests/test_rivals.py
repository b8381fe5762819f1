"""Certificates by votes: never above brute force, exact where the theory says so, and the same in every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations, product
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from balls import within_one
from ell0 import L0Ball, certify, data, evaluate, train
from ell0.attacks import sparse_rs
from ell0.certify.ablation import RandomisedAblation, VotePrecision, changed_share, votes_needed
from ell0.certify.partition import Partition
from ell0.certify.rules import run_off, run_off_radius
from ell0.certify.votes import PartitionEnsemble, PartVote
from ell0.part_networks import PartMLP

few = settings(max_examples=settings().max_examples // 8)
VALUES = (-1.0, 0.5, 2.0**20)
seeds = st.integers(0, 2**40)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(seed: int) -> Tensor:
    """``(6,)``, with few bits, so that sums are exact."""
    return torch.randint(-64, 65, (6,), generator=seeded(seed)) / 64


def changed(row: Tensor, budget: int) -> Iterator[Tensor]:
    """All images on VALUES that differ from a row ``(d,)`` in at most so many places."""
    for places in combinations(range(len(row)), budget):
        for values in product(VALUES, repeat=budget):
            image = row.clone()
            image[list(places)] = torch.tensor(values)
            yield image


def network(*widths: int) -> nn.Sequential:
    before, hidden, classes = widths
    return nn.Sequential(nn.Flatten(), nn.Linear(before, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class Base(nn.Module):
    """Answers each image by a function of it, and keeps what it sees."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer, self.seen = answer, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return F.one_hot(self.answer(x), 3).double()


def whim(seed: int, share: float) -> Base:
    """Answers by a hash, in whole numbers, so that no row depends on its batch; ``share`` of images are class 0."""
    factors = torch.randint(1, 2**20, (12,), generator=seeded(seed))

    def answer(x: Tensor) -> Tensor:
        hashed = ((x.double().flatten(1) * 2**12).long() * factors).sum(1) * -7046029254386353131 >> 20
        return torch.where(hashed % 1000 < 1000 * share, 0, hashed // 1000 % 3)

    return Base(answer)


def sentinel() -> Base:
    """Class 1 if it sees the largest of VALUES, else class 0."""
    return Base(lambda x: (x.flatten(1).amax(1) > 1000).long())


def probabilities(model: nn.Module, keep: int, images: Tensor) -> Tensor:
    """Exactly: ``(n, classes)``, over all sets of kept pixels, from the definition.  images: ``(n, d)``."""
    n, d = images.shape
    total = torch.zeros(n, 3, dtype=torch.float64)
    for kept in map(list, combinations(range(d), keep)):
        copy = torch.zeros(n, 2, d, dtype=images.dtype)
        copy[:, 0, kept], copy[:, 1, kept] = (1 + images[:, kept]) / 2, (1 - images[:, kept]) / 2
        total += F.one_hot(model(copy.flatten(1)).argmax(1), 3)
    return total / math.comb(d, keep)


@few
@given(seeds, st.integers(1, 3), st.floats(0.5, 1.0), st.booleans())
def test_an_ablation_radius_holds_for_every_attacked_image(seed: int, keep: int, share: float, flat: bool) -> None:
    model, image = whim(seed, share), picture(seed)
    # So sure that no luck is to be seen in the draws.
    smoothed = RandomisedAblation(model, keep, selection=20, samples=300, confidence=1 - 1e-6).eval()
    x = image.expand(3, 6) if flat else image.expand(3, 1, 6).view(3, 1, 2, 3)
    for label, radius in enumerate(smoothed.radius(x, torch.arange(3)).tolist()):
        assert -1 <= radius <= 2
        for budget in range(radius + 1):
            chances = probabilities(model, keep, torch.stack(list(changed(image, budget))))
            assert bool((chances.argmax(1) == label).all()), (label, radius, budget)


@pytest.mark.parametrize(("keep", "radius"), [(1, 2), (2, 1), (3, 0)])
def test_the_bound_of_an_ablation_is_attained(keep: int, radius: int) -> None:
    image = torch.zeros(6)
    for budget in range(4):
        least = float(probabilities(sentinel(), keep, torch.stack(list(changed(image, budget))))[:, 0].min())
        assert least == pytest.approx(1 - float(changed_share(6, keep, budget)), abs=1e-12)
        assert (least > 0.5) == (budget <= radius)
    smoothed = RandomisedAblation(sentinel(), keep, selection=10, samples=1000).eval()
    beyond = L0Ball(6, low=-math.inf, high=math.inf)
    assert int(smoothed.radius(image.view(1, 1, 2, 3), torch.tensor([0]), beyond)) == radius


def test_colours_of_a_pixel_are_seen_together() -> None:
    x, watch = torch.rand(5, 3, 4, 4, generator=seeded(0)) * 2 - 1, sentinel()
    smoothed = RandomisedAblation(watch, 7).train()
    smoothed(x)
    smoothed(x)
    copies, others = watch.seen
    shown = copies.abs().sum(1) > 0
    assert torch.equal(shown.flatten(1).sum(1), torch.full((5,), 7))
    assert torch.equal(copies, torch.cat(((1 + x) / 2, (1 - x) / 2), 1) * shown.unsqueeze(1))
    assert not torch.equal(copies, others)


@given(st.integers(1, 300), st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.5, 0.95, 0.999]))
def test_votes_needed_are_those_of_clopper_and_pearson(samples: int, d: int, keep: int, confidence: float) -> None:
    keep = min(keep, d)
    needed = votes_needed(d, keep, samples, confidence)
    counts = torch.arange(1, samples + 1).double().numpy()
    lower = [0.0, *stats.beta.ppf(1 - confidence, counts, samples - counts + 1)]
    for budget, need in enumerate(needed.tolist()):
        bar = 0.5 + float(changed_share(d, keep, budget))
        # A count whose bound is the bar to rounding may fall on either side.
        assert all(low <= bar + 1e-7 for low in lower[:need])
        assert all(low > bar - 1e-7 for low in lower[need:])
    assert changed_share(d, keep, len(needed)) >= 0.5 if len(needed) <= d else keep == 0
    assert needed.tolist() == sorted(needed.tolist())


def test_settings_with_known_radii() -> None:
    """The published one; and all of n votes certify one of 6 pixels with 2 seen if (1/2 + 1/3)^n < 0.05: n >= 17."""
    published = RandomisedAblation(sentinel(), 45)
    assert (published.limit(torch.zeros(1, 784), within_one(0)), published.forwards) == (11, 11_000)
    assert float(changed_share(784, 45, 8)) == pytest.approx(1 - math.prod(1 - 45 / (784 - i) for i in range(8)))
    for samples, radius in ((16, 0), (17, 1)):
        smoothed = RandomisedAblation(sentinel(), 2, selection=1, samples=samples).eval()
        assert int(smoothed.radius(torch.zeros(1, 6), torch.tensor([0]))) == radius


def test_every_set_of_pixels_is_drawn_as_often_for_each_row_apart() -> None:
    watch = sentinel()
    smoothed = RandomisedAblation(watch, 3, selection=1, samples=4000).eval()
    smoothed.radius(torch.ones(2, 6), torch.zeros(2, dtype=torch.int64), batch=1000)
    shown = torch.cat(watch.seen[2:]).view(-1, 2, 12)[:, :, :6] > 0  # after the rehearsal and the selection
    assert len(shown) == 4000
    sets = (shown * 2 ** torch.arange(6)).sum(2)
    for row in (0, 1):
        assert stats.chisquare(sets[:, row].bincount()[sets[:, 0].unique()]).pvalue > 0.001
    # The two agree as often as independent ones do, 1 of 20 times.
    assert float((sets[:, 0] == sets[:, 1]).double().mean()) == pytest.approx(1 / 20, abs=0.012)


def test_a_class_is_not_estimated_on_the_copies_that_chose_it() -> None:
    watch = sentinel()
    RandomisedAblation(watch, 5, selection=30, samples=40).eval().radius(torch.ones(1, 40), torch.tensor([0]))
    assert len(torch.cat(watch.seen[1:]).unique(dim=0)) == 70


def test_an_ablation_does_not_depend_on_the_batch() -> None:
    x = torch.randint(-64, 65, (9, 1, 2, 3), generator=seeded(1)) / 64
    smoothed = RandomisedAblation(whim(5, 0.8), 2, selection=20, samples=100).eval()
    y, rows = torch.zeros(9, dtype=torch.int64), torch.arange(100, 109)
    whole = smoothed.radius(x, y, rows=rows)
    assert len(whole.unique()) > 1
    for batch in (1, 4, 1000):
        assert torch.equal(smoothed.radius(x, y, rows=rows, batch=batch), whole)
    order = torch.randperm(9, generator=seeded(2))
    assert torch.equal(smoothed.radius(x[order], y, rows=rows[order]), whole[order])
    assert torch.equal(smoothed(x[order]), smoothed(x)[order])
    assert torch.equal(smoothed(x).sum(1), torch.full((9,), 20.0))
    assert not torch.equal(smoothed.radius(x, y, generator=seeded(9)), whole)


def test_an_attack_queries_the_votes_of_the_same_copies() -> None:
    x, watch = torch.randint(-63, 64, (9, 1, 2, 3), generator=seeded(3)) / 64, whim(7, 0.6)
    smoothed = RandomisedAblation(watch, 2, selection=31).eval()
    votes = smoothed(x)
    shown = torch.stack(watch.seen).abs().sum(2) > 0  # (rows, copies, height, width)
    assert torch.equal(shown, shown[:1].expand(9, 31, 2, 3))  # a row by itself, with the copies of every row
    assert (shown.sum((2, 3)) == 2).all()
    assert len(shown[0].unique(dim=0)) > 10
    assert torch.equal(votes.long(), torch.stack([F.one_hot(watch.answer(copies), 3).sum(0) for copies in watch.seen]))
    ball, y = L0Ball(2, low=-1.0, high=1.0), votes.argmax(1)
    attacked = [evaluate(smoothed, x, y, ball, {"rs": partial(sparse_rs, queries=8)}, batch=batch) for batch in (9, 2)]
    assert torch.equal(attacked[0].verdict, attacked[1].verdict)
    assert len(attacked[0].verdict.unique()) == 2
    assert not any("random outputs" in flag for flag in attacked[0].flags)


@st.composite
def elections(draw: st.DrawFn, sizes: tuple[tuple[int, int], ...]) -> Tensor:
    """Logits ``(parts, classes)`` with ties.  sizes: (most parts, classes)."""
    most, classes = draw(st.sampled_from(sizes))
    parts, favourite = draw(st.integers(1, most)), draw(st.integers(0, classes - 1))
    logits = torch.randint(0, 3, (parts, classes), generator=seeded(draw(seeds))).double()
    if draw(st.booleans()):  # one class is first or second in every part: only the first round can stop it
        logits = F.one_hot(logits.argmax(1), classes) * 2.0
        logits[:, favourite] += 1
    else:  # for wide margins
        logits[: draw(st.integers(0, parts)), favourite] += 2
    return logits


def winner(parts: list[list[float]]) -> int:
    """Of a run-off, from the definition.  parts: the logits of each."""
    first = [part.index(max(part)) for part in parts]
    low, high = sorted(sorted(range(len(parts[0])), key=lambda c: (-first.count(c), c))[:2])
    return low if 2 * sum(part[low] >= part[high] for part in parts) >= len(parts) else high


def lasts(parts: list[list[float]], sayings: list[list[float]]) -> int:
    """How many parts may say any of the sayings before another class wins; all of them if none ever does."""
    was = winner(parts)
    for budget in range(1, len(parts) + 1):
        for reached in combinations(range(len(parts)), budget):
            for said in product(sayings, repeat=budget):
                attacked = list(parts)
                for part, logits in zip(reached, said, strict=True):
                    attacked[part] = logits
                if winner(attacked) != was:
                    return budget - 1
    return len(parts)


@few
@given(elections(((7, 2), (4, 3), (3, 4))))
def test_a_vote_is_never_certified_beyond_brute_force(logits: Tensor) -> None:
    """A part in the attacker's hands may put the classes in any order."""
    parts = logits.tolist()
    assert run_off(logits.unsqueeze(0)).argmax(1).tolist() == [winner(parts)]
    radius = int(run_off_radius(logits.unsqueeze(0), torch.tensor([winner(parts)])))
    true = lasts(parts, [list(map(float, order)) for order in permutations(range(logits.shape[1]))])
    assert 0 <= radius <= true
    if logits.shape[1] == 2:
        assert radius == true


def test_a_run_off_is_certified_no_further_than_rivals_of_the_winner_let_it() -> None:
    """More parts, in each of which the attacker puts the winner last: mostly that is the worst that can be done."""
    exact = []

    @given(elections(((8, 3), (5, 4))))
    def check(logits: Tensor) -> None:
        parts = logits.tolist()
        y = winner(parts)
        radius = int(run_off_radius(logits.unsqueeze(0), torch.tensor([y])))
        orders = permutations(range(1, logits.shape[1]))
        true = lasts(parts, [[*map(float, order[:y]), 0.0, *map(float, order[y:])] for order in orders])
        assert 0 <= radius <= true
        exact.append(radius == true)

    check()
    assert sum(exact) > 0.95 * len(exact)


@few
@given(seeds, st.integers(2, 6))
def test_an_ensemble_radius_holds_for_every_attacked_image(seed: int, parts: int) -> None:
    torch.manual_seed(seed)
    ensemble = PartitionEnsemble(network(6, 4, 3), (1, 2, 3), parts).eval()
    image = picture(seed)
    answer = ensemble(image.view(1, 1, 2, 3)).argmax(1)
    radius = int(ensemble.radius(image.view(1, 1, 2, 3), answer))
    assert 0 <= radius <= parts
    for budget in range(min(radius, 3) + 1):
        attacked = torch.stack(list(changed(image, budget))).view(-1, 1, 2, 3)
        assert bool((ensemble(attacked).argmax(1) == answer).all())
    assert int(ensemble.radius(image.view(1, 1, 2, 3), (answer + 1) % 3)) == -1


@pytest.mark.parametrize("shape", [(3, 2, 4), (9,)])
def test_a_part_is_seen_alone_with_zeros_around_it(shape: tuple[int, ...]) -> None:
    """In eval mode by every part; in training by a drawn one, which covers all of them."""
    watch = Base(lambda x: torch.zeros(len(x), dtype=torch.int64))
    ensemble = PartitionEnsemble(watch, shape, 4)
    x = 1 + torch.rand(50, *shape, generator=seeded(0))
    pixels = x.flatten(2) if x.ndim == 4 else x
    shown = [torch.where(torch.arange(pixels.shape[-1]) % 4 == part, pixels, 0.0).view_as(x) for part in range(4)]
    watch.seen.clear()
    ensemble.eval().part_logits(x)
    assert torch.equal(torch.cat(watch.seen), torch.stack(shown, 1).flatten(0, 1))
    watch.seen.clear()
    ensemble.objective(ensemble.train(), x, torch.zeros(50, dtype=torch.int64))
    same = [[torch.equal(row, part[i]) for part in shown] for i, row in enumerate(watch.seen[0])]
    assert [sum(row) for row in same] == [1] * 50
    assert all(any(row[part] for row in same) for part in range(4))


def test_another_rule_counts_the_same_logits() -> None:
    torch.manual_seed(0)
    ensemble, x = PartitionEnsemble(network(9, 30, 4), (9,), 5).eval(), 20 * torch.randn(60, 9)
    plain = PartitionEnsemble(ensemble.network.base, (9,), 5, rule="plurality").eval()  # type: ignore[arg-type]
    y = plain(x).argmax(1)
    found = certify.radius(ensemble, x, y, method="plurality")
    assert torch.equal(found, plain.radius(x, y))
    assert not torch.equal(found, ensemble.radius(x, y))
    assert ensemble.rule == "run-off"
    for model, method in ((ensemble, "ibp"), (RandomisedAblation(sentinel(), 3).eval(), "plurality")):
        with pytest.raises(ValueError, match=f"method must be .*got '{method}'"):
            certify.radius(model, x, y, method=cast(Any, method))


@pytest.mark.parametrize("sure", [1.0, 1e3])
def test_the_training_loss_is_the_mean_of_the_parts(sure: float) -> None:
    torch.manual_seed(0)
    votes = PartVote(PartMLP((3,), 4, classes=3, width=6, dropout=0.0), Partition.dealt((9,), 4)).double().train()
    x, y = sure * torch.randn(5, 9).double(), torch.tensor([0, 1, 2, 1, 0])
    weights = list(votes.parameters())
    losses = (F.cross_entropy(votes(x), y), F.cross_entropy(votes.part_logits(x).flatten(0, 1), y.repeat_interleave(4)))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, weights) for loss in losses))


def test_the_training_loss_stays_finite_where_all_parts_are_certain() -> None:
    votes = PartVote(PartMLP((3,), 3, classes=2, width=6), Partition.dealt((9,), 3)).train()
    votes.part_logits = lambda x, *_: (x[:, None, :2] * 1e4).expand(-1, 3, -1)  # type: ignore[method-assign]
    x = torch.tensor([[1.0, -1.0]], requires_grad=True)
    loss = F.cross_entropy(votes(x), torch.tensor([0]))
    loss.backward()
    assert x.grad is not None
    assert float(loss.detach()) == pytest.approx(0, abs=1e-6)
    assert bool(x.grad.isfinite().all())


def test_both_learn_the_digits() -> None:
    """With n = 360 test images for the ensemble and 60 for the ablation, most are certified for a change."""
    rows, (x, y) = data.load("digits", "train+validation"), data.load("digits", "test")
    torch.manual_seed(0)
    ensemble = PartitionEnsemble(network(64, 64, 10), (1, 8, 8), 9)
    ablation = RandomisedAblation(network(128, 64, 10), 16, selection=20, samples=200)
    config = train.TrainConfig(epochs=12, batch=128, rates=(5e-3,), schedule="cosine", optimizer="adam")
    train.fit(ensemble, rows, replace(config, epochs=25), objective=ensemble.objective)
    train.fit(ablation, rows, replace(config, epochs=25))
    radii = ensemble.eval().radius(x, y)
    assert torch.equal(radii, ensemble.radius(x, y, batch=7))
    assert torch.equal(radii >= 0, ensemble(x).argmax(1) == y)
    assert certify.accuracy(ensemble, x, y, [1])[1] == float((radii > 0).double().mean())
    assert int(radii.median()) >= 1
    x, y = x[:60], y[:60]
    assert certify.accuracy(ablation.eval(), x, y, [1])[1] > 0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_vote_in_the_precision_asked_for(precision: VotePrecision) -> None:
    seen = set()
    base = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    base.register_forward_hook(lambda *given: seen.add(given[-1].dtype))
    ablation = RandomisedAblation(base, 2, selection=3, samples=5, precision=precision)
    x, y = torch.rand(2, 1, 2, 3), torch.zeros(2, dtype=torch.int64)
    ablation.eval()(x)
    ablation.radius(x, y)
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    seen.clear()
    assert ablation.train()(x).dtype == torch.float32


def test_bad_input_is_named() -> None:
    x, y, base = torch.zeros(2, 1, 2, 3), torch.zeros(2, dtype=torch.int64), network(6, 4, 10)
    ablation, ensemble = RandomisedAblation(sentinel(), 3).eval(), PartitionEnsemble(base, (1, 2, 3), 3).eval()
    coloured = x.expand(2, 3, 2, 3)
    for call, message in (
        (lambda: RandomisedAblation(sentinel(), 7).eval().radius(x, y), "keep must be at most .* keep=7 with 6 pixels"),
        (lambda: RandomisedAblation(sentinel(), 0), "keep must be an int >= 1, got 0"),
        (lambda: RandomisedAblation(sentinel(), 3, confidence=1), r"confidence must lie in \(0, 1\), got 1"),
        (lambda: RandomisedAblation(sentinel(), 3, precision=cast(Any, "tf32")), 'must be "fp32" or "bf16", got'),
        (lambda: ablation.radius(x, y, rows=torch.zeros(3)), "rows must be int64 of shape"),
        (lambda: ablation.radius(coloured, y), 'unit must be "pixel", of which a copy sees all channels'),
        (lambda: PartitionEnsemble(base, (1, 2, 3), 3).radius(x, y), "model must be in eval mode"),
        (lambda: ensemble.radius(torch.zeros(2, 7), y), r"x must have shape \(n, 1, 2, 3\)"),
        (lambda: ensemble.radius(x, y + 10), r"y must lie in \[0, 10\), got 10 to 10"),
        (lambda: ensemble.radius(x / 0, y), "x must be .* finite"),
        (lambda: ensemble.radius(x, y, batch=0), "batch must be an int >= 1, got 0"),
        (lambda: certify.accuracy(ensemble, x, y, [1, 1]), "budgets must be different ints >= 0"),
        (
            lambda: PartitionEnsemble(base, (1, 2, 3), 7),
            "parts must be at most the number of pixels, got parts=7 with 6",
        ),
        (lambda: PartitionEnsemble(base, (2, 3), 2), "shape must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
