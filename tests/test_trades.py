"""An attack inside the step: where its points lie, what is learnt from them, and that nothing else is touched."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from balls import trades_within_one
from ell0 import L0Ball, certify, models, recipe
from ell0.nn import TruncatedLinear
from ell0.results import Results
from ell0.train import Trades, TrainConfig, fit
from ell0.train.stepper import Stepper
from small_training import Killed, images, run, same
from watching import Watch


def normed(seed: int = 0) -> nn.Sequential:
    """A network with batch norm behind a convolution, which an attack merges, and at its end, which it cannot."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3), nn.BatchNorm1d(3)
    )


def learnt() -> nn.Sequential:
    """The same, with weights and statistics of a short clean training."""
    model = normed()
    fit(model, images(120), TrainConfig(epochs=3, batch=24, rates=(0.05,)))
    return model


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize(
    "trades",
    [
        trades_within_one(4, "pixel"),
        trades_within_one(7),
        Trades(3, "pixel", low=-0.2, high=0.4),
        trades_within_one(36, "pixel"),
        trades_within_one(5, high=9.0),
    ],
    ids=["pixels", "features", "narrow", "all", "wide"],
)
def test_points_lie_in_the_ball(trades: Trades, steps: int) -> None:
    (x, y), model = images(), learnt()
    torch.manual_seed(1)
    x_adv = replace(trades, steps=steps).attacked(model, x, y)
    ball = L0Ball(trades.budget, trades.unit, trades.low, trades.high)
    assert ball.contains(x, x_adv).all()
    assert (ball.count(x, x_adv) >= trades.budget - 1).all()  # a value at the edge of the box may be that of x
    assert not x_adv.requires_grad
    assert not torch.equal(x_adv, trades.attacked(model, x, y))
    # Rows that lie apart in memory are attacked in the same way.
    torch.manual_seed(1)
    apart = x.repeat_interleave(2, 0)[::2].transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(replace(trades, steps=steps).attacked(model, apart, y), x_adv)


def test_the_loss_is_that_of_the_formula() -> None:
    (x, y), trades = images(), trades_within_one(4, "pixel", steps=3, weight=2.5)
    by_hand, mine, adversarial = learnt(), learnt(), learnt()
    torch.manual_seed(1)
    x_adv = trades.attacked(by_hand, x, y)
    logits = by_hand(torch.cat((x, x_adv)))
    clean, attacked = logits[: len(x)].softmax(1), logits[len(x) :].softmax(1)
    entropy = -clean[range(len(y)), y].log().mean()
    apart = (clean * (clean / attacked).log()).sum(1).mean()
    (entropy + 2.5 * apart).backward()
    torch.manual_seed(1)
    scores, loss = trades(mine, x, y)
    loss.backward()
    torch.testing.assert_close(loss, entropy + 2.5 * apart)
    torch.testing.assert_close(scores, logits[len(x) :])
    for parameter, other in zip(mine.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(mine.named_buffers()), dict(by_hand.named_buffers()))  # one batch of both

    torch.manual_seed(1)
    scores, loss = replace(trades, loss="adversarial")(adversarial, x, y)
    logits = learnt()(x_adv)
    torch.testing.assert_close(scores, logits)
    torch.testing.assert_close(loss, F.cross_entropy(logits, y))


def test_the_attack_leaves_the_model_as_it_was() -> None:
    (x, y), model = images(), learnt()
    before, kept = copy.deepcopy(model), x.clone()
    model.train()[1].eval()  # a layer may be in a mode of its own
    trades_within_one(4, "pixel").attacked(model, x, y)
    assert same(model, before)
    assert [module.training for module in model] == [True, False, True, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x, kept)
    with pytest.raises(RuntimeError):
        trades_within_one(4, "pixel").attacked(model, x[:, :2], y)
    assert [module.training for module in model] == [True, False, True, True, True, True]


def test_it_finds_the_best_points_of_a_linear_model() -> None:
    """Where every number counts for itself, the optimum is known: the units that can do most, at the edge."""
    torch.manual_seed(0)
    model, x = nn.Linear(40, 2), torch.rand(50, 40) * 2 - 1
    y = model(x).argmax(1)
    weight = (model.weight[y] - model.weight[1 - y]).detach()
    gains = torch.maximum(weight * (x + 1), weight * (x - 1)).sort(1, descending=True).values[:, :5].sum(1)

    def gained(steps: int) -> Tensor:
        moved = x - trades_within_one(5, steps=steps).attacked(model, x, y)
        return torch.div((weight * moved).sum(1), gains)

    several = torch.stack([gained(20) for _ in range(6)]).detach()  # of either mask
    assert several.max() <= 1 + 1e-5
    assert several.mean(1).max() > 0.98
    assert several.mean(1).min() > 0.7
    assert gained(0).mean() < 0.3


