"""Sorting networks as data: comparators ``(i, j)``, after each of which place i holds the larger value."""

from __future__ import annotations

from itertools import product

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


def partition(size: int, top: int, bottom: int) -> Comparators:
    """Takes values apart: the ``top`` largest come first, the ``bottom`` smallest last, in no order among themselves.

    A sort, or the lists of `_extremes`, without what only orders values of the same part.
    """
    networks = [_sort(size)]
    if top + bottom <= 8 <= size:
        networks.append(_extremes(size, top, bottom))
    return min((_needed(network, size, top, bottom) for network in networks), key=len)


def _sort(size: int) -> Comparators:
    """Batcher's network, for any number of values (Knuth, volume 3, section 5.2.2, algorithm M)."""
    comparators = []
    largest = 1 << max(0, (size - 1).bit_length() - 1)
    step = largest
    while step:
        half, offset, distance = largest, 0, step
        while distance:
            comparators += [(i, i + distance) for i in range(size - distance) if i & step == offset]
            offset, distance, half = step, half - step, half // 2
        step //= 2
    return tuple(comparators)


def _extremes(size: int, top: int, bottom: int) -> Comparators:
    """Sorts eight values at a time and merges their extremes into a list for each side; the rest go one by one."""
    found: list[tuple[int, int]] = []
    eights = [range(start, start + 8) for start in range(0, size - 7, 8)]
    lists = [list(eights[0][:top]), list(eights[0][::-1][:bottom])]  # the most extreme first

    def compare(side: int, first: int, second: int) -> None:
        found.append((first, second) if side == 0 else (second, first))

    for values in eights:
        found += [(values[i], values[j]) for i, j in SORT8]
        if values is eights[0]:
            for value, side in product(range(8 * len(eights), size), (0, 1)):
                for listed in lists[side]:
                    compare(side, listed, value)
            continue
        for side, falling in enumerate((values, values[::-1])):
            mine = lists[side]
            for listed, value in zip(mine, reversed(falling[: len(mine)]), strict=True):
                compare(side, listed, value)
            comparators, places = merge(len(mine))
            for i, j in comparators:
                compare(side, mine[i], mine[j])
            lists[side] = [mine[p] for p in places]
    others = [value for value in range(size) if value not in lists[0] + lists[1]]
    place = {value: i for i, value in enumerate((*lists[0], *others, *lists[1]))}
    return tuple((place[i], place[j]) for i, j in found)


def _needed(comparators: Comparators, size: int, top: int, bottom: int) -> Comparators:
    """The comparators without those that only order what ends in the same part."""
    part: list[int | None] = [*[0] * top, *[1] * (size - top - bottom), *[2] * bottom]
    needed = []
    for i, j in reversed(comparators):
        if part[i] is None or part[i] != part[j]:
            needed.append((i, j))
            part[i] = part[j] = None
    return tuple(reversed(needed))
