"""The trimmed product in Triton: what runs on the GPU, or in Triton's interpreter. `gpu` calls it.

Two matrices with rows of d numbers meet: x (samples) and weight (rows). One of them is walked: each of its rows from
its largest magnitude on, by one warp, while 32 rows of the other lie in the lanes. Once the magnitude that follows
cannot pass a cut of any lane, nothing further can. Which side is walked is chosen for each 32 samples: the weight where
many coordinates of a sample are about as large as its largest (images), else the samples.

The dense product comes in and the removed terms are taken out of it. Outlying coordinates of a sample are zeros in its
panel and in the dense product; their terms, clamped to what the others can reach, join the selection apart. Where this
short cut is unsound (ties that matter, cancellation, infinities), `_by_definition` does the pair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import smid

LANES = tl.constexpr(32)
CHUNK = tl.constexpr(16)  # terms a network takes at a time
LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITE = tl.constexpr(0x7F800000)  # its bits; a NaN's are above


ALIGNED: dict[str, tuple[int, ...]] = {}
"""Arguments, by place, that a kernel is compiled for: whether they are divisible by 16, or equal to 1."""


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """A kernel that is compiled for its constants and for how these arguments are aligned, nothing else: a batch that
    shrinks from query to query costs no compilation, and no look-up by the values of the arguments.
    """

    def compiled(function: Callable[..., None]) -> Any:
        names = [name for name, kind in inspect.get_annotations(function).items() if "constexpr" in str(kind)]
        arguments = [name for name in inspect.signature(function).parameters if name not in names]
        others = [name for name in arguments if name not in aligned]
        ALIGNED[function.__name__] = tuple(arguments.index(name) for name in aligned)
        return triton.jit(function, do_not_specialize=others, do_not_specialize_on_alignment=others)

    return compiled


# --- what is learnt of a matrix ---------------------------------------------------------------------------------------


@kernel()
def order_rows(matrix, votes, asked, order, bound, d, blocks, WIDTH: tl.constexpr, VOTED: tl.constexpr):
    """Orders a row by falling magnitude, up to the last bits of the mantissa, where the index sits while sorting.

    order: in the upper half of each number the byte at which the coordinate begins in a panel, 128 times its index; in
    the lower half the weight. bound: no magnitude from each sixteenth
    place on is larger; NaN first if the row has a NaN. VOTED: only if its 32 rows all ask for it, which is noted.
    """
    row = tl.program_id(0)
    wanted = 1
    if VOTED:
        wanted = tl.min(tl.load(votes + row // LANES * LANES + tl.arange(0, LANES)), 0)
    if wanted > 0:
        if VOTED:
            tl.store(asked, 1)
        place = tl.arange(0, WIDTH)
        inside = place < d
        bits = tl.load(matrix + row * d + place, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        undefined = tl.max((bits > INFINITE).to(tl.int32), 0)
        low = WIDTH - 1
        key = tl.where(inside, (bits & ~low) | place, -1)
        key = tl.sort(key, descending=True)
        index = key & low
        weight = tl.load(matrix + row * d + index, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        both = ((index * 128).to(tl.int64) << 32) | (weight.to(tl.int64) & 0xFFFFFFFF)
        tl.store(order + row * d + place, both, mask=inside)
        reach = tl.minimum(key | low, INFINITE).to(tl.float32, bitcast=True)
        reach = tl.where((undefined > 0) & (place == 0), float("nan"), reach)
        tl.store(bound + row * blocks + place // CHUNK, reach, mask=inside & (place % CHUNK == 0))


@kernel("matrix", "panel", "inner", "d", "width")
def pack(
    matrix, asked, panel, reach, inner, votes, lead_count, lead_index, lead_value, rows, width, d,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Turns a matrix over, ``panel (width / 32, d, 32)``, so that its rows lie in the lanes; zeros fill the last ones.

    reach: the largest magnitude in the panel, NaN if the row has a NaN. Of SAMPLES the outlying coordinates become
    zeros there and in ``inner (d, width)``, and are listed; a vote says that few coordinates are large. Other matrices
    are packed only if somebody asked. asked: that flag; whether a coordinate is outlying, a sample undefined.
    """
    if not SAMPLES:
        if tl.load(asked) == 0:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < d)[None, :]
    x = tl.load(matrix + row[:, None] * d + column[None, :], mask=inside, other=0.0)
    size = tl.abs(x)
    undefined = tl.max((x != x).to(tl.int32), 1) > 0
    x = tl.where(undefined[:, None], 0.0, x)
    if SAMPLES:
        size = tl.where(undefined[:, None], 0.0, size)
        finite = size <= LARGEST
        peak = tl.max(tl.where(finite, size, 0.0), 1)
        near = tl.sum((finite & (size > (peak / 8)[:, None])).to(tl.int32), 1)
        limit = tl.full((ROWS,), LARGEST, tl.float32)
        odd = (near <= LEADS) & (peak > 0)
        if tl.max(odd.to(tl.int32), 0) > 0:
            # Eight times the magnitude that follows the LEADS largest; or the median, where few are not zero.
            bits = tl.where(finite, size, 0.0).to(tl.int32, bitcast=True)
            rank = tl.minimum(tl.sum((bits > 0).to(tl.int32), 1) // 2, LEADS) + 1
            low = tl.full((ROWS,), 0, tl.int32)
            for step in tl.static_range(15):
                middle = low | (1 << (30 - step))
                enough = tl.sum((bits >= middle[:, None]).to(tl.int32), 1) >= rank
                low = tl.where(enough, middle, low)
            found = low.to(tl.float32, bitcast=True)
            limit = tl.where(odd & (found <= LARGEST / 8), found * 8, limit)
        outlying = size > limit[:, None]
        count = tl.sum(outlying.to(tl.int32), 1)
        if tl.max(count, 0) > 0:
            place = tl.cumsum(outlying.to(tl.int32), 1) - 1
            listed = outlying & (place < LEADS) & inside
            at = place * width + row[:, None]
            tl.store(lead_index + at, tl.broadcast_to(column[None, :], (ROWS, WIDTH)), mask=listed)
            tl.store(lead_value + at, x, mask=listed)
        x = tl.where(outlying, 0.0, x)
        size = tl.where(outlying, 0.0, size)
        most = tl.max(size, 1)
        few = tl.sum((size > (most / 2)[:, None]).to(tl.int32), 1) * 4 < d
        tl.store(lead_count + row, count, mask=row < width)
        if tl.max(count, 0) > 0:
            tl.atomic_max(asked + 1, 1)
        if tl.max(undefined.to(tl.int32), 0) > 0:
            tl.atomic_max(asked + 2, 1)
        turned = inner + row[:, None] + column[None, :] * width
        tl.store(turned, x, mask=(column < d)[None, :] & (row < width)[:, None])
        tl.store(votes + row, ((few & (count == 0)) | (row >= rows)).to(tl.int32), mask=row < width)
    most = tl.max(tl.abs(x), 1)
    tl.store(reach + row, tl.where(undefined, float("nan"), most), mask=row < width)
    at = panel + (row // LANES * d * LANES + row % LANES)[:, None] + column[None, :] * LANES
    tl.store(at, x, mask=(column < d)[None, :] & (row < width)[:, None])


# --- networks ---------------------------------------------------------------------------------------------------------


@triton.jit
def _network(v, COMPARATORS: tl.constexpr, FALLING: tl.constexpr):
    for n in tl.static_range(len(COMPARATORS)):
        larger = tl.maximum(v[COMPARATORS[n][0]], v[COMPARATORS[n][1]])
        smaller = tl.minimum(v[COMPARATORS[n][0]], v[COMPARATORS[n][1]])
        if FALLING == (COMPARATORS[n][0] < COMPARATORS[n][1]):
            first = larger
            second = smaller
        else:
            first = smaller
            second = larger
        v = (
            v[: min(COMPARATORS[n][0], COMPARATORS[n][1])]
            + (first,)
            + v[min(COMPARATORS[n][0], COMPARATORS[n][1]) + 1 : max(COMPARATORS[n][0], COMPARATORS[n][1])]
            + (second,)
            + v[max(COMPARATORS[n][0], COMPARATORS[n][1]) + 1 :]
        )
    return v


@triton.jit
def _merged(v, COMPARATORS: tl.constexpr, PLACES: tl.constexpr, FALLING: tl.constexpr):
    """Sorts what `_join` left."""
    v = _network(v, COMPARATORS, FALLING)
    out = ()
    for i in tl.static_range(len(PLACES)):
        out = out + (v[PLACES[i]],)
    return out


@triton.jit
def _join(best, b, SIZE: tl.constexpr, FALLING: tl.constexpr):
    """The SIZE extreme values of a sorted list and others that fall, falling and rising (or the other way round)."""
    out = ()
    for i in tl.static_range(SIZE):
        if FALLING:
            if SIZE - 1 - i < len(b):
                out = out + (tl.maximum(best[i], b[SIZE - 1 - i]),)
            else:
                out = out + (best[i],)
        else:
            if len(b) - SIZE + i >= 0:
                out = out + (tl.minimum(best[i], b[len(b) - SIZE + i]),)
            else:
                out = out + (best[i],)
    return out


@triton.jit
def _cut(best, SIZE: tl.constexpr, STRICT: tl.constexpr, FALLING: tl.constexpr):
    """The least extreme value of a list, and its neighbour: if STRICT the list has one more than is removed."""
    last = best[0]
    cut = last
    for i in tl.static_range(1, SIZE):
        if FALLING:
            if STRICT:
                cut = tl.maximum(last, best[i]) if i == 1 else tl.minimum(cut, tl.maximum(last, best[i]))
            last = tl.minimum(last, best[i])
        else:
            if STRICT:
                cut = tl.minimum(last, best[i]) if i == 1 else tl.maximum(cut, tl.minimum(last, best[i]))
            last = tl.maximum(last, best[i])
    if not STRICT:
        cut = last
    return cut, last


@triton.jit
def _reversed(v):
    out = ()
    for i in tl.static_range(16):
        out = out + (v[15 - i],)
    return out


# --- one pair of rows by the definition -------------------------------------------------------------------------------


@triton.jit
def _product(a, b):
    return tl.where((a == 0) | (b == 0), 0.0, a * b + 0.0)


@triton.jit
def _terms_of(walker, lane, j, d, TILE: tl.constexpr):
    i = j + tl.arange(0, TILE)
    a = tl.load(walker + i, mask=i < d, other=0.0)
    b = tl.load(lane[None, :] + i[:, None], mask=(i < d)[:, None], other=0.0)
    return _product(tl.broadcast_to(a[:, None], b.shape), b), (i < d)[:, None]


@triton.jit
def _keys(terms):
    """Integers that order as the terms do."""
    bits = terms.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bits(mask):
    """A mask of lanes as one number."""
    return tl.sum(mask.to(tl.int32) << tl.arange(0, LANES), 0)


@triton.jit(noinline=True)
def _by_definition(
    walker, lanes_raw, bias, first, bits, d, top, bottom, out, out_stride, cuts, cut_stride, second, ties,
    walker_tied, lane_tied, HAS_BIAS: tl.constexpr, BY_WEIGHT: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Value, cuts and tied removals (in the encoding of `kernel.forward`) of the lanes in `bits`.

    Any input but NaN. Bisects the bits of the cuts, counting all terms at each step. A function of its own, so that the
    short cut does not share its registers.
    """
    SIZE: tl.constexpr = LANES
    chosen = ((bits >> tl.arange(0, SIZE)) & 1) > 0
    lane_at = tl.where(chosen, first + tl.arange(0, SIZE), first)
    lane = lanes_raw + lane_at * d
    low = tl.full((SIZE,), -0x7F800001, tl.int32)  # at least `top` terms are at or above it
    high = tl.full((SIZE,), 0x7F800001, tl.int32)  # fewer are
    low2 = low  # the same for the complements of the keys, in which the smallest terms come first
    high2 = high
    sure = tl.full((SIZE,), 0, tl.int32)
    sure2 = sure
    step = 0
    go = 1
    while go > 0:
        # Ties at zero are the common ones: two steps find them.
        middle = (low & high) + ((low ^ high) >> 1)
        middle2 = (low2 & high2) + ((low2 ^ high2) >> 1)
        if step < 2:
            middle = tl.where((low < step) & (step < high), step, middle)
            middle2 = tl.where((low2 < step - 1) & (step - 1 < high2), step - 1, middle2)
        count = tl.full((SIZE,), 0, tl.int32)
        count2 = count
        for j in range(0, d, TILE):
            terms, inside = _terms_of(walker, lane, j, d, TILE)
            key = _keys(terms)
            count += tl.sum((inside & (key >= middle[None, :])).to(tl.int32), 0)
            count2 += tl.sum((inside & (~key >= middle2[None, :])).to(tl.int32), 0)
        open1 = (sure == 0) & (high > middle) & (middle > low)
        low = tl.where(open1 & (count >= top), middle, low)
        high = tl.where(open1 & (count < top), middle, high)
        sure = tl.where(open1 & (count == top), 1, sure)
        open2 = (sure2 == 0) & (high2 > middle2) & (middle2 > low2)
        low2 = tl.where(open2 & (count2 >= bottom), middle2, low2)
        high2 = tl.where(open2 & (count2 < bottom), middle2, high2)
        sure2 = tl.where(open2 & (count2 == bottom), 1, sure2)
        # Not high - low: that may overflow.
        more = (top > 0) & (sure == 0) & (low + 1 < high)
        more2 = (bottom > 0) & (sure2 == 0) & (low2 + 1 < high2)
        go = tl.max((more | more2).to(tl.int32), 0)
        step += 1
    # The cut is the smallest key from `low` on.
    cut = tl.full((SIZE,), 0x7F800000, tl.int32)
    cut2 = cut
    for j in range(0, d, TILE):
        terms, inside = _terms_of(walker, lane, j, d, TILE)
        key = _keys(terms)
        cut = tl.minimum(cut, tl.min(tl.where(inside & (key >= low[None, :]), key, 0x7F800000), 0))
        cut2 = tl.minimum(cut2, tl.min(tl.where(inside & (~key >= low2[None, :]), ~key, 0x7F800000), 0))
    upper = tl.where(top > 0, _value_of(cut), float("inf"))
    lower = tl.where(bottom > 0, _value_of(~cut2), float("-inf"))
    kept = tl.full((TILE, SIZE), 0.0, tl.float32)
    above = tl.full((SIZE,), 0, tl.int32)
    below = above
    at_upper = above
    at_lower = above
    for j in range(0, d, TILE):
        terms, inside = _terms_of(walker, lane, j, d, TILE)
        kept += tl.where(inside & (terms < upper[None, :]) & (terms > lower[None, :]), terms, 0.0)
        above += tl.sum((inside & (terms > upper[None, :])).to(tl.int32), 0)
        below += tl.sum((inside & (terms < lower[None, :])).to(tl.int32), 0)
        at_upper += tl.sum((inside & (terms == upper[None, :])).to(tl.int32), 0)
        at_lower += tl.sum((inside & (terms == lower[None, :])).to(tl.int32), 0)
    leave = tl.where(top > 0, top - above, 0)
    leave2 = tl.where(bottom > 0, bottom - below, 0)
    one = upper == lower
    stay = at_upper - leave - tl.where(one, leave2, 0)
    stay2 = tl.where(one, 0, at_lower - leave2)
    value = tl.sum(kept, 0)
    if HAS_BIAS:
        value += tl.load(bias + lane_at * (not BY_WEIGHT))
    value += tl.where(stay > 0, stay.to(tl.float32) * upper, 0.0)
    value += tl.where(stay2 > 0, stay2.to(tl.float32) * lower, 0.0)
    tl.store(out + lane_at * out_stride, value, mask=chosen)
    if KEEP:
        cell = lane_at * cut_stride
        tl.store(cuts + cell, upper, mask=chosen)
        tl.store(cuts + second + cell, lower, mask=chosen)
        tie = tl.where(stay > 0, leave + 1, 0)
        tie2 = tl.where((stay2 > 0) | one, leave2 + 1, 0)
        tl.store(ties + cell, tie, mask=chosen)
        tl.store(ties + second + cell, tie2, mask=chosen)
        some = chosen & ((tie != 0) | (tie2 != 0))
        if tl.max(some.to(tl.int32), 0) > 0:
            tl.atomic_max(walker_tied, 1)
            tl.atomic_max(lane_tied + lane_at, 1, mask=some)


# --- work -------------------------------------------------------------------------------------------------------------
#
# A unit of work is 32 lanes and a part of the walkers, handed out in shares: a ticket is the next share's number. A
# multiprocessor begins with units of its own, so that their panels stay in its cache; then it takes what others left.
# Who does a share does not change its result.


@triton.jit
def _first_unit(sms, GPU: tl.constexpr):
    return smid() if GPU else tl.program_id(0) % sms


@triton.jit
def _next_unit(unit, tickets, shares, units, sms):
    unit += sms
    if unit >= units:
        found = units
        for u in range(0, units, 128):
            some = u + tl.arange(0, 128)
            drawn = tl.load(tickets + some, mask=some < units, other=1 << 30)
            found = tl.minimum(found, tl.min(tl.where(drawn < shares, some, 1 << 30), 0))
        unit = found
    return unit


# --- few removed terms: the walk --------------------------------------------------------------------------------------


@triton.jit
def _coordinate(panel, both):
    """What a panel holds at a place of an order. With bytes the address takes the least arithmetic."""
    at = panel.to(tl.pointer_type(tl.int8), bitcast=True) + (both.to(tl.uint64) >> 32)
    return tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True))


@triton.jit
def _weight_of(both):
    return both.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _places(order, panel, j, d, beyond, SIZE: tl.constexpr, EXACT: tl.constexpr):
    """The terms of SIZE places of the order; `beyond` stands for those after its end."""
    v = ()
    for r in tl.static_range(SIZE):
        if EXACT:
            both = tl.load(order + j + r)
            v = v + (_weight_of(both) * _coordinate(panel, both),)
        else:
            inside = j + r < d
            both = tl.load(order + j + r, mask=inside, other=0)
            v = v + (tl.where(inside, _weight_of(both) * _coordinate(panel, both), beyond),)
    return v


@triton.jit
def _bar(order, j, d, far, low):
    """What no term from place j on can pass. The load fetches the line of the order that is walked next."""
    both = tl.load(order + j, mask=j < d, other=0)
    largest = tl.minimum((both.to(tl.int32) & 0x7FFFFFFF) | low, INFINITE).to(tl.float32, bitcast=True)
    return tl.where(j < d, largest, 0.0) * far


@triton.jit
def _leads16(walker, lead_index, lead_value, width, count):
    """Up to sixteen outlying terms of each lane; zeros stand for those missing."""
    v = ()
    for r in tl.static_range(16):
        there = r < count
        i = tl.load(lead_index + r * width, mask=there, other=0)
        x = tl.load(lead_value + r * width, mask=there, other=0.0)
        v = v + (_product(tl.load(walker + i), x),)
    return v


@triton.jit
def _sum(v, SIZE: tl.constexpr):
    total = v[0]
    for i in tl.static_range(1, SIZE):
        total += v[i]
    return total


@triton.jit
def _size(v, SIZE: tl.constexpr):
    total = tl.abs(v[0])
    for i in tl.static_range(1, SIZE):
        total += tl.abs(v[i])
    return total


@triton.jit
def _within(v, cap, SIZE: tl.constexpr):
    """Values beyond `cap`, which only an outlying term can have, become zeros."""
    out = ()
    for i in tl.static_range(SIZE):
        out = out + (tl.where(tl.abs(v[i]) <= cap, v[i], 0.0),)
    return out


@triton.jit
def _equal(v, cut, SIZE: tl.constexpr):
    """How many values equal the cut."""
    total = (v[0] == cut).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        total += (v[i] == cut).to(tl.int32)
    return total


@triton.jit
def _pair(
    walker, tile, order, bound, walkers_raw, panel, far, lanes_raw, count, lead_index, lead_value, bias,
    out, cuts, ties, marks, lanes, width, d, blocks, samples, rows, low,
    TOP: tl.constexpr, BOTTOM: tl.constexpr, KEEP: tl.constexpr, BY_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    STEP: tl.constexpr, EXACT: tl.constexpr, SORT: tl.constexpr, SORT8: tl.constexpr, MERGE_UP: tl.constexpr,
    PLACES_UP: tl.constexpr, MERGE_DOWN: tl.constexpr, PLACES_DOWN: tl.constexpr,
):  # fmt: skip
    """One walker and 32 lanes."""
    UP: tl.constexpr = len(PLACES_UP)
    DOWN: tl.constexpr = len(PLACES_DOWN)
    lane = tile * LANES + tl.arange(0, LANES)
    here = lane < lanes
    places = order + walker * d
    largest = tl.load(bound + walker * blocks)
    bar = _bar(places, 32, d, far, low)
    if BY_WEIGHT:
        at = out + lane * rows + walker
    else:
        at = out + walker * rows + lane
    value = tl.load(at, mask=here, other=0.0)
    cap = largest * far
    most = tl.max(count, 0)
    a = _places(places, panel, 0, d, 0.0, 16, True)
    b = _places(places, panel, 16, d, 0.0, 16, True)
    seen = _size(a, 16) + _size(b, 16)
    a = _network(a, SORT, True)
    b = _network(b, SORT, True)
    upper = tl.full((LANES,), float("inf"), tl.float32)
    lower = -upper
    last = upper
    last2 = lower
    up = ()
    down = ()
    if UP > 0:
        up = _join(a, b, UP, True)
        upper, last = _cut(up, UP, KEEP, True)
    if DOWN > 0:
        down = _join(_reversed(a), b, DOWN, False)
        lower, last2 = _cut(down, DOWN, KEEP, False)
    added = tl.full((LANES,), 0.0, tl.float32)
    if BY_WEIGHT:
        if most > 0:
            # Outlying terms are not in the dense product: those that stay are added. The ones beyond all others rank by
            # themselves; the rest are added here and, if they leave, taken out with the removed terms.
            v = _leads16(walkers_raw + walker * d, lead_index + lane, lead_value + lane, width, tl.minimum(count, 16))
            v = _network(v, SORT, True)
            seen += _size(_within(v, cap, 16), 16)
            for i in tl.static_range(16):
                stays = tl.abs(v[i]) <= cap
                if i >= TOP:
                    stays = stays | (v[i] > cap)
                if i < 16 - BOTTOM:
                    stays = stays | (v[i] < -cap)
                added += tl.where(stays, v[i], 0.0)
            if UP > 0:
                up = _join(_merged(up, MERGE_UP, PLACES_UP, True), v, UP, True)
                upper, last = _cut(up, UP, KEEP, True)
            if DOWN > 0:
                down = _join(_merged(down, MERGE_DOWN, PLACES_DOWN, False), v, DOWN, False)
                lower, last2 = _cut(down, DOWN, KEEP, False)
    j = 32
    narrow = tl.minimum(upper, -lower)
    open_ = (bar >= narrow) if KEEP else (bar > narrow)
    more = (tl.max((open_ & here).to(tl.int32), 0) > 0) & (j < d)
    while more:
        # What lies between the cuts enters no list.
        beyond = 0.5 * upper + 0.5 * lower
        if UP == 0:
            beyond = upper
        if DOWN == 0:
            beyond = lower
        v = _places(places, panel, j, d, beyond, STEP, EXACT)
        if EXACT:
            seen += _size(v, STEP)
        else:
            seen += _size(_within(v, cap, STEP), STEP)
            seen -= tl.where(tl.abs(beyond) <= cap, tl.abs(beyond), 0.0) * tl.maximum(j + STEP - d, 0).to(tl.float32)
        v = _network(v, SORT if STEP == 16 else SORT8, True)
        j += STEP
        bar = _bar(places, j, d, far, low)
        if UP > 0:
            up = _join(_merged(up, MERGE_UP, PLACES_UP, True), v, UP, True)
            upper, last = _cut(up, UP, KEEP, True)
        if DOWN > 0:
            down = _join(_merged(down, MERGE_DOWN, PLACES_DOWN, False), v, DOWN, False)
            lower, last2 = _cut(down, DOWN, KEEP, False)
        narrow = tl.minimum(upper, -lower)
        open_ = (bar >= narrow) if KEEP else (bar > narrow)
        more = (tl.max((open_ & here).to(tl.int32), 0) > 0) & (j < d)
    depth = tl.minimum(j, d)
    removed = tl.full((LANES,), 0.0, tl.float32)
    size = removed
    if UP > 0:
        inner = up
        edge = last
        if most > 0:
            inner = _within(up, cap, UP)
            edge = tl.where(tl.abs(last) <= cap, last, 0.0)
        removed += _sum(inner, UP) - edge if KEEP else _sum(inner, UP)
        size += _size(inner, UP) - tl.abs(edge) if KEEP else _size(inner, UP)
    if DOWN > 0:
        inner = down
        edge = last2
        if most > 0:
            inner = _within(down, cap, DOWN)
            edge = tl.where(tl.abs(last2) <= cap, last2, 0.0)
        removed += _sum(inner, DOWN) - edge if KEEP else _sum(inner, DOWN)
        size += _size(inner, DOWN) - tl.abs(edge) if KEEP else _size(inner, DOWN)
    # What stays must not be small against what is taken out of the sum.
    lost = (far != far) | (tl.full((LANES,), 0.0, tl.float32) + largest != largest)
    defined = here & ~lost
    while (tl.max((defined & ~(size <= 5 * (seen - size))).to(tl.int32), 0) > 0) & (j < d):
        seen += _size(_places(places, panel, j, d, 0.0, STEP, EXACT), STEP)
        j += STEP
    # Zeros stand for outlying terms in the panel, and for those that other lanes have: they must lie between the cuts.
    odd = (count > 16) | ~(cap <= LARGEST) | (upper == lower)
    if (UP == 0) | (DOWN == 0):
        # An infinite term that stays is tied with a cut at infinity.
        odd = odd | ((count > 0) & ~(tl.abs(added) <= LARGEST))
    if UP > 0:
        odd = odd | ((most > 0) & ~(upper > 0))
    if DOWN > 0:
        odd = odd | ((most > 0) & ~(lower < 0))
    unsound = ~(size <= 5 * (seen - size)) | ~(tl.abs(value) <= LARGEST)
    odd = (odd | (unsound & (count > 0))) & defined
    value += added - removed
    unsound = unsound & defined & ~odd
    if tl.max(unsound.to(tl.int32), 0) > 0:
        # The cuts are right: the kept terms are added up instead.
        kept = tl.full((LANES,), 0.0, tl.float32)
        stay = kept
        stay2 = kept
        for i in range(0, d, STEP):
            v = _places(places, panel, i, d, float("nan"), STEP, EXACT)
            part = tl.full((LANES,), 0.0, tl.float32)
            for r in tl.static_range(STEP):
                part += tl.where((v[r] < upper) & (v[r] > lower), v[r], 0.0)
                stay += (v[r] == upper).to(tl.float32)
                stay2 += (v[r] == lower).to(tl.float32)
            kept += part
        if UP > 0:
            kept += (stay - (_equal(up, upper, UP) - (upper == last).to(tl.int32) * KEEP).to(tl.float32)) * upper
        if DOWN > 0:
            kept += (stay2 - (_equal(down, lower, DOWN) - (lower == last2).to(tl.int32) * KEEP).to(tl.float32)) * lower
        if HAS_BIAS:
            kept += tl.load(bias + tl.where(here, lane, 0) * (not BY_WEIGHT) + walker * BY_WEIGHT)
        value = tl.where(unsound, kept, value)
    tl.store(at, tl.where(lost, float("nan"), value), mask=here & ~odd)
    if BY_WEIGHT:
        cell = walker * samples
        stride = 1
    else:
        cell = walker
        stride = samples
    bits = _bits(odd)
    if bits != 0:
        depth = d
        _by_definition(
            walkers_raw + walker * d, lanes_raw, bias + walker * BY_WEIGHT, tile * LANES, bits,
            d, TOP, BOTTOM, out + walker * (1 if BY_WEIGHT else rows), rows if BY_WEIGHT else 1,
            cuts + cell, stride, rows * samples, ties + cell,
            marks + rows + walker + rows * (not BY_WEIGHT), marks + rows + rows * BY_WEIGHT,
            HAS_BIAS, BY_WEIGHT, KEEP, 8,
        )  # fmt: skip
    if KEEP:
        fine = here & ~odd
        tl.store(cuts + cell + lane * stride, tl.where(lost, float("nan"), upper), mask=fine)
        tl.store(cuts + rows * samples + cell + lane * stride, lower, mask=fine)
        some = ((upper == last) | (lower == last2)) & fine & ~lost
        if UP == 0:
            some = (lower == last2) & fine & ~lost
        if DOWN == 0:
            some = (upper == last) & fine & ~lost
        if tl.max(some.to(tl.int32), 0) > 0:
            # One more than is removed is listed, and equals the cut: as many tied terms leave as do so, less one.
            if UP > 0:
                tie = tl.where(upper == last, _equal(up, upper, UP), 0)
                tl.store(ties + cell + lane * stride, tie, mask=some)
            if DOWN > 0:
                tie2 = tl.where(lower == last2, _equal(down, lower, DOWN), 0)
                tl.store(ties + rows * samples + cell + lane * stride, tie2, mask=some)
            tl.atomic_max(marks + rows + walker + rows * (not BY_WEIGHT), 1)
            tl.atomic_max(marks + rows + rows * BY_WEIGHT + lane, 1, mask=some)
        if BY_WEIGHT:
            tl.atomic_max(marks + walker, depth)
        else:
            tl.atomic_max(marks + lane, d, mask=here)


@kernel()
def walk(
    order, bound, walkers_raw, panel, reach, lanes_raw, votes, lead_count, lead_index, lead_value, bias,
    out, cuts, ties, marks, tickets, asked, walkers, lanes, width, d, blocks, parts, units, sms, share_size,
    samples, rows,
    TOP: tl.constexpr, BOTTOM: tl.constexpr, KEEP: tl.constexpr, BY_WEIGHT: tl.constexpr, ASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, EXACT: tl.constexpr, SORT: tl.constexpr,
    SORT8: tl.constexpr, MERGE_UP: tl.constexpr, PLACES_UP: tl.constexpr, MERGE_DOWN: tl.constexpr,
    PLACES_DOWN: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Takes the removed terms out of the dense product: ``out (samples, rows)``, cuts and ties ``(2, rows, samples)``.

    ASK: each 32 samples have voted for the side that is walked.
    marks: of each row of the weight, to which depth of its order a term of its panel may have been removed; of each
    row, then of each sample, whether some term tied with a cut stays.
    """
    low = WIDTH - 1  # what `order_rows` takes no account of
    if not BY_WEIGHT:
        if tl.load(asked) == 0:
            return
    groups = walkers if BY_WEIGHT else (walkers + LANES - 1) // LANES
    per_part = (groups + parts - 1) // parts
    shares = (per_part + share_size - 1) // share_size
    unit = _first_unit(sms, GPU)
    while unit < units:
        tile = unit // parts
        lane = tile * LANES + tl.arange(0, LANES)
        far = tl.load(reach + lane)
        mine = panel + tile * d * LANES + tl.arange(0, LANES)
        first = unit % parts * per_part
        if BY_WEIGHT:
            count = tl.load(lead_count + lane)
            if ASK:
                # Not ours: all tickets are drawn at once.
                if tl.min(tl.load(votes + lane), 0) > 0:
                    tl.atomic_max(tickets + unit, shares)
        share = tl.atomic_add(tickets + unit, 1)
        while share < shares:
            following = tl.atomic_add(tickets + unit, 1)
            begin = first + share * share_size
            end = tl.minimum(tl.minimum(begin + share_size, first + per_part), groups)
            if BY_WEIGHT:
                for walker in range(begin, end):
                    _pair(
                        walker, tile, order, bound, walkers_raw, mine, far, lanes_raw, count, lead_index, lead_value,
                        bias, out, cuts, ties, marks, lanes, width, d, blocks, samples, rows, low,
                        TOP, BOTTOM, KEEP, BY_WEIGHT, HAS_BIAS,
                        STEP, EXACT, SORT, SORT8, MERGE_UP, PLACES_UP, MERGE_DOWN, PLACES_DOWN,
                    )  # fmt: skip
            else:
                group = begin * LANES
                stop = tl.minimum(group + LANES, walkers)
                present = (begin < end) & (group < walkers)
                vote = tl.min(tl.load(votes + group + tl.arange(0, LANES), mask=present, other=0), 0)
                for walker in range(group, tl.where(vote > 0, stop, 0)):
                    _pair(
                        walker, tile, order, bound, walkers_raw, mine, far, lanes_raw, tl.full((LANES,), 0, tl.int32),
                        lead_index, lead_value, bias,
                        out, cuts, ties, marks, lanes, width, d, blocks, samples, rows, low,
                        TOP, BOTTOM, KEEP, BY_WEIGHT, HAS_BIAS,
                        STEP, EXACT, SORT, SORT8, MERGE_UP, PLACES_UP, MERGE_DOWN, PLACES_DOWN,
                    )  # fmt: skip
            share = following
        unit = _next_unit(unit, tickets, shares, units, sms)


# --- many removed terms, or few terms at all --------------------------------------------------------------------------

CANDIDATES = tl.constexpr(32)  # terms around a cut that are told apart by sorting
AROUND = tl.constexpr(12.0)  # terms to either side of where a cut should be: less than half as many
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _lead(walker, lead_index, lead_value, r, width, count):
    """One outlying term of each lane; NaN, which is never counted, where there are fewer."""
    there = r < count
    i = tl.load(lead_index + r * width, mask=there, other=0)
    x = tl.load(lead_value + r * width, mask=there, other=0.0)
    return tl.where(there, _product(tl.load(walker + i), x), float("nan"))


@triton.jit
def _count(v, near, far, above_near, above_far, UP: tl.constexpr):
    """Adds how many terms lie beyond each of two pivots; downwards the pivots are negated."""
    for r in tl.static_range(len(v)):
        if UP:
            above_near = tl.where(v[r] > near, above_near + 1.0, above_near)
            above_far = tl.where(v[r] > far, above_far + 1.0, above_far)
        else:
            above_near = tl.where(v[r] < -near, above_near + 1.0, above_near)
            above_far = tl.where(v[r] < -far, above_far + 1.0, above_far)
    return above_near, above_far


@triton.jit
def _closer(a, b, above_a, above_b, pivot, above, k):
    """Moves the end of (a, b] to a pivot inside of it: k terms or more lie above a, fewer above b."""
    raised = (above >= k) & (pivot > a)
    lowered = (above < k) & (pivot < b)
    a = tl.where(raised, pivot, a)
    above_a = tl.where(raised, above, above_a)
    b = tl.where(lowered, pivot, b)
    above_b = tl.where(lowered, above, above_b)
    return a, b, above_a, above_b


@triton.jit
def _aim(a, b, above_a, above_b, gap, k, step):
    """Two pivots around where k terms should lie above, and the distance of terms there."""
    wide = above_a - above_b
    closed = a > -LARGEST
    gap = tl.where(closed, (b - a) / tl.maximum(wide, 1.0), gap)
    middle = tl.where(closed, a + gap * (above_a - k + 0.5), b - gap * (k - above_b - 0.5))
    # While one end is open, further and further.
    reach = tl.maximum(0.5 * (k - above_b), AROUND) * (1 << (step - 1)).to(tl.float32)
    spread = tl.where(closed, AROUND, reach) * gap
    near = middle - spread
    far = middle + spread
    # Where the distances mislead, thirds.
    third = (b - a) * (1 / 3)
    astray = closed & (~((middle > a) & (middle < b)) | (step % 4 == 3))
    near = tl.where(astray, a + third, near)
    far = tl.where(astray, b - third, far)
    # Many terms may be zeros.
    zeros = (step == 1) & (a < -TINY) & (b > 0)
    return tl.where(zeros, -TINY, near), tl.where(zeros, 0.0, far), gap


@triton.jit
def _collect(v, a, b, found, listed, removed, UP: tl.constexpr):
    """Lists the terms in (a, b], a line of lanes for each; adds up those above b."""
    for r in tl.static_range(len(v)):
        q = v[r] if UP else -v[r]
        gone = q > b
        between = (q > a) & ~gone
        removed = tl.where(gone, removed + v[r], removed)
        tl.store(found + listed, q, mask=between)
        listed = tl.where(between, listed + LANES, listed)
    return listed, removed


@triton.jit
def _half(found, listed, FIRST: tl.constexpr, SORT: tl.constexpr):
    """Sixteen of the listed terms, falling."""
    v = ()
    for r in tl.static_range(16):
        v = v + (tl.load(found + (FIRST + r) * LANES, mask=FIRST + r < listed, other=float("-inf")),)
    return _network(v, SORT, True)


@triton.jit
def _taken(v, m, cut, after, FIRST: tl.constexpr):
    """The sum and the size of the first m of the listed terms, the last of them, and the one that follows."""
    total = tl.full((LANES,), 0.0, tl.float32)
    size = total
    for r in tl.static_range(16):
        total = tl.where(FIRST + r < m, total + v[r], total)
        size = tl.where(FIRST + r < m, size + tl.abs(v[r]), size)
        cut = tl.where(FIRST + r == m - 1, v[r], cut)
        after = tl.where(FIRST + r == m, v[r], after)
    return total, size, cut, after


@triton.jit
def _tied(v, m, cut, FIRST: tl.constexpr):
    """How many of the first m listed terms equal the cut."""
    total = tl.full((LANES,), 0, tl.int32)
    for r in tl.static_range(16):
        total += ((FIRST + r < m) & (v[r] == cut)).to(tl.int32)
    return total


@triton.jit
def _cut_of(found, listed, m, SORT: tl.constexpr, MERGE: tl.constexpr, PLACES: tl.constexpr):
    """Of the m largest listed terms the last, the sum, the size, and how many are tied with one that is not of them."""
    cut = tl.full((LANES,), float("inf"), tl.float32)
    after = -cut
    a = _half(found, listed, 0, SORT)
    b = _half(found, listed, 16, SORT)
    larger = _merged(_join(a, b, 16, True), MERGE, PLACES, True)
    smaller = _merged(_join(a, _reversed(b), 16, False), MERGE, PLACES, True)
    total, size, cut, after = _taken(larger, m, cut, after, 0)
    total2, size2, cut, after = _taken(smaller, m, cut, after, 16)
    tie = tl.full((LANES,), 0, tl.int32)
    if tl.max((cut == after).to(tl.int32), 0) > 0:
        tie = tl.where(cut == after, _tied(larger, m, cut, 0) + _tied(smaller, m, cut, 16), 0)
    return cut, total + total2, size + size2, tie


@kernel()
def select(
    order, bound, weight, panel, reach, x, lead_count, lead_index, lead_value, bias,
    out, cuts, ties, marks, tickets, scratch, rows, samples, width, d, blocks, parts, units, sms,
    top, bottom, top2, bottom2,
    PAIRS: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, SHORT: tl.constexpr, EXACT: tl.constexpr,
    PASSES: tl.constexpr, SORT: tl.constexpr, MERGE: tl.constexpr, PLACES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """As `walk` by the weight, for any number of removed terms and two pairs of numbers: cuts are found by counting.

    scratch: of each program, ``(2, CANDIDATES, 32)``.  SHORT: there are few terms, and each pair goes by the
    definition.
    """
    SHARE: tl.constexpr = 16
    found = scratch + tl.program_id(0) * 2 * CANDIDATES * LANES + tl.arange(0, LANES)
    per_part = (rows + parts - 1) // parts
    shares = (per_part + SHARE - 1) // SHARE
    unit = _first_unit(sms, GPU)
    while unit < units:
        tile = unit // parts
        first = unit % parts * per_part
        lane = tile * LANES + tl.arange(0, LANES)
        far = tl.load(reach + lane)
        count = tl.load(lead_count + lane)
        mine = panel + tile * d * LANES + tl.arange(0, LANES)
        share = tl.atomic_add(tickets + unit, 1)
        while share < shares:
            # Guesses go from row to row of one share, never further: who did what before must not matter.
            nothing = tl.full((LANES,), 0.0, tl.float32)
            depth, up, up_gap, down, down_gap = 0, nothing, nothing, nothing, nothing
            depth2, up2, up_gap2, down2, down_gap2 = 0, nothing, nothing, nothing, nothing
            begin = first + share * SHARE
            for row in range(begin, tl.minimum(tl.minimum(begin + SHARE, first + per_part), rows)):
                for pair in range(PAIRS):
                    if PAIRS == 2:
                        # What the other pair learnt waits.
                        depth, depth2 = depth2, depth
                        up, up2 = up2, up
                        up_gap, up_gap2 = up_gap2, up_gap
                        down, down2 = down2, down
                        down_gap, down_gap2 = down_gap2, down_gap
                    depth, up, up_gap, down, down_gap = _counted(
                        row, tile, pair, depth, up, up_gap, down, down_gap, order, bound, weight, mine, far, x, count,
                        lead_index, lead_value, bias, out, cuts, ties, marks, found, rows, samples, width, d, blocks,
                        tl.where(pair == 0, top, top2), tl.where(pair == 0, bottom, bottom2),
                        KEEP, HAS_BIAS, SHORT, EXACT, PASSES, SORT, MERGE, PLACES,
                    )  # fmt: skip
            share = tl.atomic_add(tickets + unit, 1)
        unit = _next_unit(unit, tickets, shares, units, sms)


@triton.jit
def _counted(
    row, tile, pair, depth, up, up_gap, down, down_gap, order, bound, weight, mine, far, x, count, lead_index,
    lead_value, bias, out, cuts, ties, marks, found, rows, samples, width, d, blocks, k, k2,
    KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, SHORT: tl.constexpr, EXACT: tl.constexpr, PASSES: tl.constexpr,
    SORT: tl.constexpr, MERGE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row and 32 samples. How far to look and where the cuts may be comes from the row before, and goes on.

    For each cut an interval (a, b] that holds it is narrowed, until few terms lie in it. These are listed and sorted.
    Downwards all is negated.
    """
    lane = tile * LANES + tl.arange(0, LANES)
    here = lane < samples
    places = order + row * d
    steps = bound + row * blocks
    raw = weight + row * d
    largest = tl.load(steps)
    cap = largest * far
    lost = (far != far) | (tl.full((LANES,), 0.0, tl.float32) + largest != largest)
    defined = here & ~lost & (cap <= LARGEST)
    at = out + pair * samples * rows + lane * rows + row
    dense = tl.load(at, mask=here, other=0.0)
    nothing = tl.full((LANES,), 0.0, tl.float32)
    odd = here & ~lost
    removed = nothing
    infinite = nothing + float("inf")
    upper = infinite
    lower = -infinite
    tie = tl.full((LANES,), 0, tl.int32)
    tie2 = tie
    walked = d
    if not SHORT:
        most = tl.minimum(tl.max(count, 0), 16)
        found2 = found + CANDIDATES * LANES
        leads = lead_index + lane
        values = lead_value + lane
        whole = (d + 15) // 16 * 16
        if depth == 0:
            depth = ((k + k2) * 3 // 2 + 31) // 16 * 16
        depth = tl.minimum(depth, whole)
        fresh = up_gap == 0
        up = tl.where(fresh, 0.5 * cap, up)
        up_gap = tl.where(fresh, cap / (4.0 * k + 1.0), up_gap)
        fresh = down_gap == 0
        down = tl.where(fresh, 0.5 * cap, down)
        down_gap = tl.where(fresh, cap / (4.0 * k2 + 1.0), down_gap)
        found_up = odd
        found_down = odd
        size = nothing
        seen = nothing
        narrow = nothing
        b = infinite
        b2 = infinite
        go = 1
        while go > 0:
            # No number of a panel passes `cap`; of a side that loses nothing the interval is empty.
            b = tl.where(k > 0, cap, infinite)
            a = tl.where(k > 0, -infinite, b)
            b2 = tl.where(k2 > 0, cap, infinite)
            a2 = tl.where(k2 > 0, -infinite, b2)
            above_b = nothing
            above_b2 = nothing
            above_a = nothing
            above_a2 = nothing
            ahead = tl.minimum(AROUND, 0.45 * k) * up_gap
            ahead2 = tl.minimum(AROUND, 0.45 * k2) * down_gap
            p = up - ahead
            q = up + ahead
            p2 = down - ahead2
            q2 = down + ahead2
            step = 0
            open_ = 1
            while open_ > 0:
                near = nothing
                distant = nothing
                near2 = nothing
                distant2 = nothing
                for n in range(most):
                    v = (_lead(raw, leads, values, n, width, count),)
                    near, distant = _count(v, p, q, near, distant, True)
                    near2, distant2 = _count(v, p2, q2, near2, distant2, False)
                    above_b = tl.where((step == 0) & (v[0] > b), above_b + 1.0, above_b)
                    above_b2 = tl.where((step == 0) & (v[0] < -b2), above_b2 + 1.0, above_b2)
                for j in range(0, depth, 16):
                    v = _places(places, mine, j, d, float("nan"), 16, EXACT)
                    near, distant = _count(v, p, q, near, distant, True)
                    near2, distant2 = _count(v, p2, q2, near2, distant2, False)
                a, b, above_a, above_b = _closer(a, b, above_a, above_b, p, near, k)
                a, b, above_a, above_b = _closer(a, b, above_a, above_b, q, distant, k)
                a2, b2, above_a2, above_b2 = _closer(a2, b2, above_a2, above_b2, p2, near2, k2)
                a2, b2, above_a2, above_b2 = _closer(a2, b2, above_a2, above_b2, q2, distant2, k2)
                found_up = (a > -LARGEST) & (above_a - above_b <= CANDIDATES)
                found_down = (a2 > -LARGEST) & (above_a2 - above_b2 <= CANDIDATES)
                step += 1
                open_ = tl.max((defined & ~(found_up & found_down)).to(tl.int32), 0)
                if step == PASSES:
                    open_ = 0
                p, q, up_gap = _aim(a, b, above_a, above_b, up_gap, k, step)
                p2, q2, down_gap = _aim(a2, b2, above_a2, above_b2, down_gap, k2, step)
            # Where too many are left to be listed, none are.
            floor = tl.where(found_up, a, b)
            floor2 = tl.where(found_down, a2, b2)
            listed = tl.full((LANES,), 0, tl.int32)
            listed2 = listed
            gone = nothing
            gone2 = nothing
            seen = nothing
            for n in range(most):
                v = (_lead(raw, leads, values, n, width, count),)
                listed, gone = _collect(v, floor, b, found, listed, gone, True)
                listed2, gone2 = _collect(v, floor2, b2, found2, listed2, gone2, False)
            gone = nothing
            gone2 = nothing
            for j in range(0, depth, 8):
                v = _places(places, mine, j, d, float("nan"), 8, EXACT)
                seen += _size(v if EXACT else _within(v, cap, 8), 8)
                listed, gone = _collect(v, floor, b, found, listed, gone, True)
                listed2, gone2 = _collect(v, floor2, b2, found2, listed2, gone2, False)
            listed = listed // LANES
            listed2 = listed2 // LANES
            removed = gone + gone2
            size = gone - gone2
            alike = tl.full((LANES,), 0, tl.int32) > 0
            alike2 = alike
            tie = tl.full((LANES,), 0, tl.int32)
            tie2 = tie
            known = found_up & (listed == (above_a - above_b).to(tl.int32))
            known2 = found_down & (listed2 == (above_a2 - above_b2).to(tl.int32))
            m = k - above_b.to(tl.int32)
            m2 = k2 - above_b2.to(tl.int32)
            rare = ~(known & known2) | (b < 0) | (b2 < 0)
            if tl.max((defined & rare).to(tl.int32), 0) > 0:
                # Terms of both signs may leave on one side. And if all terms of an interval are one value, it is the
                # cut: some of them leave and some stay.
                size = nothing
                low, high = infinite, -infinite
                low2, high2 = infinite, -infinite
                for j in range(0, depth, 4):
                    v = _places(places, mine, j, d, float("nan"), 4, EXACT)
                    for r in tl.static_range(4):
                        size = tl.where((v[r] > b) | (v[r] < -b2), size + tl.abs(v[r]), size)
                        between = (v[r] > a) & (v[r] <= b)
                        low = tl.where(between, tl.minimum(low, v[r]), low)
                        high = tl.where(between, tl.maximum(high, v[r]), high)
                        between = (v[r] < -a2) & (v[r] >= -b2)
                        low2 = tl.where(between, tl.minimum(low2, -v[r]), low2)
                        high2 = tl.where(between, tl.maximum(high2, -v[r]), high2)
                alike = ~known & (low == high) & (a > -LARGEST) & (count == 0)
                upper = low
                tie = tl.where(alike, m, 0)
                alike2 = ~known2 & (low2 == high2) & (a2 > -LARGEST) & (count == 0)
                lower = low2
                tie2 = tl.where(alike2, m2, 0)
                leave = tl.where(alike, m.to(tl.float32) * low, 0.0)
                leave2 = tl.where(alike2, m2.to(tl.float32) * low2, 0.0)
                removed += leave - leave2
                size += tl.abs(leave) + tl.abs(leave2)
            for side in range(2):
                down_now = side > 0
                chosen = tl.where(down_now, known2, known)
                cut, total, bulk, tied = _cut_of(
                    found + side * CANDIDATES * LANES, tl.where(down_now, listed2, listed),
                    tl.where(chosen, tl.where(down_now, m2, m), 0), SORT, MERGE, PLACES,
                )  # fmt: skip
                removed += tl.where(down_now, -total, total)
                size += bulk
                if down_now:
                    lower = tl.where(chosen, cut, lower)
                    tie2 = tl.where(chosen, tied, tie2)
                else:
                    upper = tl.where(chosen, cut, upper)
                    tie = tl.where(chosen, tied, tie)
            known = known | alike
            known2 = known2 | alike2
            odd = ~(known & known2)
            # No term after the depth may reach a cut. More terms only move the cuts away from zero.
            narrow = tl.minimum(tl.where(k > 0, upper, cap), tl.where(k2 > 0, lower, cap))
            need = depth
            while (need < d) & (
                tl.max((defined & ~odd & (tl.load(steps + need // 16, mask=need < d) * far >= narrow)).to(tl.int32), 0)
                > 0
            ):
                need += 16
            if (need < whole) & (tl.max((defined & odd).to(tl.int32), 0) > 0):
                # Perhaps there are too few terms.
                need = tl.maximum(need, tl.minimum(2 * depth, whole))
            go = (need > depth).to(tl.int32)
            depth = need
            up = tl.where(known, upper, up)
            down = tl.where(known2, lower, down)
            lower = -lower
        # Further terms tell whether the subtraction is sound.
        j = depth
        while (j < d) & (tl.max((defined & ~odd & ~(size <= 5 * (seen - size))).to(tl.int32), 0) > 0):
            seen += _size(_places(places, mine, j, d, 0.0, 4, EXACT), 4)
            j += 4
        odd = odd | ~(size <= 5 * (seen - size)) | ~(cap <= LARGEST) | ~(tl.abs(dense) <= LARGEST) | (upper == lower)
        if most > 0:
            # Outlying terms are not in the dense product: those that stay are added, and those that were listed and
            # leave are not taken out.
            for n in range(most):
                v = _lead(raw, leads, values, n, width, count)
                removed -= tl.where((v <= b) & (v >= -b2), v, 0.0)
            # A zero in the panel that stands for an outlying term must not be among those removed.
            wrong = (~(upper > 0) & (k > 0)) | (~(lower < 0) & (k2 > 0)) | (count > 16)
            # An infinite term that stays is tied with a cut at infinity.
            wrong = wrong | (((k == 0) | (k2 == 0)) & ~(tl.abs(removed) <= LARGEST))
            odd = odd | ((count > 0) & wrong)
        odd = odd & here & ~lost
        walked = tl.minimum(depth, d)
        # A row that needs a little more costs twice, so some are kept in hand.
        ahead = tl.load(steps + tl.maximum(depth - 48, 0) // 16) * far
        if (depth > 64) & (tl.max((defined & ~odd & (ahead >= narrow)).to(tl.int32), 0) == 0):
            depth -= 16
    tl.store(at, tl.where(lost, float("nan"), dense - removed), mask=here & ~odd)
    cell = pair * 2 * rows * samples + row * samples
    noted = marks + pair * (2 * rows + samples)
    bits = _bits(odd)
    if bits != 0:
        walked = d
        _by_definition(
            raw, x, bias + row, tile * LANES, bits, d, k, k2, out + pair * samples * rows + row, rows,
            cuts + cell, 1, rows * samples, ties + cell, noted + rows + row, noted + 2 * rows,
            HAS_BIAS, True, KEEP, 8,
        )  # fmt: skip
    if KEEP:
        fine = here & ~odd
        tl.store(cuts + cell + lane, tl.where(lost, float("nan"), upper), mask=fine)
        tl.store(cuts + rows * samples + cell + lane, lower, mask=fine)
        some = fine & ~lost & ((tie > 0) | (tie2 > 0))
        if tl.max(some.to(tl.int32), 0) > 0:
            tl.store(ties + cell + lane, tl.where(tie > 0, tie + 1, 0), mask=some)
            tl.store(ties + rows * samples + cell + lane, tl.where(tie2 > 0, tie2 + 1, 0), mask=some)
            tl.atomic_max(noted + rows + row, 1)
            tl.atomic_max(noted + 2 * rows + lane, 1, mask=some)
        tl.atomic_max(noted + row, walked)
    return depth, up, up_gap, down, down_gap


# --- gradients --------------------------------------------------------------------------------------------------------


@triton.jit
def _tied_stay(terms, inside, upper, lower, ties, ties2):
    """Which terms of one pair, by rising index, are tied with a cut and stay."""
    many = 1 << 30
    leave = tl.where(ties == 0, many, ties - 1)
    leave2 = tl.where(ties2 == 0, many, ties2 - 1)
    at_upper = inside & (terms == upper)
    at_lower = inside & (terms == lower)
    rank = tl.cumsum(at_upper.to(tl.int32), 0)
    rank2 = tl.cumsum(at_lower.to(tl.int32), 0)
    before = tl.where(upper == lower, tl.minimum(leave, many), 0)
    gone = at_upper & (rank <= leave)
    gone2 = at_lower & (rank2 > before) & (rank2 - before <= leave2)
    return (at_upper | at_lower) & ~gone & ~gone2


@kernel("grad", "panel", "cuts", "samples", "d")
def weight_parts(
    grad, order, panel, cuts, marks, parts, samples, rows, d,
    BLOCK: tl.constexpr, BATCH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Of one row and a block of samples: sums of the kept terms at the walked places, ``parts (blocks, rows, d)``.

    All rows take a block before the next one comes, so that its part of the panel stays in the second-level cache.
    """
    row = tl.program_id(0) % rows
    part = tl.program_id(0) // rows
    grad += row * samples
    cuts += row * samples
    depth = tl.minimum(tl.load(marks + row), d)
    for j in range(0, depth, PLACES):
        place = j + tl.arange(0, PLACES)
        inside = place < depth
        both = tl.load(order + row * d + place, mask=inside, other=0)
        i = (both >> 32).to(tl.int32) // 128
        w = _weight_of(both)
        total = tl.full((PLACES, BATCH), 0.0, tl.float32)
        for b in range(part * BLOCK, tl.minimum(part * BLOCK + BLOCK, samples), BATCH):
            lane = b + tl.arange(0, BATCH)
            here = lane < samples
            g = tl.load(grad + lane, mask=here, other=0.0, eviction_policy="evict_first")
            upper = tl.load(cuts + lane, mask=here, other=0.0, eviction_policy="evict_first")
            lower = tl.load(cuts + rows * samples + lane, mask=here, other=0.0, eviction_policy="evict_first")
            at = i[:, None] * LANES + (lane // LANES * d * LANES + lane % LANES)[None, :]
            v = tl.load(panel + at, mask=inside[:, None] & here[None, :], other=0.0)
            term = w[:, None] * v
            keeps = (term < upper[None, :]) & (term > lower[None, :])
            total += tl.where(keeps, g[None, :] * v, 0.0)
        tl.store(parts + (part * rows + row) * d + place, tl.sum(total, 1), mask=inside)


@triton.jit
def _last_to_leave(cut, leave, base, order, panel, depth):
    """Of each lane the index of the last term tied with the cut that leaves, -1 if none does."""
    last = tl.full((LANES,), -1, tl.int32)
    while tl.max(leave, 0) > 0:
        following = tl.full((LANES,), 1 << 30, tl.int32)
        for j in range(0, depth, 64):
            i, term, _ = _walked(order, panel, base, j, depth)
            candidate = (term == cut[None, :]) & (i > last[None, :])
            following = tl.minimum(following, tl.min(tl.where(candidate, i, 1 << 30), 0))
        last = tl.where(leave > 0, following, last)
        leave -= 1
    return last


@triton.jit
def _walked(order, panel, base, j, depth):
    """Index ``(64, lanes)``, term and coordinate at 64 places of an order; NaN for terms beyond the depth."""
    place = j + tl.arange(0, 64)
    both = tl.load(order + place, mask=place < depth, other=0)
    i = tl.broadcast_to(((both >> 32).to(tl.int32) // 128)[:, None], (64, LANES))
    v = tl.load(panel + base[None, :] + i * LANES)
    term = tl.where((place < depth)[:, None], _weight_of(both)[:, None] * v, float("nan"))
    return i, term, v


@triton.jit
def _add_tied(
    tied, first, many, grad, x, raw, order, panel, lead_count, cuts, ties, below, out, d, depth, WIDTH: tl.constexpr
):
    """Adds to a row's gradient, for 32 of the samples listed in `tied`, the terms tied with a cut that stay."""
    listed = first + tl.arange(0, LANES)
    here = listed < many
    sample = tl.load(tied + listed, mask=here, other=0)
    g = tl.load(grad + sample, mask=here, other=0.0)
    upper = tl.load(cuts + sample)
    lower = tl.load(cuts + below + sample)
    tie = tl.load(ties + sample, mask=here, other=0)
    tie2 = tl.load(ties + below + sample, mask=here, other=0)
    # Few tied terms of walked coordinates: lanes together. Else one sample after the other.
    few = here & (tie < 8) & (tie2 < 8) & (upper != lower) & (tl.load(lead_count + sample) == 0)
    if tl.max(few.to(tl.int32), 0) > 0:
        base = sample // LANES * d * LANES + sample % LANES
        last = _last_to_leave(upper, tl.where(few, tie - 1, 0), base, order, panel, depth)
        last2 = _last_to_leave(lower, tl.where(few, tie2 - 1, 0), base, order, panel, depth)
        for j in range(0, depth, 64):
            i, term, v = _walked(order, panel, base, j, depth)
            stays = (term == upper[None, :]) & (tie > 0)[None, :] & (i > last[None, :])
            stays = stays | ((term == lower[None, :]) & (tie2 > 0)[None, :] & (i > last2[None, :]))
            share = tl.sum(tl.where(stays & few[None, :], g[None, :] * v, 0.0), 1)
            tl.atomic_add(out + tl.max(i, 1), share, mask=share != 0)
    tl.debug_barrier()  # so that the sums have one order
    left = here & ~few
    while tl.max(left.to(tl.int32), 0) > 0:
        one = listed == tl.min(tl.where(left, listed, 1 << 30), 0)
        mine = tl.sum(tl.where(one, sample, 0), 0)
        column = tl.arange(0, WIDTH)
        inside = column < d
        v = tl.load(x + mine * d + column, mask=inside, other=0.0)
        stays = _tied_stay(
            _product(tl.load(raw + column, mask=inside, other=0.0), v), inside, tl.load(cuts + mine),
            tl.load(cuts + below + mine), tl.load(ties + mine), tl.load(ties + below + mine),
        )  # fmt: skip
        tl.atomic_add(out + column, tl.load(grad + mine) * v, mask=stays)
        left = left & ~one


@kernel()
def weight_gradient(
    grad, x, weight, order, bound, panel, asked, lead_count, lead_index, lead_value, cuts, ties, marks, parts, tied,
    out, samples, rows, width, d, blocks, count_parts, WIDTH: tl.constexpr, BATCH: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Of one row: ``out (rows, d)`` holds the dense product of ``grad (rows, samples)`` and the panel.

    A place of the order that no sample walked keeps that value; a walked one is added up from its kept terms alone.
    """
    row = tl.program_id(0)
    grad += row * samples
    cuts += row * samples
    ties += row * samples
    below = rows * samples
    raw = weight + row * d
    out += row * d
    depth = tl.minimum(tl.load(marks + row), d)
    most = tl.load(asked + 1)
    lost = tl.load(asked + 2)
    for j in range(0, depth, 64):
        place = j + tl.arange(0, 64)
        inside = place < depth
        i = (tl.load(order + row * d + place, mask=inside, other=0) >> 32).to(tl.int32) // 128
        total = tl.full((64,), 0.0, tl.float32)
        for part in range(0, count_parts):
            total += tl.load(parts + (part * rows + row) * d + place, mask=inside, other=0.0)
        tl.store(out + i, total, mask=inside)
    tl.debug_barrier()
    if most > 0:
        # Outlying coordinates are not in the panel. Few of their terms stay: one after the other.
        for b in range(0, samples, 32):
            lane = b + tl.arange(0, 32)
            here = lane < samples
            count = tl.load(lead_count + lane, mask=here, other=0)
            if tl.max(count, 0) > 0:
                g = tl.load(grad + lane, mask=here, other=0.0)
                upper = tl.load(cuts + lane, mask=here, other=0.0)
                lower = tl.load(cuts + below + lane, mask=here, other=0.0)
                for q in range(0, tl.minimum(tl.max(count, 0), LEADS)):
                    there = (q < count) & (count <= LEADS)
                    i = tl.load(lead_index + q * width + lane, mask=there, other=0)
                    v = tl.load(lead_value + q * width + lane, mask=there, other=0.0)
                    term = _product(tl.load(raw + i, mask=there, other=0.0), v)
                    left = there & (term < upper) & (term > lower)
                    while tl.max(left.to(tl.int32), 0) > 0:
                        one = lane == tl.min(tl.where(left, lane, 1 << 30), 0)
                        at = tl.sum(tl.where(one, i, 0), 0)
                        tl.atomic_add(out + at, tl.sum(tl.where(one, g * v, 0.0), 0))
                        left = left & ~one
                # A sample with too many to list: all of its row.
                left = count > LEADS
                while tl.max(left.to(tl.int32), 0) > 0:
                    sample = tl.min(tl.where(left, lane, 1 << 30), 0)
                    column = tl.arange(0, WIDTH)
                    v = tl.load(x + sample * d + column, mask=column < d, other=0.0)
                    p = tl.load(
                        panel + column * LANES + sample // LANES * d * LANES + sample % LANES,
                        mask=column < d,
                        other=0.0,
                    )
                    term = _product(tl.load(raw + column, mask=column < d, other=0.0), v)
                    stays = (term < tl.load(cuts + sample)) & (term > tl.load(cuts + below + sample))
                    stays = stays & (v != p) & (column < d)
                    tl.atomic_add(out + column, tl.load(grad + sample) * v, mask=stays)
                    left = left & (lane != sample)
    if tl.load(marks + rows + row) > 0:
        tied += row * BATCH
        for b in range(0, samples, BATCH):
            lane = b + tl.arange(0, BATCH)
            here = lane < samples
            some = here & (
                tl.load(ties + lane, mask=here, other=0) + tl.load(ties + below + lane, mask=here, other=0) > 0
            )
            many = tl.sum(some.to(tl.int32), 0)
            if many > 0:
                tl.store(tied + tl.cumsum(some.to(tl.int32), 0) - 1, lane, mask=some)
                tl.debug_barrier()
                for first in range(0, many, LANES):
                    _add_tied(
                        tied, first, many, grad, x, raw, order + row * d, panel, lead_count, cuts, ties, below, out,
                        d, depth, WIDTH,
                    )  # fmt: skip
                tl.debug_barrier()
    largest = tl.load(bound + row * blocks)
    if (lost > 0) | (largest != largest):
        tl.debug_barrier()
        column = tl.arange(0, WIDTH)
        tl.store(out + column, tl.full((WIDTH,), float("nan"), tl.float32), mask=column < d)


@kernel("grad", "cuts", "samples", "d")
def input_gradient(
    grad, x, weight, bound, cuts, out, samples, rows, d, blocks, SIZE: tl.constexpr, BATCH: tl.constexpr
):
    """``out (samples, d)``: every kept term added up, none subtracted; ``grad (rows, samples)``."""
    lane = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    here = lane < samples
    inside = (column < d)[:, None] & here[None, :]
    v = tl.load(x + lane[None, :] * d + column[:, None], mask=inside, other=0.0)
    total = tl.full((SIZE, BATCH), 0.0, tl.float32)
    for first in range(0, rows, 64):
        part = tl.full((SIZE, BATCH), 0.0, tl.float32)
        for row in range(first, tl.minimum(first + 64, rows)):
            g = tl.load(grad + row * samples + lane, mask=here, other=0.0)
            upper = tl.load(cuts + row * samples + lane, mask=here, other=0.0)
            lower = tl.load(cuts + rows * samples + row * samples + lane, mask=here, other=0.0)
            w = tl.load(weight + row * d + column, mask=column < d, other=0.0)
            g = tl.where(upper == upper, g, float("nan"))
            lower = tl.where(upper == upper, lower, float("nan"))
            term = w[:, None] * v
            if ~(tl.load(bound + row * blocks) <= LARGEST):
                term = _product(tl.broadcast_to(w[:, None], (SIZE, BATCH)), v)
            # So put, a product of zero and infinity stays: the weight is the zero, and adds nothing.
            gone = (term >= upper[None, :]) | (term <= lower[None, :])
            part += tl.where(gone, 0.0, g[None, :] * w[:, None])
        total += part
    tl.store(out + lane[None, :] * d + column[:, None], total, mask=inside)


@kernel()
def input_ties(grad, x, weight, cuts, ties, marks, out, samples, rows, d, WIDTH: tl.constexpr):
    """Adds to `input_gradient` the terms of one sample that are tied with a cut and stay."""
    sample = tl.program_id(0)
    if tl.load(marks + 2 * rows + sample) > 0:
        column = tl.arange(0, WIDTH)
        inside = column < d
        v = tl.load(x + sample * d + column, mask=inside, other=0.0)
        extra = tl.load(out + sample * d + column, mask=inside, other=0.0)
        for row in range(0, rows):
            at = row * samples + sample
            tie = tl.load(ties + at)
            tie2 = tl.load(ties + rows * samples + at)
            if (tie != 0) | (tie2 != 0):
                w = tl.load(weight + row * d + column, mask=inside, other=0.0)
                stays = _tied_stay(
                    _product(w, v), inside, tl.load(cuts + at), tl.load(cuts + rows * samples + at), tie, tie2
                )
                extra += tl.where(stays, tl.load(grad + at) * w, 0.0)
        tl.store(out + sample * d + column, extra, mask=inside)
