"""The trimmed convolution: each output drops the extremes of its own receptive field.

The receptive fields are unfolded. With unit "feature" they are the rows of a trimmed product (`operator`). With unit
"pixel" a field has one term for each place of the window. These terms are made a block of fields at a time, in the
forward pass and again in the backward pass; they are compared as whole tensors, or sorted where the window is large.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.utils import _pair

from ..threat import Unit
from .blocked import ascending
from .checks import check_counts, check_tensors, refuse_forward_mode
from .operator import trimmed_linear

Pair = int | tuple[int, int]

BLOCK = 1 << 24  # terms of pixels that are made at once on a GPU: 64 MiB of float32
CACHED = 1 << 18  # the same on the CPU, where terms that are compared again and again should stay in the cache
LARGE, SORTED = 64, 1 << 22  # places of a window beyond which the CPU makes so many: its products would be tiny
COMPARED = 512  # terms times removed terms; beyond it terms are sorted instead of compared


def trimmed_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    top: int,
    bottom: int,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    unit: Unit = "feature",
) -> Tensor:
    """Convolution whose sums drop the ``top`` largest and ``bottom`` smallest terms of their receptive field.

    feature: the terms are the products of the field, in * kh * kw of them
    pixel:   the terms are u_p = sum over channels c of weight[o, c, p] * x[c, p], kh * kw of them

    Zero padding counts as terms of value 0. Terms are compared as the dtype rounds them, those of pixels after a sum
    in float64. At ties the lowest index of ``weight[o]`` is removed first, the top side before the bottom side. 0 * inf
    is 0; a NaN, or inf - inf in a pixel, makes the outputs that see it NaN. The gradient goes through the kept terms,
    to x, weight and bias. ``top = bottom = 0`` is ``F.conv2d``.

    Args:
        x: ``(n, in, height, width)``.  weight: ``(out, in, kh, kw)``.  bias: ``(out,)``, added after trimming.
            float32 or float64.
        top, bottom: terms removed on each side, ``top + bottom <`` the number of terms.
    """
    x = check_tensors(x, weight, bias, ("out", "in", "height", "width"))
    channels, kernel = weight.shape[1], (weight.shape[2], weight.shape[3])
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"x must have shape (n, {channels}, height, width) to match weight, got {tuple(x.shape)}")
    check_counts(top, bottom, count_terms(channels, kernel, unit))
    refuse_forward_mode(x, weight, bias)
    if top == bottom == 0:
        return F.conv2d(x, weight, bias, stride, padding, dilation)
    fields = F.unfold(x, kernel, dilation, padding, stride).transpose(1, 2)
    if unit == "feature":
        out = trimmed_linear(fields, weight.flatten(1), bias, top=top, bottom=bottom)
    else:
        pixels = fields.reshape(-1, channels, kernel[0] * kernel[1])
        out = torch.ops.ell0.trimmed_pixels(pixels, weight.flatten(2), bias, top, bottom)
    # In the memory format of x, as F.conv2d has it.
    steps = zip(x.shape[2:], _pair(padding), _pair(dilation), kernel, _pair(stride), strict=True)
    size = [(length + 2 * pad - apart * (window - 1) - 1) // step + 1 for length, pad, apart, window, step in steps]
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    out = out.view(x.shape[0], *size, weight.shape[0]).permute(0, 3, 1, 2)
    return out.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def count_terms(channels: int, kernel: Sequence[int], unit: Unit) -> int:
    """How many terms the sum of one receptive field has."""
    if unit not in get_args(Unit):
        raise ValueError(f'unit must be "feature" or "pixel", got {unit!r}')
    places = kernel[0] * kernel[1]
    return places if unit == "pixel" else channels * places


def _multiplication(*tensors: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The matrix product to take. Without infinities no product of 0 and infinity can arise."""
    # To ask a GPU would be to wait for it.
    finite = not tensors[0].is_cuda and all(bool(t.isfinite().all()) for t in tensors)
    return torch.matmul if finite else _product


