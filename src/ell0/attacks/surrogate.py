"""Gradients for the backward pass of an attack, where a removed term or a clipped number has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from ..nn import InputClamp, InputTruncation, TruncatedLinear

__all__ = ["Vote", "is_vote", "surrogate_gradients"]


class Vote(Protocol):
    """A module that adds up what disjoint parts of its input say, as `certify.PartVote`.

    parts: their number.  owner: ``(pixels,)`` int64, the part of each pixel.
    """

    parts: int
    owner: Tensor
    training: bool

    def forward(self, x: Tensor, /) -> Tensor:
        """The scores, ``(n, classes)``."""

    def part_logits(self, x: Tensor, /) -> Tensor:
        """What each part says: ``(n, parts, classes)``. A pixel changes what its own part says, and nothing else."""

    def scores(self, logits: Tensor, /, *, straight: bool = False) -> Tensor:
        """``(n, classes)``, from the logits of parts. straight: the same with a gradient to every part."""

    def leads(self, logits: Tensor, y: Tensor, /) -> Tensor:
        """What each part says for y ``(n,)`` against each class, in [-1, 1]: ``(n, parts, classes)``."""


def is_vote(module: object) -> TypeGuard[Vote]:
    """Whether a module has all that a `Vote` has. From Python 3.12 on isinstance overlooks buffers, as owner is."""
    return all(hasattr(module, name) for name in ("parts", "owner", "training", "part_logits", "scores", "leads"))


@contextmanager
def surrogate_gradients(model: object) -> Iterator[None]:
    """Inside, layers that truncate or clamp, and votes, give their exact values with another gradient to their input.

        d out[b, o] / d x[b, i] = w[o, i], that of the layer that removes nothing

    An `InputTruncation` and an `InputClamp` pass the gradient on unchanged, beyond the ends of the clamp too: from
    there a number can come back. Parameters keep their ordinary gradients. A `Vote` in eval mode has a gradient to
    every part, also to one that can say no more. Nothing changes for a model that is not an ``nn.Module``. Afterwards
    the layers are as they were; uses may be nested.
    """
    kinds = (TruncatedLinear, InputTruncation, InputClamp)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [layer for layer in modules if isinstance(layer, kinds) or is_vote(layer)]
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            weight = layer.weight.detach() if isinstance(layer, TruncatedLinear) else None
            redirected = partial(_voted, layer) if is_vote(layer) else partial(_forward, weight)
            layer.__dict__["forward"] = partial(redirected, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


def _voted(vote: Vote, ordinary: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ordinary(x) if vote.training else vote.scores(vote.part_logits(x), straight=True)


def _forward(weight: Tensor | None, ordinary: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # The values come from the ordinary forward, bit for bit, and with them the gradients to its parameters.
    return _Redirect.apply(ordinary(x.detach()), x, weight)  # type: ignore[no-any-return]


class _Redirect(torch.autograd.Function):
    """A value as it is, with a gradient to x: that of the value, times the weight if there is one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.weight = weight
        # A view could not be changed in place, as the ReLU behind a layer may do.
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        return grad, grad if ctx.weight is None else grad @ ctx.weight, None
