"""One registered torch operator in front of the backends: `torch.ops.ell0.trimmed_linear` and its backward.

The compiled kernel (CPU) and the Triton kernels (GPU) take tensors whose weight was prepared for them (`prepare`);
everything else takes the blocked torch path. All backends return the same cuts, and from these alone the backward pass
knows which terms stayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import blocked, gpu, kernel
from .checks import bounds_per_row, check_counts, check_k, check_matrix, check_order, check_weight, refuse_forward_mode

Arrays = tuple[Tensor, Tensor, Tensor]  # order, ranked and bound of `Prepared`
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # output, cuts, ties, what was walked
Kept = list[Any] | None

FORWARD = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor order, Tensor ranked, Tensor bound, SymInt[] counts, "
    "bool keep_cuts) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weight, Tensor order, Tensor bound, Tensor cuts, Tensor ties, Tensor walked, "
    "bool to_x, bool to_weight) -> (Tensor, Tensor)"
)


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
        # This object holds the weight, so no other weight can have its memory.
        now, then = ((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (weight, self.weight))
        if now != then or self.version != _version(self.weight):
            raise ValueError("prepared must come from this weight as it is now: call ops.prepare(weight) again")


def _version(weight: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or weight.is_inference() else weight._version


def _order(weight: Tensor) -> Arrays:
    if kernel.serves(weight):
        return kernel.prepare(weight)
    if gpu.serves(weight):
        return gpu.prepare(weight)
    return weight.new_empty((0, 0), dtype=torch.int32), weight.new_empty((0, 0)), weight.new_empty((0, 0))


_prepare = torch.library.custom_op(
    "ell0::prepare", _order, mutates_args=(), schema="(Tensor weight) -> (Tensor, Tensor, Tensor)"
)


@_prepare.register_fake
def _(weight: Tensor) -> Arrays:
    on_cpu, on_gpu = kernel.serves(weight), gpu.serves(weight)
    rows, d = weight.shape if on_cpu or on_gpu else (0, 0)
    order = weight.new_empty((rows, d), dtype=torch.int64 if on_gpu else torch.int32)
    return order, weight.new_empty((rows, d) if on_cpu else (0, 0)), weight.new_empty((rows, bounds_per_row(d)))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, kept: Kept = None) -> Outputs:
    """The results of each pair (top, bottom), stacked.

    rest: as `FORWARD` says; counts are top and bottom of each pair in turn.  kept: gets what the backward pass can use.
    """
    order, ranked, bound, counts, keep_cuts = rest
    arrays, pairs = (order, ranked, bound), tuple(zip(counts[::2], counts[1::2], strict=True))
    if order.numel() and order.is_cuda:
        return gpu.forward(x, weight, bias, arrays, pairs, keep_cuts, kept)
    if order.numel():
        found = [kernel.forward(x, weight, bias, arrays, *pair, keep_cuts) for pair in pairs]
    else:
        found = [blocked.forward(x, weight, bias, *pair, keep_cuts) for pair in pairs]
    # Not a view if there is one pair: the next layer may write into its input.
    stack = torch.stack if len(found) > 1 else lambda one: torch.ops.aten._unsafe_view(one[0], (1, *one[0].shape))
    out, cuts, ties, walked = (stack(each) for each in zip(*found, strict=True))
    return out, cuts, ties, walked


def _checked_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Outputs:
    """`_forward` for callers of the registered operator, who may pass anything."""
    order, _, _, counts, _ = rest
    x = check_matrix(x, weight, bias)
    if x.dim() != 2 or not counts or len(counts) % 2:
        raise ValueError(f"x must have shape (n, in) and counts be pairs, got {tuple(x.shape)} and {list(counts)}")
    for top, bottom in zip(counts[::2], counts[1::2], strict=True):
        check_counts(top, bottom, weight.shape[1])
    check_order(order, weight)
    return _forward(x, weight, bias, *rest)


_trimmed_linear = torch.library.custom_op("ell0::trimmed_linear", _checked_forward, mutates_args=(), schema=FORWARD)


@_trimmed_linear.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, order: Tensor, *rest: Any) -> Outputs:
    *_, counts, keep_cuts = rest
    n, rows, pairs = x.shape[0], weight.shape[0], len(counts) // 2
    shape = (pairs, 2, rows, n) if keep_cuts else (pairs, 2, 0, 0)
    walked = 0
    if keep_cuts and order.numel():
        both = tuple(zip(counts[::2], counts[1::2], strict=True))
        walked = gpu.marks_of(both, x.shape[1], rows, n) if order.device.type == "cuda" else rows
    cuts, ties = x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
    return x.new_empty((pairs, n, rows)), cuts, ties, x.new_empty((pairs, walked), dtype=torch.int32)


def _backward(grad: Tensor, *rest: Any, kept: Kept = None) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight, added up over the pairs. rest: as `BACKWARD` says."""
    x, weight, order, bound, cuts, ties, walked, to_x, to_weight = rest
    call = kernel.backward if order.numel() else blocked.backward
    if order.numel() and order.is_cuda:
        call = partial(gpu.backward, kept=kept)
    pairs = zip(grad, cuts, ties, walked, strict=True)
    grads = [call(upstream, (x, weight, order, bound, *pair), to_x, to_weight) for upstream, *pair in pairs]
    grad_x, grad_weight = (reduce(torch.add, each) for each in zip(*grads, strict=True))
    return grad_x, grad_weight