def _blocks(fields: Tensor, weight: Tensor, multiply: Callable[..., Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Some fields ``(m, in, places)`` at a time, and their terms ``(places, fields, out)``."""
    places, _, out = weight.shape
    elements = BLOCK if weight.is_cuda else CACHED if places <= LARGE else SORTED
    many = max(1, elements // max(1, places * out))
    for start in range(0, len(fields), many):
        rows = slice(start, start + many)
        yield rows, multiply(fields[rows].permute(2, 0, 1).double(), weight).to(fields.dtype)


def _by_place(weight: Tensor) -> Tensor:
    """``(places, in, out)`` in float64 for a weight ``(out, in, places)``."""
    return weight.permute(2, 1, 0).double().contiguous()


def _forward(fields: Tensor, weight: Tensor, bias: Tensor | None, top: int, bottom: int) -> Tensor:
    """``(m, out)`` for fields ``(m, in, places)`` and weight ``(out, in, places)``."""
    out = fields.new_empty(len(fields), len(weight))
    for rows, terms in _blocks(fields, _by_place(weight), _multiplication(fields, weight)):
        left, _, _ = _trim(terms, top, bottom)
        if isinstance(left, Tensor):
            total = left.sum(0, dtype=torch.float64)
        else:
            total = left[0].double()
            for term in left[1:]:
                total += term
        out[rows] = total if bias is None else total.add_(bias)
    return out


def _backward(
    grad: Tensor, fields: Tensor, weight: Tensor, top: int, bottom: int, to_fields: bool, to_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients to fields and weight for ``grad (m, out)``; one that is not wanted is empty. 0 * inf is 0 here too."""
    grad_fields = torch.empty_like(fields) if to_fields else fields.new_empty(0)
    # In float64: there may be many blocks to add up.
    grad_weight = weight.new_zeros(weight.shape if to_weight else (0,), dtype=torch.float64)
    multiply, factors = _multiplication(fields, weight, grad), _by_place(weight)
    for rows, terms in _blocks(fields, factors, multiply):
        _, high, low = _trim(terms, top, bottom)
        undefined = (high if top else low).isnan()
        stays = _kept(terms, (high, torch.gt, top), (low, torch.lt, bottom))
        to_terms = grad[rows].masked_fill(undefined, torch.nan).expand_as(terms).masked_fill(~stays, 0.0).double()
        if to_fields:
            grad_fields[rows] = multiply(to_terms, factors.transpose(1, 2)).permute(1, 2, 0)
        if to_weight:
            grad_weight += multiply(fields[rows].permute(2, 1, 0).double(), to_terms).permute(2, 1, 0)
    return grad_fields, grad_weight.to(weight.dtype)


FORWARD = "(Tensor fields, Tensor weight, Tensor? bias, SymInt top, SymInt bottom) -> Tensor"
BACKWARD = (
    "(Tensor grad, Tensor fields, Tensor weight, SymInt top, SymInt bottom, bool to_fields, bool to_weight) "
    "-> (Tensor, Tensor)"
)
_trimmed_pixels = torch.library.custom_op("ell0::trimmed_pixels", _forward, mutates_args=(), schema=FORWARD)
_trimmed_pixels_backward = torch.library.custom_op(
    "ell0::trimmed_pixels_backward", _backward, mutates_args=(), schema=BACKWARD
)


@_trimmed_pixels.register_fake
def _(fields: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return fields.new_empty(fields.shape[0], weight.shape[0])


@_trimmed_pixels_backward.register_fake
def _(_grad: Tensor, fields: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, to_fields, to_weight = rest
    return fields.new_empty(fields.shape if to_fields else (0,)), weight.new_empty(weight.shape if to_weight else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    fields, weight, _, *ctx.counts = inputs
    ctx.save_for_backward(fields, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_fields, to_weight, to_bias, *_ = ctx.needs_input_grad
    grad_fields, grad_weight = None, None
    if to_fields or to_weight:
        saved = (*ctx.saved_tensors, *ctx.counts, to_fields, to_weight)
        grad_fields, grad_weight = torch.ops.ell0.trimmed_pixels_backward(grad, *saved)
    grad_bias = grad.sum(0) if to_bias else None
    return grad_fields if to_fields else None, grad_weight if to_weight else None, grad_bias, None, None


_trimmed_pixels.register_autograd(_differentiate, setup_context=_save)


def _trim(terms: Tensor, top: int, bottom: int) -> tuple[Sequence[Tensor] | Tensor, Tensor, Tensor]:
    """The terms that stay, in no order, and the last ones removed on each side, which mean nothing if none is.

    terms: ``(places, ...)``.  Where one is NaN, so are the result and the cuts.
    """
    places = len(terms)
    if (top + bottom) * places > COMPARED:
        order = ascending(terms.movedim(0, -1)).movedim(-1, 0)
        order = order.masked_fill(terms.isnan().any(0), torch.nan)
        return order[bottom : places - top], order[places - max(1, top)], order[max(1, bottom) - 1]
    left: Sequence[Tensor] = terms.clone().unbind()
    cuts = []
    for count, first, last in ((top, torch.maximum, torch.minimum), (bottom, torch.minimum, torch.maximum)):
        edge = spare = torch.empty_like(terms[0])
        for _ in range(count):
            edge, *left = left
            for term in left:
                first(edge, term, out=spare)
                last(edge, term, out=term)
                edge, spare = spare, edge
        cuts.append(edge)
    return left, cuts[0], cuts[1]


def _kept(terms: Tensor, *sides: tuple[Tensor, Callable[..., Tensor], int]) -> Tensor:
    """True at the terms that stay, given for each side its cut, what lies beyond it, and how many are removed."""
    numbers = torch.uint8 if len(terms) < 256 else torch.int32
    stays = torch.ones_like(terms, dtype=torch.bool)
    # The top side first: among terms tied with both cuts it takes the lowest indices, the bottom side the next ones.
    for cut, beyond, count in sides:
        if count:
            gone, tied = beyond(terms, cut), stays & (terms == cut)
            room = count - gone.sum(0, dtype=numbers)
            stays &= ~(gone | (tied & (tied.cumsum(0, dtype=numbers) <= room)))
    return stays


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of two tensors in float64, where 0 * inf is 0."""
    far_a, far_b = a.isinf(), b.isinf()
    # How many infinite products of each sign there are: a finite factor has its sign, and 0 none.
    left, right = torch.cat((a.sign().where(far_a, 0.0), a.sign().where(~far_a, 0.0)), -1), b.sign()
    right = torch.cat((right, right.where(far_b, 0.0)), -2)
    count, sum_of_signs = left.abs() @ right.abs(), left @ right
    infinite = torch.where(sum_of_signs.abs() == count, sum_of_signs * torch.inf, torch.nan)
    return a.masked_fill(far_a, 0.0) @ b.masked_fill(far_b, 0.0) + infinite.masked_fill(count == 0, 0.0)
