"""One pair of rows by the definition."""

import triton
import triton.language as tl

from ._language import LANES, product_of

TILE = tl.constexpr(256)  # terms that are looked at together


@triton.jit
def _terms_of(a, b, j, d):
    """Some terms of a pair, one in each lane or several, and which of them there are."""
    i = j + tl.arange(0, TILE)
    return product_of(tl.load(a + i, mask=i < d, other=0.0), tl.load(b + i, mask=i < d, other=0.0)), i < d


@triton.jit
def keys_of(terms):
    """Integers that order as the terms do."""
    bits = terms.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(mask):
    return tl.sum(mask.to(tl.int32), 0)


@triton.jit(noinline=True)
def by_definition(
    walker, lanes_raw, bias, first, bits, d, top, bottom, out, out_stride, cuts, cut_stride, second, ties,
    walker_tied, lane_tied, HAS_BIAS: tl.constexpr, BY_WEIGHT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Value, cuts and tied removals (in the encoding of `kernel.forward`) of the lanes in `bits`, one after the other.

    Any input but NaN. Bisects the bits of the cuts, counting all terms at each step. A function of its own, so that the
    short cut does not share its registers.
    """
    for at in range(0, LANES):
        if ((bits >> at) & 1) > 0:
            lane = lanes_raw + (first + at) * d
            low = bits * 0 - 0x7F800001  # at least `top` terms are at or above it
            high = bits * 0 + 0x7F800001  # fewer are
            low2, high2 = low, high  # the same for the complements of the keys, in which the smallest terms come first
            sure, sure2, step = bits * 0, bits * 0, bits * 0
            while ((top > 0) & (sure == 0) & (low + 1 < high)) | ((bottom > 0) & (sure2 == 0) & (low2 + 1 < high2)):
                # Ties at zero are the common ones: two steps find them.
                middle = (low & high) + ((low ^ high) >> 1)
                middle2 = (low2 & high2) + ((low2 ^ high2) >> 1)
                middle = tl.where((step < 2) & (low < step) & (step < high), step, middle)
                middle2 = tl.where((step < 2) & (low2 < step - 1) & (step - 1 < high2), step - 1, middle2)
                count, count2 = bits * 0, bits * 0
                for j in range(0, d, TILE):
                    terms, inside = _terms_of(walker, lane, j, d)
                    key = keys_of(terms)
                    count += _count(inside & (key >= middle))
                    count2 += _count(inside & (~key >= middle2))
                open1 = (sure == 0) & (high > middle) & (middle > low)
                low = tl.where(open1 & (count >= top), middle, low)
                high = tl.where(open1 & (count < top), middle, high)
                sure = tl.where(open1 & (count == top), 1, sure)
                open2 = (sure2 == 0) & (high2 > middle2) & (middle2 > low2)
                low2 = tl.where(open2 & (count2 >= bottom), middle2, low2)
                high2 = tl.where(open2 & (count2 < bottom), middle2, high2)
                sure2 = tl.where(open2 & (count2 == bottom), 1, sure2)
                step += 1
            # The cut is the smallest key from `low` on.
            cut = bits * 0 + 0x7F800000
            cut2 = cut
            for j in range(0, d, TILE):
                terms, inside = _terms_of(walker, lane, j, d)
                key = keys_of(terms)
                cut = tl.minimum(cut, tl.min(tl.where(inside & (key >= low), key, 0x7F800000), 0))
                cut2 = tl.minimum(cut2, tl.min(tl.where(inside & (~key >= low2), ~key, 0x7F800000), 0))
            upper = tl.where(top > 0, value_of(cut), float("inf"))
            lower = tl.where(bottom > 0, value_of(~cut2), float("-inf"))
            kept = tl.full((TILE,), 0.0, tl.float32)
            above, below, at_upper, at_lower = bits * 0, bits * 0, bits * 0, bits * 0
            for j in range(0, d, TILE):
                terms, inside = _terms_of(walker, lane, j, d)
                kept += tl.where(inside & (terms < upper) & (terms > lower), terms, 0.0)
                above += _count(inside & (terms > upper))
                below += _count(inside & (terms < lower))
                at_upper += _count(inside & (terms == upper))
                at_lower += _count(inside & (terms == lower))
            leave = tl.where(top > 0, top - above, 0)
            leave2 = tl.where(bottom > 0, bottom - below, 0)
            one = upper == lower
            stay = at_upper - leave - tl.where(one, leave2, 0)
            stay2 = tl.where(one, 0, at_lower - leave2)
            value = tl.sum(kept, 0)
            if HAS_BIAS:
                value += tl.load(bias + (first + at) * (not BY_WEIGHT))
            value += tl.where(stay > 0, stay.to(tl.float32) * upper, 0.0)
            value += tl.where(stay2 > 0, stay2.to(tl.float32) * lower, 0.0)
            tl.store(out + (first + at) * out_stride, value)
            if KEEP:
                cell = (first + at) * cut_stride
                tl.store(cuts + cell, upper)
                tl.store(cuts + second + cell, lower)
                tie = tl.where(stay > 0, leave + 1, 0)
                tie2 = tl.where((stay2 > 0) | one, leave2 + 1, 0)
                tl.store(ties + cell, tie)
                tl.store(ties + second + cell, tie2)
                if (tie != 0) | (tie2 != 0):
                    tl.atomic_max(walker_tied, 1)
                    tl.atomic_max(lane_tied + first + at, 1)
