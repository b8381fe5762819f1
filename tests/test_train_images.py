"""Training on images: augmentation, how they lie in memory, and what is particular to convolutions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ell0 import train
from ell0.attacks import AttackResult
from ell0.nn import InputTruncation
from ell0.train import TrainConfig, fit
from ell0.train import checkpoint as checkpoints
from ell0.train.rows import AUGMENTS, Bends, Moves, Warps
from small_training import CLASSES, CONFIG, Killed, images, run, same

MOVES = {name: moves for name, moves in AUGMENTS.items() if isinstance(moves, Moves)}
ALL_MOVES = [(moves, 9 if name == "shift" else 162) for name, moves in MOVES.items()]


def convolutions() -> nn.Module:
    """What the paper has in VGG(k), with few numbers."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        features = InputTruncation((3, 6, 6), 2), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        return nn.Sequential(*features, nn.Flatten(), nn.Linear(144, CLASSES))


def moved_by_hand(image: Tensor, way: int, moves: Moves) -> Tensor:
    """The definition, for one image ``(channels, height, width)``."""
    shift, flips = divmod(way, 2) if moves.mirrored else (way, 0)
    top, left = divmod(shift, 2 * moves.reach + 1)
    how = {"nearest": {"mode": "edge"}, "reflect": {"mode": "reflect"}}
    fill: Any = how[moves.fill] if isinstance(moves.fill, str) else {"constant_values": moves.fill}
    padded = torch.from_numpy(np.pad(image.numpy(), [(0, 0), *[(moves.reach, moves.reach)] * 2], **fill))
    crop = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return crop.flip(2) if flips else crop


