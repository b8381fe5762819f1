"""The trimmed convolution with small receptive fields: one output position to a lane, its field in registers.

Positions are numbered through all samples, row by row. A network takes the terms of one output apart: those that leave
on top, those that stay, those that leave at the bottom. What the backward pass must know of an output is one bit for
each of its terms, whether it stays; no bit at all is an output that is undefined, for some term always stays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._language import kernel, size_of
from ._networks import network


@triton.jit
def _corner(position, high, wide, down, across, above, beside):
    """Sample, row and column of the output, and where its window begins on the image."""
    row = position // wide % high
    column = position % wide
    return position // (high * wide), row, column, row * down - above, column * across - beside


@triton.jit
def _field(
    x, y, z, here, height, width, channel, vertical, horizontal, lower, further,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """What the windows that begin at row y and column z see, in the order of the weight; x points to the samples."""
    v = ()
    for i in tl.static_range(CHANNELS * KH * KW):
        at_y = y + (i // KW % KH) * lower
        at_z = z + (i % KW) * further
        inside = here & (at_y >= 0) & (at_y < height) & (at_z >= 0) & (at_z < width)
        at = (i // (KH * KW)) * channel + at_y * vertical + at_z * horizontal
        v = v + (tl.load(x + at, mask=inside, other=0.0),)
    return v


@triton.jit
def _doubled(v, SIZE: tl.constexpr):
    out = ()
    for i in tl.static_range(SIZE):
        out = out + (v[i].to(tl.float64),)
    return out


@triton.jit
def _defined(product):
    """0 for a product of zero and infinity. One of a NaN is gone too: the sizes of its factors tell."""
    return tl.where(product != product, 0.0, product)


@triton.jit
def _terms(field, weight, size, CHANNELS: tl.constexpr, PLACES: tl.constexpr, PIXELS: tl.constexpr):
    """The terms of one output, and whether it is undefined; size: that of the field.

    For terms that are pixels field and weight are float64.
    """
    w = ()
    for i in tl.static_range(CHANNELS * PLACES):
        w = w + (tl.load(weight + i),)
    size += size_of(w, CHANNELS * PLACES)
    lost = size != size
    v = ()
    if PIXELS:
        for p in tl.static_range(PLACES):
            total = _defined(w[p] * field[p])
            for c in tl.static_range(1, CHANNELS):
                total += _defined(w[c * PLACES + p] * field[c * PLACES + p])
            # Infinities of both signs.
            lost = lost | (total != total)
            v = v + (total.to(tl.float32),)
    else:
        for i in tl.static_range(CHANNELS * PLACES):
            v = v + (_defined(w[i] * field[i]),)
    return v, lost


@triton.jit
def _share(shares, each, OUTS: tl.constexpr):
    """The block of positions of this program, its group, and its first and last output."""
    share = tl.program_id(0) % shares
    per_group = (each + OUTS - 1) // OUTS
    group = share // per_group
    first = group * each + share % per_group * OUTS
    return tl.program_id(0) // shares, group, first, tl.minimum(first + OUTS, group * each + each)


@kernel()
def trim_fields(
    x, weight, bias, out, positions, each, high, wide, height, width, shares,
    sample, channel, vertical, horizontal, out_sample, out_channel, out_vertical, out_horizontal,
    down, across, above, beside, lower, further,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PIXELS: tl.constexpr, TOP: tl.constexpr,
    BOTTOM: tl.constexpr, COMPARATORS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """The sums of what stays."""
    FIELD: tl.constexpr = CHANNELS * KH * KW
    TERMS: tl.constexpr = KH * KW if PIXELS else FIELD
    block, group, first, last = _share(shares, each, OUTS)
    position = block * BLOCK + tl.arange(0, BLOCK)
    here = position < positions
    n, row, column, y, z = _corner(position, high, wide, down, across, above, beside)
    x += n * sample + group * CHANNELS * channel
    field = _field(x, y, z, here, height, width, channel, vertical, horizontal, lower, further, CHANNELS, KH, KW)
    if PIXELS:
        field = _doubled(field, FIELD)
    size = size_of(field, FIELD)
    out += n * out_sample + row * out_vertical + column * out_horizontal
    for o in range(first, last):
        v, lost = _terms(field, weight + o * FIELD, size, CHANNELS, KH * KW, PIXELS)
        v = network(v, COMPARATORS, True)
        total = v[TOP]
        for i in tl.static_range(TOP + 1, TERMS - BOTTOM):
            total += v[i]
        if HAS_BIAS:
            total += tl.load(bias + o)
        tl.store(out + o * out_channel, tl.where(lost, float("nan"), total), mask=here)


@triton.jit
def _edge(v, FIRST: tl.constexpr, LAST: tl.constexpr, TOP: tl.constexpr):
    """The least extreme of the terms that leave on one side, and how many of them equal it."""
    cut = v[FIRST]
    for i in tl.static_range(FIRST + 1, LAST):
        cut = tl.minimum(cut, v[i]) if TOP else tl.maximum(cut, v[i])
    room = (v[FIRST] == cut).to(tl.int32)
    for i in tl.static_range(FIRST + 1, LAST):
        room += (v[i] == cut).to(tl.int32)
    return cut, room


@kernel()
def mark_fields(
    x, weight, marks, positions, each, high, wide, height, width, shares, outs,
    sample, channel, vertical, horizontal, down, across, above, beside, lower, further,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PIXELS: tl.constexpr, TOP: tl.constexpr,
    BOTTOM: tl.constexpr, COMPARATORS: tl.constexpr, BLOCK: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """Which terms stay: bits in ``marks (samples, outs, high, wide)`` int32."""
    FIELD: tl.constexpr = CHANNELS * KH * KW
    TERMS: tl.constexpr = KH * KW if PIXELS else FIELD
    block, group, first, last = _share(shares, each, OUTS)
    position = block * BLOCK + tl.arange(0, BLOCK)
    here = position < positions
    n, row, column, y, z = _corner(position, high, wide, down, across, above, beside)
    x += n * sample + group * CHANNELS * channel
    field = _field(x, y, z, here, height, width, channel, vertical, horizontal, lower, further, CHANNELS, KH, KW)
    if PIXELS:
        field = _doubled(field, FIELD)
    size = size_of(field, FIELD)
    marks += n * outs * high * wide + row * wide + column
    for o in range(first, last):
        v, lost = _terms(field, weight + o * FIELD, size, CHANNELS, KH * KW, PIXELS)
        apart = network(v, COMPARATORS, True)
        if TOP > 0:
            upper, room = _edge(apart, 0, TOP, True)
        if BOTTOM > 0:
            lower_cut, room2 = _edge(apart, TERMS - BOTTOM, TERMS, False)
        bits = tl.full((BLOCK,), 0, tl.int32)
        for i in tl.static_range(TERMS):
            gone = lost
            # The top side first: among terms tied with both cuts it takes the lowest indices, the bottom the next ones.
            if TOP > 0:
                tied = v[i] == upper
                gone = gone | (v[i] > upper) | (tied & (room > 0))
                room -= tied.to(tl.int32)
            if BOTTOM > 0:
                tied2 = (v[i] == lower_cut) & ~gone
                gone = gone | (v[i] < lower_cut) | (tied2 & (room2 > 0))
                room2 -= tied2.to(tl.int32)
            bits |= tl.where(gone, 0, 1) << i
        tl.store(marks + o * high * wide, bits, mask=here)


@triton.jit
def _upstream(grad, marks, at, here):
    """The gradient to an output and the bits of the terms it goes through: NaN and all where it is undefined."""
    g = tl.load(grad + at, mask=here, other=0.0)
    bits = tl.load(marks + at, mask=here, other=0)
    lost = here & (bits == 0)
    return tl.where(lost, float("nan"), g), tl.where(lost, -1, bits)


@triton.jit
def _part(g, v, bits, TERM: tl.constexpr, PIXELS: tl.constexpr):
    """What one term gives to a gradient, v its other factor."""
    product = g * v
    if PIXELS:
        product = tl.where((product != product) & (g == g), 0.0, product)
    return tl.where(((bits >> TERM) & 1) != 0, product, 0.0)


@kernel()
def field_weights(
    grad, marks, x, parts, positions, each, high, wide, height, width, outs,
    sample, channel, vertical, horizontal, down, across, above, beside, lower, further,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Gradient to the weight of one output from SPAN positions: a row of ``parts (spans, outs, field)``."""
    FIELD: tl.constexpr = CHANNELS * KH * KW
    o = tl.program_id(0) % outs
    begin = tl.program_id(0) // outs * SPAN
    total = ()
    for _ in tl.static_range(FIELD):
        total = total + (tl.full((BLOCK,), 0.0, tl.float32),)
    for first in range(begin, tl.minimum(begin + SPAN, positions), BLOCK):
        position = first + tl.arange(0, BLOCK)
        here = position < positions
        n, row, column, y, z = _corner(position, high, wide, down, across, above, beside)
        g, bits = _upstream(grad, marks, ((n * outs + o) * high + row) * wide + column, here)
        seen = x + (n * sample + o // each * CHANNELS * channel)
        field = _field(seen, y, z, here, height, width, channel, vertical, horizontal, lower, further, CHANNELS, KH, KW)
        more = ()
        for i in tl.static_range(FIELD):
            more = more + (total[i] + _part(g, field[i], bits, i % (KH * KW) if PIXELS else i, PIXELS),)
        total = more
    for i in tl.static_range(FIELD):
        tl.store(parts + tl.program_id(0) * FIELD + i, tl.sum(total[i], 0))


@kernel()
def field_inputs(
    grad, marks, weight, out, positions, each, high, wide, height, width, outs, groups,
    down, across, above, beside, lower, further,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient to the samples, contiguous: each place of a group collects from the outputs whose windows see it."""
    PLACES: tl.constexpr = KH * KW
    group = tl.program_id(0) % groups
    position = tl.program_id(0) // groups * BLOCK + tl.arange(0, BLOCK)
    here = position < positions
    n = position // (height * width)
    y = position // width % height + above
    z = position % width + beside
    at = ()
    sees = ()
    for p in tl.static_range(PLACES):
        from_y = y - (p // KW) * lower
        from_z = z - (p % KW) * further
        row = from_y // down
        column = from_z // across
        there = here & (from_y >= 0) & (from_z >= 0) & (from_y % down == 0) & (from_z % across == 0)
        sees = sees + (there & (row < high) & (column < wide),)
        at = at + (n * outs * high * wide + row * wide + column,)
    total = ()
    for _ in tl.static_range(CHANNELS):
        total = total + (tl.full((BLOCK,), 0.0, tl.float32),)
    for o in range(group * each, group * each + each):
        part = ()
        for _ in tl.static_range(CHANNELS):
            part = part + (tl.full((BLOCK,), 0.0, tl.float32),)
        for p in tl.static_range(PLACES):
            g, bits = _upstream(grad, marks, at[p] + o * high * wide, sees[p])
            more = ()
            for c in tl.static_range(CHANNELS):
                w = tl.load(weight + (o * CHANNELS + c) * PLACES + p)
                more = more + (part[c] + _part(g, w, bits, p if PIXELS else c * PLACES + p, PIXELS),)
            part = more
        more = ()
        for c in tl.static_range(CHANNELS):
            more = more + (total[c] + part[c],)
        total = more
    inside = position % (height * width)
    for c in tl.static_range(CHANNELS):
        plane = (n * groups + group) * CHANNELS + c
        tl.store(out + plane * height * width + inside, total[c], mask=here)
