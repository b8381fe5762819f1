"""The definition of the trimmed product and of the trimmed convolution: slow and plain, it makes every product.

The other backends are tested against it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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


Geometry = Mapping[str, Any]  # stride, padding and dilation of a convolution, as F.unfold takes them


def fields(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """What each output sees, zero padding included: ``(n, 1, in, places, positions)``, in float64."""
    columns = F.unfold(x, weight.shape[2:], **geometry)
    return columns.view(len(x), 1, weight.shape[1], -1, columns.shape[-1]).double()


def conv_terms(x: Tensor, weight: Tensor, geometry: Geometry, unit: str) -> Tensor:
    """All terms of a convolution in the dtype of x, with 0 * inf = 0: ``(n, out, positions, terms)``.

    A term is a product, in the order of ``weight[o]``; with unit "pixel" the sum of a place's products over the
    channels, made in float64.
    """
    seen, rows = fields(x, weight, geometry), weight.flatten(2).unsqueeze(-1).double()
    nothing = ((seen == 0) & rows.isinf()) | (seen.isinf() & (rows == 0))
    every = (seen * rows).masked_fill(nothing, 0.0)
    terms = every.sum(2) if unit == "pixel" else every.flatten(2, 3)
    return terms.to(x.dtype).transpose(2, 3)


def trimmed_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, *, top: int, bottom: int, unit: str
) -> Tensor:
    """Sum of the kept terms plus bias, added up in float64: ``(n, out, positions)``, NaN where a term is."""
    terms = conv_terms(x, weight, geometry, unit)
    out = terms.double().where(kept(terms, top, bottom), 0.0).sum(-1).masked_fill(terms.isnan().any(-1), torch.nan)
    return out if bias is None else out + bias.double().unsqueeze(-1)


def conv_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stays: Tensor, geometry: Geometry, unit: str
) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight for ``grad (n, out, positions)``, through the terms that stay, in float64.

    stays: ``(n, out, positions, terms)``, True for all terms of an undefined output, whose grad is NaN.
    """
    seen, rows = fields(x, weight, geometry), weight.flatten(2).unsqueeze(-1).double()
    stays = stays.transpose(2, 3).unflatten(2, (1 if unit == "pixel" else rows.shape[1], rows.shape[2]))
    upstream = grad.double()[:, :, None, None]
    columns = (upstream * rows).where(stays, 0.0).sum(1).flatten(1, 2)
    to_x = F.fold(columns, x.shape[2:], weight.shape[2:], **geometry)
    return to_x, (upstream * seen).where(stays, 0.0).sum((0, -1)).view(weight.shape)
