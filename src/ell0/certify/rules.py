"""How parts vote: scores of the classes from the logits of each part, and what a few parts can do to them.

[Hammoudeh24] Z. Hammoudeh, D. Lowd, "Provable Robustness against a Union of L0 Adversarial Attacks", 2024.
[Rezaei23] K. Rezaei et al., "Run-Off Election: Improved Provable Defense against Data Poisoning Attacks", 2023.

Everywhere: logits ``(n, parts, classes)``, y ``(n,)`` int64, and delta, a number or ``(n, 1, 1)``, by how much a logit
of a part that nobody touches may be another than it is here, as it is computed in another batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["duel", "hard", "plurality", "run-off"]


def scores(logits: Tensor, rule: Rule, tau: float) -> Tensor:
    """The scores of the classes under a rule, ``(n, classes)``: the answer is the largest, the lowest class at ties."""
    if rule == "plurality":
        return tally(logits.argmax(2).T, logits.shape[2]).to(logits.dtype)
    if rule == "run-off":
        return run_off(logits).to(logits.dtype)
    if rule == "hard":
        return _worst_duels(logits, lambda gap: gap.sign().sum(1))
    return _worst_duels(logits, lambda gap: gap.clamp(-tau, tau).sum(1) / tau)


def straight_scores(logits: Tensor, tau: float) -> Tensor:
    """The scores of the duel, up to rounding, with the gradient that they have where no part is clipped."""
    return _worst_duels(logits, lambda gap: (gap + (gap.clamp(-tau, tau) - gap).detach()).sum(1) / tau)


def _worst_duels(logits: Tensor, duel: Callable[[Tensor], Tensor]) -> Tensor:
    """For each class the least of its duels.  duel: gaps ``(n, parts, some)`` -> sums over parts, antisymmetric."""
    worst = torch.full_like(logits[:, 0], torch.inf)
    for y in range(logits.shape[2] - 1):  # one by one: all pairs at once would take classes times the memory
        duels = duel(logits[:, :, y : y + 1] - logits[:, :, y + 1 :])
        own = torch.minimum(worst[:, y], duels.amin(1)).unsqueeze(1)
        worst = torch.cat((worst[:, :y], own, torch.minimum(worst[:, y + 1 :], -duels)), 1)
    return worst


def leads(logits: Tensor, y: Tensor, rule: Rule, tau: float, delta: Tensor | float) -> Tensor:
    """The least that each part says for y against each class while nobody touches it: ``(n, parts, classes)``."""
    if rule == "plurality":
        return _least_votes(logits, y, delta) - _most_votes(logits, delta)
    gap = logits.gather(2, y.view(-1, 1, 1).expand(-1, logits.shape[1], 1)) - logits - 2 * delta
    return gap.sign() if rule == "hard" else (gap / tau).clamp(-1, 1)


def _least_votes(logits: Tensor, y: Tensor, delta: Tensor | float) -> Tensor:
    """1 where a part votes for y in any case, ``(n, parts, 1)``."""
    own = y.view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    lowered = logits.scatter_add(2, own, (-2 * delta * torch.ones_like(own)).to(logits))
    return (lowered.argmax(2, keepdim=True) == own).to(logits.dtype)


def _most_votes(logits: Tensor, delta: Tensor | float) -> Tensor:
    """1 where a part may vote for a class, ``(n, parts, classes)``."""
    (best, first), raised = logits.max(2, keepdim=True), logits + 2 * delta
    order = torch.arange(logits.shape[2], device=logits.device)
    return ((raised > best) | ((raised == best) & (order <= first))).to(logits.dtype)


def lasts(leads: Tensor, reached: Tensor, need: Tensor) -> Tensor:
    """How many parts may say the worst, -1, against each class with more than ``need`` left: ``(n, classes)``.

    All m at once: the m parts that cost most are the first m of one sort. The number of parts where all may.
    leads: ``(n, parts, classes)``.  reached: ``(n, parts)`` bool, parts that can be touched.  need: ``(n, classes)``.
    """
    leads = leads.transpose(1, 2).contiguous()  # many times faster to sort
    costs = ((1 + leads) * reached.unsqueeze(1)).sort(2, descending=True).values
    left = leads.sum(2, keepdim=True) - costs.cumsum(2)
    return (left > need.unsqueeze(2)).long().cumprod(2).sum(2)


def radii(
    logits: Tensor, y: Tensor, reached: Tensor, rule: Rule, tau: float, delta: Tensor | float, slack: float
) -> Tensor:
    """Parts, of those reached, that may say anything while y stays the answer, which it now is: ``(n,)``.

    The number of parts where all of them may.  slack: what rounding may do to a sum of the duel.
    """
    parts, classes = logits.shape[1:]
    if rule == "run-off":
        # A part that may put two classes in another order counts as one that was touched.
        close = (logits.sort(2).values.diff(dim=2) <= 2 * delta) & (torch.as_tensor(delta, device=y.device) > 0)
        most = run_off_radius(logits, y) - close.any(2).sum(1)
        return torch.where(reached.sum(1) <= most, parts, most.clamp(min=0))
    order = torch.arange(classes, device=y.device)
    # Whole numbers have no rounding: y < c wins a tie at 0.
    need = torch.full_like(order, slack, dtype=logits.dtype) if rule == "duel" else -0.5 * (y.unsqueeze(1) < order)
    found = lasts(leads(logits, y, rule, tau, delta), reached, need.expand(len(y), -1))
    return found.scatter(1, y.unsqueeze(1), parts).amin(1)


def score_bounds(
    logits: Tensor, budget: int, reached: Tensor, rule: Rule, tau: float, delta: Tensor | float, slack: float
) -> tuple[Tensor, Tensor]:
    """Below and above the scores while ``budget`` parts, of those reached, say anything: two ``(n, classes)``."""

    def dearest(costs: Tensor) -> Tensor:
        return (costs * reached.unsqueeze(2)).topk(min(budget, costs.shape[1]), 1).values.sum(1)

    n, _, classes = logits.shape
    each = [torch.full((n,), y, device=logits.device) for y in range(classes)]
    if rule == "plurality":
        least, most = torch.cat([_least_votes(logits, y, delta) for y in each], 2), _most_votes(logits, delta)
        return least.sum(1) - dearest(least), most.sum(1) + dearest(1 - most)
    against = [leads(logits, y, rule, tau, delta) for y in each]
    # [row, y, c]: below D(y, c), and so -D(c, y).
    below = torch.stack([lead.sum(1) - dearest(1 + lead) for lead in against], 1) - (slack if rule == "duel" else 0)
    below.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    above = -below.transpose(1, 2)
    above.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return below.amin(2), above.amin(2)


def run_off(logits: Tensor) -> Tensor:
    """The votes ``(n, classes)`` int64, the winner's the most; those of the second round on top of all of the first."""
    parts, classes = logits.shape[1:]
    votes = tally(logits.argmax(2).T, classes)
    # The two classes with most votes, the lowest first at ties.
    final = (votes * classes - torch.arange(classes, device=votes.device)).topk(2).indices
    first = prefers(logits, final[:, 0]).sum(1).gather(1, final[:, 1:])
    return votes.scatter(1, final, parts + torch.cat((first, parts - first), 1))


