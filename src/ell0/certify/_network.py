"""A model read as what a certificate knows: clamps, the attacked layer, and a head of known layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..nn import ClippedLinear, InputClamp, InputScale, InputTruncation, TruncatedConv2d, TruncatedLinear
from ..ops.conv import output_size
from ._conv import Convolved
from ._first import First
from ._separable import Clipped, Dense
from ._truncated import Truncated

ATTACKED = (nn.Linear, TruncatedLinear, ClippedLinear, TruncatedConv2d)
AFFINE = (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.AvgPool2d, nn.Flatten, nn.Unflatten)
BENT = (nn.ReLU, nn.MaxPool2d)
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
MOODY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
"""What does something else in training mode."""


@dataclass(frozen=True, eq=False)
class Network:
    """``head(first(rising(x)))``; layers that do nothing in eval mode are left out.

    rising: what happens to each number by itself, and keeps the order of two numbers.
    shape: of a row as the attacked layer sees it. The outputs of a convolution go flat into the head, which begins with
    their shape.
    """

    rising: tuple[InputClamp | InputScale, ...]
    layer: nn.Linear | TruncatedConv2d
    head: tuple[nn.Module, ...]
    shape: tuple[int, ...]

    @classmethod
    def read(cls, model: nn.Module, x: Tensor, *, training: bool = False) -> Network:
        """Raises a ValueError that names the layer where the model is none that can be certified.

        training: whether the model may be in training mode, as far as that changes none of its layers.
        """
        leaves = list(_leaves("", model))
        for name, layer in leaves:
            if layer.training and (not training or type(layer) in MOODY):
                raise ValueError(f"model must be in eval mode, and {name} is in training mode: call model.eval()")
        layers = [(name, layer) for name, layer in leaves if type(layer) not in NOTHING]
        rising: list[InputClamp | InputScale] = []
        flat = x.ndim == 2
        for place, (name, layer) in enumerate(layers):
            if type(layer) is nn.Flatten:
                _check_later(name, layer)
                flat = True
            elif isinstance(layer, InputClamp | InputScale) and type(layer) in (InputClamp, InputScale):
                rising.append(layer)
            elif isinstance(layer, nn.Linear | TruncatedConv2d) and type(layer) in ATTACKED:
                shape = _check_first(name, layer, x, flat)
                head = [after for _, after in layers[place + 1 :]]
                for later, after in layers[place + 1 :]:
                    _check_later(later, after)
                if isinstance(layer, TruncatedConv2d):
                    size = output_size(shape[1:], layer.weight.shape[2:], layer.geometry)
                    head.insert(0, nn.Unflatten(1, (layer.out_channels, *size)))
                return cls(tuple(rising), layer, tuple(head), shape)
            else:
                raise ValueError(
                    "model must begin with TruncatedLinear, TruncatedConv2d, ClippedLinear or Linear, after Flatten, "
                    f"InputClamp and InputScale at most, got {name} ({type(layer).__name__}) before any of them"
                )
        raise ValueError("model must have a TruncatedLinear, TruncatedConv2d, ClippedLinear or Linear layer, got none")

    def double(self) -> Network:
        """A copy in float64 without gradients."""
        head = tuple(copy.deepcopy(part).double().requires_grad_(False) for part in self.head)
        return Network(self.rising, copy.deepcopy(self.layer).double().requires_grad_(False), head, self.shape)

    @property
    def first(self) -> First:
        layer, parts = self.layer, (self.layer.weight, self.layer.bias)
        if isinstance(layer, TruncatedConv2d):
            return Convolved(layer, self.shape)
        if isinstance(layer, ClippedLinear):
            return Clipped(*parts, layer.clip)
        # A truncated layer that removes nothing is a plain one.
        return Truncated(*parts, layer.k) if isinstance(layer, TruncatedLinear) and layer.k else Dense(*parts)


def _leaves(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested ``nn.Sequential`` in order, with the names an error gives them."""
    label = f"layer {name!r}" if name else "the model"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        raise ValueError(f"model must do what its layers say, got hooks or another forward on {label}")
    if type(module) is not nn.Sequential:
        yield label, module
        return
    for child, layer in zip(module._modules, module, strict=True):  # named_children leaves out a layer's second use
        yield from _leaves(f"{name}.{child}" if name else child, layer)


def _check_first(name: str, layer: nn.Linear | TruncatedConv2d, x: Tensor, flat: bool) -> tuple[int, ...]:
    """The shape of a row as the layer sees it."""
    if isinstance(layer, TruncatedConv2d):
        if flat or x.ndim != 4 or x.shape[1] != layer.in_channels:
            raise ValueError(
                f"x must be images (n, {layer.in_channels}, height, width), with no Flatten before {name}, got "
                f"{tuple(x.shape)}"
            )
        shape = tuple(x.shape[1:])
    else:
        if not flat:
            raise ValueError(
                f"x must be (n, features), or go through Flatten first, before {name}, got {tuple(x.shape)}"
            )
        if x[0].numel() != layer.in_features:
            raise ValueError(f"x must have {layer.in_features} numbers a row for {name}, got shape {tuple(x.shape)}")
        shape = (layer.in_features,)
    known = x.dtype in (torch.float32, torch.float64)
    if not known or (x.dtype, x.device) != (layer.weight.dtype, layer.weight.device):
        raise ValueError(
            f"x must be float32 or float64 with the dtype and device of {name} "
            f"({layer.weight.dtype} on {layer.weight.device}), got {x.dtype} on {x.device}"
        )
    return shape


def _check_later(name: str, layer: nn.Module) -> None:
    kind = type(layer)
    if kind in (TruncatedLinear, TruncatedConv2d, ClippedLinear, InputTruncation):
        raise ValueError(f"model must truncate or clip in its first layer alone, got {name} ({kind.__name__}) after it")
    if kind not in AFFINE + BENT:
        known = ", ".join(each.__name__ for each in AFFINE + BENT)
        raise ValueError(f"model must have layers that bounds pass through ({known}), got {name} ({kind.__name__})")
    if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
        raise ValueError(f"model must pad with zeros, got padding_mode={layer.padding_mode!r} on {name}")
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.running_mean is None:
        raise ValueError(f"model must have batch norm with running statistics, got {name} without")
    if isinstance(layer, nn.MaxPool2d) and (layer.return_indices, layer.ceil_mode, layer.dilation) != (False, False, 1):
        raise ValueError(f"model must have max pooling without indices, ceil_mode and dilation, got {name}: {layer}")
    if isinstance(layer, nn.AvgPool2d) and (layer.divisor_override or 1) < 0:
        raise ValueError(f"model must have average pooling by a positive divisor, got {name}: {layer}")
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
        raise ValueError(f"model must flatten whole rows, got {name}: {layer}")
