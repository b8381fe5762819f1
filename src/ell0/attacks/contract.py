"""What every attack has in common: checks of its arguments, queries, the best point of each row, the last check."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn

from ..common import Progress, Step, silent
from ..nn import prepared
from ..threat import L0Ball, Unit, channels_last, describe
from ..wrapping import Model, Wrapped, as_rows, wrap
from .draws import Draws
from .graphs import FILLED, Graphs, recording
from .surrogate import surrogate_gradients

__all__ = ["AttackResult", "Model", "Victim"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, repr=False)
class AttackResult:
    """What an attack found for each of n rows. All tensors are on the device of x.

    x_adv: ``(n, ...)``, equal to x where the attack failed.
    success: ``(n,)`` bool; the model errs on x_adv, or gives the target.
    distance: ``(n,)`` int64, units changed; 0 if misclassified from the start, -1 if the attack failed.
    queries: ``(n,)`` int64; one forward is 1, one backward is 1, the clean check is free.
    x_best, margin: ``(n, ...)`` and ``(n,)``, the point of the lowest margin seen inside the ball, x included. The
        margin is z_y - max of the other logits, or with a target the max of the other logits - z_target.
    ball: of the attack.
    late: ``(n,)`` bool; the row fell in the last tenth of the queries that a standing row of its batch has spent. More
        queries may break more. None for an attack that goes on after a break, for few changes.
    """

    x_adv: Tensor
    success: Tensor
    distance: Tensor
    queries: Tensor
    x_best: Tensor
    margin: Tensor
    ball: L0Ball | None = None
    late: Tensor | None = None

    def __repr__(self) -> str:
        found = self.distance[self.success & (self.distance > 0)]
        median = "" if not len(found) else f", by {_several(int(found.median()), 'change')} in the median"
        lines = [f"{int(self.success.sum())} of {len(self.success)} rows broken{median}"]
        if wrong := int((self.success & (self.distance == 0)).sum()):
            lines.append(f"{wrong} of them misclassified from the start")
        if self.ball is not None:
            lines.append(f"ball: {self.ball}")
        lines.append(f"queries a row: {float(self.queries.double().mean()):.0f}, at most {int(self.queries.max())}")
        if self.late is not None and self.late.any():
            rows = _several(int(self.late.sum()), "row")
            lines.append(f"not converged: {rows} fell in the last tenth of the queries")
        return "\n".join(lines)


def by_unit(numbers: Tensor, unit: Unit) -> Tensor:
    """``(m, channels, units)``: the numbers ``(m, ...)`` of each unit."""
    return numbers.flatten(2) if unit == "pixel" else numbers.flatten(1).unsqueeze(1)


class Victim:
    """A model under attack: answers queries about rows of a batch, counts them and keeps the best of each row.

        with Victim(model, x, y, ball, generator=generator, rows=rows, target=target, progress=progress) as victim:
            for query in victim.while_standing(range(queries), "name of the attack"):
                at = victim.standing
                victim.margins(candidates, at)
            return victim.result()

    graphs: where steps can be replayed from CUDA graphs, what does it; else None.

    Inside, the model is in eval mode and its parameters ask for no gradient; afterwards both are as they were.

    Args:
        minimal: the attack wants few changed units and may query points outside the ball: every adversarial point is
            measured, the nearest is kept, and points with more changed units than the budget are no success. Otherwise
            the attack queries points of the ball only.
        finite: the attack needs a finite box.

    labels: ``(n,)`` int64, those that the attack leads away from; if ``targeted``, those that it leads to.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        ball: L0Ball,
        *,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
        target: Tensor | None = None,
        progress: Progress = silent,
        minimal: bool = False,
        finite: bool = True,
    ) -> None:
        x, y = as_rows(model, x, y)
        _check(x, y, ball, rows, target, finite)
        self.x, self.ball, self.n = x.detach().contiguous(), ball, len(x)
        # Counts the units of some rows, where a box with values for every row would not fit.
        self._ruler = L0Ball(ball.budget, ball.unit, -torch.inf, torch.inf)
        self.low, self.high, self.mutable = (t.expand_as(x) for t in ball.box(x))
        self.model: Model = model if callable(model) else wrap(model)
        self.targeted, self._minimal, self._progress = target is not None, minimal, progress
        self._y, self.labels = y, (y if target is None else target).long()
        self._chunk = max(self.n, 512)  # an attack may ask for a row several times at once
        rows = torch.arange(self.n, device=x.device) if rows is None else rows
        self.draws = Draws(generator, rows.to(torch.int64))
        self.queries = torch.zeros(self.n, dtype=torch.int64, device=x.device)
        self.left = self.n  # rows that stood when `while_standing` looked last
        self.graphs: Graphs | None = None
        self._batches: dict[Hashable, tuple[Tensor, ...]] = {}
        self._sound = torch.ones((), dtype=torch.bool, device=x.device)  # what `_holds` could not wait for

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if isinstance(self.model, nn.Module):
                for module in self.model.modules():
                    stack.callback(setattr, module, "training", module.training)
                self.model.eval()
                for parameter in [p for p in self.model.parameters() if p.requires_grad]:
                    stack.callback(parameter.requires_grad_, True)
                    parameter.requires_grad_(False)
                stack.enter_context(prepared(self.model))
            try:
                logits = self._logits(self.x.clone())
            except RuntimeError as error:
                if way := channels_last(self.x.shape):
                    raise ValueError(f"model must take rows of the shape of x, {way}") from error
                raise
            for name, labels in (("target" if self.targeted else "y", self.labels), ("y", self._y)):
                out = labels[(labels < 0) | (labels >= logits.shape[1])]
                if len(out):
                    rule = f"{name} must lie in 0 .. {logits.shape[1] - 1}, the classes of the model"
                    raise ValueError(f"{rule}, got {int(out[0])}")
            self.margin, self.success = self.judge(logits, torch.arange(self.n, device=logits.device))
            self.distance = torch.where(self.success, 0, -1)
            self.x_adv, self.x_best = self.x.clone(), self.x.clone()
            self._restore = stack.pop_all()
        self.graphs = Graphs.of(self.model, self.x)
        return self

    def __exit__(self, *_: object) -> None:
        self.graphs = None
        self._restore.close()

    @property
    def standing(self) -> Tensor:
        """Positions of the rows that are not broken: ``(m,)`` int64."""
        return self.above(self.x[0].numel())

    def above(self, goal: int) -> Tensor:
        """Positions of the rows that are not broken within ``goal`` changed units: ``(m,)`` int64."""
        return ((self.distance < 0) | (self.distance > goal)).nonzero().squeeze(1)

    def units(self, numbers: Tensor) -> Tensor:
        """``(m, channels, units)``: the numbers ``(m, ...)`` of each unit."""
        return by_unit(numbers, self.ball.unit)

    def points(self, units: Tensor) -> Tensor:
        """The inverse of `units`: ``(m, ...)``."""
        return units.reshape(len(units), *self.x.shape[1:])

    def margins(self, points: Tensor, at: Tensor, alive: Tensor | None = None) -> Tensor:
        """Margins ``(m,)`` of points for the rows ``at``, some perhaps several times; each costs its row a query.

        alive: ``(m,)`` bool, of rows that are all different: only these are asked, and nobody waits for the device.
        """
        logits = self._logits(points)
        if alive is None:
            return self._learn(points, at, logits, cost=1)[0]
        margin, wrong = self.judge(logits, at)
        better, broken = alive & (margin < self.margin[at]), alive & wrong
        self.queries.index_add_(0, at, alive.to(at.dtype))
        news = (
            (self.margin, margin, better), (self.x_best, points, better), (self.x_adv, points, broken),
            (self.success, broken, broken), (self.distance, self._ruler.count(self.x[at], points), broken),
        )  # fmt: skip
        for known, new, where in news:
            known.index_copy_(0, at, torch.where(where.view(-1, *[1] * (new.ndim - 1)), new, known[at]))
        return margin

    def errs(self, points: Tensor, at: Tensor) -> Tensor:
        """Whether the model errs on the points, or gives the target: ``(m,)`` bool; costs as `margins`."""
        return self._learn(points, at, self._logits(points), cost=1)[1]

    def judge(self, logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """The margins that logits ``(m, classes)`` mean for the rows ``at``, and whether they break: ``(m,)`` each."""
        labels = self.labels[at]
        own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
        others = logits.scatter(1, labels.unsqueeze(1), -torch.inf).amax(1)
        margin = others - own if self.targeted else own - others
        # A search with nothing to compare would stand still.
        if not self._holds(margin.isfinite()):
            raise ValueError("model must return finite logits, got an infinite one where it decides the margin")
        given = logits.argmax(1) == labels
        return margin, given if self.targeted else ~given

    def ask(self, function: Model, points: Tensor, at: Tensor) -> Tensor:
        """What another function says of points, perhaps outside the ball; costs as `margins`, and nothing is kept."""
        self.queries.index_add_(0, at, torch.ones_like(at))
        with torch.no_grad():
            return self._in_parts(lambda part: (function(part),), points)[0]

    def slopes(
        self,
        points: Tensor,
        at: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        straight: bool = False,
        behind: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Margins, the gradient ``(m, ...)`` of a loss, and at what input; each point costs a forward and a backward.

        loss: logits ``(m, classes)`` and margins ``(m,)`` -> ``(m,)``; the margin itself if None.
        straight: the backward pass goes straight through truncated layers, see `surrogate_gradients`.
        behind: a layer; the gradient is that to its output, the input is its own. If None, both are at the points.
        """
        if torch.is_inference_mode_enabled():
            raise ValueError("an attack by gradients must be called outside of torch.inference_mode()")
        seen: list[tuple[Tensor, Tensor]] = []

        def cut(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.append((inputs[0], output.detach().requires_grad_()))
            return seen[-1][1].clone()  # what follows may write into it

        def ask(part: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            leaf = part.detach().requires_grad_(behind is None)
            seen[:] = [(leaf, leaf)]
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                if straight:
                    stack.enter_context(surrogate_gradients(self.model))
                if behind is not None:
                    stack.enter_context(behind.register_forward_hook(cut))
                logits = self._ask(leaf)
                margin = self.judge(logits, rows)[0]
                value = (margin if loss is None else loss(logits, margin)).sum()
                source, leaf = seen[-1]
                slope = torch.autograd.grad(value, leaf, allow_unused=True)[0] if logits.requires_grad else None
            if slope is None:
                raise ValueError("model must have a gradient for this attack, got logits that autograd cannot follow")
            return logits.detach(), slope, source.detach()

        logits, slope, source = self._replayed((loss, straight, behind), ask, points, at)
        return self._learn(points, at, logits, cost=2)[0], slope, source

    def while_standing(self, steps: Iterable[int], name: str, goal: int | None = None) -> Iterator[int]:
        """Yields the steps until every row is broken (within ``goal`` units if given), and reports each of them."""
        steps, start = list(steps), time.monotonic()
        for number, step in enumerate(steps):
            self._check_sound()
            self.left = len(self.above(self.x[0].numel() if goal is None else goal))
            if not self.left:
                return
            self.report(name, number, len(steps), start, f"{self.left} of {self.n} rows stand")
            yield step

    def report(self, name: str, done: int, total: int, start: float, note: str) -> None:
        """Calls ``progress``. start: when this piece of work began, by ``time.monotonic()``."""
        left = (time.monotonic() - start) * (total - done) / done if done else None
        self._progress(Step(name, done, total, note, left))

    def result(self) -> AttackResult:
        """Everything that was found, checked once more: points in the ball, successes by a forward of their own."""
        self._check_sound()
        for name, points in (("x_adv", self.x_adv), ("x_best", self.x_best)):
            outside = (~self.ball.contains(self.x, points)).nonzero()
            if len(outside):
                raise AssertionError(f"the attack left the ball: {name} of row {int(outside[0])}; please report this")
        claimed = self.success.nonzero().squeeze(1)
        success, x_adv, distance = self.success.clone(), self.x_adv.clone(), self.distance.clone()
        if len(claimed):
            # A model whose answer depends on the batch or on chance may take a claim back.
            wrong = self.judge(self._logits(self.x_adv[claimed]), claimed)[1]
            refuted = claimed[~wrong]
            success[refuted], distance[refuted] = False, -1
            x_adv[refuted] = self.x[refuted]
        spent = self.queries[~success]
        late = success & (self.queries > (0.9 * int(spent.max()) if len(spent) else torch.inf))
        found = x_adv, success, distance, self.queries, self.x_best, self.margin, self.ball
        return AttackResult(*found, late=None if self._minimal else late)

    def _learn(self, points: Tensor, at: Tensor, logits: Tensor, cost: int) -> tuple[Tensor, Tensor]:
        """Counts the queries and keeps what is new. Returns margins and errors, ``(m,)`` each."""
        every = self.judge(logits, at)
        self.queries.index_add_(0, at, torch.full_like(at, cost))
        news = (every[1] | (every[0] < self.margin[at])).nonzero().squeeze(1)
        if not len(news):
            return every
        points, at, margin, wrong = points[news], at[news], every[0][news], every[1][news]
        distance, known = self._ruler.count(self.x[at], points), self.distance[at]
        inside = distance <= self.ball.budget if self._minimal else torch.ones_like(wrong)
        best = _least(at, margin, inside & (margin < self.margin[at]))
        self.margin[at[best]], self.x_best[at[best]] = margin[best], points[best]
        nearest = _least(at, distance, inside & wrong & ((known < 0) | (distance < known)))
        self.success[at[nearest]], self.distance[at[nearest]] = True, distance[nearest]
        self.x_adv[at[nearest]] = points[nearest]
        return every

    @torch.no_grad()
    def _logits(self, points: Tensor) -> Tensor:
        return self._in_parts(lambda part: (self._ask(part),), points)[0]

    def _replayed(self, key: Hashable, ask: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """`_in_parts`, or a replay of it for at least as many rows: those beyond are rows of before."""
        m, batch = len(tensors[0]), self._batches.get(key)
        if self.graphs is None or m > self._chunk:
            return self._in_parts(ask, *tensors)
        if batch is None or not FILLED * len(batch[0]) <= m <= len(batch[0]):
            batch = self._batches[key] = tuple(t.clone() for t in tensors)
            self.graphs.forget(key)
        for held, t in zip(batch, tensors, strict=True):
            held[:m].copy_(t)
        return tuple(t[:m].clone() for t in self.graphs.run(key, lambda: self._in_parts(ask, *batch)))

    def _holds(self, good: Tensor) -> bool:
        """Whether all are good. While a graph is recorded nobody knows: `_check_sound` says it later."""
        if not recording():
            return bool(good.all())
        self._sound.logical_and_(good.all())
        return True

    def _check_sound(self) -> None:
        if self.graphs is not None and not self._sound:
            raise ValueError("model must return finite logits, got others in a step of this attack")

    def _in_parts(self, ask: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """``ask`` for all rows of the tensors, in as many parts as memory requires."""
        while True:
            try:
                if len(tensors[0]) <= self._chunk:
                    return ask(*tensors)
                answers = [ask(*parts) for parts in zip(*(t.split(self._chunk) for t in tensors), strict=True)]
                return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))
            except RuntimeError as error:
                full = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
                if self._chunk == 1 or not full:
                    raise
            self._chunk = (min(self._chunk, len(tensors[0])) + 1) // 2

    def _ask(self, points: Tensor) -> Tensor:
        version = 0 if points.is_inference() else points._version  # rises when somebody writes into the points
        logits = self.model(points)
        if not isinstance(self.model, Wrapped) and not _are_logits(logits):
            self.model = wrap(self.model)  # a dict, a tuple, one logit: from now on they become logits
            logits = self.model(points)
        if not points.is_inference() and points._version != version:
            raise ValueError("model must leave its input as it is, got one that writes into it")
        if not _are_logits(logits) or len(logits) != len(points):
            rule = f"model must return floating-point logits of shape ({len(points)}, classes), 2 classes or more"
            raise ValueError(f"{rule}, got {describe(logits)}")
        top = logits.detach().amax(1)
        if not self._holds(top.isfinite()):
            raise ValueError(f"model must return finite logits, got {float(top[~top.isfinite()][0])} among them")
        return logits


def _several(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _are_logits(answer: object) -> bool:
    good = isinstance(answer, Tensor) and answer.is_floating_point() and answer.ndim == 2
    return good and cast(Tensor, answer).shape[1] > 1


def _least(at: Tensor, value: Tensor, among: Tensor) -> Tensor:
    """For each row of ``at`` ``(m,)``, where its least value stands among those chosen, the first at ties."""
    chosen = among.nonzero().squeeze(1)
    chosen = chosen[value[chosen].argsort(stable=True)]
    chosen = chosen[at[chosen].argsort(stable=True)]
    rows = at[chosen]
    first = torch.ones_like(rows, dtype=torch.bool)
    first[1:] = rows[1:] != rows[:-1]
    return chosen[first]


def _check(x: Tensor, y: Tensor, ball: L0Ball, rows: Tensor | None, target: Tensor | None, finite: bool) -> None:
    if not isinstance(ball, L0Ball):
        raise ValueError(f"ball must be an L0Ball, got {ball!r}")
    ball.count(x, x)  # x, unit, budget and the shapes of the box
    if len(x) == 0:
        raise ValueError("x must have at least one row, got an empty batch")
    if not x.isfinite().all():
        raise ValueError("x must be finite, got NaN or infinity")
    ball.check_near(x)
    given = {"y": y} | {key: value for key, value in (("target", target), ("rows", rows)) if value is not None}
    for name, value in given.items():
        good = isinstance(value, Tensor) and value.dtype in _INTEGERS
        if not good or (value.shape, value.device) != (x.shape[:1], x.device):
            rule = f"{name} must be an integer tensor of shape ({len(x)},) on {x.device}"
            raise ValueError(f"{rule}, got {describe(value)}{_way(value, len(x)) if name == 'y' else ''}")
    if target is not None and (target == y).any():
        raise ValueError(f"target must differ from y in every row, row {int((target == y).nonzero()[0])} does not")
    if finite:
        low, high, mutable = ball.box(x)
        if not ((high - low).isfinite() | ~mutable).all():
            raise ValueError(f"this attack needs a finite box, got low={ball.low!r} and high={ball.high!r}")


def _way(y: object, n: int) -> str:
    """How labels of another form, true or false, floating-point, in a column or one-hot, become integers."""
    if not isinstance(y, Tensor) or y.shape[:1] != (n,) or y.ndim > 2 or (y.ndim == 1 and y.dtype in _INTEGERS):
        return ""
    whole = "" if y.dtype in _INTEGERS else ".long()"
    return f"; use y{whole}" if y.ndim == 1 else f"; use y[:, 0]{whole}" if y.shape[1] == 1 else "; use y.argmax(1)"
