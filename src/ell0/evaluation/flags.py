"""Whether an evaluation can be trusted: claims are checked once more, and doubts become flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks import ATTACKS, Attack, declared
from ..attacks.contract import Victim
from ..attacks.surrogate import is_vote, surrogate_gradients
from ..nn import InputTruncation, TruncatedLinear
from ..parallel import Team
from ..threat import L0Ball
from ..wrapping import Model
from .state import State

PROBED = 64  # rows that show what kind of outputs a model gives
_BEATEN = 3.0  # points that other attacks may take from those by gradients alone before a flag is raised
_LATE = 0.01  # share of rows that may fall in the last tenth of the queries before a flag is raised
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
    """What a few forward passes say about a model.

    blind: 0 if it has a gradient; 1 if it has none of its own, but a surrogate for attacks of ell0; 2 if it has none.
    noise: the largest difference of a logit between two passes.
    softmaxed: rows are non-negative and sum to 1.  squashed: or all numbers, at least 16, lie in [0, 1].
    """

    blind: int
    noise: float
    random: bool
    softmaxed: bool
    squashed: bool

    @classmethod
    def of(cls, model: Model, x: Tensor) -> Probe:
        with torch.no_grad():
            logits, again = model(x[:PROBED]), model(x[:PROBED])
        noise = float((logits - again).abs().nan_to_num(nan=0.0, posinf=0.0).max())
        softmaxed = bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones_like(logits[:, 0]))
        squashed = not softmaxed and logits.numel() >= 16 and bool(((logits >= 0) & (logits <= 1)).all())
        random = not torch.allclose(logits, again, _SAME, _SAME)
        blind = 0 if _differentiable(model, x) else 1
        if blind:
            with surrogate_gradients(model):
                blind += not _differentiable(model, x)
        return cls(blind, noise, random, softmaxed, squashed)


def _differentiable(model: Model, x: Tensor) -> bool:
    leaf = x[:1].detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            logits = model(leaf)
            # Weights that ask for a gradient make the logits ask for one even where x has none.
            slope = torch.autograd.grad(logits.sum(), leaf, allow_unused=True) if logits.requires_grad else (None,)
    except RuntimeError:  # a model that leaves torch, through x.numpy() for one
        slope = (None,)
    return slope[0] is not None


def clean_pass(attacked: Attacked, batch: int, blind: int, team: Team) -> tuple[Tensor, Tensor, Tensor]:
    """Three ``(n,)``: margins in float64, whether misclassified, and what gradient is of no use to attacks.

    That is 0 if none; 1 if the model's own is zero or not finite; 2 if the surrogate is, too. From ``blind`` on.
    """

    def look(rows: Tensor) -> Tensor:
        seen = []
        for some in rows.split(batch):
            with attacked.victim(some) as victim:
                margin, wrong, useless = (
                    victim.margin.clone(),
                    victim.success.clone(),
                    torch.full_like(victim.labels, blind),
                )
                for kind in range(blind, 2):
                    if len(at := (useless == kind).nonzero().squeeze(1)):
                        slope = victim.slopes(victim.x[at], at, straight=kind > 0)[1].flatten(1)
                        useless[at] += (slope == 0).all(1) | ~slope.isfinite().all(1)
            seen.append(torch.stack([margin.double(), wrong.double(), useless.double()], 1))
        return torch.cat(seen)

    margin, wrong, useless = team.by_row(look, torch.arange(len(attacked.x), device="cpu")).unbind(1)
    return margin, wrong.bool(), useless.long()


def check_claims(attacked: Attacked, state: State, names: Sequence[str], batch: int, random: bool, team: Team) -> int:
    """Checks every broken row once more; raises a RuntimeError if a claim is wrong.

    Returns the number of successes that did not come back: all such of a model that answers by chance, otherwise those
    so near the boundary that rounding may take them to either side.
    """
    rows, far, false, missed = _claims(attacked, state, state.verdict > 0, batch, random, team)
    for claim, wrong in (("lies in the ball at its distance", far), ("is misclassified", false)):
        for row in rows[wrong].tolist():
            name = names[int(state.verdict[row]) - 1]
            raise RuntimeError(f"attack {name!r} says that its point for row {row} {claim}, which is not so")
    return int(missed.sum())


def unfounded(attacked: Attacked, state: State, fresh: State, batch: int, random: bool, team: Team) -> Tensor:
    """Rows of a state that was read, ``(n,)`` bool, that are not what their verdict says.

    A row is misclassified from the start, or not, as in a fresh state, unless the model answers by chance. The point of
    a broken row lies in the ball at its distance and is misclassified; that of any other is x.
    """
    first, attacks = fresh.verdict == 0, state.tried.shape[1]
    moved = (state.x_adv != fresh.x_adv).flatten(1).any(1).cpu()
    bad = (state.verdict < -1) | (state.verdict > attacks)
    bad |= (state.verdict <= 0) & (moved | (state.verdict != state.distance))
    bad |= torch.zeros_like(first) if random else (state.verdict == 0) != first
    rows, far, false, _ = _claims(attacked, state, (state.verdict > 0) & ~bad, batch, random, team)
    bad[rows] = far | false
    return bad


def _claims(
    attacked: Attacked, state: State, broken: Tensor, batch: int, random: bool, team: Team
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the rows that are broken, their numbers, and whether the point of each ``(m,)``

    does not lie in the ball at its distance; is classified rightly, by more than rounding; is classified rightly.
    """

    def look(rows: Tensor) -> Tensor:
        model, x, y, ball = attacked.part(rows)
        points = state.x_adv[rows.to(x.device)]
        far = ~ball.contains(x, points) | (ball.count(x, points).cpu() != state.distance[rows]).to(x.device)
        with attacked.victim(rows) as victim:
            missed = ~victim.errs(points, torch.arange(len(rows), device=x.device))
        false = missed.clone()
        if missed.any():
            # It is a lie if the label wins by more than rounding.
            with torch.no_grad():
                logits = torch.cat([model(some) for some in points[missed].split(PROBED)])
            labels = y[missed].long().unsqueeze(1)
            lead = logits.gather(1, labels).squeeze(1) - logits.scatter(1, labels, -torch.inf).amax(1)
            false[missed] = lead > _BOUNDARY * logits.abs().where(logits.isfinite(), 0.0).amax(1)
        return torch.stack([far, false & (not random), missed], 1)

    rows = broken.nonzero().squeeze(1)
    shares = team.gather(lambda: [look(some).cpu() for some in team.share(rows).split(batch) if len(some)])
    found = [torch.cat([torch.zeros(0, 3, dtype=torch.bool, device="cpu"), *share]) for share in shares]
    far, false, missed = team.whole(found).unbind(1)
    return rows, far, false, missed


