"""A model as a certificate sees it: layers on the inputs, the attacked layer, and the layers behind it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from ..nn import InputClamp, InputScale, TruncatedLinear
from .first_layer import Dense
from .truncated import Truncated

Affine = nn.Linear | nn.BatchNorm1d
LaterLayer = Affine | nn.ReLU
IGNORED = (nn.Identity, nn.Dropout, nn.Flatten)
_VOTE = (
    "; a vote of parts has a certificate whatever its network is: cut = ell0.certify.Partition.strides(x.shape[1:], "
    "(3, 3)); model = ell0.certify.PartVote(ell0.part_networks.PartCNN(cut.part_shape, cut.parts), cut)"
)


@dataclass(frozen=True, eq=False)
class Network:
    """``head(layer(rising(x)))``; layers that do nothing in eval mode are left out.

    rising: layers that change each number by itself and keep the order of two numbers.
    """

    rising: tuple[InputClamp | InputScale, ...]
    layer: nn.Linear
    head: tuple[LaterLayer, ...]

    @classmethod
    def read(cls, model: nn.Module, x: Tensor, *, training: bool = False) -> Network:
        """Raises ValueError, and names the layer, if bounds do not pass.  training: allow it where nothing differs."""
        layers = list(_layers("", model))
        for name, layer in layers:
            if layer.training and (not training or type(layer) in (nn.BatchNorm1d, nn.Dropout)):
                raise ValueError(f"model must be in eval mode, and {name} is in training mode: call model.eval()")
            if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
                raise ValueError(f"model must flatten whole rows, got {name}: {layer}")
        rising: list[InputClamp | InputScale] = []
        for place, (name, layer) in enumerate(layers):
            if type(layer) in (TruncatedLinear, nn.Linear) and isinstance(layer, nn.Linear):
                flat = x.ndim == 2 or any(type(before) is nn.Flatten for _, before in layers[:place])
                _check_rows(name, layer, x, flat)
                head = [_later(its, later) for its, later in layers[place + 1 :] if type(later) not in IGNORED]
                return cls(tuple(rising), layer, tuple(head))
            if type(layer) in (InputClamp, InputScale) and isinstance(layer, InputClamp | InputScale):
                rising.append(layer)
            elif type(layer) not in IGNORED:
                raise ValueError(
                    "model must begin with TruncatedLinear or Linear, after Flatten, InputClamp and InputScale only, "
                    f"got {name} ({type(layer).__name__}) before any of them{_VOTE}"
                )
        raise ValueError("model must have a TruncatedLinear or Linear layer, got none")

    def double(self) -> Network:
        layer, head = copy.deepcopy((self.layer, self.head))
        for part in (layer, *head):
            part.double().requires_grad_(False)
        return Network(self.rising, layer, head)

    @property
    def first(self) -> Dense:
        layer, parts = self.layer, (self.layer.weight, self.layer.bias)
        # A truncated layer that removes nothing is a plain one.
        return Truncated(*parts, layer.k) if isinstance(layer, TruncatedLinear) and layer.k else Dense(*parts)


def _layers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested ``nn.Sequential`` in order, with the names that errors use."""
    label = f"layer {name!r}" if name else "the model"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        raise ValueError(f"model must have no hooks and no replaced forward, got one on {label}")
    if type(module) is not nn.Sequential:
        yield label, module
        return
    for child, layer in zip(module._modules, module, strict=True):  # named_children skips a layer's second use
        yield from _layers(f"{name}.{child}" if name else child, layer)


def _check_rows(name: str, layer: nn.Linear, x: Tensor, flat: bool) -> None:
    if not flat:
        raise ValueError(f"x must be (n, features), or go through Flatten first, before {name}, got {tuple(x.shape)}")
    if x[0].numel() != layer.in_features:
        raise ValueError(f"x must have {layer.in_features} numbers a row for {name}, got shape {tuple(x.shape)}")
    dtype, device = layer.weight.dtype, layer.weight.device
    if x.dtype not in (torch.float32, torch.float64) or (x.dtype, x.device) != (dtype, device):
        rule = f"float32 or float64 with the dtype and device of {name} ({dtype} on {device})"
        raise ValueError(f"x must be {rule}, got {x.dtype} on {x.device}")


def _later(name: str, layer: nn.Module) -> LaterLayer:
    known = (*get_args(LaterLayer), *IGNORED)
    if type(layer) not in known or not isinstance(layer, LaterLayer):
        names = ", ".join(each.__name__ for each in known)
        raise ValueError(f"model must have only {names} behind its first layer, got {name} ({type(layer).__name__})")
    if isinstance(layer, nn.BatchNorm1d) and layer.running_mean is None:
        raise ValueError(f"model must have batch norm with running statistics, got {name} without")
    return layer
