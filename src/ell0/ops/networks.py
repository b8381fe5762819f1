"""Sorting networks as data: comparators ``(i, j)``, after each of which place i holds the larger value."""

from __future__ import annotations

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
