"""Sorting networks: comparators ``(i, j)``, after each of which place i holds the larger value; sums of lists."""

import triton
import triton.language as tl

Comparators = tuple[tuple[int, int], ...]

# Green's network, largest first: sixty comparisons.
SORT16: Comparators = (
    (0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15),
    (0, 2), (4, 6), (8, 10), (12, 14), (1, 3), (5, 7), (9, 11), (13, 15),
    (0, 4), (8, 12), (1, 5), (9, 13), (2, 6), (10, 14), (3, 7), (11, 15),
    (0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15),
    (5, 10), (6, 9), (3, 12), (13, 14), (4, 8), (7, 11), (1, 2),
    (1, 4), (7, 13), (2, 8), (11, 14),
    (2, 4), (5, 6), (9, 10), (11, 13), (3, 8), (7, 12),
    (6, 8), (10, 12), (3, 5), (7, 9),
    (3, 4), (5, 6), (7, 8), (9, 10), (11, 12),
    (6, 7), (8, 9),
)  # fmt: skip

# Nineteen comparisons.
SORT8: Comparators = (
    (0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1), (2, 3), (4, 5), (6, 7),
    (2, 4), (3, 5), (1, 4), (3, 6), (1, 2), (3, 4), (5, 6),
)  # fmt: skip


def merge(size: int) -> tuple[Comparators, tuple[int, ...]]:
    """Sorts ``size`` values that fall and then rise: the comparators, and the places of the results, largest first.

    A bitonic merge of the next power of two, of whose values the missing ones are known to come first.
    """
    width = 1 << max(0, size - 1).bit_length()
    place: list[int | None] = [*range(size), *[None] * (width - size)]
    comparators = []
    step = width // 2
    while step:
        for upper in range(width):
            lower = upper + step
            if upper & step or place[upper] is None:
                continue
            if place[lower] is None:
                place[upper], place[lower] = None, place[upper]
            else:
                comparators.append((place[upper], place[lower]))
        step //= 2
    return tuple(comparators), tuple(p for p in place if p is not None)  # type: ignore[arg-type]


@triton.jit
def network(v, COMPARATORS: tl.constexpr, FALLING: tl.constexpr):
    for n in tl.static_range(len(COMPARATORS)):
        larger = tl.maximum(v[COMPARATORS[n][0]], v[COMPARATORS[n][1]])
        smaller = tl.minimum(v[COMPARATORS[n][0]], v[COMPARATORS[n][1]])
        first, second = (larger, smaller) if FALLING == (COMPARATORS[n][0] < COMPARATORS[n][1]) else (smaller, larger)
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
def _extreme(a, b, LARGER: tl.constexpr):
    return tl.maximum(a, b) if LARGER else tl.minimum(a, b)


@triton.jit
def join(best, b, SIZE: tl.constexpr, FALLING: tl.constexpr):
    """The SIZE extreme values of a sorted list and others that fall, falling and rising (or the other way round)."""
    out = ()
    for i in tl.static_range(SIZE):
        if SIZE - 1 - i < len(b):
            out = out + (_extreme(best[i], b[SIZE - 1 - i if FALLING else len(b) - SIZE + i], FALLING),)
        else:
            out = out + (best[i],)
    return out


@triton.jit
def least_of(best, SIZE: tl.constexpr, STRICT: tl.constexpr, FALLING: tl.constexpr):
    """The least extreme value of a list, and its neighbour: if STRICT the list has one more than is removed."""
    last = best[0]
    cut = last
    for i in tl.static_range(1, SIZE):
        if STRICT:
            further = _extreme(last, best[i], FALLING)
            cut = further if i == 1 else _extreme(cut, further, not FALLING)
        last = _extreme(last, best[i], not FALLING)
    return cut if STRICT else last, last


@triton.jit
def backwards(v):
    out = ()
    for i in tl.static_range(16):
        out = out + (v[15 - i],)
    return out


@triton.jit
def sum_of(v, SIZE: tl.constexpr):
    total = v[0]
    for i in tl.static_range(1, SIZE):
        total += v[i]
    return total


@triton.jit
def size_of(v, SIZE: tl.constexpr):
    total = tl.abs(v[0])
    for i in tl.static_range(1, SIZE):
        total += tl.abs(v[i])
    return total


@triton.jit
def within(v, cap, SIZE: tl.constexpr):
    """Values beyond `cap`, which only an outlying term can have, become zeros."""
    out = ()
    for i in tl.static_range(SIZE):
        out = out + (tl.where(tl.abs(v[i]) <= cap, v[i], 0.0),)
    return out


@triton.jit
def equal_to(v, cut, SIZE: tl.constexpr):
    """How many values equal the cut."""
    total = (v[0] == cut).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        total += (v[i] == cut).to(tl.int32)
    return total
