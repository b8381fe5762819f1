"""Merges batch norms into the layers before them, which makes the many forwards of an attack cheaper."""

from collections.abc import Iterator
from copy import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from .residual import ResidualBlock


def folded(model: nn.Module) -> nn.Module:
    """Returns a model with the same outputs, up to rounding, whose batch norms are merged into other layers.

    In an ``nn.Sequential``, nested ones and those of a `ResidualBlock` included, each ``Conv2d`` followed by a
    ``BatchNorm2d`` (and perhaps a ``ReLU``), or ``Linear`` followed by a ``BatchNorm1d``, becomes one layer with
    its own weights; all other layers are shared with the model. Later changes of the model do not reach these weights.
    Returns the model itself if it is in training mode or nothing can be merged.
    """
    if not model.training and _is_plain(model, ResidualBlock):
        short = copy(model)  # with children of its own
        short._modules = {name: layer and folded(layer) for name, layer in model._modules.items()}
        return short
    if model.training or not _is_plain(model, nn.Sequential):
        return model
    layers = list(model._modules.values())  # not children(), which skips the second use of a layer
    parts = list(_merged([layer for layer in layers if layer is not None]))
    if len(parts) == len(layers) and all(part is layer for part, layer in zip(parts, layers, strict=True)):
        return model
    short = nn.Sequential(*parts)
    short.training = False  # not eval(), which would change the shared layers
    return short


def _merged(layers: list[nn.Module]) -> Iterator[nn.Module]:
    while layers:
        first, *layers = layers
        if not layers or not _can_merge(first, layers[0]):
            yield folded(first)
        elif isinstance(first, nn.Linear):
            yield _Rows(first, cast(nn.BatchNorm1d, layers.pop(0)))
        else:
            merged = fuse_conv_bn_eval(cast(nn.Conv2d, first), cast(nn.BatchNorm2d, layers.pop(0)))
            relu = bool(layers) and _is_plain(layers[0], nn.ReLU)
            yield _Convolution(merged, relu)
            layers = layers[relu:]


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of this very kind and nothing else runs when it is called."""
    changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return type(layer) is kind and not changed


def _can_merge(layer: nn.Module, norm: nn.Module) -> bool:
    if _is_plain(layer, nn.Linear):
        fits = _is_plain(norm, nn.BatchNorm1d) and norm.affine and norm.num_features == layer.out_features
    else:
        fits = _is_plain(layer, nn.Conv2d) and _is_plain(norm, nn.BatchNorm2d)
        fits = fits and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return bool(fits) and not (layer.training or norm.training) and norm.running_mean is not None


class _Convolution(nn.Module):
    """A convolution and perhaps a ReLU; on a GPU without gradients one kernel does both and adds the bias."""

    def __init__(self, layer: nn.Conv2d, relu: bool) -> None:
        super().__init__()
        self.training = False
        assert layer.bias is not None
        assert not isinstance(layer.padding, str)
        self.relu, self._how = relu, (layer.stride, layer.padding, layer.dilation, layer.groups)
        self.weight, self.bias = (nn.Parameter(t.detach(), requires_grad=False) for t in (layer.weight, layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, channels, height, width)``; result as of the convolution."""
        # Not cudnn.is_acceptable(x), which refuses bfloat16.
        one = self.relu and x.is_cuda and torch.backends.cudnn.enabled and torch.version.hip is None
        if not one or torch.is_grad_enabled():
            out = F.conv2d(x, self.weight, self.bias, *self._how)
            return out.relu_() if self.relu else out
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        # Torch's convolution adds the bias and takes the ReLU in two more passes.
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return torch.cudnn_convolution_relu(x.to(dtype), weight, bias, *self._how)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self._how}, relu={self.relu}"


class _Rows(nn.Module):
    """A linear layer and its batch norm, as one product for rows; other inputs are normed along another axis."""

    def __init__(self, layer: nn.Linear, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.training = False
        self._pair = layer, norm  # no children: the model holds them
        self.merged = fuse_linear_bn_eval(layer, norm).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, in_features)``, or as for the two layers."""
        out: Tensor = self.merged(x) if x.ndim == 2 else self._pair[1](self._pair[0](x))
        return out
