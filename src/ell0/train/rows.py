"""What steps are trained on: the rows X, adversarial rows X' beside them, images moved and mirrored at random."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attacks.contract import AttackResult
from ..common import seeded
from ..parallel import Team
from .config import Augment, TrainConfig

BoundAttack = Callable[..., AttackResult]
"""``attack(model, x, y, *, generator, rows)``: an attack of ``ell0.attacks`` with its ball and settings bound."""

Labelled = tuple[Tensor, Tensor]  # x ``(n, ...)`` and y ``(n,)``


@dataclass(frozen=True)
class AppendedRows:
    """X', as its differences from X: a sparse attack changes few numbers.

    epoch: the attack runs before it.  done: rows of X attacked so far.  seconds: spent on them.
    rows: ``(m,)`` int64, the broken rows of X, ascending.
    of, at, values: ``(c,)``, for each changed number its row of X, its place in the row, and its value. On the CPU.
    """

    epoch: int
    done: int
    seconds: float
    rows: Tensor
    of: Tensor
    at: Tensor
    values: Tensor

    @classmethod
    def none(cls, epoch: int, x: Tensor) -> AppendedRows:
        empty = torch.zeros(0, dtype=torch.int64, device="cpu")
        return cls(epoch, 0, 0.0, empty, empty, empty, torch.zeros(0, dtype=x.dtype, device="cpu"))

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, and the rest as JSON has it: ``AppendedRows(**tensors, **rest)`` gives it back."""
        tensors = {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}
        return tensors, {key: value for key, value in vars(self).items() if key not in tensors}


class TrainingSet:
    """X and, behind it in the same memory, X'.

    points, labels: ``(n, ...)``, contiguous, and ``(n,)``, then room for n rows of X'.  appended: rows of X'.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = self.points, self.labels = x.detach().contiguous(), y
        self.appended = 0

    def __len__(self) -> int:
        return len(self.x) + self.appended

    def append(self, new: AppendedRows) -> None:
        """Replaces X'."""
        n, m = len(self.x), len(new.rows)
        if m and self.points is self.x:
            self.points, self.labels = (torch.cat([t, torch.empty_like(t)]) for t in (self.x, self.y))
            self.x, self.y = self.points[:n], self.labels[:n]
        rows, at = new.rows.to(self.x.device), torch.searchsorted(new.rows, new.of) * self.x[0].numel() + new.at
        self.points[n : n + m] = self.x[rows]
        self.points[n : n + m].view(-1)[at.to(self.x.device)] = new.values.to(self.x.device)
        self.labels[n : n + m] = self.y[rows]
        self.appended = m


def search(
    attack: BoundAttack, model: nn.Module, x: Tensor, y: Tensor, found: AppendedRows, config: TrainConfig, team: Team
) -> Iterator[AppendedRows]:
    """Attacks the rows of X from ``found.done`` on, and yields all that was found after each call."""

    def broken(rows: Tensor) -> tuple[Tensor, ...]:
        """Attacks some rows: rows, of, at and values of those that a change broke, as in `AppendedRows`."""
        if not len(rows):
            return tuple(AppendedRows.none(found.epoch, x).saved()[0].values())
        result = attack(model, x[rows], y[rows], generator=seeded(config.seed, "attack", found.epoch), rows=rows)
        chosen = (result.success & (result.distance != 0)).nonzero().squeeze(1)
        points, rows = result.x_adv[chosen].flatten(1), rows[chosen]
        of, at = (points != x[rows].flatten(1)).nonzero().unbind(1)
        return rows.cpu(), rows[of].cpu(), at.cpu(), points[of, at].cpu()

    size = (config.attack_batch or _rows_of_a_call(x)) * team.size
    while found.done < len(x):
        start, done = time.perf_counter(), min(found.done + size, len(x))
        mine = team.share(torch.arange(found.done, done, device=x.device))
        parts = tuple(found.saved()[0].values()), *team.gather(partial(broken, mine))
        # Copies to the CPU wait for the device, so the clock is read after them.
        rows, of, at, values = map(torch.cat, zip(*parts, strict=True))
        seconds = found.seconds + time.perf_counter() - start
        found = AppendedRows(found.epoch, done, seconds, rows.sort().values, of, at, values)
        yield found