def run_off_radius(logits: Tensor, y: Tensor) -> Tensor:
    """Parts that may answer anything while y, now the winner of the run-off, stays it: ``(n,)`` int64.

    The answer changes in two ways only     ([Rezaei23]):
        1. c wins the second round against y, for which c must have passed every third class in the first;
        2. two classes have passed y in the first. A part that goes over from y to one of them narrows the gap to it by
           2 and the gap to the other by 1, so this takes max(ceil(a / 2), ceil(b / 2), ceil((a + b) / 3)) parts for
           gaps a and b.
    """
    parts, classes = logits.shape[1:]
    votes, order = tally(logits.argmax(2).T, classes), torch.arange(classes, device=y.device)
    own, same = order == y.unsqueeze(1), torch.eye(classes, dtype=torch.bool, device=y.device)

    duel = (2 * prefers(logits, y).sum(1) - parts - (order < y.unsqueeze(1)).long()) // 2
    # [row, b, c]: how long class b stays ahead of c in the first round.
    stays = (votes.unsqueeze(2) - votes.unsqueeze(1) - (order < order.unsqueeze(1)).long()) // 2
    third = stays.masked_fill(own.unsqueeze(2) | same, -parts).amax(1)
    beaten = torch.maximum(duel, third).masked_fill(own, parts).amin(1)

    gaps = votes.gather(1, y.unsqueeze(1)) - votes + (y.unsqueeze(1) < order).long()
    gaps = gaps.masked_fill(own, 3 * parts)
    one, other = gaps.unsqueeze(2), gaps.unsqueeze(1)
    takes = torch.maximum(-(-torch.maximum(one, other) // 2), -(-(one + other) // 3))
    passed = takes.masked_fill(same, 2 * parts).flatten(1).amin(1) - 1
    return torch.minimum(beaten, passed)


def prefers(logits: Tensor, one: Tensor) -> Tensor:
    """Whether a part puts class ``one`` (n,) of a row above each class, the lowest first at ties, as logits."""
    mine = logits.gather(2, one.view(-1, 1, 1).expand(-1, logits.shape[1], 1))
    later = one.view(-1, 1, 1) < torch.arange(logits.shape[2], device=one.device)
    return (mine > logits) | ((mine == logits) & later)


def tally(answers: Tensor, classes: int) -> Tensor:
    """How many voters answer each class: ``(n, classes)`` int64.  answers: ``(voters, n)`` int64."""
    votes = torch.zeros(answers.shape[1], classes, dtype=torch.int64, device=answers.device)
    return votes.scatter_add_(1, answers.T, torch.ones_like(answers.T))
