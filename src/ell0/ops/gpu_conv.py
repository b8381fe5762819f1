"""The trimmed convolution on the GPU where a receptive field fits in the registers: nothing is unfolded.

Launches the kernels of `triton_kernels._fields`, as `gpu` does those of the trimmed product and under its promises:
nothing waits for the device, and two runs give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import gpu, networks
from .reference import Geometry

FIELD = 32
"""Numbers of the largest receptive field that is taken, those of all its channels; an int32 has a bit for each."""

AT_ONCE = 1 << 26
"""Outputs, or numbers of x, that one launch takes: 256 MiB of marks in the backward pass."""

LARGEST = 1 << 30
"""Numbers of a sample, its output or the weight: places are int32, also those that a last block has too many."""

TRIM = MARK = (128, 16, 4)  # positions and outputs to a program, warps
WEIGHTS = (128, 4096, 4)  # positions at a time and positions to a program, warps
INPUTS = (128, 4)  # positions to a program, warps


def serves(x: Tensor, weight: Tensor, size: tuple[int, int]) -> bool:
    """Whether these kernels take the convolution of x with this weight; size: height and width of the output."""
    return weight.device.type == "cuda" and fits(x, weight, size) and gpu.available()


def fits(x: Tensor, weight: Tensor, size: tuple[int, int]) -> bool:
    """Whether dtype and shapes are ones that the kernels take."""
    each = max(x.shape[1:].numel(), len(weight) * size[0] * size[1], weight.numel())
    small = 0 < weight.numel() <= FIELD * len(weight) and x.numel() > 0 and each <= LARGEST
    return weight.dtype == torch.float32 and small


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    counts: Sequence[int],
    geometry: Geometry,
    unit: str,
) -> None:
    """Writes ``out (pairs, n, out, height, width)``, of any strides; counts: top and bottom of each pair in turn."""
    x, weight, bias = _dense(x), weight.contiguous(), None if bias is None else bias.contiguous()
    for samples in _samples(x, out):
        work = _Work(x[samples], weight, _factors(weight, unit), geometry, unit)
        for p, room in enumerate(out[:, samples]):
            work.trim(bias, room, counts[2 * p], counts[2 * p + 1])


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    geometry: Geometry,
    unit: str,
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight for ``grad (pairs, n, out, height, width)``; one that is not wanted is empty."""
    grad_x = x.new_empty((grad.shape[0], *x.shape) if to_x else (1, 0))
    grad_weight: list[Tensor] = []
    x, weight, grad = _dense(x), weight.contiguous(), grad.contiguous()
    for samples in _samples(x, grad):
        work = _Work(x[samples], weight, _factors(weight, unit), geometry, unit)
        for p, upstream in enumerate(grad[:, samples]):
            marks = work.mark(upstream, counts[2 * p], counts[2 * p + 1])
            if to_weight:
                grad_weight.append(work.weights(upstream, marks))
            if to_x:
                work.inputs(upstream, marks, grad_x[p, samples])
    # In float64: there may be many parts to add up.
    summed = torch.cat(grad_weight).sum(0, dtype=torch.float64) if to_weight else weight.new_empty(0)
    return grad_x[0] if len(grad_x) == 1 else grad_x.sum(0), summed.to(weight.dtype)


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _factors(weight: Tensor, unit: str) -> Tensor:
    """The weight as the terms are made of it: pixels are added up in float64."""
    return weight.double() if unit == "pixel" else weight


