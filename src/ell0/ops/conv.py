"""The trimmed convolution: each output drops the extremes of its own receptive field.

The fields of some output positions at a time are unfolded, for the forward and again for the backward pass; none of
them is kept in between. With unit "feature" they are the rows of the trimmed product (`operator`); with unit "pixel"
the terms are few, one for each place of the window, and are sorted out by comparing whole tensors; those of a large
window are sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ..threat import Unit
from .blocked import ascending
from .checks import check_counts, check_tensors, refuse_forward_mode
from .reference import Geometry

Pair = int | tuple[int, int]

UNFOLDED = 1 << 24
"""Numbers that are unfolded at once: 64 MiB of float32."""

CACHED = 1 << 18
"""The same for pixels on the CPU, where what is compared again and again should stay in the cache."""

LARGE, SORTED = 64, 1 << 22
"""Places of a window beyond which so many are unfolded after all: its matrix products, one a place, would be tiny."""

COMPARED = 512
"""Terms times those that leave; beyond it pixels are sorted instead of compared."""


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
    groups: int = 1,
    unit: Unit = "feature",
) -> Tensor:
    """Convolution whose sums drop the ``top`` largest and ``bottom`` smallest terms of their receptive field.

    feature: the terms are the products of the field, in / groups * kh * kw of them
    pixel:   the terms are u_p = sum over channels c of weight[o, c, p] * x[c, p], kh * kw of them

    Zero padding counts as terms of value 0. Terms are compared as the dtype rounds them, those of pixels after a sum
    in float64; at ties the lowest index of ``weight[o]`` leaves first, the top side before the bottom side. 0 * inf is
    0; a NaN, or inf - inf in a pixel, makes the outputs that see it NaN. The gradient goes through the kept terms, to
    x, weight and bias. ``top = bottom = 0`` is ``F.conv2d``.

    Args:
        x: ``(n, in, height, width)``.  weight: ``(out, in / groups, kh, kw)``.  bias: ``(out,)``, added after trimming.
            float32 or float64.
        top, bottom: terms removed on each side, ``top + bottom <`` the number of terms.
    """
    geometry = check_geometry(stride, padding, dilation, groups)
    x = _admit(x, weight, bias, ((top, bottom),), geometry, unit)
    where = (geometry.stride, geometry.padding, geometry.dilation, groups)
    if top == bottom == 0:
        return F.conv2d(x, weight, bias, *where)
    return torch.ops.ell0.trimmed_conv2d(x, weight, bias, [top, bottom], *where, unit)[0]  # type: ignore[no-any-return]


def trimmed_conv2ds(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    counts: Sequence[tuple[int, int]],
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    unit: Unit = "feature",
) -> Tensor:
    """Several trimmed convolutions of the same x and weight: `trimmed_conv2d` for each pair of top and bottom.

    Result ``(pairs, n, out, height, width)``. The pairs share the unfolded fields, and those of pixels their terms.
    """
    geometry = check_geometry(stride, padding, dilation, groups)
    x = _admit(x, weight, bias, counts, geometry, unit)
    if not all(any(pair) for pair in counts):
        options: dict[str, Any] = {"unit": unit, **vars(geometry)}
        return torch.stack([trimmed_conv2d(x, weight, bias, top=t, bottom=b, **options) for t, b in counts])
    where = (geometry.stride, geometry.padding, geometry.dilation, groups)
    flat = [number for pair in counts for number in pair]
    return torch.ops.ell0.trimmed_conv2d(x, weight, bias, flat, *where, unit)  # type: ignore[no-any-return]


def count_terms(channels: int, kernel: Sequence[int], unit: Unit) -> int:
    """How many terms the sum of one receptive field has; channels: those of a group."""
    if unit not in get_args(Unit):
        raise ValueError(f'unit must be "feature" or "pixel", got {unit!r}')
    places = kernel[0] * kernel[1]
    return places if unit == "pixel" else channels * places


def check_pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """The value as a pair, vertical and horizontal; raises unless it is one or two ints that are not too small."""
    pair = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v >= least for v in pair):
        raise ValueError(f"{name} must be an int >= {least} or two of them, got {value!r}")
    return pair


def check_geometry(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Geometry:
    """The geometry of these arguments; raises where one makes no sense."""
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise ValueError(f"groups must be an int >= 1, got {groups!r}")
    pairs = check_pair("stride", stride, 1), check_pair("padding", padding, 0), check_pair("dilation", dilation, 1)
    return Geometry(*pairs, groups)


def _admit(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Sequence[tuple[int, int]],
    geometry: Geometry,
    unit: Unit,
) -> Tensor:
    """x in the dtype of the weight; raises unless everything fits together."""
    x = check_tensors(x, weight, bias, ("out", "in / groups", "height", "width"))
    out, channels = weight.shape[0], weight.shape[1] * geometry.groups
    if out % geometry.groups:
        raise ValueError(f"groups must divide the {out} outputs of weight, got {geometry.groups}")
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"x must have shape (n, {channels}, height, width) to match weight, got {tuple(x.shape)}")
    if min(output_size(x.shape[2:], weight.shape[2:], geometry)) < 1:
        raise ValueError(
            f"x must be at least as large as the window after padding, got {tuple(x.shape[2:])} for a window of "
            f"{tuple(weight.shape[2:])} with {geometry}"
        )
    if not counts:
        raise ValueError("counts must hold at least one pair of top and bottom, got none")
    terms = count_terms(weight.shape[1], weight.shape[2:], unit)
    for top, bottom in counts:
        check_counts(top, bottom, terms)
    refuse_forward_mode(x, weight, bias)
    return x


def output_size(size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> tuple[int, int]:
    """Height and width of the output for those of an image and of the window."""
    height, width = (
        (size[i] + 2 * geometry.padding[i] - geometry.dilation[i] * (kernel[i] - 1) - 1) // geometry.stride[i] + 1
        for i in (0, 1)
    )
    return height, width


def _empty(x: Tensor, weight: Tensor, geometry: Geometry, pairs: int) -> Tensor:
    """Room for the output, in the memory format of x as ``F.conv2d`` has it."""
    (n, out), (height, width) = (x.shape[0], weight.shape[0]), output_size(x.shape[2:], weight.shape[2:], geometry)
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return x.new_empty((pairs, n, out, height, width))
    return x.new_empty((pairs, n, height, width, out)).permute(0, 1, 4, 2, 3)


class _Features:
    """The sums of one group whose terms are products: rows of the trimmed product.  weight: ``(out, in, places)``."""

    def __init__(self, weight: Tensor, counts: Sequence[int]) -> None:
        self._weight, self._counts = weight.flatten(1), counts
        self._order, self._ranked, self._bound = torch.ops.ell0.prepare(self._weight)

    def forward(self, fields: Tensor, bias: Tensor | None) -> Tensor:
        """``(pairs, m, out)`` for fields ``(m, in, places)``."""
        return self._trim(fields.flatten(1), bias, keep_cuts=False)[0]

    def backward(self, grad: Tensor, fields: Tensor, to_x: bool, to_weight: bool) -> tuple[Tensor, Tensor]:
        """Gradients to fields and weight for ``grad (pairs, m, out)``; one that is not wanted comes back empty."""
        rows = fields.flatten(1)
        _, cuts, ties, walked = self._trim(rows, None, keep_cuts=True)
        to_fields, to_rows = torch.ops.ell0.trimmed_linear_backward(
            grad, rows, self._weight, self._order, self._bound, cuts, ties, walked, to_x, to_weight
        )
        return to_fields.reshape(-1, *fields.shape[1:]), to_rows.reshape(-1, *fields.shape[1:])

    def _trim(self, rows: Tensor, bias: Tensor | None, keep_cuts: bool) -> tuple[Tensor, ...]:
        arrays = (self._order, self._ranked, self._bound)
        found: tuple[Tensor, ...] = torch.ops.ell0.trimmed_linear(
            rows, self._weight, bias, *arrays, self._counts, keep_cuts
        )
        return found


class _Pixels:
    """The sums of one group whose terms are whole pixels.  weight: ``(out, in, places)``.

    finite: whether everything is known to be, so that no product of 0 and infinity can arise. In the gradients it is 0
    too, where that of the trimmed product is NaN.
    """

    def __init__(self, weight: Tensor, counts: Sequence[int], finite: bool) -> None:
        self._counts = list(zip(counts[::2], counts[1::2], strict=True))
        self._multiply: _Multiply = torch.matmul if finite else _product
        # Laid out once as `pixel_terms` wants it.
        self._weight = weight.permute(2, 1, 0).double().contiguous().permute(2, 1, 0)

    def forward(self, fields: Tensor, bias: Tensor | None) -> Tensor:
        """``(pairs, m, out)`` for fields ``(m, in, places)``."""
        terms = pixel_terms(fields, self._weight, self._multiply)
        sums = []
        for top, bottom in self._counts:
            left, _, _ = trim_places(terms, top, bottom)
            total = left[0].double()
            if isinstance(left, Tensor):
                total = left.sum(0, dtype=torch.float64)
            else:
                for term in left[1:]:
                    total += term
            sums.append(total if bias is None else total.add_(bias))
        return torch.stack(sums).to(terms.dtype)

    def backward(self, grad: Tensor, fields: Tensor, to_x: bool, to_weight: bool) -> tuple[Tensor, Tensor]:
        """Gradients to fields and weight for ``grad (pairs, m, out)``; one that is not wanted comes back empty."""
        terms = pixel_terms(fields, self._weight, self._multiply)
        to_terms = torch.zeros_like(terms, dtype=torch.float64)
        for upstream, (top, bottom) in zip(grad, self._counts, strict=True):
            _, high, low = trim_places(terms, top, bottom)
            undefined = (high if top else low).isnan()
            leaves = ~_kept(terms, (high, torch.gt, top), (low, torch.lt, bottom))
            to_terms += upstream.masked_fill(undefined, torch.nan).expand_as(terms).masked_fill(leaves, 0.0)
        to_fields, to_rows = fields.new_empty((0, *fields.shape[1:])), fields.new_empty((0, *fields.shape[1:]))
        if to_x:
            to_fields = self._multiply(to_terms, self._weight.permute(2, 0, 1)).permute(1, 2, 0)
        if to_weight:
            to_rows = self._multiply(fields.permute(2, 1, 0).double(), to_terms).permute(2, 1, 0)
        return to_fields, to_rows


_Compare = Callable[..., Tensor]
_Multiply = Callable[[Tensor, Tensor], Tensor]


def trim_places(terms: Tensor, top: int, bottom: int) -> tuple[Sequence[Tensor] | Tensor, Tensor, Tensor]:
    """The terms that stay, in no order, and the last ones that left; those mean nothing where none did.

    terms: ``(places, ...)``.  A NaN leaves neither the terms nor the cuts.
    """
    places = len(terms)
    if (top + bottom) * places > COMPARED:
        order = ascending(terms.movedim(0, -1)).movedim(-1, 0)
        order = order.masked_fill(terms.isnan().any(0), torch.nan)
        return order[bottom : places - top], order[places - max(1, top)], order[max(1, bottom) - 1]
    left: Sequence[Tensor] = terms.clone().unbind()
    spare, cuts = torch.empty_like(terms[0]), []
    for count, first, last in ((top, torch.maximum, torch.minimum), (bottom, torch.minimum, torch.maximum)):
        edge = spare
        for _ in range(count):
            edge, *left = left
            for term in left:
                first(edge, term, out=spare)
                last(edge, term, out=term)
                edge, spare = spare, edge
        cuts.append(edge)
        spare = torch.empty_like(edge)
    return left, cuts[0], cuts[1]


def _kept(terms: Tensor, *sides: tuple[Tensor, _Compare, int]) -> Tensor:
    """True at the terms that stay, given for each side its cut, what lies beyond it, and how many leave."""
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


def pixel_terms(fields: Tensor, weight: Tensor, multiply: _Multiply = _product) -> Tensor:
    """Terms of unit "pixel": ``(places, m, out)`` for fields ``(m, in, places)`` and weight ``(out, in, places)``."""
    return multiply(fields.permute(2, 0, 1).double(), weight.permute(2, 1, 0).double()).to(fields.dtype)


def _sums(weight: Tensor, counts: Sequence[int], groups: int, unit: str, *others: Tensor) -> list[_Features | _Pixels]:
    """What computes the sums of each group."""
    parts = weight.flatten(2).chunk(groups)
    if unit == "feature":
        return [_Features(part, counts) for part in parts]
    # To ask a GPU would be to wait for it.
    finite = not weight.is_cuda and all(bool(t.isfinite().all()) for t in (weight, *others))
    return [_Pixels(part, counts, finite) for part in parts]


class _Windows:
    """The receptive fields of a convolution on x, some at a time."""

    def __init__(self, x: Tensor, weight: Tensor, geometry: Geometry, unit: str) -> None:
        self._x, self._geometry = x, geometry
        self._kernel = weight.shape[2:]
        self._height, self._width = output_size(x.shape[2:], self._kernel, geometry)
        places = self._kernel.numel()
        # A feature leaves two cuts and two counts of ties for each output, a pixel its terms.
        each = places * len(weight) if unit == "pixel" else max(x.shape[1] * places, 4 * len(weight))
        elements = UNFOLDED
        if unit == "pixel" and not x.is_cuda:
            elements = CACHED if places <= LARGE else SORTED
        self._rows = max(1, elements // max(1, each * self._width))

    def images(self) -> Iterator[tuple[slice, Tensor]]:
        """Some samples at a time, padded."""
        vertical, horizontal = self._geometry.padding
        count = max(1, self._rows // self._height)
        for n in range(0, len(self._x), count):
            samples = slice(n, min(n + count, len(self._x)))
            yield samples, F.pad(self._x[samples], (horizontal, horizontal, vertical, vertical))

    def rows(self) -> Iterator[slice]:
        """Some rows of the output at a time."""
        for i in range(0, self._height, self._rows):
            yield slice(i, min(i + self._rows, self._height))

    def unfold(self, padded: Tensor, rows: slice) -> Tensor:
        """The fields of some rows of padded samples, ``(groups, m, in / groups, places)``."""
        fields = torch.stack([place.permute(0, 2, 3, 1) for place in self._places(padded, rows)], -1)
        groups = self._geometry.groups
        return fields.view(-1, groups, fields.shape[3] // groups, fields.shape[4]).transpose(0, 1)

    def fold(self, fields: Tensor, padded: Tensor, rows: slice) -> None:
        """Adds what lies in fields, ``(groups, m, in / groups, places)``, to where the fields came from."""
        for place, part in zip(self._places(padded, rows), fields.unbind(-1), strict=True):
            place += part.transpose(0, 1).reshape(place.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)

    def inside(self, padded: Tensor) -> Tensor:
        """Padded samples without their padding."""
        (vertical, horizontal), (height, width) = self._geometry.padding, self._x.shape[2:]
        return padded[:, :, vertical : vertical + height, horizontal : horizontal + width]

    def _places(self, padded: Tensor, rows: slice) -> Iterator[Tensor]:
        """For each place of the window what the fields have there: views ``(n, in, rows, width)``."""
        (down, across), (lower, further) = self._geometry.stride, self._geometry.dilation
        for i in range(self._kernel[0]):
            for j in range(self._kernel[1]):
                first, left = i * lower + rows.start * down, j * further
                last, right = i * lower + (rows.stop - 1) * down, left + (self._width - 1) * across
                yield padded[:, :, first : last + 1 : down, left : right + 1 : across]


Rule = Callable[[Tensor, Tensor, bool, bool], tuple[Tensor, Tensor]]
"""What `_Features.backward` does, for one group: gradients to some of its fields and to its part of the weight."""


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    unit: str,
    rules: Sequence[Rule],
    *,
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients to x and weight that the rules, one for each group, make of ``grad (pairs, n, out, height, width)``.

    One that is not wanted comes back empty. The fields are unfolded some at a time, as in the forward pass.
    """
    groups, windows = geometry.groups, _Windows(x, weight, geometry, unit)
    grad_x = x.new_empty(x.shape if to_x else (0,))
    # In float64: there may be many chunks to add up.
    grad_rows = [part.new_zeros(part.shape, dtype=torch.float64) for part in weight.flatten(2).chunk(groups)]
    for samples, padded in windows.images():
        grad_padded = torch.zeros_like(padded) if to_x else padded
        for rows in windows.rows():
            upstream = grad[:, samples, :, rows].permute(0, 1, 3, 4, 2).flatten(1, 3).chunk(groups, 2)
            found = []
            for group, fields in enumerate(windows.unfold(padded, rows)):
                to_fields, to_rows = rules[group](upstream[group], fields, to_x, to_weight)
                found.append(to_fields)
                if to_weight:
                    grad_rows[group] += to_rows
            if to_x:
                windows.fold(torch.stack(found), grad_padded, rows)
        if to_x:
            grad_x[samples] = windows.inside(grad_padded)
    grad_weight = torch.cat(grad_rows).view(weight.shape).to(weight.dtype) if to_weight else weight.new_empty(0)
    return grad_x, grad_weight


