"""Bounds through the layers behind the first: intervals forwards, linear functions backwards, rounding beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._first import rounding_share, slack
from ._network import AFFINE

Interval = tuple[Tensor, Tensor]
"""The least and the largest value of each number."""


def intervals(layers: Sequence[nn.Module], start: Interval) -> list[Interval]:
    """What goes into each layer, and what comes out of the last: interval bound propagation.

    An affine layer moves the centre and spreads the radius with the magnitudes of its weights; ReLU and max pooling
    rise with their input, so they take it end by end.
    """
    found = [start]
    for layer in layers:
        low, high = found[-1]
        if isinstance(layer, AFFINE):
            centre, radius = layer((low + high) / 2), _spread(layer, (high - low) / 2)
            found.append((centre - radius, centre + radius))
        elif isinstance(layer, nn.ReLU):
            found.append((F.relu(low), F.relu(high)))  # the layer itself may work in place
        else:
            found.append((layer(low), layer(high)))
    return found


def rounding(layers: Sequence[nn.Module], passed: Sequence[Interval], error: Tensor) -> Tensor:
    """How far the last layer's outputs in float32 lie from the exact ones at most, given those of the input.

    passed: what `intervals` found. A sum of p products in any order errs by p unit roundoffs of the sum of their
    magnitudes, on top of what the errors of its input add up to. ReLU and max pooling err by no more than their input,
    and ReLU not at all where neither the exact nor the rounded number can be positive.
    """
    for layer, (low, high) in zip(layers, passed, strict=False):
        if isinstance(layer, AFFINE):
            size = torch.maximum(low.abs(), high.abs()) + error
            terms, offset = _terms(layer), _offset(layer, low.ndim)
            own = slack(rounding_share(terms), terms, _spread(layer, size) + offset)
            error = _spread(layer, error) + (own if terms else 0.0)
        elif isinstance(layer, nn.ReLU):
            error = error.masked_fill(high + error <= 0, 0.0)
        else:
            error = layer(error)
    return error


def backward(
    layers: Sequence[nn.Module], passed: Sequence[Interval], goals: Tensor, relax: bool = True
) -> tuple[Tensor, Tensor, int]:
    """A linear function of an earlier layer's input that lies below ``goals @ output`` wherever the intervals hold.

    goals: ``(n, c, classes)``.  passed: what `intervals` found, ``(n, ...)`` each. Result: slopes ``(n, c, ...)``,
    constants ``(n, c)``, and the number of layers in front of where they stand: 0 with ``relax``, else as far back as
    the layers are affine, where nothing is lost.

    CROWN's rules: ReLU lies above z * (1 if high > -low else 0) and below high (z - low) / (high - low) where its input
    changes sign; a maximum lies above the number with the largest low end, and below that number where no other can
    exceed it, else below the largest high end.
    """
    n, c = goals.shape[:2]
    slopes, constants = goals.flatten(0, 1), goals.new_zeros(n * c)
    place = len(layers)
    for layer, (low, high) in zip(reversed(layers), reversed(passed[:-1]), strict=True):
        if isinstance(layer, AFFINE):
            slopes, more = _transposed(layer, slopes, low.shape[1:])
        elif not relax:
            break
        elif isinstance(layer, nn.ReLU):
            slopes, more = _through_relu(slopes, *(end.repeat_interleave(c, 0) for end in (low, high)))
        else:
            assert isinstance(layer, nn.MaxPool2d)
            slopes, more = _through_maximum(layer, slopes, *(end.repeat_interleave(c, 0) for end in (low, high)))
        constants = constants + more
        place -= 1
    return slopes.unflatten(0, (n, c)), constants.view(n, c), place


def _through_relu(slopes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    crosses = (low < 0) & (high > 0)
    active = (low >= 0).to(slopes)
    # Elsewhere a width of 0 would make the gradient NaN, though nobody looks at the quotient.
    steepness = torch.where(crosses, high / torch.where(crosses, high - low, 1.0), active)
    lower = torch.where(crosses, (high > -low).to(slopes), active)
    gains, losses = slopes.clamp(min=0), slopes.clamp(max=0)
    constants = (losses * torch.where(crosses, -steepness * low, 0.0)).flatten(1).sum(1)
    return gains * lower + losses * steepness, constants


def _through_maximum(pool: nn.MaxPool2d, slopes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    window = (pool.kernel_size, pool.stride, pool.padding)
    lowest, chosen = F.max_pool2d(low, *window, return_indices=True)
    highest = F.max_pool2d(high, *window)
    index = torch.arange(low[0, 0].numel(), device=low.device).view(1, 1, *low.shape[2:])
    itself = _windows(pool, index, -1) == chosen.unsqueeze(-1)
    rivals = _windows(pool, high, -torch.inf).masked_fill(itself, -torch.inf).amax(-1)
    wins = rivals <= lowest
    gains, losses = slopes.clamp(min=0), slopes.clamp(max=0)
    back = torch.zeros_like(low).flatten(2)
    back.scatter_add_(2, chosen.flatten(2), (gains + losses * wins).flatten(2))
    return back.view_as(low), (losses * highest).masked_fill(wins, 0.0).flatten(1).sum(1)


def _windows(pool: nn.MaxPool2d, images: Tensor, outside: float) -> Tensor:
    """What each window of a pooling sees: ``(n, channels, out height, out width, places)``."""
    (height, width), (down, right), (above, left) = (_pair(v) for v in (pool.kernel_size, pool.stride, pool.padding))
    padded = F.pad(images, (left, left, above, above), value=outside)
    return padded.unfold(2, height, down).unfold(3, width, right).flatten(4)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _transposed(layer: nn.Module, slopes: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``slopes @ layer(z)`` as slopes of z and a constant: the backward pass of an affine layer is its transpose."""
    with torch.enable_grad():
        zeros = slopes.new_zeros(len(slopes), *shape).requires_grad_()
        out = layer(zeros)
    (back,) = torch.autograd.grad(out, zeros, slopes, create_graph=torch.is_grad_enabled())
    return back, (slopes * (out if torch.is_grad_enabled() else out.detach())).flatten(1).sum(1)


