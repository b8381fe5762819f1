"""Gradients for the backward pass of an attack, where a removed term or a clipped number has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from ..nn import InputClamp, InputTruncation, TruncatedConv2d, TruncatedLinear

__all__ = ["surrogate_gradients"]

InputGradient = Callable[[Tensor, Tensor], Tensor]
"""The gradient to the input of a layer, from the gradient to its output and the input."""


@contextmanager
def surrogate_gradients(model: object) -> Iterator[None]:
    """Inside, layers of the model that truncate or clamp give their exact values with another gradient to their input.

        d out[b, o] / d x[b, i] = w[o, i], that of the layer that removes nothing

    An `InputClamp` passes the gradient on unchanged, beyond its ends too: from there a number can come back.
    The layers are the `TruncatedLinear`, `TruncatedConv2d`, `InputTruncation` and `InputClamp` of an ``nn.Module``;
    their parameters keep their ordinary gradients. Nothing changes for any other model. Afterwards the layers are as
    they were; uses may be nested.
    """
    kinds = (TruncatedLinear, TruncatedConv2d, InputTruncation, InputClamp)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [layer for layer in modules if isinstance(layer, kinds)]
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.__dict__["forward"] = partial(_forward, layer.forward, _straight(layer))
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


def _forward(ordinary: Callable[[Tensor], Tensor], gradient: InputGradient, x: Tensor) -> Tensor:
    # The values come from the ordinary forward, bit for bit, and with them the gradients to its parameters.
    return _Redirect.apply(ordinary(x.detach()), x, gradient)  # type: ignore[no-any-return]


class _Redirect(torch.autograd.Function):
    """A value as it is, with a gradient to x that is made of the gradient to the value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, gradient: InputGradient) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        # A view could not be changed in place, as the ReLU behind a layer may do.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        return grad, ctx.gradient(grad, x) if ctx.needs_input_grad[1] else None, None


def _straight(layer: TruncatedLinear | TruncatedConv2d | InputTruncation | InputClamp) -> InputGradient:
    if isinstance(layer, InputClamp) or layer.weight is None:
        return lambda grad, _: grad
    weight = layer.weight.detach()
    if isinstance(layer, TruncatedConv2d):
        return lambda grad, x: conv2d_input(x.shape, weight, grad, **layer.geometry)
    return lambda grad, _: grad @ weight if isinstance(layer, TruncatedLinear) else grad * weight
