"""Argument checks that the operators and layers share. Errors name the argument, the rule and the value."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_matrix(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x ``(..., in)`` in the dtype of the weight ``(out, in)``; raises unless all three fit.

    Terms are compared in the precision of the weight, so an x that autocast lowered is raised again.
    """
    check_weight(weight)
    for name, tensor in (("x", x), ("bias", bias)):
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if x.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},) to match weight, got {tuple(bias.shape)}")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.dtype != weight.dtype:
            raise ValueError(f"{name} must have the dtype of weight ({weight.dtype}), got {tensor.dtype}")
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"{name} must be on the device of weight ({weight.device}), got {tensor.device}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have shape (..., {weight.shape[1]}) to match weight, got {tuple(x.shape)}")
    return x


def check_weight(weight: Tensor) -> None:
    """Raises unless weight is a float32 or float64 tensor ``(out, in)``."""
    if not isinstance(weight, Tensor):
        raise ValueError(f"weight must be a tensor, got {type(weight).__name__}")
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (out, in), got {tuple(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"weight must be float32 or float64, got {weight.dtype}")


def check_k(k: int, terms: int, name: str = "in_features") -> None:
    """Raises unless k terms can be removed on each side of so many, which the message gives this name."""
    if isinstance(k, bool) or not isinstance(k, int | torch.SymInt):
        raise ValueError(f"k must be an integer, got {k!r}")
    if not 0 <= 2 * k < terms:
        raise ValueError(f"k must satisfy 0 <= 2*k < {name}, got k={k} with {name}={terms}")


def check_counts(top: int, bottom: int, d: int) -> None:
    """Raises unless ``top`` and ``bottom`` of d terms can be removed and at least one stays."""
    for name, value in (("top", top), ("bottom", bottom)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {name}={value}")
    if top + bottom >= d:
        raise ValueError(
            f"top + bottom must be smaller than the number of terms, got top={top} and bottom={bottom} with {d} terms"
        )


def check_prepared(weight: Tensor, order_dtype: torch.dtype, **arrays: Tensor) -> None:
    """Raises where a kernel would read the arrays of another weight beyond their ends."""
    rows, d = weight.shape
    for name, tensor in arrays.items():
        shape = (rows, bounds_per_row(d)) if name == "bound" else (rows, d)
        dtype = order_dtype if name == "order" else weight.dtype
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"prepared must come from this weight: its {name} must be {dtype} of shape {shape}, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )


def check_order(order: Tensor, weight: Tensor, walked: Tensor | None = None) -> None:
    """Raises where the order of a prepared weight, or how far it was walked, leads the CPU kernel out of the weight."""
    ranges = {"order": (order, 0, weight.shape[1] - 1)}
    ranges |= {} if walked is None else {"walked": (walked, ~weight.shape[1], weight.shape[1])}
    for name, (tensor, low, high) in ranges.items():
        if tensor.numel() and tensor.device.type == "cpu":
            least, most = (int(end) for end in tensor.aminmax())
            if least < low or most > high:
                raise ValueError(f"{name} must lie in [{low}, {high}] for this weight, got {least} to {most}")


def bounds_per_row(d: int) -> int:
    """Length of a row of `Prepared.bound`."""
    return -(-d // 16)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raises for a tensor with a forward-mode tangent, which torch would ignore in silence."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("the trimmed product has no forward-mode derivative: use backward()")
