"""One registered torch operator in front of the backends: `torch.ops.ell0.trimmed_linear` and its backward.

The compiled kernel (CPU) and the Triton kernels (GPU) serve tensors whose weight was prepared for them (`prepare`);
everything else takes the blocked torch path. All leave the same cuts behind, and the backward pass needs nothing else
to know which terms stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from . import blocked, gpu, kernel


@dataclass(frozen=True, eq=False)
class Prepared:
    """What `prepare` learns about a weight: each row's order by falling magnitude.

    order: ``(out, in)`` int32.  ranked: the weight in that order.  bound: ``(out, ceil(in / 16))``, the largest
    magnitude from each sixteenth position on. On the GPU order is int64 and holds the weight too, and ranked is empty.
    All three are empty where no kernel can use them.
    """

    order: Tensor
    ranked: Tensor
    bound: Tensor
    weight: Tensor
    version: int | None

    def check(self, weight: Tensor) -> None:
        """Raises unless this was made from the weight as it is now."""
        # The weight is held, so no other one can lie where it lies.
        same = _place(weight) == _place(self.weight) and self.version == _version(self.weight)
        if not same:
            raise ValueError("prepared must come from this weight as it is now: call ops.prepare(weight) again")


def _place(weight: Tensor) -> tuple[object, ...]:
    return (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device)


def _version(weight: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or weight.is_inference() else weight._version


def _order(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if kernel.serves(weight):
        return kernel.prepare(weight)
    if gpu.serves(weight):
        order, bound = gpu.prepare(weight)
        return order, weight.new_empty((0, 0)), bound
    return _nothing_prepared(weight)


_prepare = torch.library.custom_op("ell0::prepare", _order, mutates_args=())


@_prepare.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, d = weight.shape
    bound = weight.new_empty((rows, kernel.bounds_per_row(d)))
    if kernel.serves(weight):
        return weight.new_empty((rows, d), dtype=torch.int32), weight.new_empty((rows, d)), bound
    if gpu.serves(weight):
        return weight.new_empty((rows, d), dtype=torch.int64), weight.new_empty((0, 0)), bound
    return _nothing_prepared(weight)


def _nothing_prepared(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty((0, 0), dtype=torch.int32), weight.new_empty((0, 0)), weight.new_empty((0, 0))


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    ranked: Tensor,
    bound: Tensor,
    counts: Sequence[int],
    keep_cuts: bool,
    kept: list[Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts: top and bottom of each pair in turn. The results of each pair, one behind the other.

    kept: may get what the backward pass can use.
    """
    pairs = tuple(zip(counts[::2], counts[1::2], strict=True))
    if order.numel() and order.is_cuda:
        return gpu.forward(x, weight, bias, order, bound, pairs, keep_cuts, kept)
    found: list[tuple[Tensor, ...]] = []
    for top, bottom in pairs:
        if order.numel():
            found.append(kernel.forward(x, weight, bias, order, ranked, bound, top, bottom, keep_cuts))
        else:
            out, cuts, ties = blocked.forward(x, weight, bias, top, bottom, keep_cuts)
            found.append((out, cuts, ties, ties.new_empty(0)))
    if len(found) == 1:
        # Not views: a layer behind this one may write into its output.
        out, cuts, ties, walked = (torch.ops.aten._unsafe_view(t, (1, *t.shape)) for t in found[0])
    else:
        out, cuts, ties, walked = (torch.stack(each) for each in zip(*found, strict=True))
    return out, cuts, ties, walked


@torch.library.custom_op("ell0::trimmed_linear", mutates_args=())
def _trimmed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    ranked: Tensor,
    bound: Tensor,
    counts: Sequence[int],
    keep_cuts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(x, weight, bias, order, ranked, bound, counts, keep_cuts)


