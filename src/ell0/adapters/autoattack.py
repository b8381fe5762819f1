"""AutoAttack's shape: our evaluation called as AutoAttack is, and attacks with ``perturb`` inside `ell0.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.contract import Model
from ..evaluation import Entry, Evaluation, evaluate
from ..threat import L0Ball, Unit
from .judging import theirs as judged

__all__ = ["SparseAutoAttack", "theirs"]


class SparseAutoAttack:
    """`ell0.evaluate` called as AutoAttack is; ``eps`` is the budget.

        adversary = SparseAutoAttack(model, norm="L0", eps=20)
        x_adv = adversary.run_standard_evaluation(x, y, bs=250)

    Args:
        version: ``"standard"``: the default attacks of `ell0.evaluate`; ``"saa"``: its preset.
        attacks_to_run: names, in place of those of the version.
        unit, low, high: as those of `L0Ball`.  verbose: print the evaluation.  log_path: append it to this file, too.
    """

    def __init__(
        self,
        model: Model,
        norm: str = "L0",
        eps: int = 20,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Collection[str] = (),
        version: str = "standard",
        *,
        log_path: Path | str | None = None,
        unit: Unit = "pixel",
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        if norm != "L0":
            raise ValueError(f"norm must be 'L0', got {norm!r}")
        if version not in ("standard", "saa"):
            raise ValueError(f"version must be 'standard' or 'saa', got {version!r}")
        self.model, self.seed, self.verbose, self.log_path = model, seed or 0, verbose, log_path
        self.ball = L0Ball(eps, unit, low=low, high=high)
        self.preset = "saa" if version == "saa" and not attacks_to_run else None
        self.attacks_to_run = list(attacks_to_run) or None
        self.evaluation: Evaluation | None = None

    def run_standard_evaluation(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False, state_path: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attacks all rows and gives ``(n, ...)`` attacked rows, those that stand unchanged; then their new labels."""
        self.evaluation = evaluate(
            self.model, x_orig, y_orig, self.ball, self.attacks_to_run, preset=self.preset, batch=bs, seed=self.seed,
            state_path=state_path,
        )  # fmt: skip
        if self.verbose:
            print(self.evaluation)
        if self.log_path is not None:
            with Path(self.log_path).open("a") as file:
                file.write(f"{self.evaluation}\n")
        x_adv = self.evaluation.x_adv
        if not return_labels:
            return x_adv
        with torch.no_grad():
            return x_adv, torch.cat([self.model(some).argmax(1) for some in x_adv.split(bs)])


def theirs(make: Callable[[nn.Module, L0Ball], Any], *, white_box: bool = False) -> Entry:
    """An attack with ``perturb(x, y)`` or ``run_standard_evaluation(x, y)`` for `ell0.evaluate`.

    make: gives it for a model and a ball. ``perturb`` returns the points, or a tuple with them; of several tensors of
        their shape the last counts.
    """

    def find(model: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
        attack = make(model, ball)
        found = attack.perturb(x, y) if hasattr(attack, "perturb") else attack.run_standard_evaluation(x, y)
        parts = found if isinstance(found, tuple) else (found,)
        return [part for part in parts if isinstance(part, Tensor) and part.shape == x.shape][-1]

    return judged(find, make.__qualname__, white_box)
