"""The compiled CPU kernel (`csrc/`), loaded with ctypes after torch so that both share one OpenMP pool.

It is built at install time if there is a compiler. Without it, or if it does not load, `serves` is False and the
operator takes the blocked torch path.
"""

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import bounds_per_row, check_prepared

# One source, three targets; the first that this processor can run is used. "none" stands for no kernel.
BUILDS = ("avx512", "avx2", "generic")

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
# Name -> number of pointers and sizes before the thread count.
_FUNCTIONS = {"prepare": 6, "limits": 4, "forward": 16, "weight_gradient": 12, "input_gradient": 11}


@functools.cache
def _library() -> ctypes.CDLL | None:
    for path in sorted(Path(__file__).parent.glob("_kernel*.so")):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            warnings.warn(f"the compiled kernel does not load, the torch path serves instead: {error}", stacklevel=2)
    return None


@functools.cache
def builds() -> tuple[str, ...]:
    """The builds of the kernel that this processor can run, fastest first; empty where there is no kernel."""
    library = _library()
    if library is None:
        return ()
    can_run = {name: getattr(library, f"ell0_can_run_{name}", None) for name in BUILDS}
    return tuple(name for name, ask in can_run.items() if ask is not None and ask())


_chosen: str | None = None


def use(build: str | None) -> None:
    """Uses this build from now on ("none": no kernel; None: the fastest one). For tests and benchmarks."""
    global _chosen
    if build is not None and build not in (*builds(), "none"):
        raise ValueError(f"build must be one of {[*builds(), 'none']} or None, got {build!r}")
    _chosen = build
    _function.cache_clear()


def build() -> str:
    """The build in use, "none" where there is no kernel."""
    return _chosen or (builds() or ("none",))[0]


def serves(weight: Tensor) -> bool:
    """Whether the kernel takes products with this weight."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.numel() > 0 and build() != "none"


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    function = getattr(_library(), f"ell0_{name}_{_DTYPES[dtype]}_{build()}")
    function.argtypes = [ctypes.c_void_p] * _FUNCTIONS[name] + [ctypes.c_int]
    function.restype = ctypes.c_int64 if name == "limits" else None
    return function  # type: ignore[no-any-return]


def _call(name: str, dtype: torch.dtype, *arguments: Tensor | int | None) -> int:
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    return _function(name, dtype)(*plain, torch.get_num_threads()) or 0


def _limits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's limit ``(n,)`` beyond which a coordinate is outlying, and x with those coordinates at 0."""
    limit = x.new_empty(x.shape[0])
    if _call("limits", x.dtype, x, *x.shape, limit):
        x = x.masked_fill(x.abs() > limit.unsqueeze(1), 0.0)
    return limit, x


def prepare(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order, ranked weight and bound of `Prepared`."""
    weight = weight.contiguous()
    rows, d = weight.shape
    order = torch.empty(rows, d, dtype=torch.int32)
    ranked = torch.empty_like(weight)
    bound = weight.new_empty(rows, bounds_per_row(d))
    _call("prepare", weight.dtype, weight, rows, d, order, ranked, bound)
    return order, ranked, bound


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, arrays: Sequence[Tensor], top: int, bottom: int, keep_cuts: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output ``(n, out)``, cuts and ties ``(2, out, n)``, walked ``(out,)``; the last three empty unless keep_cuts.

    ties: 0 where every term tied with the cut leaves, else 1 + how many do.  walked: positions of the row's order that
    some sample walked, complemented (``~``) for a row that has ties.
    """
    order, ranked, bound = arrays
    check_prepared(weight, torch.int32, order=order, ranked=ranked, bound=bound)
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    (n, d), rows = x.shape, weight.shape[0]
    shape = (2, rows, n) if keep_cuts else (2, 0, 0)
    cuts, ties = x.new_empty(shape), torch.zeros(shape, dtype=torch.int32)
    walked = torch.empty(rows if keep_cuts else 0, dtype=torch.int32)
    if n == 0:
        return x.new_empty(n, rows), cuts, ties, walked.zero_()
    limit, inner = _limits(x)
    with torch.autocast("cpu", enabled=False):
        out = F.linear(inner, weight, bias)
    kept = (cuts, ties, walked) if keep_cuts else (None, None, None)
    _call("forward", x.dtype, x, weight, bias, order, ranked, bound, limit, n, rows, d, top, bottom, out, *kept)
    return out, cuts, ties, walked


def backward(grad: Tensor, saved: Sequence[Tensor], to_x: bool, to_weight: bool) -> tuple[Tensor, Tensor]:
    """Gradients ``(n, in)`` and ``(out, in)`` through the kept terms; one that is not wanted is empty.

    saved: x, weight, order, bound, cuts, ties, walked.
    """
    x, weight, order, _, cuts, ties, walked = saved
    check_prepared(weight, torch.int32, order=order)
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    (n, d), rows = x.shape, weight.shape[0]
    grad_x = torch.zeros_like(x) if to_x else x.new_empty(0)
    limit, inner = _limits(x)
    with torch.autocast("cpu", enabled=False):
        grad_weight = grad.T @ inner if to_weight else x.new_empty(0)
    if to_weight and inner is not x and not grad.isfinite().all():
        # The zeros that stand for outlying coordinates must not become NaN.
        outlying = x.abs() > limit.unsqueeze(1)
        grad_weight = torch.stack([(g.unsqueeze(1) * inner).masked_fill_(outlying, 0.0).sum(0) for g in grad.T])
    if n == 0:
        return grad_x, grad_weight
    shared = (cuts, ties, limit, n, rows, d)
    if to_weight:
        _call("weight_gradient", x.dtype, grad, x, weight, order, walked, *shared, grad_weight)
    if to_x:
        _call("input_gradient", x.dtype, grad, x, weight, walked, *shared, grad_x)
    # An undefined sample loses its own gradient and that of every row, an undefined row the other way round.
    lost = limit.isnan()
    some = int(lost.logical_not().to(torch.uint8).argmax())
    lost_rows = cuts[0, :, some].isnan()
    if to_weight:
        grad_weight.masked_fill_(lost_rows.unsqueeze(1) | lost.any(), torch.nan)
    if to_x:
        grad_x.masked_fill_(lost.unsqueeze(1) | lost_rows.any(), torch.nan)
    return grad_x, grad_weight
