"""The trimmed product in plain torch: any device, no compiler, at most one block of products in memory."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .checks import check_counts
from .reference import products

BLOCK_ELEMENTS = 1 << 20


def ascending(terms: Tensor) -> Tensor:
    """Sorted along the last dimension."""
    if terms.device.type == "cpu" and not terms.requires_grad:
        return torch.from_numpy(np.sort(terms.numpy(), -1))  # an order of magnitude faster than torch here
    return terms.sort(-1).values


def thresholds(terms: Tensor, top: int, bottom: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cuts ``high, low, ties_high, ties_low``, each ``(...)`` for terms ``(..., d)``.

    high is the top-th largest term, low the bottom-th smallest; ties_* count the removed terms equal to the cut.
    With ``top=0`` high is +inf and ties_high 0; likewise low.
    """
    high = terms.new_full(terms.shape[:-1], torch.inf)
    cuts, ties = [high, -high], [torch.zeros_like(high, dtype=torch.int32)] * 2
    for side, count in enumerate((top, bottom)):
        if count:
            removed = terms.topk(count, dim=-1, largest=side == 0).values
            cuts[side] = removed[..., -1]
            ties[side] = (removed == removed[..., -1:]).sum(-1, dtype=torch.int32)
    return cuts[0], cuts[1], ties[0], ties[1]


def between(terms: Tensor, high: Tensor, low: Tensor, ties_high: Tensor, ties_low: Tensor) -> Tensor:
    """True at the terms that stay, given the cuts of `thresholds`: ``(..., d)``."""
    # Among terms tied with both cuts the top side takes the lowest indices, the bottom side the next ones.
    first = torch.where(high == low, ties_high, 0)
    high, low, ties_high, ties_low, first = (t.unsqueeze(-1) for t in (high, low, ties_high, ties_low, first))
    at_high, at_low = terms == high, terms == low
    # torch would count in int64, which doubles the traffic.
    rank_high, rank_low = (at.cumsum(-1, dtype=torch.int32) for at in (at_high, at_low))
    gone = (terms > high) | (at_high & (rank_high <= ties_high))
    gone |= (terms < low) | (at_low & (rank_low > first) & (rank_low <= first + ties_low))
    return ~gone


def keep_mask(terms: Tensor, top: int, bottom: int) -> Tensor:
    """False at the ``top`` largest and ``bottom`` smallest entries of the last dimension: ``(..., d)``.

    At ties the lowest index is removed first, the top side before the bottom side.
    """
    check_counts(top, bottom, terms.shape[-1])
    return between(terms, *thresholds(terms, top, bottom))


def blocks(x: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and outputs whose products fit in one block."""
    pairs = max(1, BLOCK_ELEMENTS // max(1, x.shape[1]))
    rows = min(weight.shape[0], pairs)
    samples = max(1, pairs // max(1, rows))
    for b in range(0, x.shape[0], samples):
        for o in range(0, weight.shape[0], max(1, rows)):
            yield slice(b, b + samples), slice(o, o + rows)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, top: int, bottom: int, keep_cuts: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output ``(n, out)``, cuts and ties ``(2, out, n)``, both empty unless keep_cuts, and an empty tensor."""
    n, rows = x.shape[0], weight.shape[0]
    out = x.new_empty(n, rows)
    shape = (2, rows, n) if keep_cuts else (2, 0, 0)
    cuts = x.new_empty(shape)
    ties = torch.empty(shape, dtype=torch.int32, device=x.device)
    for b, o in blocks(x, weight):
        terms = products(x[b], weight[o])
        high, low, ties_high, ties_low = thresholds(terms, top, bottom)
        undefined = terms.isnan().any(-1)
        total = terms.where(between(terms, high, low, ties_high, ties_low), 0.0).sum(-1)
        out[b, o] = total.masked_fill_(undefined, torch.nan)
        if keep_cuts:
            cuts[0, o, b], cuts[1, o, b] = high.masked_fill(undefined, torch.nan).T, low.T
            ties[0, o, b], ties[1, o, b] = ties_high.T, ties_low.T
    if bias is not None:
        out += bias
    return out, cuts, ties, ties.new_empty(0)


def backward(grad: Tensor, saved: Sequence[Tensor], to_x: bool, to_weight: bool) -> tuple[Tensor, Tensor]:
    """Gradients ``(n, in)`` and ``(out, in)`` through the kept terms; one that is not wanted is empty.

    saved: x, weight, order, bound, cuts, ties, walked.
    """
    x, weight, _, _, cuts, ties, _ = saved
    grad_x = torch.zeros_like(x) if to_x else x.new_empty(0)
    grad_weight = torch.zeros_like(weight) if to_weight else x.new_empty(0)
    for b, o in blocks(x, weight):
        terms = products(x[b], weight[o])
        high, low, ties_high, ties_low = (t.T for t in (cuts[0, o, b], cuts[1, o, b], ties[0, o, b], ties[1, o, b]))
        undefined = high.isnan()
        gone = ~between(terms, high, low, ties_high, ties_low) & ~undefined.unsqueeze(-1)
        del terms
        upstream = grad[b, o].masked_fill(undefined, torch.nan).unsqueeze(-1)
        if to_x:
            grad_x[b] += (upstream * weight[o]).masked_fill_(gone, 0.0).sum(1)
        if to_weight:
            grad_weight[o] += (upstream * x[b].unsqueeze(1)).masked_fill_(gone, 0.0).sum(0)
    return grad_x, grad_weight
