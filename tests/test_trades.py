"""An attack inside the step: where its points lie, what is learnt from them, and that nothing else is touched."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ell0 import L0Ball, certify, data, models, recipe
from ell0.attacks import sparse_pgd
from ell0.common import Step
from ell0.nn import TruncatedLinear
from ell0.results import Results
from ell0.train import Trades, TrainConfig, fit, load_checkpoint
from ell0.train.stepper import Stepper
from small_training import same


def images(n: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes of 3 x 6 x 6 images, each bright in rows of its own."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = 0.3 * torch.randn(n, 3, 6, 6, generator=generator)
    x[torch.arange(n), :, y] += 0.7
    return x.clamp(-1, 1), y


def normed(seed: int = 0) -> nn.Sequential:
    """A network with batch norm behind a convolution, which an attack merges, and at its end, which it cannot."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3), nn.BatchNorm1d(3)
    )


def learnt(**words: Any) -> nn.Sequential:
    """The same, with weights and statistics of a short clean training."""
    model = normed()
    fit(model, images(120), TrainConfig(epochs=3, batch=24, rates=(0.05,)), **words)
    return model


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize(
    "trades",
    [Trades(4, "pixel"), Trades(7), Trades(3, "pixel", low=-0.2, high=0.4), Trades(36, "pixel"), Trades(5, high=9.0)],
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
    (x, y), trades = images(), Trades(4, "pixel", steps=3, weight=2.5)
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
    model.get_parameter("0.weight").requires_grad_(False)
    before, kept = copy.deepcopy(model), x.clone()
    Trades(4, "pixel").attacked(model.train(), x, y)
    model[1].eval()  # a layer may be in a mode of its own
    Trades(4, "pixel").attacked(model, x, y)
    assert same(model, before)
    assert [module.training for module in model] == [True, False, True, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, *[True] * 7]
    assert torch.equal(x, kept)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    model[4].register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="broken"):
        Trades(4, "pixel").attacked(model, x, y)
    assert [module.training for module in model] == [True, False, True, True, True, True]


def test_it_finds_the_best_points_of_a_linear_model() -> None:
    """Where every number counts for itself, the optimum is known: the units that can do most, at the edge."""
    torch.manual_seed(0)
    model, x = nn.Linear(40, 2), torch.rand(50, 40) * 2 - 1
    y = model(x).argmax(1)
    weight = (model.weight[y] - model.weight[1 - y]).detach()
    gains = torch.maximum(weight * (x + 1), weight * (x - 1)).sort(1, descending=True).values[:, :5].sum(1)
    margin = (model(x).gather(1, y[:, None]) - model(x).gather(1, 1 - y[:, None])).squeeze(1)

    def gained(steps: int) -> Tensor:
        z = model(Trades(5, steps=steps).attacked(model, x, y))
        after = (z.gather(1, y[:, None]) - z.gather(1, 1 - y[:, None])).squeeze(1)
        return torch.div(margin - after, gains)

    several = torch.stack([gained(20) for _ in range(6)]).detach()  # of either mask
    assert several.max() <= 1 + 1e-5
    assert several.mean(1).max() > 0.98
    assert several.mean(1).min() > 0.7
    assert gained(0).mean() < 0.3


