"""Many removed terms: the cuts are found by counting, at a price that does not grow with how many leave.

A pair's first pivot on each side is a guess from moments of its terms, by a regression on some pairs whose cuts are
found by sorting. Passes over all terms count what lies beyond the pivots and move them; these counts may err. The last
lays a band over each cut. One exact pass adds up what lies between the bands, counts what lies beyond, and lists what
lies in them; `cut_bands` finds the cuts there. The few pairs whose bands miss or hold too many terms are listed, and
`odd_pairs` does them by the definition.
"""

import triton
import triton.language as tl

from ._definition import keys_of, value_of
from ._language import LARGEST, any_of, kernel, product_of
from ._networks import backwards, merged, network

# In gaps between terms: how far beside a term a pivot is to lie, and more for the root of how many terms the last one
# was off; and half the width of a band whose ends were not counted, and more for that root.
ASIDE, SPREAD, SLACK, WIDER = tl.constexpr(1.5), tl.constexpr(0.2), tl.constexpr(4.0), tl.constexpr(2.0)
NEAR = tl.constexpr(8.0)
MOMENTS = tl.constexpr(8)  # sums that the guess knows: of squares, then seven that describe the shape
FARTHEST = tl.constexpr(4.0)  # deviations from the mean of the pairs it was learnt from
OVER = tl.constexpr(4096)  # two counts up to half of it are one number


