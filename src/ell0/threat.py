"""What the attacker may do: one value, passed to every attack, evaluation, certificate and report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from .common import check_count

__all__ = ["L0Ball", "Unit"]

Unit = Literal["feature", "pixel"]


@dataclass(frozen=True, eq=False)
class L0Ball:
    """All points that differ from x in at most ``budget`` units, with the changed units inside a box.

        {x_adv : #{units with x_adv != x} <= budget,  low <= x_adv <= high on changed units,  frozen numbers kept}

    Args:
        budget: units that may change, ``>= 0``.
        unit: ``"feature"``, one number of x; ``"pixel"``, all channels of one position, x ``(n, c, h, w)``.
        low, high: box of a changed unit, numbers or tensors broadcastable to x; infinite is allowed. They have no
            default: `of` takes them from the data. x itself may lie outside: an unchanged unit is not looked at, a
            changed pixel is with all its channels.
        mutable: bool, broadcastable to x, False where a number is frozen. The frozen channels of a pixel never change
            and are not held to the box; the pixel may change in the others, and counts as one.

    Numbers compare by value: 0.0 is -0.0, infinity is itself, and NaN in both x and x_adv is no change. NaN lies
    outside every box, infinity inside an infinite one. ``low`` and ``high`` are rounded to the dtype of x.
    """

    budget: int
    unit: Unit = "feature"
    low: float | Tensor = None  # type: ignore[assignment]  # asked for in words that name a way out
    high: float | Tensor = None  # type: ignore[assignment]
    mutable: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_count("budget", self.budget, least=0))
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit must be "feature" or "pixel", got {self.unit!r}')
        if any(end is None for end in (self.low, self.high)):
            rule = "low and high must be given, the range of a changed value, such as low=0.0, high=1.0"
            raise ValueError(f"{rule}; L0Ball.of(x, {self.budget}) takes the range of x")
        for name, value in (("low", self.low), ("high", self.high)):
            # Such as the least number of an array or a tensor.
            if isinstance(value, np.generic) or (isinstance(value, Tensor) and not value.ndim):
                value = value.item()
                object.__setattr__(self, name, value)
            real = value.dtype != torch.bool if isinstance(value, Tensor) else isinstance(value, int | float)
            if not real or isinstance(value, bool):
                raise ValueError(f"{name} must be a number or a real tensor, got {describe(value)}")
        try:
            ordered = self.low <= self.high
        except RuntimeError as error:
            got = f"{describe(self.low)} and {describe(self.high)}"
            raise ValueError(f"low and high must be real, of one device and broadcastable, got {got}") from error
        if not (ordered.all() if isinstance(ordered, Tensor) else ordered):
            raise ValueError(f"low must be <= high everywhere, got low={self.low!r} with high={self.high!r}")
        if self.mutable is not None and not (isinstance(self.mutable, Tensor) and self.mutable.dtype == torch.bool):
            raise ValueError(f"mutable must be a bool tensor or None, got {describe(self.mutable)}")

    @classmethod
    def of(
        cls, x: Tensor | np.ndarray[Any, Any], budget: int, unit: Unit = "feature", mutable: Tensor | None = None
    ) -> Self:
        """The ball whose box is the range of x, from its least number to its largest. x: ``(n, ...)``, an array too.

        For a table whose columns have ranges of their own: ``L0Ball(budget, low=x.amin(0), high=x.amax(0))``.
        """
        try:
            numbers = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError) as error:
            rule = "x must be a tensor or an array for its range to be a box; otherwise give low and high"
            raise ValueError(f"{rule}, got {describe(x)}") from error
        if not numbers.numel() or not numbers.isfinite().all():
            raise ValueError(f"x must be finite numbers, at least one, for their range to be a box, got {describe(x)}")
        return cls(budget, unit, float(numbers.min()), float(numbers.max()), mutable)

    def __str__(self) -> str:
        return f"{self.budget} {self.unit}{'s' * (self.budget != 1)} changed, {self.values}"

    @property
    def values(self) -> str:
        """The box in words: ``values in [0, 1]``."""
        low, high = (_least(self.low), -_least(-self.high))
        own = "" if self._plain else ", each number in a range of its own"
        return "any value" if (low, high) == (-math.inf, math.inf) else f"values in [{low:g}, {high:g}]{own}"

    @property
    def entries(self) -> dict[str, float | str]:
        """The box as results name it: ``beta`` for [-beta, beta], ``box`` for any other, neither for any value."""
        if self.values == "any value":
            return {}
        plain = self._plain and float(self.high) == -float(self.low) < math.inf
        return {"beta": float(self.high)} if plain else {"box": self.values.removeprefix("values in ")}

    @property
    def _plain(self) -> bool:
        return not any(isinstance(end, Tensor) and end.numel() > 1 for end in (self.low, self.high))

    def check_near(self, x: Tensor) -> None:
        """Raises ValueError if a number of x lies farther from the box than the box is wide.

        Such rows have another scale than the box. Where they lie on both sides of it, it may be narrow on purpose: then
        20 times that far. A box of tensors, of one point or of infinite width is not looked at.
        """
        if not isinstance(self.low, Tensor) and not isinstance(self.high, Tensor):
            least, most = self._range(x)
            width, inside = self.high - self.low, least < self.low and self.high < most
            far = 20 * width if inside else width
            if width > 0 and (least < self.low - far or most > self.high + far):
                scale = f"x lies in [{least:g}, {most:g}], the box is [{self.low:g}, {self.high:g}]"
                way = f"give low={least:g} and high={most:g}, as L0Ball.of(x, {self.budget}, {self.unit!r}) does"
                way += f"; if it is meant so, low=torch.tensor([{self.low:g}])"
                raise ValueError(f"low and high must be of the scale of x: {scale}; {way}")

    def doubt(self, x: Tensor) -> str | None:
        """A sentence if the box does not seem to be meant for x ``(n, ...)``, or None."""
        if isinstance(self.low, Tensor) or isinstance(self.high, Tensor) or not len(x):
            return None
        (least, most), width = self._range(x), self.high - self.low
        where = f"x lies in [{least:g}, {most:g}], the box is [{self.low:g}, {self.high:g}]"
        if least < float(x.new_tensor(self.low)) or most > float(x.new_tensor(self.high)):  # the box in the dtype of x
            return f"clean values outside the box: {where}; L0Ball.of(x, {self.budget}) takes the range of x"
        below = most > self.high - 0.05 * width and least >= self.low + 0.4 * width
        above = least < self.low + 0.05 * width and most <= self.high - 0.4 * width
        if width < math.inf and most - least > 0.2 * width and (below or above):
            end = f"low={least:g}" if below else f"high={most:g}"
            return f"half of the box is empty: {where}; give {end} if the attacker cannot leave the range of x"
        return None

    def _range(self, x: Tensor) -> tuple[float, float]:
        """The least and the largest of the numbers of x that may change."""
        numbers = x.detach() if self.mutable is None else x.detach()[self.mutable.expand_as(x)]
        return (float(numbers.min()), float(numbers.max())) if numbers.numel() else (math.nan, math.nan)

    def count(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Number of changed units in each row: ``(n,)`` int64. x, x_adv: ``(n, ...)``."""
        self._check(x, x_adv)
        return self._units(_differs(x, x_adv)).sum(1)

    def contains(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Whether each row of x_adv lies in the ball around that row of x: ``(n,)`` bool. x, x_adv: ``(n, ...)``."""
        self._check(x, x_adv)
        low, high, mutable = self.box(x)
        changed = _differs(x, x_adv)
        units = self._units(changed)
        held = self._numbers(units, x) & mutable
        wrong = (changed & ~mutable) | (held & ~((low <= x_adv) & (x_adv <= high)))
        return (units.sum(1) <= self.budget) & ~wrong.flatten(1).any(1)

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Brings each row of x_adv into the ball around that row of x. x, x_adv, result: ``(n, ...)``.

        Frozen numbers go back to x, changed units are clipped to the box, then the ``budget`` units with the largest L2
        change stay, lowest index at ties. A unit with NaN goes back to x. A point of the ball comes back as it is.
        """
        self._check(x, x_adv)
        low, high, mutable = self.box(x)
        moved = torch.where(mutable, x_adv, x)
        held = self._numbers(self._units(_differs(x, moved)), x) & mutable
        clipped = torch.where(held, torch.maximum(torch.minimum(moved, high), low), x)
        clipped = torch.where(self._numbers(self._units(held & clipped.isnan()), x), x, clipped)
        changed = self._units(_differs(x, clipped))
        change = torch.where(_differs(x, clipped), clipped.detach().double() - x.detach().double(), 0.0)
        change = change.nan_to_num(nan=torch.inf)
        size = (torch.linalg.vector_norm(change, dim=1) if self.unit == "pixel" else change.abs()).flatten(1)
        # Unchanged units rank below every changed one: the square of a tiny change may underflow to 0.
        largest = size.masked_fill(~changed, -1.0).argsort(dim=1, descending=True, stable=True)[:, : self.budget]
        keep = torch.zeros_like(changed).scatter(1, largest, True) & changed
        return torch.where(self._numbers(keep, x), clipped, x)

    def box(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``low, high, mutable`` as tensors broadcastable to x, on its device; the bounds in its dtype."""
        bounds = [self.low, self.high, True if self.mutable is None else self.mutable]
        # Numbers are made on the device: a copy from the host would wait for it, which a CUDA graph cannot hold.
        made = [b if isinstance(b, Tensor) else torch.full((), b, dtype=torch.float64, device=x.device) for b in bounds]
        return made[0].to(x), made[1].to(x), made[2].bool()

    def part(self, x: Tensor, rows: Tensor, budget: int | None = None) -> Self:
        """The ball for the rows ``(m,)`` of x: their part of a box or mask with a value for each row.

        budget: another budget, if given.
        """
        changed: dict[str, Any] = {} if budget is None else {"budget": budget}
        for name in ("low", "high", "mutable"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.ndim == x.ndim and len(value) == len(x) > 1:
                changed[name] = value[rows]
        return replace(self, **changed)

    def _units(self, numbers: Tensor) -> Tensor:
        """``(n, units)``: whether any number of a unit holds. numbers: bool, the shape of x."""
        return (numbers.any(1) if self.unit == "pixel" else numbers).flatten(1)

    def _numbers(self, units: Tensor, x: Tensor) -> Tensor:
        """``(n, units)`` spread over the numbers of each unit, broadcastable to x."""
        return units.view(x.shape[0], 1, *x.shape[2:]) if self.unit == "pixel" else units.view(x.shape)

    def _check(self, x: Tensor, x_adv: Tensor) -> None:
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point():
            way = "; use x.float()" if isinstance(x, Tensor) and x.ndim >= 2 and not x.is_complex() else ""
            raise ValueError(f"x must be a floating-point tensor of shape (n, ...), got {describe(x)}{way}")
        if self.unit == "pixel" and x.ndim != 4:
            raise ValueError(f'x must be (n, channels, height, width) for unit="pixel", got shape {tuple(x.shape)}')
        if self.unit == "pixel" and (way := channels_last(x.shape)):
            raise ValueError(f'x must be (n, channels, height, width) for unit="pixel", {way}')
        if (x_adv.shape, x_adv.dtype, x_adv.device) != (x.shape, x.dtype, x.device):
            rule = "x_adv must have the shape, dtype and device of x"
            raise ValueError(f"{rule}, got {describe(x_adv)} for {describe(x)}")
        for name, value in (("low", self.low), ("high", self.high), ("mutable", self.mutable)):
            if isinstance(value, Tensor) and not _fits(value, x):
                rule = f"{name} must be broadcastable to x and on its device"
                raise ValueError(f"{rule}, got {describe(value)} for {describe(x)}")
        units = x.shape[1 if self.unit == "feature" else 2 :].numel()
        if self.budget > units:
            rule = "budget must be at most the number of units of x"
            raise ValueError(f"{rule}, got budget={self.budget} with {units} units")


def _differs(x: Tensor, x_adv: Tensor) -> Tensor:
    return (x != x_adv) & ~(x.isnan() & x_adv.isnan())


def _least(end: float | Tensor) -> float:
    return float(end.min() if isinstance(end, Tensor) else end)


def _fits(value: Tensor, x: Tensor) -> bool:
    sizes = zip(value.shape[::-1], x.shape[::-1], strict=False)
    return value.device == x.device and value.ndim <= x.ndim and all(own in (1, size) for own, size in sizes)


def channels_last(shape: Sequence[int]) -> str:
    """What to do if a shape (n, ...) seems to be that of images with their channels last; empty if it does not."""
    if len(shape) != 4 or shape[3] > 4 or min(shape[1:3]) <= 4:
        return ""
    way = "use x.permute(0, 3, 1, 2), of an array x.transpose(0, 3, 1, 2)"
    return f"got channels last, {tuple(shape)}: {way}; and ell0.wrap(model, channels_last=True) if it takes them last"


def describe(value: object) -> str:
    """What was passed, in the words of an error."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"a NumPy {value.dtype} array of shape {value.shape}; use torch.from_numpy"
    words = " ".join(repr(value).split())
    return words if len(words) <= 200 else f"{words[:200]}..."
