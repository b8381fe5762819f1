"""Whether an evaluation can be trusted: claims are checked once more, and doubts become flags."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..attacks.contract import Model, Victim
from ..parallel import Team
from ..threat import L0Ball
from .state import State

_PROBED = 64  # rows that show what kind of outputs a model gives
_BEATEN = 3.0  # points that other attacks may take from those by gradients alone before a flag is raised
_SAME = 1e-5  # relative and absolute difference of logits that rounding explains
# A point on the decision boundary may fall to either side in another batch: so much of the largest logit is rounding.
_BOUNDARY = 1e-3


@dataclass(frozen=True)
class Attacked:
    """A model and the rows on which it is attacked. x: ``(n, ...)``.  y: ``(n,)``."""

    model: Model
    x: Tensor
    y: Tensor
    ball: L0Ball

    def part(self, rows: Tensor, budget: int | None = None) -> tuple[Model, Tensor, Tensor, L0Ball]:
        """The first four arguments of an attack on some rows."""
        rows = rows.to(self.x.device)
        return self.model, self.x[rows], self.y[rows], self.ball.part(self.x, rows, budget)

    def victim(self, rows: Tensor) -> Victim:
        return Victim(*self.part(rows), finite=False)


@dataclass(frozen=True)
class Probe:
    """What a few forward passes say about a model. noise: the largest difference of a logit between two of them."""

    differentiable: bool
    noise: float
    random: bool
    softmaxed: bool

    @classmethod
    def of(cls, model: Model, x: Tensor) -> Probe:
        with torch.no_grad():
            logits, again = model(x[:_PROBED]), model(x[:_PROBED])
        noise = float((logits - again).abs().nan_to_num(nan=0.0, posinf=0.0).max())
        softmaxed = bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones_like(logits[:, 0]))
        random = not torch.allclose(logits, again, _SAME, _SAME)
        return cls(_differentiable(model, x[:1]), noise, random, softmaxed)


def _differentiable(model: Model, x: Tensor) -> bool:
    leaf = x.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            logits = model(leaf)
            # Weights that ask for a gradient make the logits ask for one even where x has none.
            return logits.requires_grad and torch.autograd.grad(logits.sum(), leaf, allow_unused=True)[0] is not None
    except RuntimeError:  # a model that leaves torch, through x.numpy() for one
        return False


def clean_pass(attacked: Attacked, batch: int, differentiable: bool, team: Team) -> tuple[Tensor, Tensor, Tensor]:
    """Three ``(n,)``: margins in float64, which rows are misclassified, and where the margin has no useful gradient.

    A gradient that is zero or not finite is of no use.
    """
    rows = torch.arange(len(attacked.x), device="cpu")
    parts = team.gather(partial(_clean_part, attacked, batches(team.share(rows), batch), differentiable))
    margin, wrong, blind = (team.whole(shares) for shares in zip(*parts, strict=True))
    return margin, wrong, blind


def _clean_part(attacked: Attacked, some: Sequence[Tensor], differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
    margin, wrong, blind = [], [], []
    for rows in some:
        with attacked.victim(rows) as victim:
            margin.append(victim.margin.double().cpu().clone())
            wrong.append(victim.success.cpu())
            if differentiable:
                slope = victim.slopes(victim.x, torch.arange(len(rows), device=victim.x.device))[1].flatten(1)
                blind.append(((slope == 0).all(1) | ~slope.isfinite().all(1)).cpu())
            else:
                blind.append(torch.ones(len(rows), dtype=torch.bool, device="cpu"))
    return torch.cat(margin), torch.cat(wrong), torch.cat(blind)


def check_claims(attacked: Attacked, state: State, names: tuple[str, ...], batch: int, random: bool, team: Team) -> int:
    """Checks every broken row once more; raises a RuntimeError if a claim is wrong.

    Returns the number of errors that do not come back and are no lie: all of a model that answers by chance, otherwise
    those so near the boundary that rounding may take them to either side.
    """
    rows = team.share((state.verdict > 0).nonzero().squeeze(1))
    return sum(team.gather(partial(_check_part, attacked, state, names, batches(rows, batch), random)))


def _check_part(attacked: Attacked, state: State, names: tuple[str, ...], some: Sequence[Tensor], random: bool) -> int:
    lost = 0
    for rows in some:
        model, x, y, ball = attacked.part(rows)
        points = state.x_adv[rows.to(x.device)]
        false = ~ball.contains(x, points) | (ball.count(x, points).cpu() != state.distance[rows]).to(x.device)
        _blame("lies in the ball at its distance", false, rows, state, names)
        with attacked.victim(rows) as victim:
            missed = ~victim.errs(points, torch.arange(len(rows), device=x.device))
        lost += int(missed.sum())
        if missed.any() and not random:
            false = missed.clone()
            false[missed] = _clear(model, points[missed], y[missed].long())
            _blame("is misclassified", false, rows, state, names)
    return lost


def _clear(model: Model, points: Tensor, y: Tensor) -> Tensor:
    """Whether the label wins by more than rounding: ``(m,)`` bool."""
    with torch.no_grad():
        logits = torch.cat([model(some) for some in points.split(_PROBED)])
    own = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    others = logits.scatter(1, y.unsqueeze(1), -torch.inf).amax(1)
    return own - others > _BOUNDARY * logits.abs().where(logits.isfinite(), 0.0).amax(1)


def _blame(claim: str, false: Tensor, rows: Tensor, state: State, names: tuple[str, ...]) -> None:
    if false.any():
        row = int(rows[false.cpu()][0])
        name = names[int(state.verdict[row]) - 1]
        raise RuntimeError(f"attack {name!r} says that its point for row {row} {claim}, which is not so")


def model_flags(model: Model) -> list[str]:
    """Before the evaluation changes its mode."""
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        return ["model left in train mode: it was evaluated in eval mode"]
    return []


def output_flags(probe: Probe, left_out: Collection[str], blind: int, lost: int, n: int) -> list[str]:
    """What the gradients and logits of the model are like."""
    flags = []
    if not probe.differentiable:
        which = f": {', '.join(left_out)} left out" if left_out else ""
        flags.append(f"zero or NaN gradients: the model gives no gradient at all, no white-box attack ran{which}")
    elif blind:
        flags.append(f"zero or NaN gradients: at {blind} of {n} rows, where white-box attacks are blind")
    if probe.random:
        flags.append(f"random outputs: two forward passes differ, and {lost} errors did not come back at the end")
    if probe.softmaxed:
        flags.append("softmaxed outputs: rows are non-negative and sum to 1, gradients may vanish; give logits")
    return flags


def doubt_flags(state: State, near: int) -> list[str]:
    """Rows whose verdict hangs on rounding or chance. near: broken ones on the boundary."""
    flags = []
    if refuted := int((state.refuted & (state.verdict < 0)).sum()):
        taken = f"claims taken back: {refuted} rows were broken in a query, but not in the attack's own check"
        flags.append(f"{taken}; they count as standing")
    if near:
        lie = f"on the boundary: {near} broken rows lie so near that the model did not err on them at the end"
        flags.append(f"{lie}; they count as broken")
    return flags


def beaten_flags(state: State, gradients_only: dict[str, bool]) -> list[str]:
    """Whether attacks that search broke many rows that an attack by gradients alone had tried with the same budget.

    gradients_only: for each attack, in the order of the columns, whether it uses nothing but gradients.
    """
    names, gradient = list(gradients_only), torch.tensor(list(gradients_only.values()), device="cpu")
    if not gradient.any():
        return []
    broken = (state.verdict > 0).nonzero().squeeze(1)
    column, tried = state.verdict[broken] - 1, state.tried[broken]
    own = tried.gather(1, column.unsqueeze(1)).squeeze(1)
    beaten = ~gradient[column] & (tried[:, gradient].amax(1) >= own)
    points = 100 * int(beaten.sum()) / len(state.verdict)
    if points <= _BEATEN:
        return []
    winners = ", ".join(names[i] for i in column[beaten].unique().tolist())
    losers = ", ".join(name for name, alone in gradients_only.items() if alone)
    return [f"search beats gradients by {points:.1f} points: {winners} broke rows that {losers} had left standing"]


def batches(rows: Tensor, batch: int) -> list[Tensor]:
    """Some rows, at most ``batch`` at a time."""
    return list(rows.split(batch)) if len(rows) else []
