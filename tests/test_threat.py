"""The ball: what counts as a change, what lies inside, and the way back in."""

import itertools
import math
import re
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from balls import within_one
from ell0.threat import L0Ball, Unit

inf, nan = math.inf, math.nan
few = settings(max_examples=60, deadline=None)
VALUES = [-inf, -2.0, -1.0, -0.5, -0.0, 0.0, 1e-30, 0.5, 1.0, 1.5, 3e38, inf, nan]


@st.composite
def situations(draw: st.DrawFn) -> tuple[L0Ball, Tensor, Tensor]:
    """A ball, clean rows and attacked rows, with many ties, bounds hit, frozen numbers, NaN and infinities."""
    unit: Unit = draw(st.sampled_from(["feature", "pixel"]))
    shapes = [(2, 2, 1, 3), (1, 3, 2, 2), (3, 1, 1, 2)] + ([(2, 5), (1, 1), (3, 2, 3)] if unit == "feature" else [])
    shape = draw(st.sampled_from(shapes))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def rows(values: list[float], size: tuple[int, ...] = shape) -> Tensor:
        count = math.prod(size)
        drawn = draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))
        return torch.tensor(drawn, dtype=dtype).view(size)

    x, target = rows(VALUES), rows(VALUES)
    x_adv = torch.where(rows([0.0, 1.0]) > 0, target, x)
    low: float | Tensor = draw(st.sampled_from([-1.0, -inf, 0.0, -0.25]))
    high: float | Tensor = draw(st.sampled_from([1.0, inf, 0.0]))
    if draw(st.booleans()):
        low, high = rows([-1.0, -inf, 0.0], shape[1:]), rows([0.0, 1.0, inf], (1,) * (len(shape) - 1) + shape[-1:])
    mutable = rows([0.0, 1.0, 1.0], shape[1:]) > 0 if draw(st.booleans()) else None
    units = math.prod(shape[1:] if unit == "feature" else shape[2:])
    return L0Ball(draw(st.integers(0, units)), unit, low, high, mutable), x, x_adv


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7e37), b.nan_to_num(nan=7e37))


def units_of(ball: L0Ball, shape: torch.Size) -> list[list[tuple[int, ...]]]:
    """The indices of the numbers of each unit of one row, in order."""
    numbers = list(itertools.product(*map(range, shape)))
    if ball.unit == "feature":
        return [[number] for number in numbers]
    return [[n for n in numbers if n[1:] == place] for place in itertools.product(*map(range, shape[1:]))]


def changed(a: float, b: float) -> bool:
    return a != b and not (math.isnan(a) and math.isnan(b))


def plain(ball: L0Ball, x: Tensor, x_adv: Tensor) -> tuple[list[int], list[bool]]:
    """`count` and `contains` as the definition says, number by number."""
    low, high = (torch.as_tensor(bound, dtype=x.dtype).expand_as(x) for bound in (ball.low, ball.high))
    mutable = (torch.tensor(True) if ball.mutable is None else ball.mutable).expand_as(x)
    counts, inside = [], []
    for row in range(len(x)):
        moved = [
            u for u in units_of(ball, x.shape[1:]) if any(changed(x[row][i].item(), x_adv[row][i].item()) for i in u)
        ]
        good = len(moved) <= ball.budget
        for i in itertools.chain(*moved):
            value, index = x_adv[row][i].item(), (row, *i)
            if mutable[index]:
                good &= low[index].item() <= value <= high[index].item()
            else:
                good &= not changed(x[row][i].item(), value)
        counts.append(len(moved))
        inside.append(good)
    return counts, inside


@few
@given(situations())
def test_count_and_contains_are_the_definition(situation: tuple[L0Ball, Tensor, Tensor]) -> None:
    ball, x, x_adv = situation
    count, contains = ball.count(x, x_adv), ball.contains(x, x_adv)
    assert (count.tolist(), contains.tolist()) == plain(ball, x, x_adv)
    assert (count.dtype, contains.dtype) == (torch.int64, torch.bool)


