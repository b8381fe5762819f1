"""A model of two classes, and an attack that knows it and notes its calls; for the tests of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from balls import within_one
from ell0.attacks import AttackResult
from ell0.evaluation import Entry, Evaluation, evaluate
from ell0.threat import L0Ball

N, D = 40, 8
WEIGHT = torch.tensor([2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])


class Line(nn.Module):
    """Two classes on either side of a plane; small whole numbers, so a row's answer is the same in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.clone())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum(1)
        return torch.stack([-score, score], 1)


class Spy:
    """A minimal attack that knows `Line`: sends the heaviest coordinates over, to within ``reach`` of the budget.

    It notes each call; a row with a wrong label, as in the rehearsal, is broken at once and not noted.
    """

    def __init__(self, reach: int = D, only: Callable[[Tensor], Tensor] | None = None, dies_after: int = -1) -> None:
        self.reach, self.only, self._dies_after = reach, only, dies_after
        self.calls: list[tuple[int, list[int]]] = []
        self.keys: set[int] = set()

    def __call__(
        self,
        model: Callable[[Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        ball: L0Ball,
        *,
        generator: torch.Generator,
        rows: Tensor,
        strength: int = 1,
    ) -> AttackResult:
        wrong = model(x).argmax(1) != y
        if not wrong.all():
            if len(self.calls) == self._dies_after:
                raise KeyboardInterrupt
            self.calls.append((ball.budget, rows.tolist()))
            self.keys.add(generator.initial_seed())
        side = (2.0 * y - 1).unsqueeze(1)
        # WEIGHT falls, so the first coordinates are the best ones; (n, D + 1, D), the first m of them changed.
        changed = torch.arange(D) < torch.arange(D + 1).unsqueeze(1)
        points = torch.where(changed, -side.unsqueeze(1), x.unsqueeze(1))
        errs = torch.stack([model(points[:, m]).argmax(1) != y for m in range(D + 1)], 1)
        need = errs.float().argmax(1)
        success = errs.any(1) & (need <= min(self.reach, ball.budget)) | wrong
        if self.only is not None:
            success &= self.only(rows)
        x_adv = torch.where(success.unsqueeze(1), points[torch.arange(len(x)), need], x)
        distance = torch.where(success, ball.count(x, x_adv), -1)
        queries = torch.where(wrong, 0, strength * (1 + rows % 3))
        return AttackResult(x_adv, success, distance, queries, x_adv, torch.zeros(len(x)))


class Odd(nn.Module):
    """`Line` with something odd about it."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.line, self.odd = Line(), odd

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.line(x)
        if self.odd == "zero":
            return logits.sign() + 0 * x[:, :1]
        if self.odd == "nan":
            return logits + 0 * (x[:, :1] * 0).sqrt()
        if self.odd == "numpy":
            score = torch.from_numpy(self.line.weight.detach().numpy() * x.numpy()).sum(1, keepdim=True)
            return score * torch.tensor([-1.0, 1.0])
        if self.odd == "detached":
            return torch.as_tensor(self.line(x.detach()))
        if self.odd == "random":
            return logits + torch.rand_like(logits) / 100
        if self.odd == "sigmoid":
            return torch.cat([logits, logits[:, :1] - 3], 1).sigmoid()
        if self.odd == "softmax":
            return logits.softmax(1)
        return logits


def rows(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 2, (n,), generator=generator)
    x = (2 * y - 1).unsqueeze(1) * torch.randint(-1, 5, (n, D), generator=generator) / 4
    y[:3] = 1 - y[:3]
    return x, y


def evaluate_line(**changed: Any) -> Evaluation:
    x, y = rows()
    usual = {"model": Line(), "x": x, "y": y, "ball": within_one(2), "attacks": {"spy": Entry(Spy(), False)}}
    return evaluate(**{**usual, **changed})


def assert_same(one: Evaluation, other: Evaluation) -> None:
    for name in ("verdict", "distance", "x_adv", "queries", "tried"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.flags == other.flags


def two_spies(**options: Any) -> tuple[Spy, Spy, dict[str, Entry]]:
    first, second = Spy(reach=1), Spy(**options)
    return first, second, {"first": Entry(first, True), "second": Entry(second, False)}


def each_row(calls: list[tuple[int, list[int]]]) -> list[tuple[int, int]]:
    return [(budget, row) for budget, rows in calls for row in rows]