def _samples(x: Tensor, out: Tensor) -> Iterator[slice]:
    """Some samples at a time, for ``out (pairs, n, ...)``."""
    count = max(1, AT_ONCE // max(x.shape[1:].numel(), out.shape[2:].numel()))
    for n in range(0, len(x), count):
        yield slice(n, min(n + count, len(x)))


@dataclass(frozen=True)
class _Work:
    """One batch and one weight."""

    x: Tensor  # contiguous, or with the channels last
    weight: Tensor  # contiguous
    factors: Tensor  # what `_factors` makes of it
    geometry: Geometry
    unit: str

    def trim(self, bias: Tensor | None, out: Tensor, top: int, bottom: int) -> None:
        """Writes ``out (n, out, height, width)``."""
        block, outs, warps = TRIM
        shares, programs = self._shares(out, block, outs)
        gpu.launch(
            "trim_fields", (programs,),
            (self.x, self.factors, out if bias is None else bias, out, *self._sizes(out), shares, *_strides(self.x),
             *_strides(out), *self._moves),
            _constants(self.weight.shape[1:], self.unit, top, bottom, HAS_BIAS=bias is not None, BLOCK=block,
                       OUTS=outs),
            {"num_warps": warps},
        )  # fmt: skip

    def mark(self, grad: Tensor, top: int, bottom: int) -> Tensor:
        """For ``grad (n, out, height, width)`` which terms stay: bits, in that shape."""
        block, outs, warps = MARK
        shares, programs = self._shares(grad, block, outs)
        marks = torch.empty_like(grad, dtype=torch.int32)
        gpu.launch(
            "mark_fields", (programs,),
            (self.x, self.factors, marks, *self._sizes(grad), shares, len(self.weight), *_strides(self.x),
             *self._moves),
            _constants(self.weight.shape[1:], self.unit, top, bottom, BLOCK=block, OUTS=outs), {"num_warps": warps},
        )  # fmt: skip
        return marks

    def weights(self, grad: Tensor, marks: Tensor) -> Tensor:
        """Parts of the gradient to the weight, ``(parts, *weight.shape)``."""
        block, span, warps = WEIGHTS
        spans = -(-grad.numel() // grad.shape[1] // span)
        parts = self.weight.new_empty(spans, *self.weight.shape)
        gpu.launch(
            "field_weights", (spans * len(self.weight),),
            (grad, marks, self.x, parts, *self._sizes(grad), len(self.weight), *_strides(self.x), *self._moves),
            _constants(self.weight.shape[1:], self.unit, BLOCK=block, SPAN=span), {"num_warps": warps},
        )  # fmt: skip
        return parts

    def inputs(self, grad: Tensor, marks: Tensor, out: Tensor) -> None:
        """Writes the gradient to x, contiguous."""
        block, warps = INPUTS
        groups = self.geometry.groups
        positions = out.numel() // out.shape[1]
        gpu.launch(
            "field_inputs", (-(-positions // block) * groups,),
            (grad, marks, self.weight, out, positions, *self._sizes(grad)[1:], len(self.weight), groups, *self._moves),
            _constants(self.weight.shape[1:], self.unit, BLOCK=block), {"num_warps": warps},
        )  # fmt: skip

    @property
    def _moves(self) -> tuple[int, ...]:
        return (*self.geometry.stride, *self.geometry.padding, *self.geometry.dilation)

    def _sizes(self, out: Tensor) -> tuple[int, ...]:
        """Positions, outputs of a group, sizes of an output and of a sample; out: ``(n, out, height, width)``."""
        outs = len(self.weight)
        return (out.numel() // outs, outs // self.geometry.groups, *out.shape[2:], *self.x.shape[2:])

    def _shares(self, out: Tensor, block: int, outs: int) -> tuple[int, int]:
        """Programs that share a block of positions, and programs in all."""
        positions, each, *_ = self._sizes(out)
        shares = self.geometry.groups * -(-each // outs)
        return shares, -(-positions // block) * shares


def _strides(tensor: Tensor) -> tuple[int, ...]:
    # That of a single row can be anything.
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@functools.cache
def _constants(
    kernel: torch.Size, unit: str, top: int | None = None, bottom: int | None = None, **others: int
) -> tuple[tuple[str, Any], ...]:
    """In the order in which the kernels name them; kernel: what the weight of an output has."""
    shape = (*zip(("CHANNELS", "KH", "KW"), kernel, strict=True), ("PIXELS", unit == "pixel"))
    if top is None or bottom is None:
        return (*shape, *others.items())
    network = networks.partition(kernel[1:].numel() if unit == "pixel" else kernel.numel(), top, bottom)
    return (*shape, ("TOP", top), ("BOTTOM", bottom), ("COMPARATORS", network), *others.items())