@pytest.mark.parametrize(("moves", "ways"), ALL_MOVES)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)), data=st.data())
def test_images_move_by_the_definition(
    moves: Moves, ways: int, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    rows, way = (data.draw(st.lists(st.integers(0, most), min_size=6, max_size=6)) for most in (3, ways - 1))
    points = 1 + torch.arange(4 * math.prod(shape), dtype=torch.float32).view(4, *shape)
    moved = moves.moved(points, torch.tensor(rows), torch.tensor(way))
    want = [moved_by_hand(points[row], its, moves) for row, its in zip(rows, way, strict=True)]
    assert torch.equal(moved, torch.stack(want))


@pytest.mark.parametrize(("moves", "ways"), ALL_MOVES)
def test_every_way_to_move_is_drawn(moves: Moves, ways: int) -> None:
    counts = torch.bincount(moves.draw(ways * 100, torch.Generator().manual_seed(0)), minlength=ways)
    assert len(counts) == ways
    assert 50 < counts.min() <= counts.max() < 150


def test_images_turn_zoom_shift_and_change_their_colours() -> None:
    """Each by itself, to the end of its range, against what torch or the definition makes of it."""
    points = 2 * torch.rand(3, 3, 7, 7, generator=torch.Generator().manual_seed(0)) - 1
    rows, still = torch.tensor([2, 0]), torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0])
    image = points[rows]

    def warped(place: int, value: float, warps: Warps) -> Tensor:
        way = still.clone()
        way[place] = value
        return warps.moved(points, rows, way.expand(2, -1))

    warps, bright = Warps(90.0, 2.0, 2.0, colour=0.0), Warps(0.0, 0.0, 0.0, colour=0.5)
    torch.testing.assert_close(warped(0, 0.0, warps), image)
    torch.testing.assert_close(warped(4, -1.0, warps), image.flip(3))
    torch.testing.assert_close(warped(0, 1.0, warps), image.rot90(-1, (2, 3)))
    torch.testing.assert_close(warped(1, -1.0, warps)[:, :, 0, 0], image[:, :, 2, 2])  # three times as large
    torch.testing.assert_close(warped(2, 1.0, warps)[:, :, :5], image[:, :, 2:])
    torch.testing.assert_close(warped(3, 1.0, warps)[..., 5:], image[..., [5, 4]])
    torch.testing.assert_close(warped(5, 1.0, bright), (image + 0.5).clamp(-1, 1))
    middle, grey = image.mean((1, 2, 3), keepdim=True), image.mean(1, keepdim=True)
    torch.testing.assert_close(warped(6, -1.0, bright), middle + 0.5 * (image - middle))
    torch.testing.assert_close(warped(7, 1.0, bright), (grey + 1.5 * (image - grey)).clamp(-1, 1))
    drawn = bright.draw(1000, torch.Generator().manual_seed(1))
    assert drawn.shape == (1000, 8)
    assert float(drawn.min()) < -0.99 < 0.99 < float(drawn.max()) < 1
    both = Warps(30.0, 0.5, 2.0, colour=0.3)
    alone = [both.moved(points, rows[i : i + 1], drawn[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(both.moved(points, rows, drawn[:2]), torch.cat(alone))
    assert AUGMENTS["warp-colour"].colour > 0  # type: ignore[union-attr]


def test_images_bend_by_interpolation() -> None:
    """Each way by itself, to the end of its range, against what torch or the definition makes of it."""
    points = 2 * torch.rand(3, 2, 9, 9, generator=torch.Generator().manual_seed(0)) - 1
    rows = torch.tensor([2, 0])
    image = points[rows]

    def bent(places: Any, value: Any, bends: Bends) -> Tensor:
        way = torch.zeros(2, 2, 28)
        way[(slice(None), *places)] = torch.as_tensor(value)
        return bends.moved(points, rows, way)

    both, bends = slice(None), Bends(turn=90.0, zoom=1.0, reach=2.0, bend=1.0)
    torch.testing.assert_close(bent((both, 0), 0.0, bends), image)
    torch.testing.assert_close(bent((both, 0), 1.0, bends), image.rot90(1, (2, 3)))
    torch.testing.assert_close(bent((both, 1), -1.0, bends)[..., ::2, ::2], image[..., 2:7, 2:7])  # twice as large
    torch.testing.assert_close(bent((0, 2), 1.0, bends)[..., :7], image[..., 2:])  # x, then y
    torch.testing.assert_close(bent((1, 2), 1.0, bends), image[..., [2, 3, 4, 5, 6, 7, 8, 8, 8], :])
    torch.testing.assert_close(bent((0, 2), 0.25, bends)[..., :8], (image[..., :8] + image[..., 1:]) / 2)
    torch.testing.assert_close(bent((0, slice(3, None)), 1.0, bends)[..., :8], image[..., 1:])
    one = bent((1, 3 + 12), -1.0, bends)  # the point in the middle comes from the pixel above it
    torch.testing.assert_close(one[..., 4, 4], image[..., 3, 4])
    torch.testing.assert_close(one[..., ::2, [0, 8]], image[..., ::2, [0, 8]])
    ramp = torch.arange(9.0).expand(1, 1, 9, 9)
    way = torch.zeros(1, 2, 28)
    way[:, 0, 3 + 12] = 1.0
    smooth = bends.moved(ramp, torch.tensor([0]), way)[0, 0, 4] - ramp[0, 0, 4]
    # Cubic, with torch's -0.75: half way to the point that moves 1, then half way beyond its neighbour.
    want = torch.tensor([1.0, 0.59375, 0.59375, 0.0, -0.09375, -0.09375])
    torch.testing.assert_close(smooth[[4, 3, 5, 2, 1, 7]], want)
    drawn = bends.draw(1000, torch.Generator().manual_seed(1))
    assert float(drawn.min()) < -0.99 < 0.99 < float(drawn.max()) < 1
    alone = [bends.moved(points, rows[i : i + 1], drawn[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(bends.moved(points, rows, drawn[:2]), torch.cat(alone))
    double = bends.moved(points.double(), rows, drawn[:2])
    torch.testing.assert_close(double.float(), bends.moved(points, rows, drawn[:2]), atol=1e-5, rtol=0)
    line = torch.ones(1, 1, 1, 1)
    assert torch.equal(bends.moved(line, torch.tensor([0]), drawn[:1]), line)


def test_each_epoch_augments_x_and_x_prime_anew() -> None:
    model, (x, y), crop_flip = convolutions(), images(20), MOVES["crop-flip"]
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
    ways = [{moved_by_hand(image, way, crop_flip).numpy().tobytes() for way in range(162)} for image in x]
    assert all(any(point.numpy().tobytes() in some for some in ways) for point in first)
    sevens = (second == 7).flatten(1)
    assert int(sevens.any(1).sum()) == 20
    assert len({tuple(row) for row in sevens.tolist()}) > 5
    assert set(second[sevens.any(1)].unique().tolist()) == {0.0, 7.0}
    mine = {point.numpy().tobytes() for point in first}
    assert sum(point.numpy().tobytes() not in mine for point in second[~sevens.any(1)]) > 10  # other draws


def test_images_moved_once_are_those_of_steps_and_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y), once = convolutions(), images(20), MOVES["crop-flip-once"]
    x *= 0.9
    moved, calls, trained = Moves.moved, list[int](), list[Tensor]()
    attacked = torch.zeros_like(x)

    def counted(moves: Moves, points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
        calls.append(len(rows))
        return moved(moves, points, rows, ways)

    def attack(_: object, points: Tensor, labels: Tensor, *, rows: Tensor, **__: object) -> AttackResult:
        attacked[rows] = points
        ones = torch.ones_like(labels)
        return AttackResult(points + 7, ones == 1, ones, ones, points, ones.float())

    monkeypatch.setattr(Moves, "moved", counted)
    model.register_forward_pre_hook(lambda module, inputs: trained.append(inputs[0]) if module.training else None)
    config = TrainConfig(epochs=3, batch=40, rates=(0.1,), refresh=1, rounds=True, augment="crop-flip-once")
    fit(model, (x, y), config, attack, validation=(x, y))
    assert calls == [20]  # no step moves anything
    for image, point in zip(x, attacked, strict=True):
        assert any(torch.equal(moved_by_hand(image, way, once), point) for way in range(162))
    assert (attacked != x).flatten(1).any(1).sum() > 15
    assert attacked.min() == -1

    def as_set(points: Tensor) -> set[bytes]:
        return {point.numpy().tobytes() for point in points}

    both = torch.cat([attacked, attacked + 7])
    assert [as_set(points) for points in trained] == [as_set(attacked), as_set(both), as_set(both)]


@pytest.mark.parametrize(
    "given", [{"augment": "crop-flip", "ema": 0.9}, {"augment": "crop-flip-once", "rounds": True, "ema": 0.5}]
)
def test_images_stopped_anywhere_go_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """The draws of the augmentation and the running statistics of batch norm come back; a round begins anew."""
    monkeypatch.setattr(checkpoints, "_SHARE", math.inf)
    config = replace(CONFIG, **given)
    about: dict[str, Any] = {"config": config, "data": images(), "validation": images(9, seed=1)}
    whole = run(None, convolutions(), **about)
    assert float(whole.get_buffer("2.num_batches_tracked")) > 6
    for key in given:
        other = replace(config, **{key: getattr(CONFIG, key)})
        assert not same(whole, run(None, convolutions(), **(about | {"config": other})))
    for stop in (1, 3, 4, 8):
        out = tmp_path / str(stop)
        with pytest.raises(Killed):
            run(out, convolutions(), stop, **about)
        assert same(run(out, convolutions(), **about), whole), stop
        assert same(train.load_checkpoint(out).tensors, whole), stop
