"""Training on votes of parts: the loss by its definition, its ramps, and trainings that end with the same bits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from certify_cases import few
from ell0 import certify
from ell0.certify.vote_objective import TrainedVotes, worst_margins
from ell0.part_networks import PartCNN, PartMLP, PartTransformer
from ell0.train import TrainConfig, fit
from ell0.train import checkpoint as checkpoints
from small_training import Killed, run, same
from watching import Watch


class Said(nn.Module):
    """Parts that say what is written in the input, ``(n, parts, classes)``."""

    def part_logits(self, x: Tensor) -> Tensor:
        return x


def prefers(votes: TrainedVotes, logits: list[float], y: int, c: int, tau: float) -> float:
    if votes == "softmax":
        odds = [math.exp(each / tau) for each in logits]
        return (odds[y] - odds[c]) / sum(odds)
    ahead = (logits[y] - logits[c]) / tau
    return math.tanh(ahead)


@few
@given(
    st.integers(2, 6),
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from(get_args(TrainedVotes)),
    st.integers(0, 999),
)
def test_the_loss_is_the_definition(parts: int, classes: int, n: int, votes: TrainedVotes, seed: int) -> None:
    """Number by number; the worst margin is the least over all sets of parts that turn against the label."""
    g = torch.Generator().manual_seed(seed)
    said = 2 * torch.randn(n, parts, classes, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (n,), generator=g)
    budget = seed % math.ceil(parts / 2)
    objective = certify.VoteObjective(budget, 0.3, votes, 0.7, 0.2)
    scores, loss = objective(Said(), said, y)
    alone, bound = list[float](), list[float]()
    for row, label in zip(said.tolist(), y.tolist(), strict=True):
        for logits in row:
            log_odds = [each - math.log(sum(map(math.exp, logits))) for each in logits]
            alone.append(-0.8 * log_odds[label] - 0.2 * sum(log_odds) / classes)
        z = []
        for c in range(classes):
            d = [prefers(votes, logits, label, c, 0.7) for logits in row]
            turned = combinations(range(parts), budget)
            worst = min(sum(-1.0 if t in some else d[t] for t in range(parts)) for some in turned)
            z.append(0.0 if c == label else -16 / parts * worst)
        assert scores[len(bound)].tolist() == pytest.approx(z, abs=1e-9)
        bound.append(math.log(sum(map(math.exp, z))))
    assert float(loss) == pytest.approx(0.7 * sum(alone) / len(alone) + 0.3 * sum(bound) / n, abs=1e-9)
    zero = replace(objective, mix=0.0)(Said(), said, y)[1]
    assert float(zero) == pytest.approx(sum(alone) / len(alone), abs=1e-9)


@pytest.mark.parametrize("votes", get_args(TrainedVotes))
def test_gradients(votes: TrainedVotes) -> None:
    """Right in float64; finite for huge logits, where votes saturate, and from bf16."""
    g, y = torch.Generator().manual_seed(0), torch.tensor([0, 2])
    said = torch.randn(2, 7, 3, generator=g, dtype=torch.float64).requires_grad_()
    objective = certify.VoteObjective(2, 0.6, votes)
    assert torch.autograd.gradcheck(lambda each: objective(Said(), each, y)[1], said)
    for scale, dtype in ((1e4, torch.float32), (1.0, torch.bfloat16)):
        leaf = (said.detach() * scale).to(dtype).requires_grad_()
        scores, loss = objective(Said(), leaf, y)
        assert scores.dtype == loss.dtype == torch.float32
        loss.backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


def test_worst_margins_hold_for_no_budget_and_for_all() -> None:
    d = torch.rand(3, 8, 4) * 2 - 1
    torch.testing.assert_close(worst_margins(d, 0), d.sum(1))
    torch.testing.assert_close(worst_margins(d, 8), torch.full((3, 4), -8.0))


@given(st.integers(1, 8), st.floats(0, 1), st.integers(0, 999))
def test_a_fraction_of_a_budget_lies_between_whole_ones(parts: int, share: float, seed: int) -> None:
    d = 2 * torch.rand(3, parts, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    budget = share * parts
    below, above = (worst_margins(d, whole(budget)) for whole in (math.floor, math.ceil))
    between = below + (budget - math.floor(budget)) * (above - below)
    torch.testing.assert_close(worst_margins(d, budget), between)


@pytest.mark.parametrize("kind", [PartMLP, PartCNN, PartTransformer])
def test_a_step_may_look_at_some_of_the_parts(kind: type[nn.Module]) -> None:
    """Those that are chosen say what they say among all; all of them, in any order, have the loss of all."""
    x, y = squares(12)
    votes = voting(kind).eval()
    assert isinstance(votes, certify.PartVote)
    votes.network.requires_grad_(False)
    chosen = torch.rand(12, 8, generator=torch.Generator().manual_seed(0)).topk(3, 1).indices
    for model in (votes, certify.PartVote(votes.network, votes.partition, mirrored=True).eval()):
        want = model.part_logits(x).gather(1, chosen.unsqueeze(2).expand(-1, -1, 3))
        torch.testing.assert_close(model.part_logits(x, chosen), want)
    whole = certify.VoteObjective(3)
    torch.testing.assert_close(replace(whole, seen=8)(votes, x, y), whole(votes, x, y))
    with pytest.raises(ValueError, match="seen must be at most the number of parts, got seen=9 with 8 parts"):
        replace(whole, seen=9)(votes, x, y)
    with pytest.raises(ValueError, match="seen must be None for a model that does not say how many parts it has"):
        replace(whole, seen=2)(Said(), torch.zeros(12, 8, 3), y)
    with pytest.raises(ValueError, match="budget must be below half of the parts, got budget=4 with 8 parts"):
        certify.VoteObjective(4, seen=3)(votes, x, y)
    some = replace(whole, seen=4)
    losses = torch.stack([some(votes, x, y)[1] for _ in range(200)])
    assert len(losses.unique()) > 100
    alone = replace(some, mix=0.0)
    mean = torch.stack([alone(votes, x, y)[1] for _ in range(200)]).mean()
    torch.testing.assert_close(mean, replace(whole, mix=0.0)(votes, x, y)[1], rtol=0.005, atol=0.0)


@pytest.mark.parametrize("seen", [1, 3, 5, 8])
def test_parts_that_say_the_same_have_one_loss_however_many_are_seen(seen: int) -> None:
    x, y = squares(12)
    votes = voting()
    assert isinstance(votes, certify.PartVote)
    said = torch.tensor([2.0, 0.0, -1.0])
    votes.part_logits = lambda x, chosen=None: said.expand(len(x), 8 if chosen is None else chosen.shape[1], 3)  # type: ignore
    for budget in (0, 1, 3):
        whole = certify.VoteObjective(budget)
        torch.testing.assert_close(replace(whole, seen=seen)(votes, x, y), whole(votes, x, y))


def test_some_parts_of_rows_without_pictures_and_of_uneven_parts() -> None:
    for shape, partition in (((7,), [[0, 3], [1, 2, 6], [4, 5]]), ((2, 1, 5), [[0, 4], [1, 2, 3]])):
        cut = certify.Partition.groups(shape, partition)
        network = PartMLP(cut.part_shape, cut.parts, classes=3, width=8, depth=1, dropout=0.0)
        votes, x = certify.PartVote(network, cut), torch.randn(5, *shape)
        chosen = torch.tensor([[1], [0], [1], [0], [1]])
        torch.testing.assert_close(
            votes.part_logits(x, chosen), votes.part_logits(x).take_along_dim(chosen.unsqueeze(2), 1)
        )


def test_mix_and_budget_rise() -> None:
    objective = certify.VoteObjective(20, mix=0.8)
    losses = [objective.at(epoch, 101) for epoch in range(101)]
    assert [(losses[e].mix, losses[e].budget) for e in (0, 10)] == [(0, 0)] * 2
    assert (losses[25].mix, losses[30].budget) == (0.4, 10)
    assert losses[40].mix == pytest.approx(0.8)
    assert (losses[39].mix < 0.8, losses[50].budget, losses[48].budget) == (True, 20, 19)
    for key in ("mix", "budget"):
        values = [getattr(each, key) for each in losses]
        assert values == sorted(values)
    assert len(set(losses)) <= 16 + 20 + 1  # each is captured anew
    assert len(set(losses[50:])) == 1
    assert objective.at(0, 1) == losses[-1]
    assert objective.at(2, 5).budget == 20  # half of the way from the first epoch to the last


def squares(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy 8 x 8 images, each class bright in rows of its own: every part of strides (2, 4) knows a little."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 1, 8, 8, generator=g)
    for shift in range(2):
        x[torch.arange(n), :, 2 * y + shift] += 1.5
    return x, y


def voting(kind: type[nn.Module] = PartMLP, seed: int = 0) -> nn.Module:
    small: dict[Any, dict[str, Any]] = {
        PartMLP: {"width": 16, "depth": 1},
        PartCNN: {"widths": (8,), "blocks": 1},
        PartTransformer: {"width": 8, "depth": 1, "heads": 2},
    }
    torch.manual_seed(seed)
    partition = certify.Partition.strides((1, 8, 8), (2, 4))
    return certify.PartVote(kind(partition.part_shape, 8, classes=3, **small[kind]), partition)


CONFIG = TrainConfig(
    epochs=6, batch=16, rates=(0.01,), schedule="cosine", optimizer="adamw", weight_decay=0.05, ema=0.9,
    augment="crop-flip-reflect", precision="bf16",
)  # fmt: skip


@pytest.mark.parametrize("kind", [PartMLP, PartCNN, PartTransformer])
def test_a_killed_training_of_votes_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]
) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE", math.inf)
    about: dict[str, Any] = {"data": squares(), "validation": squares(9, seed=1), "config": CONFIG, "attack": None}
    about["objective"] = certify.VoteObjective(2, seen=5)
    whole = run(None, voting(kind), **about)
    for stop in (1, 4):
        with pytest.raises(Killed):
            run(tmp_path / str(stop), voting(kind), stop, **about)
        assert same(run(tmp_path / str(stop), voting(kind, seed=1), **about), whole), stop


def test_training_on_the_bound_proves_more() -> None:
    """Of its own rows, at three of eight parts, against parts that learn alone."""
    proven = []
    config = replace(CONFIG, epochs=20, augment="none", precision="fp32")
    for mix in (0.0, 0.9):
        model, (x, y) = voting(), squares(96)
        fit(model, (x, y), config, objective=certify.VoteObjective(3, mix))
        with torch.no_grad():
            scores, _ = certify.VoteObjective(3)(model.eval(), x, y)
        proven.append((scores.argmax(1) == y).float().mean().item())
    assert proven[1] > proven[0] + 0.1, proven


@pytest.mark.parametrize("votes", get_args(TrainedVotes))
def test_a_step_asks_the_host_for_nothing(votes: TrainedVotes) -> None:
    model, (x, y) = voting(), squares(4)
    objective = certify.VoteObjective(2, votes=votes)
    with Watch() as watch, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        objective(model, x, y)[1].backward()
    assert not watch.seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"budget": -1}, "budget must be an int >= 0, got -1"),
        ({"mix": 1.1}, r"mix must lie in \[0, 1\], got 1.1"),
        ({"smoothing": 1}, r"smoothing must lie in \[0, 1\), got 1"),
        ({"votes": "hard"}, 'votes must be "softmax" or "tanh", got \'hard\''),
        ({"tau": 0.0}, "tau must be a finite number > 0, got 0.0"),
    ],
)
def test_an_objective_complains(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        certify.VoteObjective(**{"budget": 2, **words})


def test_a_budget_that_no_vote_can_bear_is_refused_before_an_epoch_is_spent() -> None:
    with pytest.raises(ValueError, match=r"^budget must be below half of the parts, got budget=4 with 8 parts$"):
        fit(voting(), squares(), CONFIG, objective=certify.VoteObjective(4))
    with pytest.raises(ValueError, match=r"^model must be a vote of parts, which has part_logits, got Sequential$"):
        certify.VoteObjective(2).check(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), *squares(1))
