"""Gradients for the backward pass of an attack, where a removed term or a clipped number has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from ..nn import InputClamp, InputTruncation, TruncatedConv2d, TruncatedLinear
from ..ops import cuts
from ..ops.blocked import BLOCK_ELEMENTS, thresholds
from ..ops.conv import gradients, pixel_terms, trim_places
from ..ops.reference import products

__all__ = ["Surrogate", "surrogate_gradients"]

Surrogate = Literal["straight", "soft"]

Rule = Callable[[Tensor, Tensor], Tensor]
"""The gradient to the input of a layer, from the gradient to its output and the input."""

TEMPERATURE = 0.5
"""Width of the soft threshold, as a share of the distance between the two cuts."""


@contextmanager
def surrogate_gradients(model: object, kind: Surrogate | None) -> Iterator[None]:
    """Inside, layers of the model that truncate or clamp give their exact values with another gradient to their input.

        straight:  d out[b, o] / d x[b, i] = w[o, i], that of the layer that removes nothing
        soft:      the same times sigmoid((high - u) / T) * sigmoid((u - low) / T), where u = w[o, i] * x[b, i], high
                   and low are the cuts of the sum b, o, and T = TEMPERATURE * (high - low)

    An `InputClamp` lets the gradient through as it is, beyond its ends too: from there a number can come back.
    For a `TruncatedConv2d` b is a sample and a position; with unit "pixel" u is the term of the pixel that i is in.
    The layers are those of an ``nn.Module``, `TruncatedLinear`, `TruncatedConv2d`, `InputTruncation` and `InputClamp`;
    their parameters keep their ordinary gradients. None, a model without such layers and a model that is no
    ``nn.Module``: nothing changes. The layers come back as they were; uses may be nested, and the innermost decides.
    """
    if kind is not None and kind not in get_args(Surrogate):
        raise ValueError(f'surrogate must be "straight", "soft" or None, got {kind!r}')
    layers = model.modules() if isinstance(model, nn.Module) and kind is not None else ()
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, TruncatedLinear | TruncatedConv2d | InputTruncation | InputClamp):
                stack.enter_context(_forward(layer, _rule(layer, soft=kind == "soft")))
        yield


@contextmanager
def _forward(layer: nn.Module, rule: Rule) -> Iterator[None]:
    """Gives one layer a forward of its own, and then back the state it was in."""
    ordinary, own = layer.forward, "forward" in layer.__dict__

    def forward(x: Tensor) -> Tensor:
        # The values come from the ordinary forward, bit for bit, and with them the gradients to its parameters.
        return _Redirect.apply(ordinary(x.detach()), x, rule)  # type: ignore[no-any-return]

    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own:
            layer.__dict__["forward"] = ordinary
        else:
            del layer.__dict__["forward"]


class _Redirect(torch.autograd.Function):
    """A value as it is, with a gradient to x that the rule makes of the gradient to the value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, rule: Rule) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rule = rule
        # A view could not be changed in place, as the ReLU behind a layer may do.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        return grad, ctx.rule(grad, x) if ctx.needs_input_grad[1] else None, None


def _rule(layer: TruncatedLinear | TruncatedConv2d | InputTruncation | InputClamp, soft: bool) -> Rule:
    if isinstance(layer, InputClamp):
        return lambda grad, _: grad
    weight, k = layer.weight.detach(), layer.k
    if isinstance(layer, TruncatedConv2d):
        if soft and k:
            return lambda grad, x: _soft_conv(grad, x.detach(), layer)
        where = vars(layer.geometry)
        return lambda grad, x: conv2d_input(x.shape, weight, grad, **where)
    if isinstance(layer, TruncatedLinear):
        if soft and k:
            return lambda grad, x: _soft_linear(grad, x.detach(), weight, k)
        return lambda grad, _: grad @ weight
    if soft and k:
        return lambda grad, x: _soft_input(grad, x.detach(), weight, k)
    return lambda grad, _: grad * weight


def _soft_linear(grad: Tensor, x: Tensor, weight: Tensor, k: int) -> Tensor:
    """``(..., in)`` for grad ``(..., out)`` and x ``(..., in)``, a block of products at a time."""
    shape, grad, x = x.shape, grad.reshape(-1, len(weight)), x.reshape(-1, x.shape[-1])
    high, low = cuts(x, weight, top=k, bottom=k)
    result = torch.zeros_like(x)
    rows = min(len(weight), max(1, BLOCK_ELEMENTS // shape[-1]))
    samples = max(1, BLOCK_ELEMENTS // (shape[-1] * rows))
    for b in (slice(i, i + samples) for i in range(0, len(x), samples)):
        for o in (slice(i, i + rows) for i in range(0, len(weight), rows)):
            share = _share(products(x[b], weight[o]), high[b, o, None], low[b, o, None])
            result[b] += ((grad[b, o, None] * weight[o]) * share).sum(1)
    return result.view(shape)


def _soft_conv(grad: Tensor, x: Tensor, layer: TruncatedConv2d) -> Tensor:
    """``(n, in, height, width)`` for grad ``(n, out, ...)`` and x of that shape, some receptive fields at a time."""
    weight, soft = layer.weight.detach(), _soft_features if layer.unit == "feature" else _soft_pixels
    parts = weight.flatten(2).chunk(layer.groups)
    rules = [lambda g, fields, *_, part=part: (soft(g[0], fields, part, layer.k), part) for part in parts]
    return gradients(grad.unsqueeze(0), x, weight, layer.geometry, layer.unit, rules, to_x=True, to_weight=False)[0]


def _soft_features(grad: Tensor, fields: Tensor, weight: Tensor, k: int) -> Tensor:
    """``(m, in, places)`` for grad ``(m, out)``, fields of that shape and weight ``(out, in, places)``."""
    return _soft_linear(grad, fields.flatten(1), weight.flatten(1), k).view_as(fields)


def _soft_pixels(grad: Tensor, fields: Tensor, weight: Tensor, k: int) -> Tensor:
    """The same where the channels of a pixel are one term."""
    terms = pixel_terms(fields, weight)
    _, high, low = trim_places(terms, k, k)
    return torch.einsum("pmo,ocp->mcp", grad * _share(terms, high, low), weight)


def _soft_input(grad: Tensor, x: Tensor, weight: Tensor, k: int) -> Tensor:
    """``(n, *features)`` for grad and x of that shape."""
    terms = products(x.flatten(1), weight.view(1, -1)).squeeze(1)
    high, low, *_ = thresholds(terms, k, k)
    return grad * weight * _share(terms, high.unsqueeze(1), low.unsqueeze(1)).view(x.shape)


def _share(terms: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """How far each term lies between the cuts, softly: 1 in the middle, 1/2 at a cut, 0 far outside."""
    # An eighth of the largest number: differences of two such numbers, and their sums, are still finite.
    limit = torch.finfo(terms.dtype).max / 8
    terms, high, low = (t.clamp(-limit, limit) for t in (terms, high, low))
    width = (TEMPERATURE * (high - low)).clamp(min=torch.finfo(terms.dtype).tiny)
    return torch.sigmoid((high - terms) / width) * torch.sigmoid((terms - low) / width)
