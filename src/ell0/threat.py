"""What the attacker may do: one value, passed to every attack, evaluation, certificate and report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

__all__ = ["L0Ball", "Unit"]

Unit = Literal["feature", "pixel"]


@dataclass(frozen=True, eq=False)
class L0Ball:
    """All points that differ from x in at most ``budget`` units, with the changed units inside a box.

        {x_adv : #{units with x_adv != x} <= budget,  low <= x_adv <= high on changed units,  frozen numbers kept}

    Args:
        budget: units that may change, ``>= 0``.
        unit: ``"feature"``, one number of x; ``"pixel"``, all channels of one position, x ``(n, c, h, w)``.
        low, high: box of a changed unit, numbers or tensors broadcastable to x; infinite is allowed. x itself may lie
            outside: an unchanged unit is not looked at, a changed pixel is with all its channels.
        mutable: bool, broadcastable to x, False where a number is frozen. The frozen channels of a pixel never change
            and are not held to the box; the pixel may change in the others, and counts as one.

    Numbers compare by value: 0.0 is -0.0, infinity is itself, and NaN in both x and x_adv is no change. NaN lies
    outside every box, infinity inside an infinite one. ``low`` and ``high`` are rounded to the dtype of x.
    """

    budget: int
    unit: Unit = "feature"
    low: float | Tensor = -1.0
    high: float | Tensor = 1.0
    mutable: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 0:
            raise ValueError(f"budget must be an int >= 0, got {self.budget!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit must be "feature" or "pixel", got {self.unit!r}')
        _check_bound("low", self.low)
        _check_bound("high", self.high)
        _check_order(self.low, self.high)
        if self.mutable is not None and not (isinstance(self.mutable, Tensor) and self.mutable.dtype == torch.bool):
            raise ValueError(f"mutable must be a bool tensor or None, got {describe(self.mutable)}")

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
        # Numbers are made on the device: a copy from the host would wait for it, which a CUDA graph cannot hold.
        low, high = (
            (bound if isinstance(bound, Tensor) else torch.full((), bound, dtype=torch.float64, device=x.device)).to(x)
            for bound in (self.low, self.high)
        )
        mutable = torch.ones((), dtype=torch.bool, device=x.device) if self.mutable is None else self.mutable
        return low, high, mutable

    def part(self, x: Tensor, rows: Tensor, budget: int | None = None) -> Self:
        """The ball for some rows of x, where box or mask may have a value for each row; with another budget, if given.

        rows: ``(m,)`` int64.
        """

        def take(value: Any) -> Any:
            each = isinstance(value, Tensor) and value.ndim == x.ndim and len(value) == len(x) > 1
            return value[rows] if each else value

        low, high, mutable = take(self.low), take(self.high), take(self.mutable)
        return replace(self, budget=self.budget if budget is None else budget, low=low, high=high, mutable=mutable)

    def _units(self, numbers: Tensor) -> Tensor:
        """``(n, units)``: whether any number of a unit holds. numbers: bool, the shape of x."""
        return (numbers.any(1) if self.unit == "pixel" else numbers).flatten(1)

    def _numbers(self, units: Tensor, x: Tensor) -> Tensor:
        """``(n, units)`` spread over the numbers of each unit, broadcastable to x."""
        return units.view(x.shape[0], 1, *x.shape[2:]) if self.unit == "pixel" else units.view(x.shape)

    def _check(self, x: Tensor, x_adv: Tensor) -> None:
        if x.ndim < 2 or not x.is_floating_point():
            raise ValueError(f"x must be a floating-point tensor of shape (n, ...), got {describe(x)}")
        if self.unit == "pixel" and x.ndim != 4:
            raise ValueError(f'x must be (n, channels, height, width) for unit="pixel", got shape {tuple(x.shape)}')
        if (x_adv.shape, x_adv.dtype, x_adv.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"x_adv must have the shape, dtype and device of x, got {describe(x_adv)} for {describe(x)}"
            )
        for name, value in (("low", self.low), ("high", self.high), ("mutable", self.mutable)):
            if isinstance(value, Tensor) and not (
                value.device == x.device and _broadcast(value.shape, x.shape) == x.shape
            ):
                raise ValueError(
                    f"{name} must be broadcastable to x and on its device, got {describe(value)} for {describe(x)}"
                )
        units = x.shape[1 if self.unit == "feature" else 2 :].numel()
        if self.budget > units:
            raise ValueError(
                f"budget must be at most the number of units of x, got budget={self.budget} with {units} units"
            )


def _differs(x: Tensor, x_adv: Tensor) -> Tensor:
    return (x != x_adv) & ~(x.isnan() & x_adv.isnan())


def _check_bound(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        good = value.dtype != torch.bool and not value.is_complex()
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good:
        raise ValueError(f"{name} must be a number or a real tensor, got {describe(value)}")


def _check_order(low: float | Tensor, high: float | Tensor) -> None:
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        if low.device != high.device:
            raise ValueError(f"low and high must be on one device, got {low.device} and {high.device}")
        if _broadcast(low.shape, high.shape) is None:
            shapes = f"{tuple(low.shape)} and {tuple(high.shape)}"
            raise ValueError(f"low and high must be broadcastable to one another, got shapes {shapes}")
    ordered = low <= high
    if not (ordered.all() if isinstance(ordered, Tensor) else ordered):
        raise ValueError(f"low must be <= high everywhere, got low={low!r} with high={high!r}")


def _broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(tuple(one), tuple(other))
    except ValueError:
        return None


def describe(value: object) -> str:
    """What was passed, in the words of an error."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device}"
    return repr(value)
