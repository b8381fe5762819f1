"""Training on the certificate of votes of parts: the loss of each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common import check_count

TrainedVotes = Literal["softmax", "tanh"]
_MIX_RISES, _BUDGET_RISES = (0.1, 0.4), (0.1, 0.5)  # shares of the epochs at which they begin and end to rise
_SCALE = 16  # of the mean margin, so that a softmax over the classes can be sure
_STEPS = 16  # in which the weight of the bound rises: each weight is a loss of its own, which a graph is captured for


@dataclass(frozen=True)
class VoteObjective:
    """An objective of `ell0.train.fit`: every part learns the label, and the vote its bound at ``budget`` changes.

        (1 - mix) * mean over parts t of cross_entropy(l_t, y) + mix * cross_entropy(z, y)
        z_y = 0,  z_c = -16 / T * (sum_t d_t(y, c) - sum of the budget largest 1 + d_t(y, c))

    with the logits l_t of T parts. The bracket is the least by which y beats c if ``budget`` parts may say anything: a
    changed part moves d_t to -1 at worst. A part prefers y to c by

        softmax:  p_t[y] - p_t[c],  p_t = softmax(l_t / tau)     (plurality)
        tanh:     tanh((l_t[y] - l_t[c]) / tau)                  (the duel, with a gradient everywhere)

    A part that has learnt nothing yet has no vote worth defending. In the first tenth of the epochs mix and budget are
    0; then the mix rises until two fifths of the epochs, and the budget until half of them.

    Args:
        budget: parts that may be changed in the end, below half of the parts.
        mix: weight of the bound's loss in the end, in [0, 1].
        votes: how a part prefers one class to another; the certificate may use another rule.
        tau: > 0.
        smoothing: of the labels, in [0, 1), for single parts.
        seen: parts of each row that a step looks at, drawn anew in every step from torch's own generator, as dropout
            does; the budget counts in proportion. Parts of an image say much the same, so that a step on few of them
            teaches nearly as much and costs less. Default: all.
    """

    budget: int
    mix: float = 0.8
    votes: TrainedVotes = "softmax"
    tau: float = 1.0
    smoothing: float = 0.1
    seen: int | None = None

    bf16: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_count("budget", self.budget, least=0))
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix must lie in [0, 1], got {self.mix!r}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must lie in [0, 1), got {self.smoothing!r}")
        if self.votes not in get_args(TrainedVotes):
            raise ValueError(f'votes must be "softmax" or "tanh", got {self.votes!r}')
        if not 0 < self.tau < math.inf:
            raise ValueError(f"tau must be a finite number > 0, got {self.tau!r}")
        if self.seen is not None:
            object.__setattr__(self, "seen", check_count("seen", self.seen))

    def at(self, epoch: int, epochs: int) -> VoteObjective:
        """The loss of an epoch: the objective with the mix and the budget that it has then."""
        done = epoch / (epochs - 1) if epochs > 1 else 1.0
        mix = self.mix * round(_STEPS * _risen(done, _MIX_RISES)) / _STEPS
        budget = round(self.budget * _risen(done, _BUDGET_RISES))
        return replace(self, budget=budget, mix=mix)

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises ValueError unless the model is a vote of enough parts."""
        with torch.no_grad():
            self(model, x, y)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The scores z ``(n, classes)``, whose largest is y where the bound holds, and the loss, a scalar.

        Nothing waits for the device, so that a CUDA graph can hold it.
        """
        part_logits = getattr(model, "part_logits", None)
        if not callable(part_logits):
            raise ValueError(f"model must be a vote of parts, which has part_logits, got {type(model).__name__}")
        logits, parts = self._ask(part_logits, getattr(model, "parts", None), x)
        if 2 * self.budget >= parts:
            raise ValueError(f"budget must be below half of the parts, got budget={self.budget} with {parts} parts")
        seen = logits.shape[1]
        label = y.view(-1, 1, 1).expand(-1, seen, 1)
        worst = worst_margins(self._preferences(logits, label), self.budget * seen / parts) * (parts / seen)
        scores = -_SCALE / parts * worst.scatter(1, y.unsqueeze(1), 0.0)
        loss = F.cross_entropy(logits.flatten(0, 1), label.flatten(), label_smoothing=self.smoothing)
        if self.mix:
            loss = (1 - self.mix) * loss + self.mix * F.cross_entropy(scores, y)
        return scores, loss

    def _ask(self, part_logits: Callable[..., Tensor], parts: int | None, x: Tensor) -> tuple[Tensor, int]:
        """What the parts that are seen say, ``(n, seen, classes)`` in float32 or float64, and how many there are."""
        if self.seen is None:
            logits = part_logits(x)
        elif parts is None:
            raise ValueError("seen must be None for a model that does not say how many parts it has")
        elif self.seen > parts:
            raise ValueError(f"seen must be at most the number of parts, got seen={self.seen} with {parts} parts")
        else:
            chosen = torch.rand(len(x), parts, device=x.device).topk(self.seen, 1).indices
            logits = part_logits(x, chosen)
        return logits.float() if logits.dtype == torch.bfloat16 else logits, parts or logits.shape[1]

    def _preferences(self, logits: Tensor, label: Tensor) -> Tensor:
        """d_t(y, c), ``(n, parts, classes)``; 0 at y."""
        logits = logits / self.tau
        if self.votes == "softmax":
            logits = logits.softmax(2)
        ahead = logits.gather(2, label) - logits
        return ahead if self.votes == "softmax" else ahead.tanh()


def worst_margins(preferences: Tensor, budget: float) -> Tensor:
    """The least that preferences ``(n, parts, classes)`` in [-1, 1] sum to, if ``budget`` parts may say anything.

    Of the last one the fraction counts that the budget has.
    """
    whole = math.ceil(budget)
    largest = preferences.topk(whole, 1).values
    # The sum of the largest 1 + d is that of the largest d, plus their number.
    worst = preferences.sum(1) - largest.sum(1) - budget
    return worst if whole == budget else worst + (whole - budget) * largest[:, -1]


def _risen(done: float, ramp: tuple[float, float]) -> float:
    """The share of the way from the begin of a ramp to its end."""
    begin, end = ramp
    return 1.0 if done >= end else 0.0 if done <= begin else (done - begin) / (end - begin)
