"""What the attacker may do: one value, passed to every attack, evaluation, certificate and report."""

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
        object.__setattr__(self, "budget", check_count("budget", self.budget, least=0))
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit must be "feature" or "pixel", got {self.unit!r}')
        for name, value in (("low", self.low), ("high", self.high)):
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
            raise ValueError(f"x must be a floating-point tensor of shape (n, ...), got {describe(x)}")
        if self.unit == "pixel" and x.ndim != 4:
            raise ValueError(f'x must be (n, channels, height, width) for unit="pixel", got shape {tuple(x.shape)}')
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


def _fits(value: Tensor, x: Tensor) -> bool:
    sizes = zip(value.shape[::-1], x.shape[::-1], strict=False)
    return value.device == x.device and value.ndim <= x.ndim and all(own in (1, size) for own, size in sizes)


def describe(value: object) -> str:
    """What was passed, in the words of an error."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"a NumPy {value.dtype} array of shape {value.shape}; use torch.from_numpy"
    return repr(value)