@triton.jit
def _cells(first, chunk, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The pairs of a tile: samples, whether there are such; rows, the same; where a pair lies in a plane."""
    # Programs that run together share samples.
    tiles = (rows + ROWS - 1) // ROWS
    lane = (tl.program_id(0) // tiles * WIDTH + tl.arange(0, WIDTH))[None, :]
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS))[:, None]
    return first + lane, lane < chunk, row, row < rows, row * chunk + lane


@triton.jit
def _tiny(like):
    """The smallest number above 0. As a constant it would be a double."""
    return ((like != like).to(tl.int32) * 0 + 1).to(tl.float32, bitcast=True)


@triton.jit
def _halved(number):
    """In half precision, which pivots, counts and gaps are kept in; pivots and gaps are scaled as the terms are."""
    return tl.where(tl.abs(number) < 60000.0, number, tl.where(number > 0, float("inf"), float("-inf"))).to(tl.float16)


@triton.jit
def _at(planes, number, plane, here):
    return tl.load(planes + number * plane, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _narrow(count, k, zeros, scale, bars, state, plane, here, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Moves the pivot to where the k-th largest term should lie, between pivots that have been too low and too high.

    LAST: returns the band it lies in: from where to where. It is empty, just above 0, if the term is 0, and ends before
    0 if zeros would fill it.
    """
    pivot, gap = 0.0 - _at(bars, 0, plane, here), _at(state, 0, plane, here)
    low, high = pivot * 0 - float("inf"), pivot * 0 + float("inf")
    many, few = high, pivot * 0  # how many terms lie beyond those
    enough = count >= k
    if not FIRST:
        low, high = _at(state, 2, plane, here), _at(state, 4, plane, here)
        many, few = _at(state, 6, plane, here), _at(state, 8, plane, here)
        # How far apart terms lie, by what lies between this pivot and another one.
        above = (high < float("inf")) & (enough | (low == float("-inf")))
        way = tl.where(above, high, low) - pivot
        passed = count - tl.where(above, few, many)
        seen = way / tl.where(passed == 0, 1.0, passed)
        far = (passed == 0) & (way != 0) & (tl.abs(count - k) > 3)
        known = (tl.abs(passed) >= 4) & (seen > 0)
        gap = tl.where(known, tl.minimum(tl.maximum(seen, 0.25 * gap), 4 * gap), tl.where(far, 2 * gap, gap))
    low, many = tl.where(enough, pivot, low), tl.where(enough, count, many)
    high, few = tl.where(enough, high, pivot), tl.where(enough, few, count)
    closed = (low > float("-inf")) & (high < float("inf"))
    full = zeros > 8
    at_zero = (pivot == 0) & (count < k) & (k <= count + zeros)
    off = count - k
    middle = pivot + off * gap
    if LAST:
        slack = (SLACK + WIDER * tl.sqrt(tl.abs(off))) * gap
        # Counts in half precision err a little.
        aside = 0.5 * gap + 0.002 * tl.abs(pivot)
        from_ = tl.maximum(middle - slack, low - aside) / scale
        to = tl.minimum(middle + slack, high + aside) / scale
        tiny = _tiny(pivot)
        from_ = tl.where(full & ((pivot > 0) | ((pivot == 0) & enough)), tl.maximum(from_, tiny), from_)
        to = tl.where(full & ((pivot < 0) | ((pivot == 0) & ~enough)), tl.minimum(to, 0.0 - tiny), to)
        from_, to = tl.where(at_zero, tiny, from_), tl.where(at_zero, 0.0, to)
        return tl.where(k == 0, float("inf"), from_), tl.where(k == 0, float("inf"), to)
    else:
        # The next pivot is to lie beyond the term, so that both enclose it.
        beyond = tl.where(tl.abs(off) < NEAR, ASIDE + SPREAD * tl.sqrt(tl.abs(off)), 0.0) * gap
        middle = middle + tl.where(enough, beyond, 0.0 - beyond)
        # No pivot goes past zeros.
        past = full & (((pivot > 0) & (middle <= 0)) | ((pivot < 0) & (middle >= 0)))
        next_ = tl.where(at_zero, 0.0, tl.where(past, 0.5 * pivot, middle))
        # Between two pivots: on the side of the term where more others lie, and close to it.
        over, under = many - k, k - few
        close = ASIDE + SPREAD * tl.sqrt(tl.maximum(over, under))
        aim = tl.where(over >= under, tl.minimum(close, 0.5 * over), 0.0 - tl.minimum(close, 0.5 * under))
        share = tl.minimum(tl.maximum((over - aim + 0.5) / tl.maximum(many - few, 1.0), 0.02), 0.98)
        next_ = tl.where(closed & ~at_zero, low + (high - low) * share, next_)
        tl.store(bars, _halved(0.0 - next_), mask=here)
        tl.store(state, _halved(gap), mask=here)
        tl.store(state + 2 * plane, _halved(low), mask=here)
        tl.store(state + 4 * plane, _halved(high), mask=here)
        tl.store(state + 6 * plane, _halved(many), mask=here)
        tl.store(state + 8 * plane, _halved(few), mask=here)
        return pivot, pivot


@kernel()
def powers(numbers, out, plane, width, first, many, SIZE: tl.constexpr):
    """As `gpu._moments` says."""
    cell = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = cell < plane
    t = tl.load(numbers + cell // many * width + first + cell % many, mask=here, other=0.0)
    square, size = t * t, tl.abs(t)
    root = tl.sqrt(size)
    sign = (t > 0).to(tl.float32) - (t < 0).to(tl.float32)
    every = (square, t, t * square, square * square, size, sign, root, sign * root)
    for r in tl.static_range(MOMENTS):
        # Numbers of two gigabytes are many.
        tl.store(out + r * plane.to(tl.int64) + cell, every[r].to(tl.bfloat16), mask=here)


@kernel()
def solve(systems, solutions, size, sides, TILE: tl.constexpr):
    """Solves systems ``(programs, TILE, TILE)``, float64, by Gauss and Jordan: the first `size` columns are a positive
    definite matrix, the next `sides` the right sides; solutions ``(programs, size, sides)``, float32.
    """
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    m = tl.load(systems + tl.program_id(0) * TILE * TILE + row * TILE + column)
    for j in range(size):
        across = tl.sum(tl.where(row == j, m, 0.0), 0)
        down = tl.sum(tl.where(column == j, m, 0.0), 1)
        at = tl.arange(0, TILE) == j
        across = across / tl.sum(tl.where(at, across, 0.0), 0)
        m = tl.where(row == j, across[None, :], m - down[:, None] * across[None, :])
    at = tl.program_id(0) * size * sides + row * sides + column - size
    tl.store(solutions + at, m.to(tl.float32), mask=(row < size) & (column >= size) & (column < size + sides))


@kernel("moments", "bars")
def guess_pivots(
    moments, zeros, lead_count, centre, learnt, bars, gaps, first, chunk, rows, d, top, bottom,
    SIZE: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """Both pivots, as far as the terms' moments tell, and the gaps between terms there: ``(2, rows, even)`` for an even
    number of samples, scaled.

    The pivots have the other sign, as the lower terms have: what is said of the largest holds for both.
    moments ``(8, rows, chunk)``: as `gpu._moments` says.  zeros: how many coordinates of each sample are 0.
    centre ``(2, 7)``: mean and deviation of the shapes that the guess was learnt from.  learnt: ``(2, 36, 2)`` for both
    sides, what pivot and gap take of 1, of each shape and of each product of two; then the mean gap of each side.
    """
    plane, even = rows * chunk, chunk + chunk % 2
    cell = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = cell < plane
    sample = first + cell % chunk
    nothing = tl.load(zeros + sample, mask=here, other=0).to(tl.float32)
    leads = tl.load(lead_count + sample, mask=here, other=0).to(tl.float32)
    none = nothing - leads
    plane = plane.to(tl.int64)
    size = tl.sqrt(tl.maximum(_at(moments + cell, 0, plane, here) / d, 0.0))
    unit = tl.maximum(size, 1e-8)
    root, signs = tl.sqrt(unit), _at(moments + cell, 5, plane, here)
    square = unit * unit
    shapes = ()
    for r in tl.static_range(MOMENTS - 1):
        moment = _at(moments + cell, r + 1, plane, here) / d
        # Of the terms, their cubes, fourth powers, magnitudes, signs, roots of magnitudes without sign and with it.
        by = unit * square if r == 1 else (square * square if r == 2 else (root if r > 4 else unit))
        shape = moment if r == 4 else moment / by
        shape = (shape - tl.load(centre + r)) / tl.load(centre + MOMENTS - 1 + r)
        shapes = shapes + (tl.minimum(tl.maximum(shape, -FARTHEST), FARTHEST) + 0.0 * shape,)
    COUNT: tl.constexpr = MOMENTS + (MOMENTS - 1) * MOMENTS // 2
    at = cell // chunk * even + cell % chunk
    for side in tl.static_range(2):
        k = bottom if side else top
        its = learnt + side * COUNT * 2
        pivot, gap = size * 0 + tl.load(its), size * 0 + tl.load(its + 1)
        for i in tl.static_range(MOMENTS - 1):
            pivot += tl.load(its + 2 * (i + 1)) * shapes[i]
            gap += tl.load(its + 2 * (i + 1) + 1) * shapes[i]
            for j in tl.static_range(i, MOMENTS - 1):
                # Products of the i-th come after those of the ones before.
                number = MOMENTS + i * (MOMENTS - 1) - i * (i - 1) // 2 + j - i
                both = shapes[i] * shapes[j]
                pivot += tl.load(its + 2 * number) * both
                gap += tl.load(its + 2 * number + 1) * both
        mean = tl.load(learnt + 2 * COUNT * 2 + side)
        gap = tl.minimum(tl.maximum(gap, 0.3 * mean), 3 * mean) * size
        pivot = pivot * size
        positive = 0.5 * ((0.0 - signs if side else signs) + d - nothing + leads)
        full = none > 8
        pivot = tl.where(full & (k <= positive), tl.maximum(pivot, gap), pivot)
        pivot = tl.where(full & (k > positive + none), tl.minimum(pivot, 0.0 - gap), pivot)
        pivot = tl.where(full & (k > positive) & (k <= positive + none), 0.0, pivot)
        tl.store(bars + side * rows * even + at, _halved((0.0 - pivot) * STEEP), mask=here)
        tl.store(gaps + side * rows * even + at, _halved(gap * STEEP), mask=here)


@triton.jit
def _count(counts, x, w, bar, GPU: tl.constexpr):
    """Two counts in half precision, each raised by 1 if its steep ``x * w + bar`` is positive."""
    if GPU:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; fma.rn.sat.f16x2 t, $2, $3, $4; add.f16x2 $0, $1, t; }", "=r,r,r,r,r",
            [counts, x, w, bar], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = _half(counts, 0) + (_half(x, 0) * _half(w, 0) + _half(bar, 0) > 0).to(tl.float32)
        high = _half(counts, 16) + (_half(x, 16) * _half(w, 16) + _half(bar, 16) > 0).to(tl.float32)
        return _bits(low) | (_bits(high) << 16)


@triton.jit
def _half(both, SHIFT: tl.constexpr):
    return (both >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bits(number):
    return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@kernel("inner", "turned", "bars", "counts", "first", "chunk", "width", "rows", "d")
def count_terms(
    inner, turned, bars, counts, first, chunk, rows, width, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Counts ``(2, rows, chunk)`` the terms beyond both pivots of each pair, in half precision.

    All is in half precision, two samples side by side in an int32: ``inner (d, width)`` from the sample `first` on,
    bars and counts ``(2, rows, chunk)``; ``turned (d, rows)`` has each weight twice. Samples and weight are scaled.
    """
    sample, here, row, there, cell = _cells(first, chunk, rows, ROWS, WIDTH)
    plane = rows * chunk
    bar = tl.load(bars + cell, mask=here & there, other=0)
    bar2 = tl.load(bars + plane + cell, mask=here & there, other=0)
    more = tl.full((ROWS, WIDTH), 0, tl.int32)
    less = more
    for i in tl.range(0, d, loop_unroll_factor=UNROLL):
        x = tl.load(inner + i * width + sample, mask=here, other=0)
        w = tl.load(turned + i * rows + row, mask=there, other=0)
        more = _count(more, x, w, bar, GPU)
        less = _count(less, x ^ -0x7FFF8000, w, bar2, GPU)
    tl.store(counts + cell, more, mask=here & there)
    tl.store(counts + plane + cell, less, mask=here & there)


@kernel("counts", "bars", "edges", "chunk")
def move_pivots(
    counts, weight, zeros, lead_count, lead_index, lead_value, asked, scale_x, scale_w, bars, state, edges,
    first, chunk, rows, width, d, top, bottom,
    SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Moves the pivots of all pairs by what was counted. LAST: lays bands instead, whose edges are
    ``(4, rows, chunk)``.

    state ``(10, rows, even)``: for both sides the gap, the pivots that were too low and too high, and their counts.
    """
    plane, even = rows * chunk, chunk + chunk % 2
    cell = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = cell < plane
    row, sample = cell // chunk, first + cell % chunk
    at, whole = row * even + cell % chunk, rows * even
    leads = tl.load(lead_count + sample, mask=here, other=0)
    none = (tl.load(zeros + sample, mask=here, other=0) - leads).to(tl.float32)
    scale = tl.load(scale_x + sample, mask=here, other=1.0) * tl.load(scale_w + row, mask=here, other=1.0)
    more, less = _at(counts + at, 0, whole, here), _at(counts + at, 1, whole, here)
    if tl.load(asked + 1) > 0:
        up, down = 0.0 - _at(bars + at, 0, whole, here) / scale, _at(bars + at, 1, whole, here) / scale
        # Where samples are counted, outlying coordinates are zeros.
        more -= tl.where(up < 0, leads, 0)
        less -= tl.where(down > 0, leads, 0)
        for q in range(0, tl.minimum(tl.max(leads, 0), LEADS)):
            present = (q < leads) & here
            index = tl.load(lead_index + q * width + sample, mask=present, other=0)
            v = tl.load(lead_value + q * width + sample, mask=present, other=0.0)
            term = tl.load(weight + row * d + index, mask=present, other=0.0) * v
            more += (present & (term > up)).to(tl.float32)
            less += (present & (term < down)).to(tl.float32)
    high, outer_high = _narrow(more, top, none, scale, bars + at, state + at, whole, here, FIRST, LAST)
    at += whole
    low, outer_low = _narrow(less, bottom, none, scale, bars + at, state + at, whole, here, FIRST, LAST)
    if LAST:
        low, outer_low = 0.0 - low, 0.0 - outer_low
        # The outer edges of bands that meet enclose both.
        meet = (low >= high) & (outer_high >= high) & (outer_low <= low)
        tl.store(edges + cell, tl.where(meet, tl.minimum(outer_low, high), outer_low), mask=here)
        tl.store(edges + plane + cell, low, mask=here)
        tl.store(edges + 2 * plane + cell, high, mask=here)
        tl.store(edges + 3 * plane + cell, tl.where(meet, tl.maximum(outer_high, low), outer_high), mask=here)


@triton.jit
def _sort_out(part, count, at, window, term, outer_low, low, high, outer_high, STEP: tl.constexpr, GPU: tl.constexpr):
    """Adds a term between the bands to the sum and counts it; counts others that are not below the lower band as OVER;
    stores one in a band at the address `at`, which moves on by STEP bytes.
    """
    if GPU:
        # Predicated, as Triton would not. The upper half of an address stays as it is: lists are aligned.
        return tl.inline_asm_elementwise(
            """{ .reg .pred p, q; .reg .b64 a;
            mov.b32 $0, $3; mov.b32 $1, $4; mov.b32 $2, $5; mov.b64 a, {$5, $12};
            setp.gt.f32 p, $6, $8; setp.lt.and.f32 p, $6, $9, p;
            @p add.rn.f32 $0, $0, $6; @p add.rn.f32 $1, $1, 0f3F800000;
            setp.ge.and.f32 q, $6, $7, !p; @q add.rn.f32 $1, $1, 0f45800000;
            setp.le.and.f32 q, $6, $10, q; @q st.global.f32 [a], $6; @q add.u32 $2, $2, $11; }""",
            "=&f,=&f,=&r,f,f,r,f,f,f,f,f,r,r",
            [part, count, at, term, outer_low, low, high, outer_high, STEP, (window >> 32).to(tl.uint32)],
            dtype=(tl.float32, tl.float32, tl.uint32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        between = (term > low) & (term < high)
        reaches = (term >= outer_low) & ~between
        band = reaches & (term <= outer_high)
        there = (window & -(1 << 32)) + at.to(tl.int64)
        tl.store(there.to(tl.pointer_type(tl.float32), bitcast=True), term, mask=band)
        count += between.to(tl.float32) + reaches.to(tl.float32) * OVER
        return tl.where(between, part + term, part), count, at + band.to(tl.uint32) * STEP


@kernel("inner", "turned", "edges", "first", "chunk", "width", "rows", "d")
def sum_between(
    inner, turned, edges, sums, counts, lists, first, chunk, rows, width, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, SLOTS: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Adds up the terms between a pair's bands and lists those that lie in one.

    counts ``(2, rows, chunk)``: of the terms between, and of others that are not below the lower band times OVER; of
    those listed.  lists ``(tiles, SLOTS, ROWS * WIDTH)``: in the order of the terms, those of a tile aligned to their
    size. A list ends when at most 16 places are left.
    """
    sample, here, row, there, cell = _cells(first, chunk, rows, ROWS, WIDTH)
    both = here & there
    plane = rows * chunk
    outer_low = tl.load(edges + cell, mask=both, other=float("inf"))
    low = tl.load(edges + plane + cell, mask=both, other=0.0)
    high = tl.load(edges + 2 * plane + cell, mask=both, other=0.0)
    outer_high = tl.load(edges + 3 * plane + cell, mask=both, other=0.0)
    total = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    count = total
    STEP: tl.constexpr = 4 * ROWS * WIDTH
    window = (lists + tl.program_id(0).to(tl.int64) * SLOTS * ROWS * WIDTH).to(tl.int64)
    place = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = window.to(tl.uint32) + (4 * place).to(tl.uint32)
    at = start
    for begin in range(0, d, 16):
        part = tl.full((ROWS, WIDTH), 0.0, tl.float32)
        for i in tl.range(begin, tl.minimum(begin + 16, d), loop_unroll_factor=UNROLL):
            x = tl.load(inner + i * width + sample, mask=here, other=0.0)
            w = tl.load(turned + i * rows + row, mask=there, other=0.0)
            term = tl.fma(x, w, 0.0)
            part, count, at = _sort_out(part, count, at, window, term, outer_low, low, high, outer_high, STEP, GPU)
        total += part
        # Nothing lies between these ends, infinite terms neither.
        full = (at - start).to(tl.int32) > (SLOTS - 16) * STEP
        outer_low, outer_high = tl.where(full, float("inf"), outer_low), tl.where(full, -float("inf"), outer_high)
    tl.store(sums + cell, total, mask=both)
    tl.store(counts + cell, count.to(tl.int32), mask=both)
    tl.store(counts + plane + cell, (at - start).to(tl.int32) // STEP, mask=both)


@triton.jit
def _insert(listed, term):
    """A list that falls, with one more term in its place; the least one leaves."""
    out = ()
    for r in tl.static_range(len(listed)):
        out = out + (tl.maximum(listed[r], term),)
        term = tl.minimum(listed[r], term)
    return out


@triton.jit
def _append(numbers, number, some):
    """Appends numbers to a list that begins with its length."""
    if any_of(some):
        place = tl.cumsum(some.to(tl.int32), 0)
        tl.store(numbers + tl.atomic_add(numbers, tl.max(place, 0)) + place, number, mask=some)


@kernel()
def cut_bands(
    weight, bound, reach, zeros, lead_count, lead_index, lead_value, asked, counts, edges, sums, lists,
    bias, out, cuts, ties, tied, odds, again, first, samples, chunk, rows, width, d, blocks, top, bottom,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LIST: tl.constexpr, SLOTS: tl.constexpr,
    AGAIN: tl.constexpr, LEADS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, SORT: tl.constexpr,
    MERGE: tl.constexpr, PLACES: tl.constexpr, MERGE2: tl.constexpr, PLACES2: tl.constexpr,
):  # fmt: skip
    """Sorts the terms in each pair's bands, finds the cuts among them, and adds those between to the sum.

    tied: as the last two parts of the marks of `walk`.  odds: how many pairs defeat a band, then their cells, in any
    order.  again: the same for pairs with more than LIST terms, in the order of the lists; AGAIN: does those.
    """
    plane = rows * chunk
    outlying = tl.load(asked + 1)
    tiles = (rows + ROWS - 1) // ROWS
    many_again = tl.load(again) if AGAIN else 0
    units = (many_again + SIZE - 1) // SIZE if AGAIN else tl.num_programs(0)
    # Pairs lie as in the tiles of `sum_between`.
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        pair = unit * SIZE + tl.arange(0, SIZE)
        here = pair >= 0
        if AGAIN:
            here = pair < many_again
            pair = tl.load(again + 1 + pair, mask=here, other=0)
        tile, at = pair // (ROWS * WIDTH), pair % (ROWS * WIDTH)
        lane, row = tile // tiles * WIDTH + at % WIDTH, tile % tiles * ROWS + at // WIDTH
        here = here & (lane < chunk) & (row < rows)
        cell = row * chunk + lane
        lane += first
        mine = lists + tile.to(tl.int64) * SLOTS * ROWS * WIDTH + at
        outer_low = tl.load(edges + cell, mask=here, other=0.0)
        low = tl.load(edges + plane + cell, mask=here, other=0.0)
        high = tl.load(edges + 2 * plane + cell, mask=here, other=0.0)
        outer_high = tl.load(edges + 3 * plane + cell, mask=here, other=0.0)
        count = tl.load(counts + cell, mask=here, other=0)
        total = tl.load(counts + plane + cell, mask=here, other=0)
        above, below = count // OVER - total, d - count // OVER - count % OVER
        if not AGAIN:
            _append(again, pair, here & (total > LIST))
            here = here & (total <= LIST)
        listed = ()
        for r in tl.static_range(LIST // 16):
            more = ()
            for n in tl.static_range(16):
                number = 16 * r + n
                present = here & (number < total)
                more = more + (tl.load(mine + number * ROWS * WIDTH, mask=present, other=float("-inf")),)
            more = network(more, SORT, True)
            if r == 0:
                listed = more
            elif r == 1:
                listed = merged(listed + backwards(more), MERGE, PLACES, True)
            else:
                listed = merged(listed + backwards(more), MERGE2, PLACES2, True)
        far = tl.load(reach + lane, mask=here, other=0.0)
        largest = tl.load(bound + row * blocks, mask=here, other=0.0)
        leads = tl.load(lead_count + lane, mask=here, other=0)
        none = tl.load(zeros + lane, mask=here, other=0) - leads
        value = tl.load(sums + cell, mask=here, other=0.0)
        lost = (far != far) | (largest + 0.0 * far != largest)
        odd = (leads > LEADS) | ~(largest * far <= LARGEST)
        if outlying > 0:
            # In the panel they are zeros. Such a zero must not be listed.
            above -= tl.where(outer_high < 0, leads, 0)
            below -= tl.where(outer_low > 0, leads, 0)
            odd = odd | ((leads > 0) & (outer_low <= 0) & (outer_high >= 0) & ~((low < 0) & (high > 0)))
            for q in range(0, tl.minimum(tl.max(leads, 0), LEADS)):
                i = tl.load(lead_index + q * width + lane, mask=q < leads, other=0)
                v = tl.load(lead_value + q * width + lane, mask=q < leads, other=0.0)
                term = product_of(tl.load(weight + row * d + i, mask=here & (q < leads), other=0.0), v)
                value += tl.where((q < leads) & (term < high) & (term > low), term, 0.0)
                above += ((q < leads) & (term > outer_high)).to(tl.int32)
                below += ((q < leads) & (term < outer_low)).to(tl.int32)
                some = (q < leads) & (term >= outer_low) & (term <= outer_high) & ((term >= high) | (term <= low))
                listed = _insert(listed, tl.where(some, term, float("-inf")))
                total += some.to(tl.int32)
                # It stays, if it is not removed: the sum is infinite.
                odd = odd | ((q < leads) & ~(tl.abs(term) <= LARGEST) & (some | (top == 0) | (bottom == 0)))
        odd = odd | (total > LIST)
        many = total * 0
        for r in tl.static_range(LIST):
            many += ((r < total) & (listed[r] >= high)).to(tl.int32)
        many2 = total - many
        # Bands that meet are one.
        reached, reached2 = tl.where(low >= high, total, many), tl.where(low >= high, total, many2)
        # A band that ends at 0 tells how many terms are positive, or negative.
        tiny = _tiny(high)
        positive, negative = above + many, below + many2
        zero = (high == tiny) & (positive < top) & (top <= positive + none)
        zero2 = (low == 0.0 - tiny) & (negative < bottom) & (bottom <= negative + none)
        want, want2 = ~zero & (top > 0), ~zero2 & (bottom > 0)
        rank, rank2 = top - above, bottom - below
        ends = outer_low + low + high + outer_high
        odd = odd | (ends != ends) | ((zero | zero2) & ~(high > low))
        odd = odd | (want & ((rank < 1) | (rank > reached))) | (want2 & ((rank2 < 1) | (rank2 > reached2)))
        # Of the list, so many leave first, and from here on the last.
        gone = tl.where(want, rank, tl.where(zero, many, 0))
        last = total - tl.where(want2, rank2, tl.where(zero2, many2, 0))
        odd = odd | (gone > last)
        upper, lower = tl.where(zero, 0.0, value * 0 + float("inf")), tl.where(zero2, 0.0, value * 0 - float("inf"))
        inner = value * 0
        for r in tl.static_range(LIST):
            upper = tl.where(want & (gone == r + 1), listed[r], upper)
            lower = tl.where(want2 & (last == r), listed[r], lower)
            inner += tl.where((r >= gone) & (r < last), listed[r], 0.0)
        # Tied with both cuts: only zeros are so many as a rule.
        odd = odd | ((upper == lower) & ~(zero & zero2))
        value += inner
        odd = (odd | ~(tl.abs(value) <= LARGEST)) & here & ~lost
        if HAS_BIAS:
            value += tl.load(bias + row, mask=here, other=0.0)
        tl.store(out + lane * rows + row, tl.where(lost, float("nan"), value), mask=here & ~odd)
        place = row * samples
        _append(odds, cell, odd)
        if KEEP:
            good = here & ~odd
            tl.store(cuts + place + lane, tl.where(lost, float("nan"), upper), mask=good)
            tl.store(cuts + rows * samples + place + lane, lower, mask=good)
            over, equal, over2, equal2 = many * 0, many * 0, many * 0, many * 0
            for r in tl.static_range(LIST):
                over += ((r < total) & (listed[r] > upper)).to(tl.int32)
                equal += ((r < total) & (listed[r] == upper)).to(tl.int32)
                over2 += ((r < total) & (listed[r] < lower)).to(tl.int32)
                equal2 += ((r < total) & (listed[r] == lower)).to(tl.int32)
            leave, leave2 = rank - over, rank2 - over2
            stay, stay2 = equal - leave, equal2 - leave2
            tie = tl.where(zero, top - positive + 1, tl.where(want & (stay > 0), leave + 1, 0))
            tie2 = tl.where(zero2, bottom - negative + 1, tl.where(want2 & (stay2 > 0), leave2 + 1, 0))
            some = good & ~lost & ((tie > 0) | (tie2 > 0))
            if any_of(some):
                tl.store(ties + place + lane, tie, mask=some)
                tl.store(ties + rows * samples + place + lane, tie2, mask=some)
                tl.atomic_max(tied + row, 1, mask=some)
                tl.atomic_max(tied + rows + lane, 1, mask=some)


@triton.jit
def _beyond(key, inside, k, near, further, flip):
    """The k-th largest key; the k-th smallest where flip is -1, not 0.  near, further: the ends of its band."""
    low = k * 0 - 0x7F800001  # at least k are at or above it
    high = k * 0 + 0x7F800001  # fewer are
    key, near, further = tl.where(inside, key ^ flip, -0x80000000), keys_of(near) ^ flip, keys_of(further) ^ flip
    sure, step, span = k * 0, k * 0, tl.maximum(further - near, 1)
    while (k > 0) & (sure == 0) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        # Ties at zero are the common ones: two steps find them.
        zero = tl.where(low == flip, flip + 1, flip)
        middle = tl.where((low < zero) & (zero < high), zero, middle)
        # Both ends of the band, then beyond it, further each time, until the key is enclosed.
        guess = tl.where(low == -0x7F800001, high - span, tl.where(high == 0x7F800001, low + span, middle))
        guess = tl.where(step == 0, near, tl.where(step == 1, further, guess))
        middle = tl.where((low < guess) & (guess < high), guess, middle)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count < k, middle, high)
        sure = tl.where(count == k, 1, sure)
        span = tl.where(step > 1, span + span, span)
        step += 1
    return tl.min(tl.where(key >= low, key, 0x7F800000), 0) ^ flip


@kernel()
def odd_pairs(
    weight, x, bias, out, cuts, ties, tied, odds, edges, first, samples, chunk, rows, d, top, bottom, programs,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Value, cuts and tied removals of the pairs in `odds` by the definition; their terms stay in the registers.

    Any input but NaN.
    """
    i = tl.arange(0, WIDTH)
    inside = i < d
    for unit in range(tl.program_id(0), tl.load(odds), programs):
        cell = tl.load(odds + 1 + unit)
        row, lane = cell // chunk, first + cell % chunk
        w = tl.load(weight + row * d + i, mask=inside, other=0.0)
        terms = product_of(w, tl.load(x + lane * d + i, mask=inside, other=0.0))
        key = keys_of(terms)
        k, k2, plane = cell * 0 + top, cell * 0 + bottom, rows * chunk
        outer_low, low = tl.load(edges + cell), tl.load(edges + plane + cell)
        high, outer_high = tl.load(edges + 2 * plane + cell), tl.load(edges + 3 * plane + cell)
        upper = tl.where(k > 0, value_of(_beyond(key, inside, k, high, outer_high, 0)), float("inf"))
        lower = tl.where(k2 > 0, value_of(_beyond(key, inside, k2, low, outer_low, -1)), float("-inf"))
        value = tl.sum(tl.where(inside & (terms < upper) & (terms > lower), terms, 0.0), 0)
        above = tl.sum((inside & (terms > upper)).to(tl.int32), 0)
        below = tl.sum((inside & (terms < lower)).to(tl.int32), 0)
        at_upper = tl.sum((inside & (terms == upper)).to(tl.int32), 0)
        at_lower = tl.sum((inside & (terms == lower)).to(tl.int32), 0)
        leave, leave2 = tl.where(k > 0, k - above, 0), tl.where(k2 > 0, k2 - below, 0)
        one = upper == lower
        stay = at_upper - leave - tl.where(one, leave2, 0)
        stay2 = tl.where(one, 0, at_lower - leave2)
        if HAS_BIAS:
            value += tl.load(bias + row)
        value += tl.where(stay > 0, stay.to(tl.float32) * upper, 0.0)
        value += tl.where(stay2 > 0, stay2.to(tl.float32) * lower, 0.0)
        tl.store(out + lane * rows + row, value)
        if KEEP:
            at = row * samples + lane
            tl.store(cuts + at, upper)
            tl.store(cuts + rows * samples + at, lower)
            tie = tl.where(stay > 0, leave + 1, 0)
            tie2 = tl.where((stay2 > 0) | one, leave2 + 1, 0)
            tl.store(ties + at, tie)
            tl.store(ties + rows * samples + at, tie2)
            if (tie != 0) | (tie2 != 0):
                tl.atomic_max(tied + row, 1)
                tl.atomic_max(tied + rows + lane, 1)
