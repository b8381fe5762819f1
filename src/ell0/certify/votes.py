"""Votes of parts: one network looks at one part of the input at a time, and what the parts say is added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from itertools import product
from typing import ClassVar, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attacks.draws import Draws
from ..common import check_count
from ..precision import dense_products
from ..threat import L0Ball, describe
from .certifier import Certifier, Preparation
from .partition import Partition
from .rules import Rule, leads, radii, score_bounds, scores, straight_scores
from .vote_objective import VoteObjective

BATCH = 256  # rows at a time by default
LARGEST = 1e4  # of a logit
SHOWN = 1024  # rows of hidden numbers at a time
FEW = 4  # parts that are tried when a model is made


class PartVote(nn.Module, Certifier):
    """A vote of T disjoint parts of the input, each of which a network sees by itself.

    The rule ``"duel"``, with l_t the logits of part t:

        d_t(y, c) = clip((l_t[y] - l_t[c]) / tau, -1, 1)        D(y, c) = sum over t of d_t(y, c)
        score of y = min over c != y of D(y, c)

    The answer is the class with the highest score, the lowest class at ties. d is antisymmetric, so that at most one
    class has a positive score. If none has, the answer is still the highest one; its radius is 0.

    Certificate. y stays the answer while m units of any value change, NaN and infinity among them, if for every c != y

        D(y, c) - (sum of the m largest of 1 + d_t(y, c)) > 0

    Proof. Parts are disjoint and the pixels of each are gathered, not masked, so m units touch m parts at most. A
    touched part says something finite, and its d_t is -1 at worst, which costs 1 + d_t. The others say what they said.
    So D(y, c) > 0 after the change, for every c: the score of y is positive, and that of c at most D(c, y) < 0. A part
    in which all is frozen cannot be touched and costs nothing.

    Tight and not: each bound of D(y, c) is attained by some network. For two classes the radius is therefore exact,
    but for ties at 0. For more it is not: c may win its duel with y and still lose one with a third class. Nor does
    it use that a second change in the same part costs nothing more, or that one change may not make a part say the
    worst.

    Rounding. The logits of a part that nobody touches differ in their last bits from batch to batch. `radius` and
    `bounds` let each of them be off by ten times the largest difference of 28 rows, evenly spread over all, in batches
    of 256, 7 and 1 (rows are repeated if there are fewer), at least ten times the last bit of the largest logit. A row
    with a larger logit than these is allowed as much more. `rounding` is the most that a row was allowed. That is
    measured, not proven: no bound is known for any network. The sums, the model's and those here, may be off by
    ``2 * T * (T + 2)`` last bits of 1 besides. TF32 is off; the statement does not hold under autocast.

    Other rules on the same logits, with whole numbers, where y wins a tie with c > y, for which ``>= 0`` is enough:
        ``"hard"``: d_t is the sign of l_t[y] - l_t[c], the limit of small tau.
        ``"plurality"``: each part votes for its largest logit. d_t(y, c) = [votes y] - [votes c], and the same
            certificate, which is exact here, as c needs only more votes than y.
        ``"run-off"``: the two classes with most votes go into a second round, in which each part votes for the one with
            the larger logit [Hammoudeh24] [Rezaei23]. Scores are votes, those of the second round on top of T.

    In training mode the result is ``(n, classes + 1)``: the mean over parts of their log-probabilities, and the
    logarithm of what is missing to a sum of 1. Its cross-entropy is exactly the mean of those of the parts; the train
    accuracy in the log is too low, as the class that is missing may be the largest. In eval mode it is the scores,
    ``(n, classes)``.

    Args:
        network: ``network(parts, place)`` gives the logits ``(m, classes)`` of parts ``(m, channels, h, w)``, or
            ``(m, numbers)`` where the partition has no pictures, channel by channel. place ``(m,)`` int64 says which
            part each is: of every row all of them in turn, or some. Logits are clamped to +-10,000, and NaN becomes 0.
        partition: the parts.  tau: the gap of logits that counts as a whole vote of a duel, from 1e-6 to 20,000.
        mirrored: average the logits with those of the mirrored image, in eval mode. Part (i, j) is matched with the
            part of the mirrored image that holds the same pixels, so that a pixel still touches one part.

    Raises ValueError if logits of a part change with pixels of another, which is tried with a few parts of a random row
    when the model is made, and with all parts of a given row when rows are certified.
    """

    index: Tensor
    match: Tensor | None
    owner: Tensor

    def __init__(
        self, network: nn.Module, partition: Partition, *, rule: Rule = "duel", tau: float = 0.5, mirrored: bool = False
    ) -> None:
        super().__init__()
        _check_rule("rule", rule)
        # Below, float32 may lose it in a sum; above, no logits lie that far apart.
        if isinstance(tau, bool) or not isinstance(tau, int | float) or not 1e-6 <= tau <= 2 * LARGEST:
            raise ValueError(f"tau must be a number from 1e-6 to {2 * LARGEST:,.0f}, got {tau!r}")
        if not isinstance(partition, Partition):
            raise ValueError(f"partition must be a certify.Partition, got {partition!r}")
        self.network, self.partition, self.rule, self.tau = network, partition, rule, float(tau)
        self.mirrored, self.parts = mirrored, partition.parts
        self.passes = self.forwards = self.parts * (2 if mirrored else 1) * getattr(network, "passes", 1)
        weight = next(self.network.parameters(), torch.empty(0))
        # Beyond the last pixel, where a part has none, a 0 is put.
        dealt = torch.where(partition.index < 0, partition.pixels, partition.index)
        for name, value in (("index", dealt), ("owner", partition.owner)):
            self.register_buffer(name, value.to(weight.device), persistent=False)
        self.register_buffer("match", partition.mirror().to(weight.device) if mirrored else None, persistent=False)
        if not weight.is_meta:
            drawn = torch.rand(1, *partition.shape, generator=torch.Generator().manual_seed(0), device="cpu")
            self._check_network((2 * drawn - 1).to(weight), FEW)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, *shape)``."""
        logits: Tensor = self.part_logits(x)
        if not self.training:
            return scores(logits, self.rule, self.tau)
        mean = F.log_softmax(logits, 2).mean(1)
        # Where all parts are certain nothing is missing, and the logarithm must stay finite.
        sure = mean.logsumexp(1, keepdim=True).clamp_max(-torch.finfo(mean.dtype).eps)
        return torch.cat((mean, torch.log(-torch.expm1(sure))), 1)

    def part_logits(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """What each part says: ``(n, parts, classes)``.  x: ``(n, *shape)``.

        chosen: ``(n, some)`` int64, the parts of each row that are asked; default: all.
        """
        if self.match is None or self.training:
            return self._say(x, chosen)
        n, views = x.shape[0], torch.cat((x, x.flip(-1)))  # not len(x), which torch.export takes for a constant
        said = self._say(views, None if chosen is None else torch.cat((chosen, self.match[chosen])))
        mirrored = said[n:].index_select(1, self.match) if chosen is None else said[n:]
        return (said[:n] + mirrored) / 2

    def scores(self, logits: Tensor, *, straight: bool = False) -> Tensor:
        """The scores ``(n, classes)`` for logits of parts. straight: with the gradient of a duel that clips nothing."""
        found = scores(logits, self.rule, self.tau)
        if not straight:
            return found
        other = straight_scores(logits, self.tau)
        return found.detach() + (other - other.detach())

    def leads(self, logits: Tensor, y: Tensor) -> Tensor:
        """What each part says for y ``(n,)`` against each class, in [-1, 1]: ``(n, parts, classes)``."""
        return leads(logits, y, self.rule, self.tau, 0.0)

    def _say(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        self._check_shape(x)
        pixels = x.flatten(2) if x.ndim == 4 else x.unsqueeze(1)
        if self.index.numel() > self.partition.pixels:
            pixels = F.pad(pixels, (0, 1))
        # Gathered, not multiplied by a mask: a NaN elsewhere would come through.
        if chosen is None:
            seen = pixels.index_select(2, self.index.flatten()).unflatten(2, self.index.shape).transpose(1, 2)
            place = torch.arange(self.parts, device=x.device).repeat(x.shape[0])
        else:
            at = self.index[chosen]  # (n, some, *part)
            flat = at.flatten(1).unsqueeze(1).expand(-1, pixels.shape[1], -1)
            seen, place = pixels.gather(2, flat).unflatten(2, at.shape[1:]).transpose(1, 2), chosen.flatten()
        seen = seen.flatten(0, 1) if self.index.ndim == 3 else seen.flatten(2).flatten(0, 1)
        logits = cast(Tensor, self.network(seen, place))
        if logits.ndim != 2 or logits.shape[0] != place.shape[0] or logits.shape[1] < 2:
            form = f"({len(place)}, classes) with 2 classes or more"
            raise ValueError(f"network must give logits {form} for {len(place)} parts, got {describe(logits)}")
        bounded: Tensor = logits.nan_to_num(0.0).clamp(-LARGEST, LARGEST)
        return bounded.reshape(-1, self.parts if chosen is None else chosen.shape[1], logits.shape[1])

    def under(self, rule: Rule) -> Self:
        """The same network under another rule."""
        _check_rule("method", rule)
        other = copy(self)
        other.rule = rule
        return other

    def limit(self, x: Tensor, ball: L0Ball) -> int:
        """All units if some row is frozen in so many parts that those left do not count."""
        # A row of whose T parts all agree has T - 2 m left. Only in whole numbers 0 is enough.
        most = (self.parts - (self.rule == "duel")) // 2
        return most if int(self._reached(x, ball).sum(1).min()) > most else self._units(ball)

    def check(self, x: Tensor, ball: L0Ball) -> None:
        self._read(x, ball, FEW)  # without the passes that try all parts and measure rounding

    def prepare(self, x: Tensor, ball: L0Ball, draws: Draws, batch: int | None) -> Preparation:  # noqa: ARG002
        batch = check_count("batch", BATCH if batch is None else batch)
        reached, classes = self._read(x, ball, self.parts)
        delta, slack = self._allowed(x)

        def found(at: Tensor, y: Tensor) -> Tensor:
            logits = self.part_logits(x[at])
            right, logits = scores(logits, self.rule, self.tau).argmax(1) == y, logits.double()
            several = radii(logits, y, reached[at], self.rule, self.tau, delta(logits), slack)
            several = torch.where(several == self.parts, self._units(ball), several)
            return torch.where(right, several, -1)

        return Preparation(classes, batch, found)

    def bounds(self, x: Tensor, ball: L0Ball) -> tuple[Tensor, Tensor]:
        if self.rule == "run-off":
            raise ValueError('model must have another rule for bounds of its scores, got "run-off"')
        reached, _ = self._read(x, ball, self.parts)
        delta, slack = self._allowed(x)
        with torch.no_grad(), dense_products(tf32=False):
            places = torch.arange(len(x), device=x.device).split(BATCH)
            given = [(self.part_logits(x[at]).double(), ball.budget, reached[at]) for at in places]
            found = [score_bounds(*these, self.rule, self.tau, delta(these[0]), slack) for these in given]
        lower, upper = zip(*found, strict=True)
        return torch.cat(lower), torch.cat(upper)

    def _read(self, x: Tensor, ball: L0Ball, most: int) -> tuple[Tensor, int]:
        """Which parts can be touched, ``(n, parts)`` bool, and the number of classes; raises as `prepare`.

        most: see `_check_network`.
        """
        check_votes(self, x)
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"x must be float32 or float64, in which votes are counted, got {describe(x)}")
        classes = self._check_network(x[:1], most)
        first = torch.zeros(1, dtype=torch.int64, device=x.device)
        ball.part(x, first).count(x[:1], x[:1])  # raises if the ball does not fit
        return self._reached(x, ball).expand(len(x), -1), classes

    def _reached(self, x: Tensor, ball: L0Ball) -> Tensor:
        """Parts with a number that is not frozen: ``(n, parts)`` bool, or ``(1, parts)``."""
        self._check_shape(x)
        mutable = ball.box(x)[2]
        mutable = mutable.expand(torch.broadcast_shapes(mutable.shape, (1, *x.shape[1:])))
        pixels = mutable.any(1).flatten(1) if x.ndim == 4 else mutable
        found = torch.zeros(len(pixels), self.parts, dtype=torch.int64, device=x.device)
        return found.index_add(1, self.owner, pixels.long()) > 0

    def _check_shape(self, x: Tensor) -> None:
        shape = self.partition.shape
        if x.shape[1:] != shape:
            raise ValueError(f"x must have shape (n, {', '.join(map(str, shape))}), got {describe(x)}")

    def _units(self, ball: L0Ball) -> int:
        return self.partition.pixels if ball.unit == "pixel" else math.prod(self.partition.shape)

    @torch.no_grad()
    def _allowed(self, x: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
        """How far logits ``(n, parts, classes)`` of untouched parts may be off, ``(n, 1, 1)``, and sums of the duel."""
        rows = x[torch.arange(256, device=x.device) * len(x) // 256]
        with dense_products(tf32=False):
            whole, some = self.part_logits(rows)[4::9], rows[4::9]
            apart = [torch.cat([self.part_logits(few) for few in some.split(size)]) for size in (1, 7)]
        eps, largest = torch.finfo(whole.dtype).eps, float(whole.abs().max())
        seen = max(float((one - whole).abs().max()) for one in apart)
        self._rounding = least = 10 * max(seen, eps * largest)

        def delta(logits: Tensor) -> Tensor:
            found = least * (logits.abs().amax((1, 2), keepdim=True) / (largest or 1.0)).clamp(min=1.0)
            self._rounding = max(self._rounding or 0.0, float(found.max()))
            return found

        return delta, 2 * self.parts * (self.parts + 2) * eps

    @torch.no_grad()
    def _check_network(self, x: Tensor, most: int) -> int:
        """The number of classes; raises ValueError if the network looks at more than a part.

        x: one row.  most: parts that are tried, evenly spread over all.
        """
        training = [module for module in self.network.modules() if module.training]
        tried = torch.arange(0, self.parts, -(-self.parts // most), device=x.device)
        chosen = None if len(tried) == self.parts else tried.unsqueeze(0)
        try:
            self.network.eval()
            before = self._say(x, chosen)
            # Two parts differ in some bit of their numbers: each is left alone once while the other changes: a little,
            # a lot, as a pixel of any value may carry far through a small weight, and to NaN, which passes even a 0.
            for bit, value, far in product(range((len(tried) - 1).bit_length()), (0, 1), (1, 1e6, math.nan)):
                turned = torch.arange(len(tried), device=x.device) >> bit & 1 == value
                changed = torch.zeros(self.parts, dtype=torch.bool, device=x.device).index_fill(0, tried[turned], True)
                pixels = changed[self.owner].view(1, *x.shape[2:] or x.shape[1:])
                after = self._say(torch.where(pixels, far * (0.37 - x), x), chosen)
                moved = ((after - before).abs() > 1e-4 * (1 + before.abs().max())).any(2)[0]
                if len(wrong := (moved & ~turned).nonzero()):
                    said = f"part {int(tried[wrong[0]])} changes with pixels of others"
                    raise ValueError(f"network must see one part at a time, but {said}")
        finally:
            for module in training:
                module.training = True
        return before.shape[2]

    def extra_repr(self) -> str:
        names = ("parts", "rule", "tau", "mirrored")
        return ", ".join((f"shape={self.partition.shape}", *(f"{name}={getattr(self, name)!r}" for name in names)))


class PartitionEnsemble(PartVote):
    """Feature partition aggregation [Hammoudeh24]: pixel i goes to part ``i % parts``.

    The base sees whole images, in which the pixels of all other parts are 0, the middle of the range of images. Its
    objective shows it one part of each row in a step.

    Differs from [Hammoudeh24]: one network for all parts. That is as sound against changed pixels; only against changed
    training rows each part needs its own. Images are moved before the parts are taken, so that a part sees other pixels
    in each epoch, and nothing is erased.

    Args:
        base: gives the logits of ``(n, *shape)``.
        shape: of one row, ``(channels, height, width)`` or ``(d,)``.
        parts: at most the number of pixels.
    """

    objective: ClassVar[VoteObjective] = VoteObjective(0, mix=0.0, smoothing=0.2, seen=1)

    def __init__(self, base: nn.Module, shape: Sequence[int], parts: int, *, rule: Rule = "run-off") -> None:
        partition = Partition.dealt(shape, parts)
        super().__init__(Hidden(base, partition), partition, rule=rule)


class Hidden(nn.Module):
    """Shows a network whole rows, in which all but the numbers of a part are 0."""

    index: Tensor

    def __init__(self, base: nn.Module, partition: Partition) -> None:
        super().__init__()
        self.base, self.shape, self.pixels = base, partition.shape, partition.pixels
        index = torch.where(partition.index < 0, partition.pixels, partition.index)
        device = next(base.parameters(), torch.empty(0)).device
        self.register_buffer("index", index.to(device), persistent=False)

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # the loop would be one for this number of rows
            return cast(Tensor, self.base(self._rows(parts, place)))
        # A few at a time: a row becomes as many rows as there are parts.
        some = zip(parts.split(SHOWN), place.split(SHOWN), strict=True)
        return torch.cat([cast(Tensor, self.base(self._rows(*few))) for few in some])

    def _rows(self, parts: Tensor, place: Tensor) -> Tensor:
        at = self.index[place].unsqueeze(1)
        numbers = parts.unflatten(1, (-1, at.shape[2]))
        # One pixel more, for the places where a part has none.
        rows: Tensor = numbers.new_zeros(*numbers.shape[:2], self.pixels + 1).scatter(2, at.expand_as(numbers), numbers)
        return rows[:, :, :-1].reshape(-1, *self.shape)


def _check_rule(name: str, rule: str) -> None:
    if rule not in get_args(Rule):
        raise ValueError(f"{name} must be one of {', '.join(get_args(Rule))}, got {rule!r}")


def check_votes(model: nn.Module, x: Tensor) -> None:
    """Raises ValueError unless a model that counts votes can certify these rows."""
    if any(module.training for module in model.modules()):
        raise ValueError("model must be in eval mode, and it is in training mode: call model.eval()")
    if not isinstance(x, Tensor) or x.ndim not in (2, 4) or not len(x) or not bool(x.isfinite().all()):
        raise ValueError(f"x must be (n, d) or (n, channels, height, width), finite and n > 0, got {describe(x)}")