def _checked_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """`_backward` for callers of the registered operator."""
    x, weight, order, _, cuts, ties, walked, _, _ = rest
    check_matrix(x, weight, None)
    check_order(order, weight, walked)
    (n, _), rows, pairs = x.shape, weight.shape[0], len(grad)
    length = 0 if not order.numel() else rows
    if order.numel() and order.is_cuda:
        length = rows + n if walked.shape[-1] == rows + n else 2 * rows + n
    shapes = {"grad": (pairs, n, rows), "cuts": (pairs, 2, rows, n), "ties": (pairs, 2, rows, n)}
    for name, tensor in {"grad": grad, "cuts": cuts, "ties": ties, "walked": walked}.items():
        dtype, shape = torch.int32 if name in ("ties", "walked") else x.dtype, shapes.get(name, (pairs, length))
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} must be {dtype} of shape {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    return _backward(grad, *rest)


_trimmed_backward = torch.library.custom_op(
    "ell0::trimmed_linear_backward", _checked_backward, mutates_args=(), schema=BACKWARD
)


@_trimmed_backward.register_fake
def _(_grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, to_x, to_weight = rest
    return x.new_empty(x.shape if to_x else (0,)), weight.new_empty(weight.shape if to_weight else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, weight, _, order, _, bound, _, ctx.keep_cuts = inputs
    _, cuts, ties, walked = output
    ctx.save_for_backward(x, weight, order, bound, cuts, ties, walked)
    ctx.mark_non_differentiable(cuts, ties, walked)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if to_x or to_weight:
        if not ctx.keep_cuts:
            raise RuntimeError("ell0::trimmed_linear was called with keep_cuts=False and cannot be differentiated")
        # A second derivative goes through the registered operator, which refuses it.
        plain, kept = not torch.is_grad_enabled() and _is_plain(grad), getattr(ctx, "kept", None)
        call = partial(_backward, kept=kept) if plain else torch.ops.ell0.trimmed_linear_backward
        grad_x, grad_weight = call(grad, *ctx.saved_tensors, to_x, to_weight)
        if kept:
            kept.clear()  # a second backward pass makes it again
    grad_bias = grad.sum((0, 1)) if to_bias else None
    return (grad_x if to_x else None, grad_weight if to_weight else None, grad_bias, *[None] * 5)


_trimmed_linear.register_autograd(_differentiate, setup_context=_save)


class _Trimmed(torch.autograd.Function):
    """The registered operator without torch's dispatch, which takes longer than a small layer on a GPU."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Outputs:
        ctx.kept = [] if ctx.needs_input_grad[1] else None
        output = _forward(*inputs, kept=ctx.kept)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


PLAIN = (Tensor, nn.Parameter)


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether no compiler, tracer, mode, transform or tensor subclass has to see the call of the operator."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(t is None or (type(t) in PLAIN and torch._C._has_storage(t) and not t.is_meta) for t in tensors)
    )


def prepare(weight: Tensor) -> Prepared:
    """Orders a weight ``(out, in)`` once for many calls with ``prepared=``.

    Passing the result after the weight changed raises a ValueError, unless torch does not count the change: through
    ``weight.data``, in inference mode, inside `torch.compile`.
    """
    check_weight(weight)
    return Prepared(*_arrays(weight, None), weight.detach(), _version(weight))


def trimmed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, top: int, bottom: int, prepared: Prepared | None = None
) -> Tensor:
    """Linear layer whose inner sums drop their ``top`` largest and ``bottom`` smallest terms.

    out[b, o] = sum of {x[b, i] * weight[o, i]} without its top largest and bottom smallest terms, plus bias[o]

    Terms are compared as the dtype rounds them. At ties the lowest index is removed first, the top side before the
    bottom side. 0 * inf is 0; a NaN in a sample or in a row of the weight makes that sample's or that row's outputs
    NaN. The gradient goes through the kept terms, to x, weight and bias. ``top = bottom = 0`` is ``F.linear``.

    Args:
        x: ``(..., in)``.  weight: ``(out, in)``.  bias: ``(out,)``, added after trimming.  float32 or float64.
        top, bottom: terms removed on each side, ``top + bottom < in``.
        prepared: the result of `prepare` for this weight. Default: the weight is prepared in this call.
    """
    x = check_matrix(x, weight, bias)
    check_counts(top, bottom, weight.shape[1])
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
    """Several trimmed products of the same x and weight: `trimmed_linear` for each pair (top, bottom) of counts.

    Result ``(pairs, ..., out)``. On the GPU, pairs share the dense product, where removed terms are listed.
    """
    x = check_matrix(x, weight, bias)
    if not counts:
        raise ValueError("counts must hold at least one pair of top and bottom, got none")
    if any(top == bottom == 0 for top, bottom in counts):
        each = [trimmed_linear(x, weight, bias, top=t, bottom=b, prepared=prepared) for t, b in counts]
        return torch.stack(each)
    for top, bottom in counts:
        check_counts(top, bottom, weight.shape[1])
    return _apply(x, weight, bias, tuple(number for pair in counts for number in pair), prepared)


def truncated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, k: int, prepared: Prepared | None = None
) -> Tensor:
    """Linear layer whose inner sums drop their k largest and k smallest terms.

    out[b, o] = sum of the middle in - 2k values of {x[b, i] * weight[o, i]} + bias[o]     ([Beliaev22] eq. 3-5)

    Args:
        x: ``(..., in)``.  weight: ``(out, in)``.  bias: ``(out,)``, added after truncation.  float32 or float64.
        k: terms removed on each side, ``0 <= 2k < in``; ``k=0`` is ``F.linear``.
        prepared: the result of `prepare` for this weight. Default: the weight is prepared in this call.
    """
    check_weight(weight)
    check_k(k, weight.shape[1])
    return trimmed_linear(x, weight, bias, top=k, bottom=k, prepared=prepared)


def cuts(
    x: Tensor, weight: Tensor, *, top: int, bottom: int, prepared: Prepared | None = None
) -> tuple[Tensor, Tensor]:
    """Where each sum of `trimmed_linear` is cut: its ``top``-th largest and its ``bottom``-th smallest term.

    Both ``(..., out)``, without gradient; infinite where nothing is removed, NaN where the sum is.
    """
    check_matrix(x, weight, None)
    check_counts(top, bottom, weight.shape[1])
    with torch.no_grad():
        flat, arrays = x.reshape(-1, x.shape[-1]), _arrays(weight, prepared)
        found = torch.ops.ell0.trimmed_linear(flat, weight, None, *arrays, [top, bottom], True)
        high, low = (cut.T.reshape(*x.shape[:-1], weight.shape[0]) for cut in found[1][0])
    return high, torch.where(high.isnan(), high, low)


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...], prepared: Prepared | None
) -> Tensor:
    """``(pairs, ..., out)``; through the registered operator wherever a compiler, tracer or mode watches."""
    refuse_forward_mode(x, weight, bias)
    arrays = _arrays(weight, prepared)
    keep_cuts = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    call: Callable[..., Any] = torch.ops.ell0.trimmed_linear
    if _is_plain(x, weight, bias):
        differentiates = keep_cuts or (torch.is_grad_enabled() and bias is not None and bias.requires_grad)
        call = _Trimmed.apply if differentiates else _forward
    out: Tensor = call(flat, weight, bias, *arrays, counts, keep_cuts)[0]
    return out if x.dim() == 2 else out.reshape(len(out), *x.shape[:-1], weight.shape[0])


def _arrays(weight: Tensor, prepared: Prepared | None) -> Arrays:
    """The arrays of the prepared weight, made now if none is given."""
    if prepared is None:
        arrays: Arrays = (_order if _is_plain(weight) else torch.ops.ell0.prepare)(weight.detach())
        return arrays
    if not isinstance(prepared, Prepared):
        raise ValueError(f"prepared must come from ops.prepare, got {type(prepared).__name__}")
    if not torch.compiler.is_compiling():
        prepared.check(weight)
    return prepared.order, prepared.ranked, prepared.bound