def test_a_coin_decides_whose_values_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a unit that comes into view late, the value has moved before or has not."""
    (x, y), model, coins = images(6), learnt(), []
    rand = torch.rand

    def drawn(*size: Any, **words: Any) -> Tensor:
        coins.append(rand(*size, **words))
        return coins[-1]

    monkeypatch.setattr(torch, "rand", drawn)
    for _ in range(40):
        Trades(4, "pixel", steps=2).attacked(model, x, y)
    assert len(coins) == 40
    assert 8 <= sum(float(coin) < 0.5 for coin in coins) <= 32
    found = []
    for coin in (0.0, 1.0):
        monkeypatch.setattr(torch, "rand", lambda *_, coin=coin, **__: torch.tensor(coin))
        torch.manual_seed(0)
        found.append(Trades(4, "pixel", steps=8).attacked(model, x, y))
    assert not torch.equal(*found)


def test_truncated_layers_are_attacked_through() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(TruncatedLinear(40, 2, 5)), torch.rand(50, 40) * 2 - 1
    y = model(x).argmax(1)
    torch.manual_seed(1)
    steps = [F.cross_entropy(model(Trades(8, steps=steps).attacked(model, x, y)), y) for steps in (0, 10)]
    assert steps[1] > 2 * steps[0]
    seen: list[bool] = []
    model[0].register_forward_pre_hook(lambda layer, _: seen.append("forward" in layer.__dict__))
    Trades(8, steps=1).attacked(model, x, y)
    assert seen == [True, True]  # a forward of its own, which gives removed terms a gradient
    assert "forward" not in model[0].__dict__


def test_the_worst_of_the_points_is_taken() -> None:
    (x, y), model, seen = images(60, seed=1), learnt(), []
    model[5].register_forward_hook(lambda _, __, logits: seen.append(logits.detach()))
    x_adv = Trades(4, "pixel", steps=6).attacked(model, x, y)
    losses = torch.stack([F.cross_entropy(logits, y, reduction="none") for logits in seen])
    assert len(losses) == 7
    assert set(losses.argmax(0).tolist()) >= {4, 5, 6}
    found = F.cross_entropy(model.eval()(x_adv), y, reduction="none")
    torch.testing.assert_close(found, losses.amax(0), rtol=1e-4, atol=1e-4)


def test_it_starts_at_random_units() -> None:
    x, y = torch.zeros(400, 3, 6, 6), torch.zeros(400, dtype=torch.int64)
    x_adv = Trades(6, "pixel", steps=0).attacked(normed(), x, y)
    often = (x_adv != x).any(1).flatten(1).float().mean(0)
    torch.testing.assert_close(often, torch.full((36,), 1 / 6), rtol=0, atol=0.09)
    assert abs(float(x_adv[x_adv != 0].mean())) < 0.05


def test_in_bf16_all_forwards_are_rounded() -> None:
    (x, y), seen = images(), []
    model = normed()
    model[4].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    config = TrainConfig(epochs=1, batch=12, rates=(0.05,), precision="bf16")
    losses = Stepper(model, config, batch_loss=Trades(4, "pixel", steps=3)).step(x, y)
    assert losses.dtype == torch.float32
    assert seen == [torch.bfloat16] * 5
    training = fit(normed(), (x, y), config, objective=Trades(4, "pixel", steps=2))
    assert training.epochs[0].loss > 0
    with pytest.raises(ValueError, match='precision must not be "bf16" with an objective'):
        fit(models.mlp(2, in_features=108, hidden=(8,)), (x, y), config, objective=certify.Objective(1))
    seen.clear()
    Stepper(model, replace(config, precision="fp32"), batch_loss=Trades(4, "pixel", steps=3)).step(x, y)
    assert seen == [torch.float32] * 5


@pytest.mark.parametrize(
    "make", [normed, lambda: models.small_cnn(2, in_shape=(3, 6, 6), classes=3)], ids=["normed", "truncated"]
)
def test_no_shape_and_no_path_depends_on_values(make: Callable[[], nn.Module]) -> None:
    """So that a CUDA graph can hold a step: nothing asks for a value, or for as many as meet a condition."""
    (x, y), asked = images(), []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(word in str(op) for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.")):
                asked.append(str(op))
            return op(*args, **(kwargs or {}))

    model = make()
    with Watched():
        Trades(4, "pixel", steps=3)(model, x, y)[1].backward()
        assert asked == []
        float(x.sum())  # what would have been seen
        x.nonzero()
    assert asked == ["aten._local_scalar_dense.default", "aten.nonzero.default"]


def test_the_same_seed_gives_the_same_bits_also_when_killed(tmp_path: Path) -> None:
    config = TrainConfig(epochs=4, batch=16, rates=(0.05,), augment="crop-flip")
    objective, rows = Trades(5, "pixel", steps=3), images(60)

    def run(**words: Any) -> nn.Module:
        model = normed()
        fit(model, rows, **{"config": config, "objective": objective, **words})
        return model

    def stop(epoch: int, step: Step) -> None:
        if step.done > epoch:
            raise KeyboardInterrupt

    whole = run()
    torch.rand(7)
    assert same(run(), whole)
    assert not same(run(config=replace(config, seed=1)), whole)
    for epoch in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(out=tmp_path / str(epoch), progress=partial(stop, epoch))
        assert same(run(out=tmp_path / str(epoch)), whole)
    with pytest.raises(ValueError, match="differs in: objective"):
        run(out=tmp_path / "0", objective=replace(objective, weight=5.0))


def test_a_network_trained_with_it_stands_better() -> None:
    x, y = data.load("digits", "train")
    x_test, y_test = (t[:150] for t in data.load("digits", "test"))
    config = TrainConfig(epochs=6, batch=64, rates=(0.005,), optimizer="adam")
    standing = {}
    for name, objective in {"clean": None, "trades": Trades(6, steps=5)}.items():
        torch.manual_seed(0)
        model = models.small_cnn(0, in_shape=(1, 8, 8))
        fit(model, (x, y), config, objective=objective)
        standing[name] = 1 - float(sparse_pgd(model, x_test, y_test, L0Ball(3), steps=30).success.float().mean())
    assert standing["trades"] > standing["clean"] + 0.15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"budget": 0}, "budget must be an int >= 1, got 0"),
        ({"loss": "kl"}, 'loss must be "trades" or "adversarial", got \'kl\''),
        ({"steps": -1}, "steps must be an int >= 0, got -1"),
        ({"weight": 0.0}, "weight must be a finite number > 0, got 0.0"),
        ({"high": float("inf")}, "low and high must be finite, got low=-1.0 with high=inf"),
        ({"low": 2.0}, "low must be <= high everywhere, got low=2.0 with high=1.0"),
    ],
)
def test_wrong_arguments_are_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trades(**{"budget": 4, **words})


def test_what_does_not_fit_the_rows_is_said_before_an_epoch_is_spent() -> None:
    (x, y), config = images(), TrainConfig(epochs=9, batch=12)
    with pytest.raises(ValueError, match="budget must be at most the 36 units of x, got 37"):
        fit(normed(), (x, y), config, objective=Trades(37, "pixel"))
    flat = nn.Sequential(nn.Linear(108, 3))
    with pytest.raises(ValueError, match='unit must be "feature" unless x is'):
        fit(flat, (x.flatten(1), y), config, objective=Trades(3, "pixel"))


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
    made_from = load_checkpoint(out / "f0").about["made_from"]
    assert made_from["objective"].startswith("Trades {budget: 3,")
    tiny.write_text(first + "[sweep]\nbudget = [1, 2]\n")
    assert [one.classifiers[0].objective.at(0, 1).budget for one in recipe.sweep(tiny)] == [1, 2]  # type: ignore