@few
@given(situations())
def test_project_lands_in_the_ball_and_treats_each_row_alone(situation: tuple[L0Ball, Tensor, Tensor]) -> None:
    ball, x, x_adv = situation
    projected, inside = ball.project(x, x_adv), ball.contains(x, x_adv)
    assert ball.contains(x, projected).all()
    assert same(projected[inside], x_adv[inside])
    assert same(torch.cat([ball.project(x[i : i + 1], x_adv[i : i + 1]) for i in range(len(x))]), projected)


@pytest.mark.parametrize(
    ("x", "x_adv", "expected"),
    [
        ([1.0, 0.0], [9.0, 0.125], [1.0, 0.125]),  # a unit clipped back to x costs no budget
        ([0.0] * 3, [0.5, -0.5, 0.5], [0.5, 0.0, 0.0]),  # the lowest index stays at ties
        ([0.0] * 3, [0.0, 1.0, 100.0], [0.0, 1.0, 0.0]),  # size is measured after clipping
        ([0.0, nan], [0.875, 0.125], [0.0, 0.125]),  # a change away from NaN is the largest
        ([0.0, 0.0], [0.0, 1e-30], [0.0, 1e-30]),  # a change whose square is 0 is a change
        ([3.0, 0.0], [3.0, 0.5], [3.0, 0.5]),  # x outside the box stays there if it is not changed
        ([0.0, 0.0], [nan, 0.5], [0.0, 0.5]),  # NaN goes back to x
    ],
)
def test_project_keeps_the_largest_change(x: list[float], x_adv: list[float], expected: list[float]) -> None:
    projected = within_one(1).project(torch.tensor([x]), torch.tensor([x_adv]))
    assert same(projected, torch.tensor([expected]))


def test_a_changed_pixel_is_held_to_the_box_with_all_its_mutable_channels() -> None:
    x = torch.tensor([5.0, 0.0]).view(1, 2, 1, 1)
    x_adv = torch.tensor([5.0, 0.5]).view(1, 2, 1, 1)
    assert not within_one(1, "pixel").contains(x, x_adv).item()
    frozen = within_one(1, "pixel", mutable=torch.tensor([False, True]).view(2, 1, 1))
    assert frozen.contains(x, x_adv).item()
    assert not frozen.contains(x, torch.full_like(x, 0.5)).item()


def test_no_rows() -> None:
    for ball, x in ((within_one(2), torch.zeros(0, 3)), (within_one(2, "pixel"), torch.zeros(0, 3, 2, 2))):
        assert ball.count(x, x).shape == ball.contains(x, x).shape == (0,)


def test_a_ball_is_frozen_and_hashable() -> None:
    ball = within_one(1, low=torch.zeros(3))
    with pytest.raises(FrozenInstanceError):
        ball.budget = 2  # type: ignore[misc]
    assert ball in {ball}
    assert ball != within_one(1, low=torch.zeros(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": -1}, "budget must be an int >= 0, got -1"),
        ({"budget": True}, "budget must be an int >= 0, got True"),
        ({"budget": 2.0}, "budget must be an int >= 0, got 2.0"),
        ({"unit": "voxel"}, 'unit must be "feature" or "pixel", got \'voxel\''),
        ({"low": 2.0}, "low must be <= high everywhere, got low=2.0 with high=1.0"),
        ({"low": nan}, "low must be <= high everywhere, got low=nan"),
        ({"high": torch.tensor([0.0, nan])}, "low must be <= high everywhere"),
        ({"low": torch.zeros(2), "high": torch.ones(3)}, r"of one device and broadcastable, got .* \(2,\) .* \(3,\)"),
        ({"low": torch.zeros(2), "high": torch.ones(2, device="meta")}, "of one device .* on cpu and .* on meta"),
        ({"low": torch.zeros(2, dtype=torch.complex64)}, "low and high must be real"),
        ({"low": "0"}, "low must be a number or a real tensor, got '0'"),
        ({"high": True}, "high must be a number or a real tensor, got True"),
        ({"mutable": [True]}, r"mutable must be a bool tensor or None, got \[True\]"),
    ],
)
def test_bad_balls(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        within_one(**{"budget": 1, **arguments})


@pytest.mark.parametrize("arguments", [{}, {"low": 0.0}, {"high": 1.0}])
def test_the_box_has_no_default(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"low and high must be given.* low=0.0, high=1.0; L0Ball.of\(x, 7\) takes"):
        L0Ball(7, **arguments)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=9))
