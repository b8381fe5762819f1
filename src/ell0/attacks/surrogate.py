"""Gradients for the backward pass of an attack, where a removed term or a clipped number has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from ..nn import InputClamp, InputTruncation, TruncatedConv2d, TruncatedLinear

__all__ = ["Surrogate", "surrogate_gradients"]

Surrogate = Literal["straight"]

InputGradient = Callable[[Tensor, Tensor], Tensor]
"""The gradient to the input of a layer, from the gradient to its output and the input."""


@contextmanager
def surrogate_gradients(model: object, kind: Surrogate | None) -> Iterator[None]:
    """Inside, layers of the model that truncate or clamp give their exact values with another gradient to their input.

        straight:  d out[b, o] / d x[b, i] = w[o, i], that of the layer that removes nothing

    An `InputClamp` passes the gradient on unchanged, beyond its ends too: from there a number can come back.
    The layers are the `TruncatedLinear`, `TruncatedConv2d`, `InputTruncation` and `InputClamp` of an ``nn.Module``;
    their parameters keep their ordinary gradients. Nothing changes if ``kind`` is None, or for any other model.
    Afterwards the layers are as they were; uses may be nested.
    """
    if kind not in (None, "straight"):
        raise ValueError(f'surrogate must be "straight" or None, got {kind!r}')
    layers = model.modules() if isinstance(model, nn.Module) and kind is not None else ()
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, TruncatedLinear | TruncatedConv2d | InputTruncation | InputClamp):
                stack.enter_context(_forward(layer, _straight(layer)))
        yield


@contextmanager
def _forward(layer: nn.Module, gradient: InputGradient) -> Iterator[None]:
    """Gives one layer a forward of its own, and then back the state it was in."""
    ordinary, own = layer.forward, "forward" in layer.__dict__

    def forward(x: Tensor) -> Tensor:
        # The values come from the ordinary forward, bit for bit, and with them the gradients to its parameters.
        return _Redirect.apply(ordinary(x.detach()), x, gradient)  # type: ignore[no-any-return]

    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own:
            layer.__dict__["forward"] = ordinary
        else:
            del layer.__dict__["forward"]


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
    if isinstance(layer, InputClamp):
        return lambda grad, _: grad
    weight = layer.weight.detach()
    if isinstance(layer, TruncatedConv2d):
        where = vars(layer.geometry)
        return lambda grad, x: conv2d_input(x.shape, weight, grad, **where)
    if isinstance(layer, TruncatedLinear):
        return lambda grad, _: grad @ weight
    return lambda grad, _: grad * weight