def _spread(layer: nn.Module, sizes: Tensor) -> Tensor:
    """The linear part of an affine layer with the magnitudes of its weights."""
    if isinstance(layer, nn.Linear):
        return F.linear(sizes, layer.weight.abs())
    if isinstance(layer, nn.Conv2d):
        weight, place = layer.weight.abs(), (layer.stride, layer.padding, layer.dilation)
        out: Tensor = F.conv2d(sizes, weight, None, *place, layer.groups)  # type: ignore[arg-type]
        return out
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return sizes * _aligned(_factor(layer).abs(), sizes.ndim)
    reshaped: Tensor = layer(sizes)
    return reshaped


def _offset(layer: nn.Module, ndim: int) -> Tensor | float:
    """The magnitude of what an affine layer adds, broadcastable to its output; a batch norm takes away the mean."""
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        assert layer.running_mean is not None
        taken = (_factor(layer) * layer.running_mean).abs()
        return _aligned(taken if layer.bias is None else taken + layer.bias.abs(), ndim)
    if isinstance(layer, nn.Linear | nn.Conv2d) and layer.bias is not None:
        return _aligned(layer.bias.abs(), ndim if isinstance(layer, nn.Conv2d) else 2)
    return 0.0


def _terms(layer: nn.Module) -> int:
    """How many roundings a number of the output has seen; 0 for a layer that only reshapes."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if isinstance(layer, nn.Conv2d):
        return layer.weight[0].numel()
    if isinstance(layer, nn.AvgPool2d):
        return math.prod(_pair(layer.kernel_size))
    return 18 if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) else 0  # square roots err by more than a sum


def _factor(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> Tensor:
    assert layer.running_var is not None
    factor = (layer.running_var + layer.eps).rsqrt()
    return factor if layer.weight is None else layer.weight * factor


def _aligned(channels: Tensor, ndim: int) -> Tensor:
    return channels.view(-1, *[1] * (ndim - 2))