@_trimmed_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    order: Tensor,
    ranked: Tensor,  # noqa: ARG001
    bound: Tensor,  # noqa: ARG001
    counts: Sequence[int],
    keep_cuts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, rows, pairs = x.shape[0], weight.shape[0], len(counts) // 2
    shape = (pairs, 2, rows, n) if keep_cuts else (pairs, 2, 0, 0)
    walked = 0
    if keep_cuts and order.numel():
        walked = 2 * rows + n if order.device.type == "cuda" else rows
    return (
        x.new_empty((pairs, n, rows)),
        x.new_empty(shape),
        x.new_empty(shape, dtype=torch.int32),
        x.new_empty((pairs, walked), dtype=torch.int32),
    )


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    bound: Tensor,
    cuts: Tensor,
    ties: Tensor,
    walked: Tensor,
    to_x: bool,
    to_weight: bool,
    kept: list[Any] | None = None,
) -> tuple[Tensor, Tensor]:
    grads: list[tuple[Tensor, Tensor]] = []
    for g, cut, tie, walk in zip(grad, cuts, ties, walked, strict=True):
        if order.numel() and order.is_cuda:
            grads.append(gpu.backward(g, x, weight, order, bound, cut, tie, walk, to_x, to_weight, kept))
        elif order.numel():
            grads.append(kernel.backward(g, x, weight, order, cut, tie, walk, to_x, to_weight))
        else:
            grads.append(blocked.backward(g, x, weight, cut, tie, to_x, to_weight))
    grad_x, grad_weight = grads[0]
    for more_x, more_weight in grads[1:]:
        grad_x, grad_weight = grad_x + more_x, grad_weight + more_weight
    return grad_x, grad_weight


@torch.library.custom_op("ell0::trimmed_linear_backward", mutates_args=())
def _trimmed_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    bound: Tensor,
    cuts: Tensor,
    ties: Tensor,
    walked: Tensor,
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor]:
    return _backward(grad, x, weight, order, bound, cuts, ties, walked, to_x, to_weight)