def _rows_of_a_call(x: Tensor) -> int:
    """By the GPU's memory, not by what is free of it: a resumed run must split its rows as before."""
    if x.device.type != "cuda":
        return 1024
    # A call may fill 1/16 of the memory with 16 copies of its rows.
    memory = torch.cuda.get_device_properties(x.device).total_memory // 16
    return max(1, min(32768, memory // (16 * x[0].numel() * x.element_size())))


@dataclass(frozen=True)
class Moves:
    """Shifts by up to ``reach`` pixels in both directions, each with its mirror image if ``mirrored``.

    fill: what comes in at the edges: a number, the nearest pixel, or the image mirrored at its outermost pixels.
    once: before the first epoch, not in each step.
    """

    reach: int
    mirrored: bool
    fill: float | Literal["nearest", "reflect"]
    once: bool = False

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """One of the ways to move for each row: ``(rows,)`` int64, on the CPU so that every device gets the same."""
        ways = (2 * self.reach + 1) ** 2 * (2 if self.mirrored else 1)
        return torch.randint(ways, (rows,), generator=generator, device="cpu")

    def moved(self, points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
        """The images ``rows`` (m,) of points ``(n, channels, height, width)``, moved in the ways ``(m,)`` drawn."""
        channels, height, width = points.shape[1:]
        shift, side = ways // 2 if self.mirrored else ways, 2 * self.reach + 1
        # The line that each line of the result comes from; it may lie outside of the image.
        y = torch.arange(height, device=ways.device) + (shift // side - self.reach).unsqueeze(1)
        x = torch.arange(width, device=ways.device) + (shift % side - self.reach).unsqueeze(1)
        if self.mirrored:
            x = torch.where((ways % 2 == 1).unsqueeze(1), x.flip(1), x)
        y, x = y.view(-1, 1, height, 1), x.view(-1, 1, 1, width)
        if self.fill == "reflect":
            y, x = _reflected(y, height), _reflected(x, width)
        channel = torch.arange(channels, device=points.device).view(1, -1, 1, 1)
        # One gather: no padded copy is made.
        moved = points[rows.view(-1, 1, 1, 1), channel, y.clamp(0, height - 1), x.clamp(0, width - 1)]
        if isinstance(self.fill, str):
            return moved
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        return torch.where(inside, moved, self.fill)


@dataclass(frozen=True)
class Warps:
    """Turns, zooms and shifts by nearest pixels, with the image mirrored beyond its edges; mirrors half of the images.

    turn: in degrees, either way.  zoom: either way, as a share.  reach: pixels of a shift in both directions.
    colour: the most by which contrast and saturation are multiplied by more or less than 1, and brightness moves.
    """

    turn: float
    zoom: float
    reach: float
    colour: float
    once: ClassVar[bool] = False

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Eight numbers in [-1, 1) for each row: ``(rows, 8)``, on the CPU so that every device gets the same."""
        return 2 * torch.rand(rows, 8, generator=generator, device="cpu") - 1

    def moved(self, points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
        """The images ``rows`` (m,) of points ``(n, channels, height, width)``, warped in the ways ``(m, 8)`` drawn."""
        channels, height, width = points.shape[1:]
        turn, zoom, down, right, side, bright, contrast, saturation = ways.view(-1, 8, 1, 1, 1).unbind(1)
        angle, scale = math.radians(self.turn) * turn, (1 + self.zoom) ** zoom
        y = torch.arange(height, device=ways.device).view(-1, 1) - (height - 1) / 2
        x = torch.arange(width, device=ways.device) - (width - 1) / 2
        x = torch.where(side < 0, -x, x)
        cos, sin = scale * angle.cos(), scale * angle.sin()
        from_y = (cos * y - sin * x + (height - 1) / 2 + self.reach * down).round().long()
        from_x = (sin * y + cos * x + (width - 1) / 2 + self.reach * right).round().long()
        channel = torch.arange(channels, device=points.device).view(1, -1, 1, 1)
        warped = points[rows.view(-1, 1, 1, 1), channel, _reflected(from_y, height), _reflected(from_x, width)]
        grey, middle = warped.mean(1, keepdim=True), warped.mean((1, 2, 3), keepdim=True)
        coloured = grey + (1 + self.colour * saturation) * (warped - grey)
        coloured = middle + (1 + self.colour * contrast) * (coloured - middle) + self.colour * bright
        return coloured.clamp(-1, 1)


@dataclass(frozen=True)
class Bends:
    """Turns, zooms, slants, shifts and bends images by interpolation; beyond its edges an image has its nearest pixel.

    turn: in degrees, either way; of each axis by itself.  zoom: either way, as a share; of each axis by itself.
    reach: pixels of a shift in both directions.  bend: by up to how many pixels each of 5 x 5 points, spread evenly
    over the image, moves besides in both directions; the pixels between them follow smoothly.
    """

    turn: float
    zoom: float
    reach: float
    bend: float
    once: ClassVar[bool] = False

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Numbers in [-1, 1): ``(rows, 2, 28)``, on the CPU so that every device gets the same."""
        return 2 * torch.rand(rows, 2, 28, generator=generator, device="cpu") - 1

    def moved(self, points: Tensor, rows: Tensor, ways: Tensor) -> Tensor:
        """The images ``rows`` (m,) of points ``(n, channels, height, width)``, bent as drawn, ``(m, 2, 28)``."""
        height, width = points.shape[2:]
        y, x = (torch.arange(length, device=points.device) - (length - 1) / 2 for length in (height, width))
        x, y = torch.meshgrid(x, y, indexing="xy")
        turn, zoom, shift = ways[..., :3].view(-1, 1, 1, 2, 3).unbind(-1)
        angle, scale = math.radians(self.turn) * turn, (1 + self.zoom) ** zoom
        along, across = scale * angle.cos(), scale * angle.sin()
        field = F.interpolate(ways[..., 3:].unflatten(2, (5, 5)), (height, width), mode="bicubic", align_corners=True)
        # Where each pixel comes from, in pixels from the middle: x, then y.
        at = along * torch.stack((x, y), -1) + across * torch.stack((-y, x), -1)
        at = at + self.reach * shift + self.bend * field.permute(0, 2, 3, 1)
        ends = [max((length - 1) / 2, 0.5) for length in (width, height)]
        grid = torch.stack([each / end for each, end in zip(at.unbind(-1), ends, strict=True)], -1)
        return F.grid_sample(points[rows], grid.to(points.dtype), padding_mode="border", align_corners=True)


def _reflected(places: Tensor, length: int) -> Tensor:
    """Places inside of a line 0 .. length - 1, of which those outside are mirror images, as often as needed."""
    period = max(2 * (length - 1), 1)
    places = places % period
    return torch.minimum(places, period - places)


AUGMENTS: dict[Augment, Moves | Warps | Bends] = {
    # Not filled with black: truncation would spend its k on the margin.
    "crop-flip": Moves(reach=4, mirrored=True, fill=0.0),
    "crop-flip-once": Moves(reach=4, mirrored=True, fill=-1.0, once=True),
    "crop-flip-reflect": Moves(reach=4, mirrored=True, fill="reflect"),
    "shift": Moves(reach=1, mirrored=False, fill="nearest"),
    "bend": Bends(turn=7.0, zoom=0.07, reach=0.5, bend=0.8),
    "warp-colour": Warps(turn=10.0, zoom=0.15, reach=4.0, colour=0.2),
}
