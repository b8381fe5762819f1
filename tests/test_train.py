"""Training: its configuration, a step and the loop."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import train
from ell0.attacks import AttackResult
from ell0.common import Step
from ell0.results import Measurement
from ell0.train import PAPER_CIFAR10, PAPER_MNIST, TrainConfig, fit, loop
from ell0.train.config import Optimizer, Schedule
from ell0.train.stepper import GraphStepper, Stepper, cross_entropy
from small_training import ATTACK, CLASSES, CONFIG, network, read_log, rows, same


def test_the_paper() -> None:
    assert (PAPER_MNIST.epochs, PAPER_MNIST.batch, PAPER_MNIST.momentum, PAPER_MNIST.weight_decay) == (250, 256, 0.9, 0)
    assert [e for e in range(250) if PAPER_MNIST.attacks_before(e)] == list(range(25, 250, 25))
    assert PAPER_MNIST.rates_of(249, 2) == [0.001, 0.001]
    rates = [PAPER_CIFAR10.rates_of(epoch, 1)[0] for epoch in range(250)]
    assert rates == [rate for rate in PAPER_CIFAR10.rates for _ in range(25)]
    assert (rates[0], rates[-1], PAPER_CIFAR10.batch, PAPER_CIFAR10.weight_decay) == (0.2, 0.00025, 128, 5e-4)
    assert (PAPER_CIFAR10.rounds, PAPER_CIFAR10.augment, PAPER_MNIST.rounds) == (True, "crop-flip-once", False)


@pytest.mark.parametrize(("schedule", "quarter"), [("cosine", 1 + 0.5**0.5), ("triangle", 1.5)])
def test_rates_rise_and_fall_to_nothing(schedule: Schedule, quarter: float) -> None:
    config = TrainConfig(epochs=10, rates=(2.0,), schedule=schedule, warm_up=0.2)
    rates = [rate for epoch in range(10) for rate in config.rates_of(epoch, 50)]
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[0] == pytest.approx(2.0 * 0.5 / 100)
    assert max(rates) == pytest.approx(2.0, rel=2e-3)
    assert 0 < rates[-1] < 0.01
    assert rates[200] == pytest.approx(quarter, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be an int >= 1, got 0"),
        ({"attack_batch": 0}, "attack_batch must be an int >= 1, got 0"),
        ({"rates": (0.1, float("nan"))}, "rates must be a tuple of at least one number >= 0, got (0.1, nan)"),
        ({"momentum": 1.0}, "momentum must lie in [0, 1), got 1.0"),
        ({"ema": 1.0}, "ema must lie in [0, 1), got 1.0"),
        ({"weight_decay": -1}, "weight_decay must be a number >= 0, got -1"),
        ({"schedule": "linear"}, "schedule must be one of 'steps', 'cosine', 'triangle', got 'linear'"),
        ({"attack_precision": ""}, "attack_precision must be one of 'fp32', 'tf32', 'bf16', got ''"),
        ({"warm_up": 0.1}, 'warm_up must be 0 for schedule="steps", got 0.1'),
        ({"schedule": "cosine", "rates": (0.1, 0.2)}, 'rates must be one for schedule="cosine", got (0.1, 0.2)'),
        ({"graph": 1}, "graph must be True or False, got 1"),
        ({"rounds": 25}, "rounds must be True or False, got 25"),
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig(**wrong)


class Embedded(nn.Module):
    """All kinds of parameters: of linear layers, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(12, 8), nn.BatchNorm1d(12), nn.Linear(8, CLASSES)
        self.place = nn.Embedding(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(self.norm(x)).relu() + self.place((x[:, 0] > 0).long()))
        return out


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_steps_are_those_of_torch(optimizer: Optimizer) -> None:
    """The fused kernels with a rate that changes, against torch's plain loop."""
    config = TrainConfig(optimizer=optimizer, momentum=0.8, weight_decay=0.3)
    stepper, plain = Stepper(Embedded(), config), Embedded()
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, momentum=0.8),
        "nesterov": partial(torch.optim.SGD, momentum=0.8, nesterov=True),
        "adam": partial(torch.optim.Adam, betas=(0.8, 0.999)),
        "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.999)),
    }
    groups = [
        {
            "params": [each],
            "weight_decay": 0.3 if optimizer in ("sgd", "adam") or name in ("first.weight", "last.weight") else 0,
        }
        for name, each in plain.named_parameters()
    ]
    reference = makes[optimizer](groups, lr=1.0, foreach=False)
    losses, right = 0.0, 0
    for i, rate in enumerate((0.1, 0.05, 0.2)):
        x, y = rows(20, seed=i)
        stepper.rate.fill_(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        logits = plain(x)
        loss = F.cross_entropy(logits, y)
        reference.zero_grad()
        loss.backward()
        reference.step()
        torch.testing.assert_close(stepper.step(x, y), loss.detach())
        losses, right = losses + 20 * loss.item(), right + int((logits.argmax(1) == y).sum())
    for a, b in zip(stepper.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert stepper.take() == pytest.approx((losses, right))
    assert stepper.take() == (0, 0)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_graph_takes_its_warm_up_back(optimizer: Optimizer) -> None:
    config = TrainConfig(batch=20, optimizer=optimizer, rates=(0.1,), ema=0.9)

    def normed() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(12), network())

    eager, graph = Stepper(normed(), config), GraphStepper(normed(), config, *rows(20, seed=9))
    graph._graph.stepper = graph  # type: ignore[attr-defined]
    assert same(eager.model, graph.model)
    assert same(eager.state(), graph.state())
    for i, n in enumerate((20, 20, 7, 20)):
        for stepper in (eager, graph):
            stepper.rate.fill_(0.1 / (i + 1))
        torch.testing.assert_close(eager.step(*rows(n, seed=i)), graph.step(*rows(n, seed=i)))
    assert same(eager.model, graph.model)
    assert eager.take() == graph.take()
    addresses = [tensor.data_ptr() for tensor in graph.state().values()]
    graph.restart()
    assert addresses == [tensor.data_ptr() for tensor in graph.state().values()]
    new = Stepper(copy.deepcopy(graph.model), config)
    assert same(graph._optimizer_state(), new._optimizer_state())
    assert same({n: t for n, t in graph.state().items() if "average" in n}, eager.average.state())  # type: ignore[union-attr]
    for stepper in (new, graph):
        stepper.rate.fill_(0.1)
        stepper.step(*rows(20, seed=5))
    assert same(new.model, graph.model)


@dataclass(frozen=True)
class Renewed:
    """Cross-entropy, as another loss in each epoch: steps are then built anew."""

    epoch: int = -1

    def at(self, epoch: int, _: int) -> Renewed:
        return Renewed(epoch)

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None: ...

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(model, x, y)


def test_the_model_ends_with_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights and statistics, by the definition; validation sees it, steps do not."""
    seen: list[dict[str, Tensor]] = []
    validated: list[Tensor] = []
    step, right = Stepper.step, loop._TrainingRun._right

    def stepped(stepper: Stepper, *batch: Any) -> Tensor:
        loss = step(stepper, *batch)
        seen.append({name: own.double().clone() for name, own in stepper.model.state_dict().items()})
        return loss

    def classified(run: Any, *batch: Any) -> Tensor:
        validated.append(run.model.first.weight.clone())
        return right(run, *batch)

    monkeypatch.setattr(Stepper, "step", stepped)
    monkeypatch.setattr(loop._TrainingRun, "_right", classified)
    config = replace(CONFIG, epochs=20, attack_batch=None, ema=0.8)
    model, plain = Embedded(), Embedded()
    fit(model, rows(48), config, validation=rows(9, seed=1), out=tmp_path, objective=Renewed())
    assert len(seen) == 60
    mean, by_epoch = seen[0], list[Tensor]()
    for t, now in enumerate(seen, 1):
        mean = {name: own + max(0.2, 10 / (9 + t)) * (now[name] - own) for name, own in mean.items()}
        by_epoch += [mean["first.weight"]] if t % 3 == 0 else []
    for name, own in model.state_dict().items():
        if own.is_floating_point():
            torch.testing.assert_close(own.double(), mean[name], rtol=1e-4, atol=1e-5)
            assert not torch.equal(own.double(), seen[-1][name])
    torch.testing.assert_close(torch.stack(validated).double(), torch.stack(by_epoch), rtol=1e-4, atol=1e-5)
    assert same(train.load_checkpoint(tmp_path).tensors, model)
    averaged = seen.copy()
    seen.clear()
    fit(plain, rows(48), replace(config, ema=0.0))
    assert all(same(a, b) for a, b in zip(averaged, seen, strict=True))


def test_half_precision_is_for_the_steps() -> None:
    types: list[tuple[bool, torch.dtype]] = []
    model = network(nn.Linear(12, CLASSES))
    model[0].register_forward_hook(lambda module, _, out: types.append((module.training, out.dtype)))
    training = fit(model, rows(), replace(CONFIG, precision="bf16"), validation=rows(9, seed=1))
    assert set(types) == {(True, torch.bfloat16), (False, torch.float32)}
    assert training.epochs[-1].loss < training.epochs[0].loss


def test_the_attack_has_a_precision_of_its_own() -> None:
    """It holds where the attack is rehearsed and where it runs, and ends with it."""
    inside: list[bool] = []
    outside: list[bool] = []

    def attack(*arguments: Any, **named: Any) -> AttackResult:
        inside.append(torch.is_autocast_enabled("cpu"))
        return ATTACK(*arguments, **named)

    half = replace(CONFIG, attack_precision="bf16")
    fit(network(), rows(), half, attack, progress=lambda _: outside.append(torch.is_autocast_enabled("cpu")))
    assert (len(inside), all(inside), any(outside)) == (1 + 2 * 3, True, False)
    fit(network(), rows(), replace(CONFIG, precision="bf16"), attack)
    assert not any(inside[7:])


def test_training_learns_and_reports_progress(tmp_path: Path) -> None:
    seen: list[Step] = []
    model, (x, y) = network(), rows(40, seed=1)
    training = fit(model, rows(), CONFIG, ATTACK, validation=(x, y), out=tmp_path, card={"k": 1}, progress=seen.append)
    epochs, last = training.epochs, training.epochs[-1]
    assert [step for step in seen if step.what == "epoch"] == [epoch.step for epoch in epochs]
    assert [(e.epoch, e.rate) for e in epochs] == list(enumerate([0.2] * 3 + [0.1] * 3))
    assert [e.attack_seconds > 0 for e in epochs] == [False, False, True, False, True, False]
    assert [e.seconds_left is None for e in epochs] == [True, True, False, False, False, False]
    assert last.seconds_left == 0
    assert epochs[2].seconds_left == pytest.approx(3 * epochs[2].seconds + epochs[2].attack_seconds)
    attacks = [step for step in seen if step.what == "rows attacked"]
    assert [(step.done, step.total) for step in attacks] == [(done, 50) for done in (20, 40, 50)] * 2
    assert attacks[2].note == f"{epochs[2].appended} broken"
    # After the whole second attack: what is left are two epochs, as long as the last by the rows that they train.
    longer = (50 + epochs[4].appended) / (50 + epochs[3].appended)
    assert attacks[5].seconds_left == pytest.approx(2 * longer * epochs[3].seconds)
    assert last.validation_accuracy == float((model(x).argmax(1) == y).double().mean())
    right = f"accuracy {100 * last.train_accuracy:.1f} %, validation {100 * last.validation_accuracy:.1f} %"
    assert str(seen[-1]) == f"6/6 epoch, loss {last.loss:.3g}, {right}, 0:00 left"
    assert last.train_accuracy > 0.5
    spent = sum(e.attack_seconds for e in epochs)
    assert training.seconds > spent + sum(e.seconds for e in epochs)
    measured = {row.what: row for row in training.rows(classifier="F(1)")}
    assert measured["attack_seconds"] == Measurement.of("attack_seconds", spent, n=2, classifier="F(1)", unit="seconds")
    each = sorted(e.seconds for e in epochs)
    assert (measured["epoch_seconds"].low, measured["epoch_seconds"].high) == (each[0], each[-1])
    figures = {"training_seconds": training.seconds, "final_loss": last.loss, "train_accuracy": last.train_accuracy}
    assert {what: measured[what].value for what in figures} == figures
    assert measured["validation_accuracy"].value == last.validation_accuracy
    assert read_log(tmp_path) == [asdict(e) for e in epochs]
    checkpoint = train.load_checkpoint(tmp_path)
    assert (checkpoint.card, checkpoint.about["epoch"], checkpoint.about["config"]["refresh"]) == ({"k": 1}, 6, 2)
    assert same(checkpoint.tensors, model)
    assert not checkpoint.state


def test_x_prime_is_what_was_broken_and_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every three rows the attack breaks the first, fails on the second, and the third was wrong from the start."""
    model, (x, y), step = network(), rows(30), Stepper.step
    batches: list[tuple[Tensor, Tensor]] = []

    def seen(stepper: Stepper, points: Tensor, labels: Tensor, weight: float) -> Tensor:
        batches.append((points, labels))
        return step(stepper, points, labels, weight)

    monkeypatch.setattr(Stepper, "step", seen)
    calls: list[tuple[list[int], int, bool]] = []

    def attack(_: object, points: Tensor, labels: Tensor, *, generator: torch.Generator, rows: Tensor) -> AttackResult:
        if len(rows) > 1:
            assert torch.equal(points, x[rows])
            assert torch.equal(labels, y[rows])
            calls.append((rows.tolist(), generator.initial_seed(), model.training))
        kind = rows % 3
        x_adv = torch.where((kind == 0).unsqueeze(1), points + 100 * (1 + len(calls)), points)
        distance = torch.where(kind == 0, 12, torch.where(kind == 1, -1, 0))
        return AttackResult(x_adv, kind != 1, distance, kind, x_adv, kind.float())

    config = replace(CONFIG, attack_batch=None, epochs=5)
    training = fit(model, (x, y), config, attack)
    assert [ids for ids, _, _ in calls] == [list(range(30))] * 2
    assert len({seed for _, seed, _ in calls}) == 2
    assert not any(mode for _, _, mode in calls)
    assert [e.appended for e in training.epochs] == [0, 0, 10, 10, 10]
    steps, orders = iter(batches), []
    for epoch, n in enumerate((30, 30, 40, 40, 40)):
        trained, labels = map(torch.cat, zip(*itertools.islice(steps, -(-n // 16)), strict=True))
        want = torch.cat([x, x[::3] + 100 * (1 + epoch // 2)])[:n]
        where = (trained.unsqueeze(1) == want).all(2)
        assert (where.sum(0) == 1).all()
        assert (where.sum(1) == 1).all()
        orders.append(where.double().argmax(1).tolist())
        assert torch.equal(labels, torch.cat([y, y[::3]])[orders[-1]])
    assert next(steps, None) is None
    assert len({tuple(order) for order in orders}) == 5


@pytest.mark.parametrize("attack", [None, ATTACK])
@pytest.mark.parametrize("rounds", [False, True])
def test_a_round_has_its_own_optimizer_and_batches(
    monkeypatch: pytest.MonkeyPatch, rounds: bool, attack: partial[AttackResult] | None
) -> None:
    """What each step begins with and trains on, by epoch."""
    stepped: list[tuple[bool, bytes]] = []
    epochs: list[list[tuple[bool, bytes]]] = []
    step = Stepper.step

    def seen(stepper: Stepper, points: Tensor, labels: Tensor, weight: float) -> Tensor:
        new = not any(tensor.any() for tensor in stepper.state().values())
        stepped.append((new, points.numpy().tobytes()))
        return step(stepper, points, labels, weight)

    def progress(report: Step) -> None:
        if report.what == "epoch":
            epochs.append(stepped.copy())
            stepped.clear()

    monkeypatch.setattr(Stepper, "step", seen)
    config = replace(CONFIG, epochs=7, refresh=3, rounds=rounds)
    training = fit(network(), rows(), config, attack, progress=progress)
    assert bool(training.epochs[-1].appended) == (attack is not None)
    begins = [(epoch, i) for epoch, steps in enumerate(epochs) for i, (new, _) in enumerate(steps) if new]
    assert begins == ([(0, 0), (3, 0), (6, 0)] if rounds else [(0, 0)])
    batches = [tuple(points for _, points in steps) for steps in epochs]
    assert len(set(batches)) == (3 if rounds else 7)
    assert all((batches[e] == batches[e + 1]) == (rounds and e not in (2, 5)) for e in range(6))


def test_seed_alone_gives_the_weights() -> None:
    """Neither the calls of the attack, nor how rows lie in memory."""

    def fitted(seed: int = 0, batch: int = 20, **layout: Any) -> nn.Module:
        model, (x, y) = network(), rows()
        images = x.view(50, 3, 2, 2).contiguous(**layout).requires_grad_()
        fit(model, (images, y), replace(CONFIG, seed=seed, attack_batch=batch, epochs=3), ATTACK)
        return model

    whole = fitted()
    assert same(fitted(batch=7), whole)
    assert same(fitted(memory_format=torch.channels_last), whole)
    assert not same(fitted(seed=1), whole)


def test_rates_reach_the_steps() -> None:
    one, other = network(), network()
    fit(one, rows(), replace(CONFIG, epochs=1))
    fit(other, rows(), replace(CONFIG, epochs=2, rates=(0.2, 0.0)))
    assert same(one, other)


def test_each_epoch_draws_its_own_dropout() -> None:
    model, masks = network(nn.Dropout(), nn.Linear(12, CLASSES)), list[Tensor]()
    model[0].register_forward_hook(lambda its, _, out: masks.append(out == 0) if its.training else None)
    fit(model, rows(), replace(CONFIG, epochs=2, batch=50))
    assert not torch.equal(*masks)


def test_the_caller_keeps_what_is_his() -> None:
    model, x = network(nn.Linear(12, 8), nn.Dropout(), nn.Linear(8, CLASSES)), rows()
    model[1].eval()
    weight, bias = model[0].parameters()
    weight.grad = mine = torch.ones_like(weight)
    state, copies = torch.random.get_rng_state(), [t.clone() for t in x]
    fit(model, x, CONFIG, ATTACK)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (model.training, model[1].training) == (True, False)
    assert weight.grad is mine
    assert (mine == 1).all()
    assert bias.grad is None
    assert all(torch.equal(a, b) for a, b in zip(x, copies, strict=True))


@pytest.mark.parametrize(("norm", "trained"), [(True, [16, 16, 16]), (False, [16, 16, 16, 1])])
def test_a_last_batch_of_one_row(norm: bool, trained: list[int]) -> None:
    sizes: list[int] = []
    model = network(nn.Linear(12, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Linear(4, CLASSES))
    model.register_forward_hook(lambda module, x, _: sizes.append(len(x[0])) if module.training else None)
    training = fit(model, rows(49), replace(CONFIG, epochs=1))
    assert sizes == trained
    right = training.epochs[0].train_accuracy * sum(trained)
    assert 0 < right == pytest.approx(round(right))


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    with pytest.raises(ValueError, match=r"^rates must be lower for this model, the loss of epoch \d is (nan|inf)$"):
        fit(network(), rows(), replace(CONFIG, rates=(1e30,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": lambda x: x}, "model must be an nn.Module, got"),
        ({"model": nn.Flatten()}, "model must have parameters to train, all on one device, got 0 devices"),
        ({"model": nn.Sequential(nn.Linear(12, 3), nn.Unflatten(1, (3, 1)))}, "model must return logits of shape"),
        ({"data": [1, 2, 3]}, "data must be a tuple (x, y), got [1, 2, 3]"),
        ({"data": (torch.zeros(0, 12), torch.zeros(0).long())}, "data must have a floating-point x of shape (n, ...)"),
        ({"data": (torch.zeros(2, 12), torch.zeros(3).long())}, "data must have an integer y of shape (2,), got"),
        ({"data": (torch.full((2, 12), torch.nan), torch.zeros(2).long())}, "data must have a finite x"),
        ({"data": (torch.zeros(2, 12), torch.tensor([0, 3]))}, "data must have labels in 0 .. 2, the classes, got"),
        ({"validation": (torch.zeros(2, 12), torch.tensor([0, -1]))}, "validation must have labels in 0 .. 2"),
        ({"model": nn.Linear(13, 3)}, "model must take the x of data, a float32 tensor of shape (50, 12) on cpu, but:"),
        ({"validation": (torch.zeros(2, 13), torch.zeros(2).long())}, "validation must have an x like a float32"),
        ({"config": {"epochs": 6}}, "config must be a TrainConfig, got {'epochs': 6}"),
        ({"config": replace(CONFIG, augment="crop-flip")}, 'augment must be "none" unless x is (n, channels, height,'),
        ({"attack": "sparse_rs"}, "attack must be a callable, got 'sparse_rs'"),
        ({"attack": partial(ATTACK, queries=0)}, "queries must be an int >= 1, got 0"),
        ({"attack": ATTACK, "config": replace(CONFIG, refresh=6)}, "refresh must be < epochs=6 for an attack to run"),
        ({"attack": lambda *_, **__: None}, "attack must return an AttackResult, got NoneType"),
    ],
)
def test_bad_arguments_are_refused_before_a_step(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Stepper, "step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as raised:
        fit(**{"model": network(), "data": rows(), "config": CONFIG, **arguments})
    assert "\n" not in str(raised.value)
