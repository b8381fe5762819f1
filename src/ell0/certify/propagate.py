"""Bounds through the layers behind the first: intervals forwards, linear functions backwards, rounding beside them.

The layers are Linear, BatchNorm1d in eval mode and ReLU, on rows ``(n, features)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .first_layer import rounding_share, slack

Affine = nn.Linear | nn.BatchNorm1d
LaterLayer = Affine | nn.ReLU
Interval = tuple[Tensor, Tensor]
"""The least and the largest value of each number."""


def intervals(layers: Sequence[LaterLayer], start: Interval) -> list[Interval]:
    """The input of each layer, and the output of the last: interval bound propagation.

    An affine layer moves the centre and spreads the radius with the magnitudes of its weights; ReLU rises with its
    input, so an interval passes end by end.
    """
    found = [start]
    for layer in layers:
        low, high = found[-1]
        if isinstance(layer, nn.ReLU):
            found.append((F.relu(low), F.relu(high)))  # the layer itself may work in place
        else:
            centre, radius = layer((low + high) / 2), _spread(layer, (high - low) / 2)
            found.append((centre - radius, centre + radius))
    return found


def rounding(layers: Sequence[LaterLayer], passed: Sequence[Interval], error: Tensor) -> Tensor:
    """The error of the last layer's outputs in float32, given that of the first one's inputs.

    passed: what `intervals` found. A sum of p products in any order errs by p unit roundoffs of the sum of their
    magnitudes, on top of what the errors of its input add up to. ReLU errs by no more than its input, and not at all
    where neither the exact nor the rounded number can be positive.
    """
    for layer, (low, high) in zip(layers, passed, strict=False):
        if isinstance(layer, nn.ReLU):
            error = error.masked_fill(high + error <= 0, 0.0)
            continue
        size = torch.maximum(low.abs(), high.abs()) + error
        # Square roots of a batch norm err by more than a sum.
        terms = layer.in_features if isinstance(layer, nn.Linear) else 18
        error = _spread(layer, error) + slack(rounding_share(terms), terms, _spread(layer, size) + _offset(layer))
    return error


def backward(
    layers: Sequence[LaterLayer], passed: Sequence[Interval], goals: Tensor, relax: bool = True
) -> tuple[Tensor, Tensor, int]:
    """A linear function of an earlier layer's input that lies below ``goals @ output`` wherever the intervals hold.

    goals: ``(n, c, classes)``.  passed: what `intervals` found, ``(n, features)`` each. Result: slopes ``(n, c, h)``,
    constants ``(n, c)``, and the number of layers in front of where they stand: 0 with ``relax``, else as far back as
    the layers are affine, where nothing is lost.

    CROWN's rule: ReLU lies above z * (1 if high > -low else 0) and below high (z - low) / (high - low) where its input
    changes sign.
    """
    n, c = goals.shape[:2]
    slopes, constants = goals.flatten(0, 1), goals.new_zeros(n * c)
    place = len(layers)
    for layer, (low, high) in zip(reversed(layers), reversed(passed[:-1]), strict=True):
        if not isinstance(layer, nn.ReLU):
            slopes, more = _transposed(layer, slopes, low.shape[1])
        elif relax:
            slopes, more = _through_relu(slopes, *(end.repeat_interleave(c, 0) for end in (low, high)))
        else:
            break
        constants = constants + more
        place -= 1
    return slopes.unflatten(0, (n, c)), constants.view(n, c), place


def _through_relu(slopes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    crosses = (low < 0) & (high > 0)
    active = (low >= 0).to(slopes)
    steepness = torch.where(crosses, high / (high - low), active)
    lower = torch.where(crosses, (high > -low).to(slopes), active)
    gains, losses = slopes.clamp(min=0), slopes.clamp(max=0)
    constants = (losses * torch.where(crosses, -steepness * low, 0.0)).sum(1)
    return gains * lower + losses * steepness, constants


def _transposed(layer: Affine, slopes: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """``slopes @ layer(z)`` as slopes of z and a constant: the backward pass of an affine layer is its transpose."""
    with torch.enable_grad():
        zeros = slopes.new_zeros(len(slopes), features).requires_grad_()
        out = layer(zeros)
    (back,) = torch.autograd.grad(out, zeros, slopes, create_graph=torch.is_grad_enabled())
    return back, (slopes * (out if torch.is_grad_enabled() else out.detach())).sum(1)


def _spread(layer: Affine, sizes: Tensor) -> Tensor:
    """The linear part of an affine layer with the magnitudes of its weights."""
    return F.linear(sizes, layer.weight.abs()) if isinstance(layer, nn.Linear) else sizes * _factor(layer).abs()


def _offset(layer: Affine) -> Tensor | float:
    """The magnitude of what an affine layer adds: ``(h,)``; a batch norm subtracts the mean."""
    offset = 0.0 if layer.bias is None else layer.bias.abs()
    if isinstance(layer, nn.Linear):
        return offset
    assert layer.running_mean is not None
    return (_factor(layer) * layer.running_mean).abs() + offset


def _factor(layer: nn.BatchNorm1d) -> Tensor:
    assert layer.running_var is not None
    factor = (layer.running_var + layer.eps).rsqrt()
    return factor if layer.weight is None else layer.weight * factor
