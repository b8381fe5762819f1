"""The clipped product: every term of a sum is clipped. No sort, and at most one block of products in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .blocked import blocks
from .checks import check_clip, check_matrix
from .reference import products


def clipped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, clip: float) -> Tensor:
    """Linear layer whose terms are clipped before they are added up.

    out[b, o] = sum of min(max(x[b, i] * weight[o, i], -clip), clip) over i + bias[o]

    0 * inf is 0; a NaN in a sample or in a row of the weight makes that sample's or that row's outputs NaN. The
    gradient goes through the terms within the clip, to x, weight and bias.

    Args:
        x: ``(..., in)``.  weight: ``(out, in)``.  bias: ``(out,)``, added after clipping.  float32 or float64.
        clip: a number > 0.
    """
    x = check_matrix(x, weight, bias)
    check_clip(clip)
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _Clipped.apply(flat, weight, float(clip))
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class _Clipped(torch.autograd.Function):
    """``(n, out)`` for x ``(n, in)``; the backward pass computes the products again instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clip: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.clip = clip
        out = x.new_empty(len(x), len(weight))
        for b, o in blocks(x, weight):
            out[b, o] = products(x[b], weight[o]).clamp_(-clip, clip).sum(-1)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, _ = ctx.needs_input_grad
        grad_x = torch.zeros_like(x) if to_x else None
        grad_weight = torch.zeros_like(weight) if to_weight else None
        for b, o in blocks(x, weight):
            clipped = products(x[b], weight[o]).abs_() > ctx.clip
            upstream = grad[b, o].unsqueeze(-1)
            if grad_x is not None:
                grad_x[b] += (upstream * weight[o]).masked_fill_(clipped, 0.0).sum(1)
            if grad_weight is not None:
                # The term of an infinite input is clipped, or 0 because its weight is.
                part = (upstream * x[b].unsqueeze(1)).masked_fill_(clipped | x[b].isinf().unsqueeze(1), 0.0)
                grad_weight[o] += part.sum(0)
        return grad_x, grad_weight, None
