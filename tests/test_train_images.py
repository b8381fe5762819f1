"""Training on images: augmentation, how they lie in memory, and what is particular to convolutions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import train
from ell0.attacks import AttackResult
from ell0.nn import InputTruncation
from ell0.train import TrainConfig, fit
from ell0.train.rows import AUGMENTS, Moves
from small_training import CLASSES, CONFIG, Killed, run, same


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


CROP_FLIP, SHIFT = AUGMENTS["crop-flip"], AUGMENTS["shift"]


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
def test_every_way_to_move_is_drawn(moves: Moves, ways: int) -> None:
    counts = torch.bincount(moves.draw(ways * 100, torch.Generator().manual_seed(0)), minlength=ways)
    assert len(counts) == ways
    assert 50 < counts.min() <= counts.max() < 150


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


@pytest.mark.parametrize("augment", ["crop-flip", "shift"])
def test_images_stopped_anywhere_go_on_to_the_same_bits(tmp_path: Path, augment: Literal["crop-flip", "shift"]) -> None:
    """The draws of the augmentation and the running statistics of batch norm come back."""
    config = replace(CONFIG, augment=augment)
    about: dict[str, Any] = {"config": config, "data": images(), "validation": images(9, seed=1)}
    whole = run(None, convolutions(), **about)
    assert float(whole.get_buffer("2.num_batches_tracked")) > 6
    assert not same(whole, run(None, convolutions(), **(about | {"config": CONFIG})))
    for stop in (1, 4, 9):
        out = tmp_path / str(stop)
        with pytest.raises(Killed):
            run(out, convolutions(), stop, **about)
        model = run(out, convolutions(), **about)
        assert same(model, whole), stop
        assert same(train.load_checkpoint(out).tensors, whole.state_dict()), stop
