"""One pair of rows by the definition."""

import triton
import triton.language as tl

from ._language import LANES, any_of, product_of


@triton.jit
def _terms_of(walker, lane, j, d, TILE: tl.constexpr):
    i = j + tl.arange(0, TILE)
    a = tl.load(walker + i, mask=i < d, other=0.0)
    b = tl.load(lane[None, :] + i[:, None], mask=(i < d)[:, None], other=0.0)
    return product_of(tl.broadcast_to(a[:, None], b.shape), b), (i < d)[:, None]


@triton.jit
def keys_of(terms):
    """Integers that order as the terms do."""
    bits = terms.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(noinline=True)
def by_definition(
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
    low2, high2 = low, high  # the same for the complements of the keys, in which the smallest terms come first
    none = tl.full((SIZE,), 0, tl.int32)
    sure, sure2 = none, none
    step = 0
    go = 1
    while go > 0:
        # Ties at zero are the common ones: two steps find them.
        middle = (low & high) + ((low ^ high) >> 1)
        middle2 = (low2 & high2) + ((low2 ^ high2) >> 1)
        if step < 2:
            middle = tl.where((low < step) & (step < high), step, middle)
            middle2 = tl.where((low2 < step - 1) & (step - 1 < high2), step - 1, middle2)
        count, count2 = none, none
        for j in range(0, d, TILE):
            terms, inside = _terms_of(walker, lane, j, d, TILE)
            key = keys_of(terms)
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
        key = keys_of(terms)
        cut = tl.minimum(cut, tl.min(tl.where(inside & (key >= low[None, :]), key, 0x7F800000), 0))
        cut2 = tl.minimum(cut2, tl.min(tl.where(inside & (~key >= low2[None, :]), ~key, 0x7F800000), 0))
    upper = tl.where(top > 0, value_of(cut), float("inf"))
    lower = tl.where(bottom > 0, value_of(~cut2), float("-inf"))
    kept = tl.full((TILE, SIZE), 0.0, tl.float32)
    above, below, at_upper, at_lower = none, none, none, none
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
        if any_of(some):
            tl.atomic_max(walker_tied, 1)
            tl.atomic_max(lane_tied + lane_at, 1, mask=some)