def test_the_box_of_the_data_is_its_range(values: list[float]) -> None:
    x = torch.tensor(values).view(-1, 1)
    for data in (x, x.numpy()):
        ball = L0Ball.of(data, 1)
        assert (ball.low, ball.high) == (min(values), max(values))
    assert ball.doubt(x) is None
    ball.check_near(x)


def test_no_range_no_box() -> None:
    for x in (torch.zeros(0, 3), torch.tensor([[0.0, inf]])):
        with pytest.raises(ValueError, match="x must be finite numbers, at least one"):
            L0Ball.of(x, 1)


@pytest.mark.parametrize(
    ("low", "high", "words", "entries"),
    [
        (0.0, 1.0, "values in [0, 1]", {"box": "[0, 1]"}),
        (-100, 100, "values in [-100, 100]", {"beta": 100.0}),
        (-inf, inf, "any value", {}),
        (0, inf, "values in [0, inf]", {"box": "[0, inf]"}),
        (torch.tensor(-2.0), 2, "values in [-2, 2]", {"beta": 2.0}),
        (torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 3.0]), "values in [-3, 3], each number in a range of its own",
         {"box": "[-3, 3], each number in a range of its own"}),
    ],
)  # fmt: skip
def test_the_box_in_words(low: Any, high: Any, words: str, entries: dict[str, object]) -> None:
    ball = L0Ball(2, low=low, high=high)
    assert str(ball) == f"2 features changed, {words}"
    assert ball.entries == entries
    assert str(L0Ball(1, "pixel", low, high)) == f"1 pixel changed, {words}"


@pytest.mark.parametrize(
    ("x", "low", "high", "doubt"),
    [
        ([0.0, 1.0], -1.0, 1.0, r"half of the box is empty: x lies in \[0, 1\], the box is \[-1, 1\]; give low=0 if"),
        ([-1.0, 0.0], -1.0, 1.0, "half of the box is empty: .*; give high=0 if"),
        ([0.0, 1.0], -100.0, 100.0, None),  # far outside of the data on both sides: meant so
        ([-1.0, 1.0], -1.0, 1.0, None),
        ([0.0, 1.0], 0.0, 1.0, None),
        ([1.0, 1.0], -1.0, 1.0, None),  # one value has no range
        ([0.0, 1.0], -inf, 1.0, None),
        ([0.0, 1.0], torch.tensor(-1.0), 1.0, "half of the box is empty"),
        ([0.0, 1.0], torch.tensor([-1.0]), 1.0, None),
        ([-1.0, 1.0], -0.1, 0.1, "clean values outside the box"),  # narrow, and perhaps meant so
        ([-1.2, 1.0], -1.0, 1.0, r"clean values outside the box: x lies in \[-1.2, 1\], .* L0Ball.of\(x, 1\) takes"),
        ([0.0, 1.2], 0.0, 1.0, "clean values outside the box"),
    ],
)
def test_a_box_that_does_not_seem_to_be_meant(x: list[float], low: Any, high: Any, doubt: str | None) -> None:
    rows, ball = torch.tensor([x]), L0Ball(1, low=low, high=high)
    said = ball.doubt(rows)
    assert said is None if doubt is None else re.match(doubt, said or "")
    ball.check_near(rows)
    frozen = L0Ball(1, low=low, high=high, mutable=torch.tensor([False, False]))
    assert frozen.doubt(rows) is None  # only what may change counts
    wide = torch.tensor([[0.7, 1.3]], dtype=torch.float64)
    assert L0Ball.of(wide, 1).doubt(wide.float()) is None  # though rounding moves both ends


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0)])
def test_a_box_of_another_scale_is_refused(low: float, high: float) -> None:
    x = torch.tensor([[0.0, 255.0]])
    with pytest.raises(ValueError, match=r"must be of the scale of x: x lies in \[0, 255\], .* L0Ball.of\(x, 1, 'feat"):
        L0Ball(1, low=low, high=high).check_near(x)
    with pytest.raises(ValueError, match="must be of the scale of x"):
        L0Ball(1, low=low, high=high).check_near(-x)
    with pytest.raises(ValueError, match="must be of the scale of x"):
        L0Ball(1, low=torch.tensor(low), high=high).check_near(x)
    L0Ball(1, low=torch.tensor([low]), high=high).check_near(x)
    L0Ball(1, low=0.0, high=0.0).check_near(x)  # an attacker who only removes
    L0Ball(1, low=low, high=high, mutable=torch.tensor([True, False])).check_near(x)