def test_a_coin_decides_whose_values_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a unit that comes into view late, the value has moved before or has not."""
    (x, y), model, found = images(6), learnt(), []
    for coin in (0.0, 0.4, 0.6, 1.0):
        monkeypatch.setattr(torch, "rand", lambda *_, coin=coin, **__: torch.tensor(coin))
        torch.manual_seed(0)
        found.append(trades_within_one(4, "pixel", steps=8).attacked(model, x, y))
    assert [torch.equal(one, other) for one, other in itertools.pairwise(found)] == [True, False, True]


def test_truncated_layers_are_attacked_through() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(TruncatedLinear(40, 2, 5)), torch.rand(50, 40) * 2 - 1
    y = model(x).argmax(1)
    torch.manual_seed(1)
    steps = [F.cross_entropy(model(trades_within_one(8, steps=steps).attacked(model, x, y)), y) for steps in (0, 10)]
    assert steps[1] > 2 * steps[0]
    assert "forward" not in model[0].__dict__  # that of the attack, which gives removed terms a gradient


def test_the_worst_of_the_points_is_taken() -> None:
    (x, y), model, seen = images(60, seed=1), learnt(), []
    model[5].register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
    x_adv = trades_within_one(4, "pixel", steps=6).attacked(model, x, y)
    losses = torch.stack([F.cross_entropy(logits, y, reduction="none") for logits in seen])
    assert len(losses) == 7
    assert set(losses.argmax(0).tolist()) >= {4, 5, 6}
    found = F.cross_entropy(model.eval()(x_adv), y, reduction="none")
    torch.testing.assert_close(found, losses.amax(0), rtol=1e-4, atol=1e-4)


def test_in_bf16_all_forwards_are_rounded() -> None:
    (x, y), seen = images(), []
    model = normed()
    model[4].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    config = TrainConfig(epochs=1, batch=12, rates=(0.05,), precision="bf16")
    losses = Stepper(model, config, batch_loss=trades_within_one(4, "pixel", steps=3)).step(x, y)
    assert losses.dtype == torch.float32
    assert seen == [torch.bfloat16] * 5
    with pytest.raises(ValueError, match='precision must not be "bf16" with an objective'):
        fit(models.mlp(2, in_features=108, hidden=(8,)), (x, y), config, objective=certify.Objective(1))
    seen.clear()
    Stepper(model, replace(config, precision="fp32"), batch_loss=trades_within_one(4, "pixel", steps=3)).step(x, y)
    assert seen == [torch.float32] * 5


def test_no_shape_and_no_path_depends_on_values() -> None:
    """So that a CUDA graph can hold a step: nothing asks for a value, or for as many as meet a condition."""
    (x, y), networks = images(), (normed(), models.small_cnn(2, in_shape=(3, 6, 6), classes=3))
    with Watch() as watch:
        for model in networks:
            trades_within_one(4, "pixel", steps=3)(model, x, y)[1].backward()
        assert not watch.seen
        float(x.sum())  # what would have been seen
        x.nonzero()
    assert watch.seen == ["aten._local_scalar_dense.default", "aten.nonzero.default"]


def test_the_same_seed_gives_the_same_bits_also_when_killed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"data": images(60), "attack": None, "validation": None}
    arguments |= {
        "config": TrainConfig(epochs=4, batch=16, rates=(0.05,)),
        "objective": trades_within_one(5, "pixel", steps=3),
    }
    whole = run(None, normed(), **arguments)
    torch.rand(7)
    assert same(run(None, normed(), **arguments), whole)
    assert not same(run(None, normed(), **arguments | {"config": replace(arguments["config"], seed=1)}), whole)
    with pytest.raises(Killed):
        run(tmp_path, normed(), 1, **arguments)
    with pytest.raises(ValueError, match="differs in: objective"):
        run(tmp_path, normed(), **arguments | {"objective": trades_within_one(5, "pixel", steps=3, weight=5.0)})
    assert same(run(tmp_path, normed(), **arguments), whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"budget": 0}, "budget must be an int >= 1, got 0"),
        ({"loss": "kl"}, 'loss must be "trades" or "adversarial", got \'kl\''),
        ({"weight": 0.0}, "weight must be a finite number > 0, got 0.0"),
        ({"high": float("inf")}, "low and high must be finite, got low=-1.0 with high=inf"),
        ({"low": 2.0}, "low must be <= high everywhere, got low=2.0 with high=1.0"),
    ],
)
def test_wrong_arguments_are_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        trades_within_one(**{"budget": 4, **words})


def test_what_does_not_fit_the_rows_is_said_before_an_epoch_is_spent() -> None:
    (x, y), config = images(), TrainConfig(epochs=9, batch=12)
    with pytest.raises(ValueError, match="budget must be at most the 36 units of x, got 37"):
        fit(normed(), (x, y), config, objective=trades_within_one(37, "pixel"))
    with pytest.raises(ValueError, match='unit must be "feature" unless x is'):
        fit(nn.Linear(108, 3), (x.flatten(1), y), config, objective=trades_within_one(3, "pixel"))


TABLE = '[classifier.training.trades]\nbudget = 3\nunit = "pixel"\nbeta = 0.5\nsteps = 2\nweight = 3.0\n'


def test_a_recipe_trains_with_it(tiny: Path, tmp_path: Path) -> None:
    text = tiny.read_text().replace("rates = [0.05]\n", f"rates = [0.05]\n{TABLE}", 1)
    for before, after, message in (
        ("weight = 3.0", "weight = -3.0", "training, trades: weight must be a finite number > 0, got -3.0"),
        (TABLE, f"[classifier.training.certified]\nbudget = 1\n{TABLE}", "must have certified or trades, and not both"),
    ):
        tiny.write_text(text.replace(before, after, 1))
        with pytest.raises(ValueError, match=re.escape(message)):
            recipe.load(tiny)
    tiny.write_text(text)
    one, other = recipe.load(tiny).classifiers
    assert one.objective == Trades(3, "pixel", -0.5, 0.5, steps=2, weight=3.0)
    assert one.identity == {"classifier": "F(0)", "k": 0, "adversarial": True}
    assert other.objective is None
    first = text[: text.index('[[classifier]]\nname = "F(2)"')] + '[[measure]]\nwhat = "clean_accuracy"\n'
    tiny.write_text(first)
    out = recipe.run(tiny, out=tmp_path / "run", device="cpu")
    row = Results.load(out / "results.json").find(what="training_seconds", classifier="F(0)")
    assert row["adversarial"] is True
    tiny.write_text(first + "[sweep]\nbudget = [1, 2]\n")
    assert [one.classifiers[0].objective.at(0, 1).budget for one in recipe.sweep(tiny)] == [1, 2]  # type: ignore