@torch.library.custom_op("ell0::trimmed_conv2d", mutates_args=())
def _trimmed_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    unit: str,
) -> Tensor:
    geometry = _geometry(stride, padding, dilation, groups)
    out = _empty(x, weight, geometry, len(counts) // 2)
    windows, sums = _Windows(x, weight, geometry, unit), _sums(weight, counts, groups, unit, x)
    biases = [None] * groups if bias is None else bias.chunk(groups)
    for samples, padded in windows.images():
        for rows in windows.rows():
            room = out[:, samples, :, rows].permute(0, 1, 3, 4, 2).chunk(groups, 4)
            for group, fields in enumerate(windows.unfold(padded, rows)):
                found = sums[group].forward(fields, biases[group])
                room[group].copy_(found.reshape(room[group].shape))
    return out


@_trimmed_conv2d.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    counts: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    unit: str,  # noqa: ARG001
) -> Tensor:
    return _empty(x, weight, _geometry(stride, padding, dilation, groups), len(counts) // 2)


@torch.library.custom_op("ell0::trimmed_conv2d_backward", mutates_args=())
def _trimmed_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    unit: str,
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor]:
    geometry = _geometry(stride, padding, dilation, groups)
    rules = [sums.backward for sums in _sums(weight, counts, groups, unit, x, grad)]
    return gradients(grad, x, weight, geometry, unit, rules, to_x=to_x, to_weight=to_weight)


@_trimmed_conv2d_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],  # noqa: ARG001
    stride: Sequence[int],  # noqa: ARG001
    padding: Sequence[int],  # noqa: ARG001
    dilation: Sequence[int],  # noqa: ARG001
    groups: int,  # noqa: ARG001
    unit: str,  # noqa: ARG001
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if to_x else (0,)), weight.new_empty(weight.shape if to_weight else (0,))


def _geometry(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Geometry:
    return Geometry((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]), groups)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, _, *ctx.settings = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if to_x or to_weight:
        grad_x, grad_weight = torch.ops.ell0.trimmed_conv2d_backward(
            grad, *ctx.saved_tensors, *ctx.settings, to_x, to_weight
        )
    grad_bias = grad.sum((0, 1, 3, 4)) if to_bias else None
    return (grad_x if to_x else None, grad_weight if to_weight else None, grad_bias, *[None] * 6)


_trimmed_conv2d.register_autograd(_differentiate, setup_context=_save)