def test_channels_last_is_refused_for_pixels() -> None:
    ball = within_one(1, "pixel")
    for channels in (1, 2, 3, 4):
        x = torch.zeros(2, 8, 8, channels)
        with pytest.raises(ValueError, match=r"got channels last, .* x.permute\(0, 3, 1, 2\), .* ell0.wrap\(model"):
            ball.count(x, x)
        assert ball.count(x.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2)).tolist() == [0, 0]
        assert within_one(1).count(x, x).tolist() == [0, 0]


class Recorded(TorchDispatchMode):
    """Keeps what operators give; a copy from the host shows none."""

    made: ClassVar[list[Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(op(*args, **(kwargs or {})))
        return self.made[-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("low", "high"), [(0.1, 1e300), (-inf, inf), (-1, 3)])
def test_numbers_become_bounds_on_the_device(low: float, high: float, dtype: torch.dtype) -> None:
    """Rounded as a tensor's are; from the host they could not come while a CUDA graph is captured."""
    ball, x = L0Ball(1, low=low, high=high), torch.zeros(2, 3, dtype=dtype)
    for bound, wanted in zip(ball.box(x), (low, high), strict=False):
        torch.testing.assert_close(bound, torch.tensor(wanted, dtype=dtype), rtol=0.0, atol=0.0)
    with Recorded() as recorded:
        bounds = ball.box(x.to("meta"))
    assert all(any(bound is made for made in recorded.made) for bound in bounds)


IMAGE = torch.zeros(2, 3, 2, 2)


@pytest.mark.parametrize(
    ("ball", "x", "x_adv", "message"),
    [
        (within_one(13), IMAGE, IMAGE, "got budget=13 with 12 units"),
        (within_one(5, "pixel"), IMAGE, IMAGE, "got budget=5 with 4 units"),
        (within_one(1, "pixel"), IMAGE[0], IMAGE[0], r'unit="pixel", got shape \(3, 2, 2\)'),
        (within_one(1), torch.zeros(3), torch.zeros(3), r"x must be a floating-point tensor of shape \(n, ...\), got"),
        (within_one(1), IMAGE.int(), IMAGE.int(), "x must be a floating-point tensor"),
        (within_one(1), IMAGE, IMAGE[:1], "x_adv must have the shape, dtype and device of x"),
        (within_one(1), IMAGE, IMAGE.to("meta"), "on meta for .* on cpu"),
        (within_one(1, low=-torch.ones(3)), IMAGE, IMAGE, r"low must be broadcastable to x .* shape \(3,\)"),
        (within_one(1, mutable=torch.ones(2, 2, 2) > 0), IMAGE, IMAGE, "mutable must be broadcastable to x"),
        (within_one(1, mutable=torch.ones(2, device="meta") > 0), IMAGE, IMAGE, "mutable must be .* on its device"),
    ],
)
@pytest.mark.parametrize("call", ["count", "contains"])
def test_bad_inputs(call: str, ball: L0Ball, x: Tensor, x_adv: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cast(Any, getattr(ball, call))(x, x_adv)


def test_a_budget_of_numpy_becomes_an_int() -> None:
    assert type(within_one(np.int64(3)).budget) is int


def test_the_ends_of_an_array_make_a_box() -> None:
    x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    ball = L0Ball(2, low=x.min(), high=x.max())
    assert (ball.low, ball.high, str(ball)) == (0.0, 1.0, "2 features changed, values in [0, 1]")
    assert isinstance(ball.low, float)
