"""Sorting networks at work on lists of lanes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def network(v, COMPARATORS: tl.constexpr, FALLING: tl.constexpr):
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
def merged(v, COMPARATORS: tl.constexpr, PLACES: tl.constexpr, FALLING: tl.constexpr):
    """Sorts what `join` left."""
    v = network(v, COMPARATORS, FALLING)
    out = ()
    for i in tl.static_range(len(PLACES)):
        out = out + (v[PLACES[i]],)
    return out


@triton.jit
def join(best, b, SIZE: tl.constexpr, FALLING: tl.constexpr):
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
def least_of(best, SIZE: tl.constexpr, STRICT: tl.constexpr, FALLING: tl.constexpr):
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
def backwards(v):
    out = ()
    for i in tl.static_range(16):
        out = out + (v[15 - i],)
    return out