@dataclass(frozen=True)
class Ran:
    """An attack that ran: its function under partials, if declared; whether it is white-box; its settings."""

    own: Attack[...] | None
    white_box: bool
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, attack: Callable[..., Any], white_box: bool) -> Ran:
        own, given = declared(attack), dict[str, Any]()
        while isinstance(attack, partial):
            given, attack = {**attack.keywords, **given}, attack.func
        return cls(own, white_box, {**(own.settings if own else {}), **given})

    @property
    def gradients_only(self) -> bool:
        """A white-box attack that is not declared is taken for one that uses gradients only."""
        return self.own.gradients_only if self.own else self.white_box

    @property
    def effort(self) -> str:
        """What to raise: ``queries to 3000``."""
        spends = next((key for key in ("queries", "steps") if key in self.settings), None)
        return f"{spends} to {3 * self.settings[spends]}" if spends else "its effort"


def raised(
    model: object,
    probe: Probe,
    state: State,
    attacks: Mapping[str, Ran],
    blocked: Sequence[str],
    useless: Tensor,
    lost: int,
    doubt: str | None,
    least: int,
) -> tuple[str, ...]:
    """The flags of an evaluation, a sentence each that ends with what to do.

    attacks: in the order of the columns.  blocked: attacks left out.  useless: as of `clean_pass`.
    lost: errors that did not come back at the end.  doubt: about the box.  least: budget of the curve above 0.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    truncated = any(isinstance(layer, TruncatedLinear | InputTruncation) and layer.k for layer in modules)
    ran = {attack.own for attack in attacks.values()}
    aware = probe.blind == 2 or any(attack and attack.knows_truncation for attack in ran)
    votes = any(map(is_vote, modules))
    knows_votes = any(attack and attack.knows_votes for attack in ran)
    default = all(attack in ran for attack in ATTACKS.values() if attack.cascade is not None)
    refuted = int((state.refuted & (state.verdict < 0)).sum())
    n, searches = len(state.verdict), [name for name, attack in attacks.items() if not attack.gradients_only]
    search = f"raise the queries of {', '.join(searches)}" if searches else "run sparse_rs too"
    none = "zero or NaN gradients: the model gives no gradient at all, no white-box attack ran"
    left_out = f": {', '.join(blocked)} left out" if blocked else ""
    flat, dark = (int((useless == kind).sum()) for kind in (1, 2))
    some = "zero or NaN gradients: at {} of {} rows, where {}; {}".format
    random = f"random outputs: two forward passes differ, and {lost} errors did not come back at the end"
    soft = "softmaxed outputs: rows are non-negative and sum to 1, so their logarithms were attacked"
    taken = f"claims taken back: {refuted} rows were broken in a query, but not in the attack's own check"
    near = f"on the boundary: {lost} broken rows lie so near that the model did not err on them at the end"
    tight = "outputs within [0, 1], as those of sigmoids: attacks are blind where they round to 0 or 1"
    beaten, left = _beaten(state, attacks)
    late, more = _late(state, attacks)
    always = {
        doubt or "": doubt,
        "model left in train mode: it was evaluated in eval mode; call model.eval()": any(m.training for m in modules),
        f"{random}; fix its seed, or average its outputs": probe.random,
        f"{soft}; give logits, which do not round to 0 and 1": probe.softmaxed and not probe.blind,
        f"{taken}; they count as standing, add them to the uncertainty": refuted,
        f"{near}; they count as broken, add them to the uncertainty": lost and not probe.random,
    }
    # Where nothing stands, even with the least budget, no attack could break more.
    stronger = {} if ((state.verdict >= 0) & (state.distance <= least)).all() else {
        f"{none}{left_out}; {search}": probe.blind == 2,
        some(dark, n, "white-box attacks are blind", search): dark and probe.blind < 2,
        some(flat, n, "attacks by gradients follow a surrogate", search): flat,
        f"{tight}; give logits, or ell0.wrap(model, probabilities=True)": probe.squashed and not (probe.blind or votes),
        "truncated model: no attack that ran looks into truncated layers; run adaptive too": truncated and not aware,
        "votes of parts without an attack made for them: run adaptive too": votes and not knows_votes,
        f"{left}; run the default attacks": beaten > _BEATEN and not default,
        f"not converged: {late} rows fell in the last tenth of an attack; raise {more}": late >= max(3, _LATE * n),
    }  # fmt: skip
    return tuple(sentence for sentence, holds in {**always, **stronger}.items() if holds)


def _late(state: State, attacks: Mapping[str, Ran]) -> tuple[int, str]:
    """Rows that fell late, and what to raise."""
    efforts: dict[str, list[str]] = {}
    for column, (name, attack) in enumerate(attacks.items()):
        if (state.late & (state.verdict == column + 1)).any():
            efforts.setdefault(attack.effort, []).append(name)
    more = " and ".join(f"{effort} ({', '.join(names)})" for effort, names in efforts.items())
    return int((state.late & (state.verdict > 0)).sum()), more


def _beaten(state: State, attacks: Mapping[str, Ran]) -> tuple[float, str]:
    """Per cent of rows that search broke after an attack by gradients alone had tried with that budget; and by whom."""
    alone = [attack.gradients_only for attack in attacks.values()]
    names, gradient = list(attacks), torch.tensor(alone, device="cpu")
    if not gradient.any():
        return 0.0, ""
    broken = (state.verdict > 0).nonzero().squeeze(1)
    column, tried = state.verdict[broken] - 1, state.tried[broken]
    own = tried.gather(1, column.unsqueeze(1)).squeeze(1)
    beaten = ~gradient[column] & (tried[:, gradient].amax(1) >= own)
    winners = ", ".join(names[i] for i in column[beaten].unique().tolist())
    losers = ", ".join(name for name, only in zip(names, alone, strict=True) if only)
    share = 100 * int(beaten.sum()) / len(state.verdict)
    left = f"{winners} broke rows that gradients alone ({losers}) had left standing"
    return share, f"search beats gradients by {share:.1f} points: {left}"
