from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import L0Ball, models, results, train
from ell0.attacks import AttackResult, sparse_rs
from ell0.nn import InputTruncation
from ell0.parallel import ALONE
from ell0.train import (
    PAPER_CIFAR10,
    PAPER_MNIST,
    AttackStage,
    Epoch,
    TrainConfig,
    _append,
    _augment,
    _checkpoint,
    _fit,
    _folder,
    _step,
    _tensors,
    fit,
)

CONFIG = TrainConfig(epochs=6, batch=16, rates=(0.2, 0.1), refresh=2, attack_batch=20)
ATTACK = partial(sparse_rs, ball=L0Ball(3, low=-5.0, high=5.0), queries=4)
CLASSES = 3


def rows(n: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around the corners of a cube, one for each class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    return F.one_hot(y, 12).float() * 2 + 0.5 * torch.randn(n, 12, generator=g), y


def network(*layers: nn.Module, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return models.mlp(1, in_features=12, hidden=(10,), classes=CLASSES) if not layers else nn.Sequential(*layers)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: nn.Module | dict[str, Tensor], other: nn.Module | dict[str, Tensor]) -> bool:
    a, b = (w if isinstance(w, dict) else w.state_dict() for w in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def figures(epochs: tuple[Epoch, ...] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without its times; of an attack's, that there was one."""
    lines = [asdict(line) if isinstance(line, Epoch) else line for line in epochs]
    return [
        {key: value for key, value in line.items() if "seconds" not in key} | {"attacked": line["attack_seconds"] > 0}
        for line in lines
    ]


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# --- the configuration ------------------------------------------------------------------------------------------------


def test_the_paper() -> None:
    assert (PAPER_MNIST.epochs, PAPER_MNIST.batch, PAPER_MNIST.momentum, PAPER_MNIST.weight_decay) == (250, 256, 0.9, 0)
    assert [e for e in range(250) if PAPER_MNIST.attacks_before(e)] == list(range(25, 250, 25))
    assert PAPER_MNIST.rates_of(249, 2) == [0.001, 0.001]
    rates = [PAPER_CIFAR10.rates_of(epoch, 1)[0] for epoch in range(250)]
    assert rates == [rate for rate in PAPER_CIFAR10.rates for _ in range(25)]
    assert (rates[0], rates[-1], PAPER_CIFAR10.batch, PAPER_CIFAR10.weight_decay) == (0.2, 0.00025, 128, 5e-4)


def test_cosine_rises_and_falls_to_nothing() -> None:
    config = TrainConfig(epochs=10, rates=(2.0,), schedule="cosine", warm_up=0.2)
    rates = [rate for epoch in range(10) for rate in config.rates_of(epoch, 50)]
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[0] == pytest.approx(2.0 * 0.5 / 100)
    assert max(rates) == pytest.approx(2.0, rel=1e-4)
    assert 0 < rates[-1] < 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be an int >= 1, got 0"),
        ({"batch": 2.0}, "batch must be an int >= 1, got 2.0"),
        ({"refresh": 0}, "refresh must be an int >= 1, got 0"),
        ({"seed": -1}, "seed must be an int >= 0, got -1"),
        ({"attack_batch": 0}, "attack_batch must be an int >= 1, got 0"),
        ({"rates": ()}, "rates must be a tuple of at least one number >= 0, got ()"),
        ({"rates": 0.1}, "rates must be a tuple of at least one number >= 0, got 0.1"),
        ({"rates": (0.1, float("nan"))}, "rates must be a tuple of at least one number >= 0, got (0.1, nan)"),
        ({"momentum": 1.0}, "momentum must lie in [0, 1), got 1.0"),
        ({"weight_decay": -1}, "weight_decay must be a number >= 0, got -1"),
        ({"schedule": "linear"}, "schedule must be one of 'steps', 'cosine', got 'linear'"),
        ({"optimizer": "lamb"}, "optimizer must be one of 'sgd', 'adam', got 'lamb'"),
        ({"precision": "fp8"}, "precision must be one of 'fp32', 'tf32', 'bf16', got 'fp8'"),
        ({"attack_precision": ""}, "attack_precision must be one of 'fp32', 'tf32', 'bf16', got ''"),
        ({"augment": "flip"}, "augment must be one of 'none', 'crop-flip', 'shift', got 'flip'"),
        ({"channels_last": 1}, "channels_last must be True, False or None, got 1"),
        ({"warm_up": 0.1}, 'warm_up must be 0 for schedule="steps", got 0.1'),
        ({"schedule": "cosine", "rates": (0.1, 0.2)}, 'rates must be one for schedule="cosine", got (0.1, 0.2)'),
        ({"compile": 1}, "compile must be True or False, got 1"),
        ({"graph": "yes"}, "graph must be True, False or None, got 'yes'"),
        ({"graph": 1}, "graph must be True, False or None, got 1"),
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig(**wrong)


# --- the file format --------------------------------------------------------------------------------------------------

TENSORS = {
    "b": torch.tensor([True, False, True]),
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "count": torch.tensor(2**40),
    "byte": torch.arange(5, dtype=torch.uint8),
}


def write_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_tensors_come_back(tmp_path: Path) -> None:
    read, words = _tensors.read(write_file(tmp_path / "t", _tensors.encode(TENSORS, {"format": "pt", "ü": "ß"})))
    assert words == {"format": "pt", "ü": "ß"}
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=0, equal_nan=True)
        read[name].zero_()  # they may be written to


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    path = write_file(tmp_path / "ours", _tensors.encode(TENSORS, {"format": "pt"}))
    theirs = package.load_file(path)
    package.save_file({name: t.contiguous() for name, t in TENSORS.items()}, tmp_path / "theirs", {"format": "pt"})
    ours, words = _tensors.read(tmp_path / "theirs")
    assert words == {"format": "pt"}
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0, equal_nan=True)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_damage_gives_anything_but_a_sentence(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    """A file cut short is always found out; a header with a wrong byte is found out or still says something whole."""
    content = bytearray(_tensors.encode(TENSORS, {}))
    path = tmp_path_factory.getbasetemp() / "damaged"
    with pytest.raises(ValueError, match=r"damaged is damaged or not a safetensors file: "):
        _tensors.read(write_file(path, bytes(content[: at % len(content)])))
    content[at % len(content)] = byte
    with suppress(ValueError):
        read, _ = _tensors.read(write_file(path, bytes(content)))
        assert sum(t.numel() * t.element_size() for t in read.values()) == 3 + 24 + 8 + 4 + 8 + 5


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ([1], 0, "its header does not name tensors"),
        ({"a": 1}, 0, "its header does not name tensors"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 9, "it has 1 bytes too many"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 7, "ends outside of the file"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8, "a has 8 bytes, which do not fill"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, 8, "a has the unknown type 'F4'"),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, 8, "a has the shape"),
        ({"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, 0, "a has the shape"),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            6,
            "b does not lie where the tensor before it ends",
        ),
        ({"__metadata__": {"a": 1}}, 0, "its metadata are not words"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: object, data: int, message: str) -> None:
    head = json.dumps(header).encode()
    path = write_file(tmp_path / "lie", len(head).to_bytes(8, "little") + head + bytes(data))
    with pytest.raises(ValueError, match=message):
        _tensors.read(path)


def test_types_without_a_word_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^a checkpoint cannot hold z of type torch\.complex64$"):
        _tensors.encode({"z": torch.zeros(1, dtype=torch.complex64)}, {})


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    model, card = network(nn.Linear(2, 3), nn.BatchNorm1d(3)), {"name": "F(3)", "k": [3, None]}
    path = train.save_checkpoint(tmp_path / "m.safetensors", model, card)
    checkpoint = train.load_checkpoint(path)
    other = network(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert not same(model, other)
    checkpoint.into(other)
    assert same(model, other)
    assert checkpoint.card == card
    assert checkpoint.about["model"] == repr(model)
    beside = json.loads((tmp_path / "m.json").read_text())
    assert beside["card"] == card
    assert beside["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(2, 4)), "0.bias has the shape (3,) in it and (4,) here (and 1 more)"),
        (nn.Sequential(nn.Linear(2, 3, bias=False)), "the model has no 0.bias"),
        (nn.Sequential(nn.Linear(2, 3), nn.PReLU()), "the checkpoint has no 1.weight"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path, other: nn.Module, message: str) -> None:
    path = train.save_checkpoint(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(2, 3)))
    before = weights(other)
    with pytest.raises(ValueError, match=f"^the checkpoint must be of this architecture, but {re.escape(message)}$"):
        train.load_checkpoint(path).into(other)
    assert same(other, before)


def test_a_card_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        train.save_checkpoint(tmp_path / "m.safetensors", nn.Linear(1, 1), {"a": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("card", ["half a ca", "3", '["a"]'])
def test_a_damaged_card_is_one_sentence(tmp_path: Path, card: str) -> None:
    path = write_file(tmp_path / "m.safetensors", _tensors.encode({}, {"card": card}))
    with pytest.raises(ValueError, match=r"m\.safetensors is damaged: its card is not a JSON object$"):
        train.load_checkpoint(path)


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_are_those_of_torch(optimizer: Literal["sgd", "adam"]) -> None:
    """The fused kernels with a rate that changes, against torch's plain loop."""
    config = TrainConfig(optimizer=optimizer, weight_decay=0.01)
    stepper, plain = _step.Stepper(network(), config), network()
    make: Callable[..., torch.optim.Optimizer] = (
        partial(torch.optim.SGD, momentum=0.9) if optimizer == "sgd" else partial(torch.optim.Adam, betas=(0.9, 0.999))
    )
    reference = make(plain.parameters(), lr=1.0, weight_decay=0.01, foreach=False)
    losses, right = 0.0, 0
    for i, rate in enumerate((0.1, 0.05, 0.2)):
        x, y = rows(20, seed=i)
        stepper.rate.fill_(rate)
        reference.param_groups[0]["lr"] = rate
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


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_goes_on_from_its_state(optimizer: Literal["sgd", "adam"]) -> None:
    config = TrainConfig(optimizer=optimizer, rates=(0.1,))
    one = _step.Stepper(network(), config)
    one.step(*rows(20))
    other = _step.Stepper(network(), config)
    other.model.load_state_dict(one.model.state_dict())
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    for stepper in (one, other):
        stepper.step(*rows(20, seed=1))
    assert same(one.model, other.model)
    with pytest.raises(ValueError, match="must hold the optimizer's state"):
        other.load({})


class FakeGraph:
    """Stands in for a CUDA graph where there is no GPU: replays by doing the step again."""

    def replay(self) -> None:
        stepper = self.stepper  # type: ignore[attr-defined]
        stepper._loss.copy_(_step.Stepper.step(stepper, stepper._x, stepper._y))


@contextmanager
def nothing(*_: object) -> Iterator[Any]:
    yield


class FakeStream:
    def wait_stream(self, _: object) -> None: ...


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("CUDAGraph", FakeGraph),
        ("graph", nothing),
        ("stream", nothing),
        ("Stream", lambda _: FakeStream()),
        ("current_stream", lambda _: FakeStream()),
    ):
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_graph_takes_its_warm_up_back(optimizer: Literal["sgd", "adam"]) -> None:
    config = TrainConfig(batch=20, optimizer=optimizer, rates=(0.1,))

    def normed() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(12), network())

    eager, graph = _step.Stepper(normed(), config), _step.GraphStepper(normed(), config, *rows(20, seed=9))
    graph._graph.stepper = graph  # type: ignore[attr-defined]
    assert same(eager.model, graph.model)
    assert same(eager.state(), graph.state())
    for i, n in enumerate((20, 20, 7, 20)):
        for stepper in (eager, graph):
            stepper.rate.fill_(0.1 / (i + 1))
        torch.testing.assert_close(eager.step(*rows(n, seed=i)), graph.step(*rows(n, seed=i)))
    assert same(eager.model, graph.model)
    assert eager.take() == graph.take()


def test_only_whole_batches_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compiled(model: nn.Module) -> Callable[[Tensor, Tensor], Any]:
        def forward(x: Tensor, y: Tensor) -> Any:
            seen.append(len(x))
            return model(x, y)

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    fit(network(), rows(50), replace(CONFIG, compile=True, epochs=1))
    assert seen == [16, 16, 16]


def test_half_precision_is_for_the_steps() -> None:
    types: list[tuple[bool, torch.dtype]] = []
    model = network(nn.Linear(12, CLASSES))
    model[0].register_forward_hook(lambda module, _, out: types.append((module.training, out.dtype)))
    training = fit(model, rows(), replace(CONFIG, precision="bf16"), validation=rows(9, seed=1))
    assert set(types) == {(True, torch.bfloat16), (False, torch.float32)}
    assert model[0].weight.dtype == torch.float32
    assert training.epochs[-1].loss < training.epochs[0].loss


def test_the_attack_has_a_precision_of_its_own() -> None:
    """It holds where the attack is rehearsed and where it runs, and ends with it."""
    inside: list[bool] = []
    outside: list[bool] = []

    def attack(*arguments: Any, **named: Any) -> AttackResult:
        inside.append(torch.is_autocast_enabled("cpu"))
        return ATTACK(*arguments, **named)

    fit(
        network(), rows(), replace(CONFIG, attack_precision="bf16"), attack,
        progress=lambda _: outside.append(torch.is_autocast_enabled("cpu")),
    )  # fmt: skip
    assert len(inside) == 1 + 2 * 3
    assert all(inside)
    assert not any(outside)
    fit(network(), rows(), replace(CONFIG, precision="bf16"), attack)
    assert not any(inside[7:])


# --- images -----------------------------------------------------------------------------------------------------------


def images(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    x = 0.3 * torch.randn(n, 2, 6, 5, generator=g)
    x[torch.arange(n), 0, y] += 0.7
    return x, y


def convolutions() -> nn.Module:
    """What the paper has in VGG(k), with few numbers."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        features = InputTruncation((2, 6, 5), 2), nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(120, CLASSES))


CROP_FLIP, SHIFT = _augment.AUGMENTS["crop-flip"], _augment.AUGMENTS["shift"]


def cropped_and_flipped(image: Tensor, way: int) -> Tensor:
    """The definition, for one image."""
    _, height, width = image.shape
    top, left, flips = way // 2 // 9, way // 2 % 9, way % 2
    crop = F.pad(image, (4, 4, 4, 4))[:, top : top + height, left : left + width]
    return crop.flip(2) if flips else crop


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    data=st.data(),
)
def test_crop_and_flip_is_its_definition(shape: tuple[int, int, int], rows: list[int], data: st.DataObject) -> None:
    ways = data.draw(st.lists(st.integers(0, 161), min_size=len(rows), max_size=len(rows)))
    points = 1 + torch.arange(4 * math.prod(shape), dtype=torch.float32).view(4, *shape)
    moved = CROP_FLIP.moved(points, torch.tensor(rows), torch.tensor(ways))
    want = torch.stack([cropped_and_flipped(points[row], way) for row, way in zip(rows, ways, strict=True)])
    assert torch.equal(moved, want)


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)))
def test_a_shift_brings_in_the_nearest_pixel(shape: tuple[int, int, int]) -> None:
    image = 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(1, *shape)
    moved = SHIFT.moved(image, torch.zeros(9, dtype=torch.int64), torch.arange(9))
    padded = F.pad(image, (1, 1, 1, 1), mode="replicate")[0]
    height, width = shape[1:]
    for way in range(9):
        top, left = way // 3, way % 3
        assert torch.equal(moved[way], padded[:, top : top + height, left : left + width])


@pytest.mark.parametrize(("moves", "ways"), [(CROP_FLIP, 162), (SHIFT, 9)])
def test_every_way_to_move_is_drawn(moves: _augment.Moves, ways: int) -> None:
    counts = torch.bincount(moves.draw(ways * 100, torch.Generator().manual_seed(0)), minlength=ways)
    assert len(counts) == ways
    assert 50 < counts.min() <= counts.max() < 150


def test_epoch_and_seed_give_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []

    def drawn(_: object, rows: int, generator: torch.Generator) -> Tensor:
        keys.append(generator.initial_seed())
        return torch.zeros(rows, dtype=torch.int64)

    monkeypatch.setattr(_augment.Moves, "draw", drawn)
    for seed in (0, 1, 0):
        fit(convolutions(), images(20), replace(CONFIG, epochs=2, augment="crop-flip", seed=seed))
    assert keys[:2] == keys[4:]
    assert len(set(keys)) == 4


def test_a_shift_is_what_is_trained_on() -> None:
    model, (x, y) = convolutions(), images(20)
    trained: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, inputs: trained.append(inputs[0]) if module.training else None)
    fit(model, (x, y), TrainConfig(epochs=1, batch=20, rates=(0.1,), augment="shift"))
    every = [SHIFT.moved(x, torch.full((9,), row), torch.arange(9)) for row in range(20)]
    ways = {point.numpy().tobytes() for points in every for point in points}
    assert all(point.numpy().tobytes() in ways for point in trained[0])
    still = {point.numpy().tobytes() for point in x}
    assert sum(point.numpy().tobytes() not in still for point in trained[0]) > 10


def test_each_epoch_augments_x_and_x_prime_anew() -> None:
    model, (x, y) = convolutions(), images(20)
    trained: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, inputs: trained.append(inputs[0]) if module.training else None)

    def attack(_: object, points: Tensor, labels: Tensor, *, rows: Tensor, **__: object) -> AttackResult:
        """Breaks every row with the value 7; it gets them as they are."""
        if len(rows) > 1:
            assert torch.equal(points, x[rows])
        ones = torch.ones_like(labels)
        return AttackResult(torch.full_like(points, 7.0), ones == 1, ones, ones, points, ones.float())

    config = TrainConfig(epochs=2, batch=40, rates=(0.1,), refresh=1, augment="crop-flip")
    fit(model, (x, y), config, attack, validation=(x, y))
    first, second = trained
    ways = [{cropped_and_flipped(image, way).numpy().tobytes() for way in range(162)} for image in x]
    assert all(any(point.numpy().tobytes() in some for some in ways) for point in first)
    sevens = (second == 7).flatten(1)
    assert int(sevens.any(1).sum()) == 20
    assert len({tuple(row) for row in sevens.tolist()}) > 5
    assert set(second[sevens.any(1)].unique().tolist()) == {0.0, 7.0}
    mine = {point.numpy().tobytes() for point in first}
    assert sum(point.numpy().tobytes() not in mine for point in second[~sevens.any(1)]) > 10


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_stopped_anywhere_go_on_to_the_same_bits(tmp_path: Path, channels_last: bool) -> None:
    """The draws of the augmentation and the running statistics of batch norm come back."""
    config = replace(CONFIG, augment="crop-flip", channels_last=channels_last)
    about: dict[str, Any] = {"config": config, "data": images(), "validation": images(9, seed=1)}
    whole = run(None, convolutions(), **about)
    assert float(whole.get_buffer("2.num_batches_tracked")) > 6
    for stop in (1, 4, 7, 9):
        out = tmp_path / str(stop)
        with pytest.raises(Killed):
            run(out, convolutions(), stop, **about)
        model = run(out, convolutions(), **about)
        assert same(model, whole), stop
        assert same(train.load_checkpoint(out).tensors, whole.state_dict()), stop


def test_channels_last_changes_how_weights_lie_and_no_more() -> None:
    networks = []
    for channels_last in (False, True):
        model = convolutions()
        fit(model, images(), replace(CONFIG, channels_last=channels_last, epochs=2))
        networks.append(model)
    strides = [model.get_parameter("1.weight").stride() for model in networks]
    assert strides == [(18, 9, 3, 1), (18, 1, 6, 2)]
    for one, other in zip(networks[0].state_dict().values(), networks[1].state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fake_cuda")
def test_a_graph_of_convolutions_keeps_their_statistics() -> None:
    config = TrainConfig(batch=20, rates=(0.1,), precision="bf16")
    eager = _step.Stepper(convolutions(), config)
    graph = _step.GraphStepper(convolutions(), config, *images(20, seed=9))
    graph._graph.stepper = graph  # type: ignore[attr-defined]
    assert same(eager.model, graph.model)
    for i, n in enumerate((20, 20, 7, 20)):
        for stepper in (eager, graph):
            stepper.step(*images(n, seed=i))
    assert same(eager.model, graph.model)
    assert int(graph.model.get_buffer("2.num_batches_tracked")) == 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, CLASSES)), "to have 3 channels, but got 2"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, CLASSES)), "shapes cannot be multiplied"),
        (models.small_cnn(2, in_shape=(2, 8, 8)), "x must have shape (n, 2, 8, 8), got (1, 2, 6, 5)"),
    ],
)
def test_images_of_another_shape_are_one_sentence(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        fit(model, images(), CONFIG)
    assert "\n" not in str(raised.value)


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_training_learns_and_says_how_far_it_is(tmp_path: Path) -> None:
    seen: list[Epoch | AttackStage] = []
    model = network()
    training = fit(
        model, rows(), CONFIG, ATTACK, validation=rows(40, seed=1), out=tmp_path, card={"k": 1}, progress=seen.append
    )
    epochs = [each for each in seen if isinstance(each, Epoch)]
    assert tuple(epochs) == training.epochs
    assert [e.epoch for e in epochs] == list(range(6))
    assert [e.rate for e in epochs] == [0.2] * 3 + [0.1] * 3
    assert [e.attack_seconds > 0 for e in epochs] == [False, False, True, False, True, False]
    assert [e.seconds_left is None for e in epochs] == [True, True, False, False, False, False]
    assert epochs[-1].seconds_left == 0
    assert epochs[-2].seconds_left == pytest.approx(epochs[-2].seconds)
    assert epochs[2].seconds_left == pytest.approx(3 * epochs[2].seconds + epochs[2].attack_seconds)
    stages = [each for each in seen if isinstance(each, AttackStage)]
    assert [(s.epoch, s.done, s.rows) for s in stages] == [(e, d, 50) for e in (2, 4) for d in (20, 40, 50)]
    for stage in stages:
        last, part = epochs[stage.epoch - 1], stage.done / 50
        epoch_seconds = last.seconds * (50 + stage.appended / part) / (50 + last.appended)
        attacks = (1 if stage.epoch == 4 else 2) - part
        assert stage.seconds_left == pytest.approx((6 - stage.epoch) * epoch_seconds + attacks * stage.seconds / part)
    assert epochs[2].appended == stages[2].appended > 0
    assert training.epochs[0].loss > training.epochs[1].loss
    x, y = rows(40, seed=1)
    assert training.validation_accuracy == float((model(x).argmax(1) == y).double().mean())
    assert training.train_accuracy > 0.5
    assert training.seconds > training.attack_seconds + sum(e.seconds for e in epochs)
    named = {row["what"]: row for row in training.rows(classifier="F(1)")}
    assert named["attack_seconds"] == {
        "classifier": "F(1)", "what": "attack_seconds", "unit": "seconds", "value": training.attack_seconds, "n": 2
    }  # fmt: skip
    assert named["training_seconds"]["value"] == training.seconds
    assert named["epoch_seconds"]["low"] <= named["epoch_seconds"]["value"] <= named["epoch_seconds"]["high"]
    assert named["final_loss"]["value"] == training.loss
    assert read_log(tmp_path) == [asdict(e) for e in epochs]
    card = json.loads((tmp_path / "checkpoint.json").read_text())
    assert (card["card"], card["epoch"], card["config"]["refresh"]) == ({"k": 1}, 6, 2)
    checkpoint = train.load_checkpoint(tmp_path)
    assert same(checkpoint.tensors, model)
    assert not checkpoint.optimizer


class Seen(nn.Module):
    """Notes the rows it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batches = network(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches.append(x.clone())
        out: Tensor = self.layer(x)
        return out


def test_x_prime_is_what_was_broken_and_is_made_anew() -> None:
    """Of every three rows the attack breaks the first, fails on the second, and the third was wrong from the start."""
    model, (x, y) = Seen(), rows(30)
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
    steps = iter(model.batches)
    orders = []
    for epoch, n in enumerate((30, 30, 40, 40, 40)):
        trained = torch.cat(list(itertools.islice(steps, -(-n // 16))))
        want = torch.cat([x, x[::3] + 100 * (1 + epoch // 2)]) if n == 40 else x
        where = (trained.unsqueeze(1) == want).all(2)
        assert (where.sum(0) == 1).all()
        assert (where.sum(1) == 1).all()
        orders.append(where.double().argmax(1).tolist())
    assert next(steps, None) is None
    assert len({tuple(order) for order in orders}) == 5


def test_labels_of_x_prime_are_the_true_ones() -> None:
    x, y = rows(30)
    attack, key = partial(sparse_rs, ball=L0Ball(3, low=-9.0, high=9.0), queries=20), _append.generator(0, "attack", 2)
    nothing = _append.Found.nothing(2, x)
    *_, found = _append.search(attack, network(), x, y, nothing, seed=0, batch=20, team=ALONE)
    first = attack(network(), x[:20], y[:20], generator=key, rows=torch.arange(20))
    kept = first.success & (first.distance > 0)
    assert 0 < kept.sum() < 20
    whole = _append.TrainingSet(x, y)
    whole.append(found)
    m = int(kept.sum())
    assert torch.equal(whole.points[30 : 30 + m], first.x_adv[kept])
    assert torch.equal(whole.labels[30 : 30 + m], y[:20][kept])
    assert len(whole) == 30 + len(found.rows)
    assert torch.equal(whole.labels[30 : len(whole)], y[found.rows])
    assert torch.equal(whole.points[:30], x)


def test_it_does_not_matter_how_rows_lie_in_memory() -> None:
    x, y = rows()
    model = partial(network, nn.Flatten(), nn.Linear(12, CLASSES))
    models_ = [model(), model()]
    images = x.view(50, 3, 2, 2)
    fit(models_[0], (images, y), CONFIG, ATTACK)
    fit(models_[1], (images.contiguous(memory_format=torch.channels_last).requires_grad_(), y), CONFIG, ATTACK)
    assert same(*models_)


def test_the_time_of_an_attack_ends_with_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the call returns before the attack is done; reading the result waits for it."""
    learn = _append.Found.learn

    def slow(*arguments: Any) -> _append.Found:
        time.sleep(0.05)
        return learn(*arguments)

    monkeypatch.setattr(_append.Found, "learn", slow)
    training = fit(network(), rows(), replace(CONFIG, epochs=3), ATTACK)
    assert training.attack_seconds >= 3 * 0.05


def test_the_split_of_the_attack_does_not_matter() -> None:
    models_ = [network(), network()]
    for model, batch in zip(models_, (7, 50), strict=True):
        fit(model, rows(), replace(CONFIG, attack_batch=batch), ATTACK)
    assert same(*models_)


def test_seed_gives_the_order() -> None:
    models_ = [network(), network(), network()]
    for model, seed in zip(models_, (0, 0, 1), strict=True):
        fit(model, rows(), replace(CONFIG, seed=seed, epochs=1))
    assert same(models_[0], models_[1])
    assert not same(models_[0], models_[2])


def test_rates_reach_the_steps() -> None:
    one, other = network(), network()
    fit(one, rows(), replace(CONFIG, epochs=1))
    fit(other, rows(), replace(CONFIG, epochs=2, rates=(0.2, 0.0)))
    assert not same(one, network())
    assert same(one, other)


def test_the_caller_keeps_what_is_his() -> None:
    model, x = network(nn.Linear(12, 8), nn.Dropout(), nn.Linear(8, CLASSES)), rows()
    model[1].eval()
    weight, bias = model[0].parameters()
    weight.grad = mine = torch.ones_like(weight)
    state, copies = torch.random.get_rng_state(), [t.clone() for t in x]
    fit(model, x, CONFIG, ATTACK)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert not model[1].training
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
    right = training.train_accuracy * sum(trained)
    assert 0 < right == pytest.approx(round(right))


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^rates must be lower for this model, the loss of epoch \d is (nan|inf)$"):
        fit(network(), rows(), replace(CONFIG, rates=(1e30,)), out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": lambda x: x}, "model must be an nn.Module, got"),
        ({"model": nn.Flatten()}, "model must have parameters to train, all on one device, got 0 devices"),
        ({"model": nn.Sequential(nn.Linear(12, 3), nn.Unflatten(1, (3, 1)))}, "model must return logits of shape"),
        ({"config": replace(CONFIG, graph=True)}, "graph must be False or None for a model on cpu, got True"),
        ({"data": [1, 2, 3]}, "data must be a tuple (x, y), got [1, 2, 3]"),
        ({"data": (torch.zeros(0, 12), torch.zeros(0).long())}, "data must have a floating-point x of shape (n, ...)"),
        ({"data": (torch.zeros(2, 12), torch.zeros(3).long())}, "data must have an integer y of shape (2,), got"),
        ({"data": (torch.zeros(2, 12), torch.zeros(2))}, "data must have an integer y of shape (2,), got"),
        ({"data": (torch.full((2, 12), torch.nan), torch.zeros(2).long())}, "data must have a finite x"),
        ({"data": (torch.zeros(2, 12), torch.tensor([0, 3]))}, "data must have labels in 0 .. 2, the classes of the"),
        ({"validation": (torch.zeros(2, 12), torch.tensor([0, -1]))}, "validation must have labels in 0 .. 2"),
        ({"model": nn.Linear(13, 3)}, "model must take the x of data, a float32 tensor of shape (50, 12) on cpu, but:"),
        ({"model": nn.Linear(12, 3).double()}, "model must take the x of data, a float32 tensor of shape"),
        ({"validation": rows(9)[0]}, "validation must be a tuple (x, y), got"),
        ({"validation": (torch.zeros(2, 13), torch.zeros(2).long())}, "validation must have an x like that of data"),
        ({"validation": (rows()[0].double(), rows()[1])}, "validation must have an x like that of data, a float32"),
        ({"config": {"epochs": 6}}, "config must be a TrainConfig, got {'epochs': 6}"),
        (
            {"config": replace(CONFIG, augment="crop-flip")},
            "augment must be \"none\" unless x is (n, channels, height, width), got 'crop-flip' for (50, 12)",
        ),
        ({"card": {"a": {1}}}, "card must be what JSON can say, got {'a': {1}}"),
        ({"attack": "sparse_rs"}, "attack must be a callable, got 'sparse_rs'"),
        ({"attack": partial(ATTACK, queries=0)}, "queries must be an int >= 1, got 0"),
        (
            {"attack": ATTACK, "config": replace(CONFIG, refresh=6)},
            "refresh must be below epochs for an attack to run, got refresh=6 with epochs=6",
        ),
        ({"attack": lambda *_, **__: None}, "attack must return an AttackResult, got NoneType"),
    ],
)
def test_bad_arguments_are_refused_before_a_step(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(_step.Stepper, "step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        fit(**{"model": network(), "data": rows(), "config": CONFIG, **arguments})


# --- killed and called again ------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def dropping() -> nn.Module:
    """Everything that a checkpoint must bring back: statistics, chance, a truncated layer."""
    return nn.Sequential(network(), nn.BatchNorm1d(CLASSES), nn.Dropout(0.1))


def run(out: Path | None, model: nn.Module | None = None, stop: int | None = None, **other: Any) -> nn.Module:
    """A training that is stopped at its event of that number: an epoch, or a call of the attack."""
    events = itertools.count()

    def progress(_: object) -> None:
        if next(events) == stop:
            raise Killed

    model = dropping() if model is None else model
    arguments: dict[str, Any] = {"data": rows(), "config": CONFIG, "attack": ATTACK, "validation": rows(9, seed=1)}
    fit(model, **(arguments | {"progress": progress, "out": out} | other))
    return model


@pytest.mark.parametrize(("optimizer", "share"), [("sgd", math.inf), ("adam", 1e-9)])
def test_stopped_anywhere_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Literal["sgd", "adam"], share: float
) -> None:
    """With a checkpoint after every epoch, and with as few as there can be."""
    monkeypatch.setattr(_folder, "_SHARE", share)
    config = replace(CONFIG, optimizer=optimizer, schedule="cosine", rates=(0.02,))
    whole = run(tmp_path / "whole", config=config)
    for stop in range(12):
        out = tmp_path / str(stop)
        with pytest.raises(Killed):
            run(out, stop=stop, config=config)
        model = run(out, network_of_other_weights(), config=config)
        assert same(model, whole), stop
        assert figures(read_log(out)) == figures(read_log(tmp_path / "whole")), stop
        assert train.load_checkpoint(out).about["epoch"] == 6


def network_of_other_weights() -> nn.Module:
    """What a caller who sets no seed would come back with."""
    model = dropping()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def test_stopped_again_and_again_it_ends(tmp_path: Path) -> None:
    for _ in range(11):
        with pytest.raises(Killed):
            run(tmp_path, stop=1)
        if train.load_checkpoint(tmp_path).about["epoch"] == 6:
            break
    assert same(run(tmp_path), run(None))


def test_an_attack_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stop=3)  # two epochs, two calls of the attack
    seen: list[Any] = []
    fit(dropping(), rows(), CONFIG, ATTACK, validation=rows(9, seed=1), out=tmp_path, progress=seen.append)
    assert (seen[0].stage, seen[0].epoch, seen[0].done) == ("attack", 2, 50)
    assert seen[0].seconds > 0


def test_the_seconds_of_an_attack_survive_a_kill(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stop=3)
    path = tmp_path / "appended.safetensors"
    replace(_append.Found.load(path), seconds=1000.0).save(path)
    run(tmp_path)
    checkpoint = train.load_checkpoint(tmp_path)
    assert checkpoint.about["log"][2]["attack_seconds"] > 1000
    assert 1000 < checkpoint.about["seconds"] < 2000


def test_a_training_that_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(_fit, "_Run", lambda *_: pytest.fail("it was begun again"))
    assert same(run(tmp_path, network_of_other_weights()), model)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_kill_left_behind_is_cleared_up(tmp_path: Path) -> None:
    run(tmp_path)
    card = (tmp_path / "checkpoint.json").read_bytes()
    (tmp_path / "checkpoint.json").unlink()
    (tmp_path / "log.jsonl").write_text("half a li")
    for name in (".checkpoint.safetensors.abc", ".appended.safetensors.def", ".checkpoint.json.ghi"):
        (tmp_path / name).write_text("half a fi")
    run(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "checkpoint.json").read_bytes() == card
    assert len(read_log(tmp_path)) == 6


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"config": replace(CONFIG, momentum=0.5)}, "config.momentum"),
        ({"config": replace(CONFIG, attack_precision="bf16")}, "config.attack_precision"),
        ({"config": replace(CONFIG, epochs=7, seed=3)}, "config.epochs, config.seed"),
        ({"data": rows(50, seed=5)}, "x of data, y of data"),
        ({"validation": None}, "x of validation, y of validation"),
        ({"attack": partial(ATTACK, queries=9)}, "parameters of attack"),
        ({"attack": partial(ATTACK, ball=L0Ball(2, low=-5.0, high=5.0))}, "parameters of attack"),
        ({"attack": None}, "parameters of attack"),
        ({"model": nn.Sequential(network(), nn.BatchNorm1d(CLASSES), nn.Dropout(0.2))}, "model"),
    ],
)
def test_the_folder_of_another_training_is_refused(tmp_path: Path, other: dict[str, Any], differs: str) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stop=6)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = f"out must be of this training, but {str(tmp_path)!r} differs in: {differs}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(tmp_path, **other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_from_before_a_field_existed_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, stop=6)
    path = tmp_path / "checkpoint.safetensors"
    checkpoint = train.load_checkpoint(path)
    old = {part: value for part, value in checkpoint.about["parts"].items() if part != "config.augment"}
    assert len(old) == len(checkpoint.about["parts"]) - 1
    _checkpoint.write(path, replace(checkpoint, about=checkpoint.about | {"parts": old}))
    assert same(run(tmp_path), run(None))


def test_a_ball_whose_tensors_print_alike_is_another_one(tmp_path: Path) -> None:
    low = torch.full((12,), -5.3)
    balls = L0Ball(3, low=low, high=5.0), L0Ball(3, low=low - 1e-5, high=5.0)
    assert repr(balls[0]) == repr(balls[1])
    with pytest.raises(Killed):
        run(tmp_path, stop=1, attack=partial(ATTACK, ball=balls[0]))
    with pytest.raises(ValueError, match=r"differs in: parameters of attack$"):
        run(tmp_path, attack=partial(ATTACK, ball=balls[1]))
    run(tmp_path, attack=partial(ATTACK, ball=L0Ball(3, low=low.clone(), high=5.0)))


def test_what_fit_did_not_write_is_not_overwritten(tmp_path: Path) -> None:
    path = train.save_checkpoint(tmp_path / "checkpoint.safetensors", dropping())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="was written by something else"):
        run(tmp_path)
    path.write_bytes(before[:-3])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is damaged or not a safetensors file"):
        run(tmp_path)
    assert path.read_bytes() == before[:-3]


def test_without_its_appended_rows_it_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folder, "_SHARE", math.inf)  # a checkpoint after every epoch
    with pytest.raises(Killed):
        run(tmp_path, stop=5)
    (tmp_path / "appended.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^out must hold all rows appended before epoch 2, got 0 of 50 attacked$"):
        run(tmp_path)


def test_appended_rows_of_nobody_are_not_taken(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, network_of_other_weights(), stop=3)
    (tmp_path / "checkpoint.safetensors").unlink()
    assert same(run(tmp_path), run(None))
    assert len(read_log(tmp_path)) == 6


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "appended.safetensors"])
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole = results.write_whole
    done: list[bytes] = []

    def full(path: Path, content: bytes) -> None:
        if path.name == name:
            if len(done) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done.append(content)
        whole(path, content)

    for module in (_checkpoint, _append, _folder):
        monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(OSError, match=rf"{name} could not be written.*: No space left on device$"):
        run(tmp_path)
    assert (tmp_path / name).read_bytes() == done[-1]
    monkeypatch.undo()
    assert same(run(tmp_path), run(None))


def test_out_must_be_a_folder_that_can_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"^out must be a folder that can be written to, got .*file"):
        run(tmp_path / "file")


def test_checkpoints_take_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which an epoch takes 7 s and a checkpoint 10 s: of 100 s at most 5 go into checkpoints."""
    written: list[int] = []
    clock = [0.0]

    def tick(seconds: float, _: object) -> None:
        clock[0] += seconds

    def write(_: object, checkpoint: train.Checkpoint) -> None:
        written.append(checkpoint.about["epoch"])
        tick(10, None)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(_checkpoint, "write", write)
    fit(network(), rows(), replace(CONFIG, epochs=60), out=tmp_path, progress=partial(tick, 7))
    assert written == [1, 30, 59, 60]
    written.clear()
    fit(network(), rows(), replace(CONFIG, refresh=4), ATTACK, out=tmp_path, progress=partial(tick, 7))
    assert written == [1, 4, 6]


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import test_train

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # what its first use imports, the children need not
chance, kills = random.Random(0), 0


def child(out):
    read, write = os.pipe()
    process = os.fork()
    if not process:
        test_train.run(out, progress=lambda _: os.write(write, b"."))
        os._exit(0)
    os.close(write)
    return process, read


for folder in map(Path, sys.argv[2:]):
    process, events = child(folder)
    for _ in range(chance.randrange(8)):
        os.read(events, 1)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(process, signal.SIGKILL)
    kills += os.waitpid(process, 0)[1] == signal.SIGKILL
    process, events = child(folder)
    assert os.waitpid(process, 0)[1] == 0
print(kills)
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """After so many epochs or calls of the attack, and up to 20 ms into what follows; of twelve."""
    whole = run(tmp_path / "whole")
    folders = [str(tmp_path / str(i)) for i in range(10)]
    command = [sys.executable, "-c", KILLER, str(Path(__file__).parent), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5  # on a busy machine a few may be done before they are killed
    for folder in map(Path, folders):
        assert same(train.load_checkpoint(folder).tensors, whole), folder
        assert figures(read_log(folder)) == figures(read_log(tmp_path / "whole")), folder