@_trimmed_linear_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    x: Tensor,
    weight: Tensor,
    order: Tensor,  # noqa: ARG001
    bound: Tensor,  # noqa: ARG001
    cuts: Tensor,  # noqa: ARG001
    ties: Tensor,  # noqa: ARG001
    walked: Tensor,  # noqa: ARG001
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape if to_x else (0,)),
        weight.new_empty(weight.shape if to_weight else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, order, _, bound, _, keep_cuts = inputs
    _, cuts, ties, walked = output
    ctx.keep_cuts = keep_cuts
    ctx.save_for_backward(x, weight, order, bound, cuts, ties, walked)
    ctx.mark_non_differentiable(cuts, ties, walked)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, *_: None, backward: Callable[..., Any] | None = None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
    if (to_x or to_weight) and not ctx.keep_cuts:
        raise RuntimeError("ell0::trimmed_linear was called with keep_cuts=False and cannot be differentiated")
    grad_x = grad_weight = None
    if to_x or to_weight:
        x, weight, order, bound, cuts, ties, walked = ctx.saved_tensors
        grad_x, grad_weight = (backward or torch.ops.ell0.trimmed_linear_backward)(
            grad, x, weight, order, bound, cuts, ties, walked, to_x, to_weight
        )
    grad_bias = grad.sum((0, 1)) if to_bias else None
    return (grad_x if to_x else None, grad_weight if to_weight else None, grad_bias, *[None] * 5)


_trimmed_linear.register_autograd(_differentiate, setup_context=_save)


class _Trimmed(torch.autograd.Function):
    """The registered operator without its dispatch, which takes the host longer than a small layer takes a GPU."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.kept = [] if ctx.needs_input_grad[1] else None
        x, weight, bias, order, ranked, bound, counts, keep_cuts = inputs
        output = _forward(x, weight, bias, order, ranked, bound, counts, keep_cuts, ctx.kept)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        # Whoever wants to differentiate again meets the registered operator, which refuses.
        plain = not torch.is_grad_enabled() and _is_plain(grad)
        grads = _differentiate(ctx, grad, backward=partial(_backward, kept=ctx.kept) if plain else None)
        if ctx.kept:
            ctx.kept.clear()  # a second backward pass makes it anew
        return grads


PLAIN = (Tensor, nn.Parameter)


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether nobody watches the calls of operators: no compiler, tracer, mode, transform or subclass."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(t is None or (type(t) in PLAIN and torch._C._has_storage(t) and not t.is_meta) for t in tensors)
    )


def prepare(weight: Tensor) -> Prepared:
    """Orders a weight ``(out, in)`` once for many calls with ``prepared=``.

    The value is good for exactly this weight as it is now; passing it after the weight changed raises, unless torch
    keeps no count of the change: through ``weight.data``, in inference mode, inside `torch.compile`.
    """
    _check_weight(weight)
    with torch.no_grad():
        order, ranked, bound = (_order if _is_plain(weight) else torch.ops.ell0.prepare)(weight)
    weight = weight.detach()
    return Prepared(order, ranked, bound, weight, _version(weight))


def trimmed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    top: int,
    bottom: int,
    prepared: Prepared | None = None,
) -> Tensor:
    """Linear layer whose inner sums drop their ``top`` largest and ``bottom`` smallest terms.

    out[b, o] = sum of {x[b, i] * weight[o, i]} without its top largest and bottom smallest terms, plus bias[o]

    Terms are compared as the dtype rounds them; at ties the lowest index leaves first, the top side before the
    bottom side. 0 * inf is 0; a NaN in a sample or in a row of the weight makes that sample's or that row's outputs
    NaN. The gradient goes through the kept terms, to x, weight and bias. ``top = bottom = 0`` is ``F.linear``.

    Args:
        x: ``(..., in)``.  weight: ``(out, in)``.  bias: ``(out,)``, added after trimming.  float32 or float64.
        top, bottom: terms removed on each side, ``top + bottom < in``.
        prepared: what `prepare` returned for this weight; without it the weight is prepared anew.
    """
    x = leave_autocast(x, weight)
    _check(x, weight, bias)
    blocked.check_counts(top, bottom, weight.shape[1])
    if top == bottom == 0:
        return F.linear(x, weight, bias)
    return _apply(x, weight, bias, (top, bottom), prepared)[0]


def trimmed_linears(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    counts: Sequence[tuple[int, int]],
    prepared: Prepared | None = None,
) -> Tensor:
    """Several trimmed products of the same x and weight: `trimmed_linear` for each pair of top and bottom.

    Result ``(pairs, ..., out)``. On the GPU pairs share the dense product and, where terms are counted, the terms.
    """
    x = leave_autocast(x, weight)
    _check(x, weight, bias)
    if not counts:
        raise ValueError("counts must hold at least one pair of top and bottom, got none")
    for top, bottom in counts:
        blocked.check_counts(top, bottom, weight.shape[1])
    if any(top == bottom == 0 for top, bottom in counts):
        each = [trimmed_linear(x, weight, bias, top=t, bottom=b, prepared=prepared) for t, b in counts]
        return torch.stack(each)
    return _apply(x, weight, bias, tuple(number for pair in counts for number in pair), prepared)


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...], prepared: Prepared | None
) -> Tensor:
    """``(pairs, ..., out)``, through the registered operator wherever somebody watches."""
    refuse_forward_mode(x, weight, bias)
    order, ranked, bound = _arrays(weight, prepared)
    keep_cuts = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    call: Callable[..., Any] = torch.ops.ell0.trimmed_linear
    if _is_plain(x, weight, bias):
        differentiates = keep_cuts or (torch.is_grad_enabled() and bias is not None and bias.requires_grad)
        call = _Trimmed.apply if differentiates else _forward
    out: Tensor = call(flat, weight, bias, order, ranked, bound, counts, keep_cuts)[0]
    return out if x.dim() == 2 else out.reshape(len(out), *x.shape[:-1], weight.shape[0])


def truncated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, k: int, prepared: Prepared | None = None
) -> Tensor:
    """Linear layer whose inner sums drop their k largest and k smallest terms.

    out[b, o] = sum of the middle in - 2k values of {x[b, i] * weight[o, i]} + bias[o]     ([Beliaev22] eq. 3-5)

    Args:
        x: ``(..., in)``.  weight: ``(out, in)``.  bias: ``(out,)``, added after truncation.  float32 or float64.
        k: terms removed on each side, ``0 <= 2k < in``; ``k=0`` is ``F.linear``.
        prepared: what `prepare` returned for this weight; without it the weight is prepared anew.
    """
    _check_weight(weight)
    check_k(k, weight.shape[1])
    return trimmed_linear(x, weight, bias, top=k, bottom=k, prepared=prepared)


def cuts(
    x: Tensor, weight: Tensor, *, top: int, bottom: int, prepared: Prepared | None = None
) -> tuple[Tensor, Tensor]:
    """Where each sum of `trimmed_linear` is cut: its ``top``-th largest and its ``bottom``-th smallest term.

    Both ``(..., out)``, without gradient; infinite where nothing is removed, NaN where the sum is.
    """
    _check(x, weight, None)
    blocked.check_counts(top, bottom, weight.shape[1])
    with torch.no_grad():
        order, ranked, bound = _arrays(weight, prepared)
        flat = x.reshape(-1, x.shape[-1])
        found = torch.ops.ell0.trimmed_linear(flat, weight, None, order, ranked, bound, [top, bottom], True)
        high, low = (cut.T.reshape(*x.shape[:-1], weight.shape[0]) for cut in found[1][0])
    return high, torch.where(high.isnan(), high, low)


def check_k(k: int, in_features: int) -> None:
    """Raises unless k terms can leave on each side of ``in_features``."""
    if isinstance(k, bool) or not isinstance(k, int | torch.SymInt):
        raise ValueError(f"k must be an integer, got {k!r}")
    if not 0 <= 2 * k < in_features:
        raise ValueError(f"k must satisfy 0 <= 2*k < in_features, got k={k} with in_features={in_features}")


def _arrays(weight: Tensor, prepared: Prepared | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel wants to know of the weight: as it was prepared, or prepared now."""
    if prepared is None:
        order = _order if _is_plain(weight) else torch.ops.ell0.prepare
        arrays: tuple[Tensor, Tensor, Tensor] = order(weight.detach())
        return arrays
    if not isinstance(prepared, Prepared):
        raise ValueError(f"prepared must come from ops.prepare, got {type(prepared).__name__}")
    if not torch.compiler.is_compiling():
        prepared.check(weight)
    return prepared.order, prepared.ranked, prepared.bound


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    # torch would pass over the tangent in silence.
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("the trimmed product has no forward-mode derivative: use backward()")


def leave_autocast(x: Tensor, weight: Tensor) -> Tensor:
    # The comparison of terms wants the precision of the weight; autocast may have lowered that of x on its way.
    lowered = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    if lowered and torch.is_autocast_enabled(x.device.type):
        return x.to(weight.dtype)
    return x


def _check_weight(weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise ValueError(f"weight must be a tensor, got {type(weight).__name__}")
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (out, in), got {tuple(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"weight must be float32 or float64, got {weight.dtype}")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_weight(weight)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have shape (..., {weight.shape[1]}) to match weight, got {tuple(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},) to match weight, got {tuple(bias.shape)}")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != weight.dtype:
            raise ValueError(f"{name} must have the dtype of weight ({weight.dtype}), got {tensor.dtype}")
        if tensor.device != weight.device:
            raise ValueError(f"{name} must be on the device of weight ({weight.device}), got {tensor.device}")
