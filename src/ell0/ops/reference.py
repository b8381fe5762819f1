"""The definition of the trimmed product: slow and plain, it makes every product.

The other backends are tested against it.
"""

import torch
from torch import Tensor


def products(x: Tensor, weight: Tensor) -> Tensor:
    """All terms ``x[..., i] * weight[o, i]`` in the dtype of x, with 0 * inf = 0: ``(..., out, in)``."""
    x = x.unsqueeze(-2)
    nothing = ((x == 0) & weight.isinf()) | (x.isinf() & (weight == 0))
    return (x * weight).masked_fill(nothing, 0.0)


def kept(terms: Tensor, top: int, bottom: int) -> Tensor:
    """True at the terms that stay: ``(..., d)``.

    The ``top`` largest are removed, then the ``bottom`` smallest of the rest; at ties the lowest index goes first.
    """
    largest_first = terms.argsort(dim=-1, descending=True, stable=True)
    gone = torch.zeros_like(terms, dtype=torch.bool).scatter_(-1, largest_first[..., :top], True)
    smallest_first = terms.argsort(dim=-1, stable=True)
    remains = ~gone.gather(-1, smallest_first)
    leaves = remains & (remains.cumsum(-1) <= bottom)
    return ~gone & ~torch.zeros_like(gone).scatter_(-1, smallest_first, leaves)


def trimmed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, top: int, bottom: int) -> Tensor:
    """Sum of the kept terms plus bias, added up in float64: ``(..., out)``.

    A NaN in a sample or in a row of the weight makes that sample's or that row's outputs NaN.
    """
    terms = products(x, weight)
    stays = kept(terms, top, bottom)
    out = terms.double().where(stays, 0.0).sum(-1)
    if bias is not None:
        out = out + bias.double()
    return out.masked_fill(terms.isnan().any(-1), torch.nan)


def gradients(grad: Tensor, x: Tensor, weight: Tensor, *, top: int, bottom: int) -> tuple[Tensor, Tensor]:
    """Gradients to x ``(n, in)`` and weight ``(out, in)`` for ``grad (n, out)``, through the kept terms, in float64.

    Where an output is NaN the choice of terms is undefined, and so is every gradient that output reaches.
    """
    terms = products(x, weight)
    undefined = terms.isnan().any(-1)
    stays = kept(terms, top, bottom) | undefined.unsqueeze(-1)
    grad = grad.double().masked_fill(undefined, torch.nan).unsqueeze(-1)
    to_x = (grad * weight.double()).where(stays, 0.0).sum(-2)
    to_weight = (grad * x.double().unsqueeze(-2)).where(stays, 0.0).flatten(0, -3).sum(0)
    return to_x, to_weight


def scale(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, top: int, bottom: int) -> Tensor:
    """Sum of |kept terms| plus |bias|, in float64: what an error of the output is measured against."""
    terms = products(x, weight)
    total = terms.double().abs().where(kept(terms, top, bottom), 0.0).sum(-1)
    return total if bias is None else total + bias.double().abs()
