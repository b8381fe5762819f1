"""Many removed terms: the cuts are found by counting, at a price that does not grow with how many leave.

A guess from the terms' moments is a pair's first pivot on each side. Passes over all terms count what lies beyond the
pivots and move them; these counts may err. The last lays a band over each cut. One exact pass adds up what lies between
the bands, counts what lies beyond, and marks, a bit for each term, what lies in them; `cut_bands` finds the cuts there.
"""

import triton
import triton.language as tl

from ._definition import by_definition, keys_of, value_of
from ._language import LANES, LARGEST, any_of, bits_of, kernel, product_of
from ._networks import merged, network

# Half the width of a band, in gaps between terms: this, and more for each term that the pivot is off.
SLACK, SPREAD = tl.constexpr(9.0), tl.constexpr(3.0)
WHOLE = tl.constexpr(24.0)  # so few terms between two pivots are a band
CLOSE = tl.constexpr(64.0)  # so few terms between two pivots lie evenly


@triton.jit
def _cells(first, chunk, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The pairs of a tile: samples, whether there are such; rows, the same; where a pair lies in a plane."""
    # Programs that run together share samples.
    tiles = (rows + ROWS - 1) // ROWS
    lane = (tl.program_id(0) // tiles * WIDTH + tl.arange(0, WIDTH))[None, :]
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS))[:, None]
    return first + lane, lane < chunk, row, row < rows, row * chunk + lane


@triton.jit
def _signs(difference):
    return difference.to(tl.uint32, bitcast=True)


@triton.jit
def _ones(bits):
    """How many bits are set."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _tiny(like):
    """The smallest number above 0. As a constant it would be a double."""
    return ((like != like).to(tl.int32) * 0 + 1).to(tl.float32, bitcast=True)


@triton.jit
def _quantile(k, many):
    """How far from the mean the k-th largest of so many normal numbers lies, in deviations."""
    p = tl.minimum(tl.maximum(k / many, 1e-6), 1 - 1e-6)
    t = tl.sqrt(-2 * tl.log(tl.minimum(p, 1 - p)))
    z = t - (2.308 + 0.271 * t) / (1 + 0.992 * t + 0.045 * t * t)
    return tl.where(p < 0.5, z, -z)


@triton.jit
def _guess(k, zeros, d, mean, spread, tail):
    """A pivot for the k-th largest term, and how far apart terms lie there.

    `zeros` terms are 0; mean, spread and tail (excess of the fourth moment) are those of the others.
    """
    k = k + 0.0 * mean
    others = tl.maximum(d - zeros, 1.0)
    half = 0.5 * others
    away = tl.sqrt(others)
    at_zero = (zeros > 8) & (k > half - away) & (k < half + zeros + away)
    z = _quantile(tl.where(k > half + zeros, k - zeros, tl.minimum(k, half)) - 0.5, others)
    pivot = mean + spread * (z + (z * z * z - 3 * z) * tail / 24)
    stretch = tl.maximum(1 + (3 * z * z - 3) * tail / 24, 0.3)
    gap = tl.minimum(spread * stretch * 2.5066 * tl.exp(0.5 * z * z) / others, 0.25 * spread)
    return tl.where(at_zero, 0.0, pivot), gap


@triton.jit
def _bar(pivot, scale):
    """A pivot with the other sign, scaled as the terms are that are counted, in half precision."""
    return (0.0 - tl.minimum(tl.maximum(pivot * scale, -60000.0), 60000.0)).to(tl.float16)


@triton.jit
def _narrow(
    count, k, zeros, scale, pivots, gaps, bars, brackets, plane, here, FIRST: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """Moves the pivot to where the k-th largest term should lie, between pivots that have been too low and too high.

    LAST: returns the band it lies in: from where to where. It is empty, just above 0, if the term is 0, and ends before
    0 if zeros would fill it.
    """
    pivot, gap = tl.load(pivots, mask=here, other=0.0), tl.load(gaps, mask=here, other=0.0)
    low, high = pivot * 0 - float("inf"), pivot * 0 + float("inf")
    many, few = high, pivot * 0  # how many terms lie beyond those
    enough = count >= k
    if not FIRST:
        low, high = tl.load(brackets, mask=here), tl.load(brackets + 2 * plane, mask=here)
        many, few = tl.load(brackets + 4 * plane, mask=here), tl.load(brackets + 6 * plane, mask=here)
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
        slack = (SLACK + SPREAD * tl.sqrt(tl.abs(off))) * gap
        whole = closed & (many - few <= WHOLE)
        # Counts in half precision err a little.
        aside = 0.5 * gap + 0.002 * tl.abs(pivot)
        from_ = tl.where(whole, low - aside, tl.maximum(middle - slack, low - aside))
        to = tl.where(whole, high + aside, tl.minimum(middle + slack, high + aside))
        tiny = _tiny(pivot)
        from_ = tl.where(full & (pivot > 0), tl.maximum(from_, tiny), from_)
        to = tl.where(full & (pivot < 0), tl.minimum(to, 0.0 - tiny), to)
        from_, to = tl.where(at_zero, tiny, from_), tl.where(at_zero, 0.0, to)
        return tl.where(k == 0, float("inf"), from_), tl.where(k == 0, float("inf"), to)
    else:
        # No pivot goes past zeros.
        past = full & (((pivot > 0) & (middle < 0)) | ((pivot < 0) & (middle > 0)))
        next_ = tl.where(at_zero | past, 0.0, middle)
        inside = (next_ > low) & (next_ < high)
        share = tl.minimum(tl.maximum((many - k + 0.5) / tl.maximum(many - few, 1.0), 0.02), 0.98)
        close = (many - few < CLOSE) & ~(full & (next_ == 0))
        next_ = tl.where(closed & ~at_zero & (close | ~inside), low + (high - low) * share, next_)
        tl.store(pivots, next_, mask=here)
        tl.store(gaps, gap, mask=here)
        tl.store(bars, _bar(next_, scale), mask=here)
        tl.store(brackets, low, mask=here)
        tl.store(brackets + 2 * plane, high, mask=here)
        tl.store(brackets + 4 * plane, many, mask=here)
        tl.store(brackets + 6 * plane, few, mask=here)
        return pivot, pivot


@kernel("moments", "pivots")
def guess_pivots(
    moments, zeros, lead_count, scale_x, scale_w, pivots, gaps, bars, first, chunk, rows, d, top, bottom,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Both pivots ``(2, rows, chunk)``, the lower with the other sign, as far as the terms' moments tell, and the gaps
    between terms there.

    bars ``(2, rows, even)``: as `_bar` says, for an even number of samples.
    moments ``(3, rows, chunk)``: sums of the terms, of their squares and of their fourth powers.  zeros: how many
    coordinates of each sample are 0.
    """
    plane = rows * chunk
    cell = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = cell < plane
    sample = first + cell % chunk
    none = tl.load(zeros + sample, mask=here, other=0) - tl.load(lead_count + sample, mask=here, other=0)
    none = none.to(tl.float32)
    others = tl.maximum(d - none, 1.0)
    mean = tl.load(moments + cell, mask=here, other=0.0).to(tl.float32) / others
    square = tl.load(moments + plane + cell, mask=here, other=1.0).to(tl.float32) / others
    fourth = tl.load(moments + 2 * plane + cell, mask=here, other=3.0).to(tl.float32) / others
    variance = tl.maximum(square - mean * mean, 0.01 * square)
    tail = tl.minimum(tl.maximum(fourth / (variance * variance + 1e-37) - 3, -1.2), 4.0)
    spread = tl.sqrt(variance)
    up, gap = _guess(top, none, d, mean, spread, tail)
    scale = tl.load(scale_x + sample, mask=here, other=0.0) * tl.load(scale_w + cell // chunk, mask=here, other=0.0)
    even = chunk + chunk % 2
    bar = bars + cell // chunk * even + cell % chunk
    tl.store(pivots + cell, up, mask=here)
    tl.store(gaps + cell, gap, mask=here)
    tl.store(bar, _bar(up, scale), mask=here)
    down, gap = _guess(bottom, none, d, 0.0 - mean, spread, tail)
    tl.store(pivots + plane + cell, down, mask=here)
    tl.store(gaps + plane + cell, gap, mask=here)
    tl.store(bar + rows * even, _bar(down, scale), mask=here)


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


@kernel("counts", "pivots", "edges", "chunk")
def move_pivots(
    counts, weight, zeros, lead_count, lead_index, lead_value, asked, scale_x, scale_w, pivots, gaps, bars, brackets,
    edges, first, chunk, rows, width, d, top, bottom,
    SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Moves the pivots of all pairs by what was counted. LAST: lays bands instead, whose edges are
    ``(4, rows, chunk)``.
    """
    plane = rows * chunk
    cell = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = cell < plane
    row, sample = cell // chunk, first + cell % chunk
    even = chunk + chunk % 2
    at = row * even + cell % chunk
    leads = tl.load(lead_count + sample, mask=here, other=0)
    none = (tl.load(zeros + sample, mask=here, other=0) - leads).to(tl.float32)
    more = tl.load(counts + at, mask=here, other=0.0).to(tl.float32)
    less = tl.load(counts + rows * even + at, mask=here, other=0.0).to(tl.float32)
    if tl.load(asked + 1) > 0:
        up = tl.load(pivots + cell, mask=here, other=0.0)
        down = 0.0 - tl.load(pivots + plane + cell, mask=here, other=0.0)
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
    scale = tl.load(scale_x + sample, mask=here, other=0.0) * tl.load(scale_w + row, mask=here, other=0.0)
    high, outer_high = _narrow(
        more, top, none, scale, pivots + cell, gaps + cell, bars + at, brackets + cell, plane, here, FIRST, LAST
    )
    cell2 = plane + cell
    low, outer_low = _narrow(
        less, bottom, none, scale, pivots + cell2, gaps + cell2, bars + rows * even + at, brackets + cell2, plane,
        here, FIRST, LAST,
    )  # fmt: skip
    if LAST:
        low, outer_low = 0.0 - low, 0.0 - outer_low
        # The outer edges of bands that meet enclose both.
        meet = (low >= high) & (outer_high >= high) & (outer_low <= low)
        tl.store(edges + cell, tl.where(meet, tl.minimum(outer_low, high), outer_low), mask=here)
        tl.store(edges + plane + cell, low, mask=here)
        tl.store(edges + 2 * plane + cell, high, mask=here)
        tl.store(edges + 3 * plane + cell, tl.where(meet, tl.maximum(outer_high, low), outer_high), mask=here)


@kernel("inner", "turned", "edges", "marked", "first", "chunk", "width", "rows", "d")
def sum_between(
    inner, turned, edges, sums, counts, marked, first, chunk, rows, width, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Adds up the terms between a pair's bands, counts those above the upper band and those between, and marks those
    that lie in one.

    marked ``(words, rows, chunk)``: 0 for a term in a band; the last term of 32 is the lowest bit.
    """
    sample, here, row, there, cell = _cells(first, chunk, rows, ROWS, WIDTH)
    both = here & there
    plane = rows * chunk
    # The sign of a difference is that of the comparison if no zero has a sign.
    outer_low = tl.load(edges + cell, mask=both, other=0.0) + 0.0
    low = tl.load(edges + plane + cell, mask=both, other=0.0) + 0.0
    high = tl.load(edges + 2 * plane + cell, mask=both, other=0.0) + 0.0
    outer_high = tl.load(edges + 3 * plane + cell, mask=both, other=0.0) + 0.0
    total = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    more = tl.full((ROWS, WIDTH), 0, tl.int32)
    inside = more
    for begin in range(0, d, 32):
        part = tl.full((ROWS, WIDTH), 0.0, tl.float32)
        outside = tl.full((ROWS, WIDTH), 0, tl.uint32)
        over, amid = outside, outside
        for i in tl.range(begin, tl.minimum(begin + 32, d), loop_unroll_factor=UNROLL):
            x = tl.load(inner + i * width + sample, mask=here, other=0.0)
            w = tl.load(turned + i * rows + row, mask=there, other=0.0)
            term = tl.fma(x, w, 0.0)
            between = _signs(term - high) & _signs(low - term)
            above = _signs(outer_high - term)
            over = (over << 1) | (above >> 31)
            amid = (amid << 1) | (between >> 31)
            outside = (outside << 1) | ((between | above | _signs(term - outer_low)) >> 31)
            part = tl.where(between.to(tl.int32, bitcast=True) < 0, part + term, part)
        total += part
        more += _ones(over)
        inside += _ones(amid)
        tl.store(marked + begin // 32 * plane + cell, outside.to(tl.int32, bitcast=True), mask=both)
    tl.store(sums + cell, total, mask=both)
    tl.store(counts + cell, more, mask=both)
    tl.store(counts + plane + cell, inside, mask=both)


@triton.jit
def _listed(terms, r, many):
    return tl.load(terms + r * LANES, mask=r < many, other=float("-inf"))


@triton.jit
def _ranked(terms, many, rank, SORT: tl.constexpr, MERGE: tl.constexpr, PLACES: tl.constexpr):
    """The rank-th largest listed term. Up to 32 are sorted; of more the bits of the rank-th are found one by one."""
    v, b = (), ()
    for r in tl.static_range(16):
        v = v + (_listed(terms, r, many),)
        b = b + (_listed(terms, 16 + r, many),)
    v, b = network(v, SORT, True), network(b, SORT, False)
    late = rank > 16
    half = ()
    for r in tl.static_range(16):
        half = half + (tl.where(late, tl.minimum(v[r], b[r]), tl.maximum(v[r], b[r])),)
    v = merged(half, MERGE, PLACES, True)
    within = tl.where(late, rank - 16, rank)
    cut = v[0]
    for r in tl.static_range(1, 16):
        cut = tl.where(within > r, v[r], cut)
    longer = many > 32
    if any_of(longer):
        key = tl.full((LANES,), -(1 << 31), tl.int32)
        for bit in range(0, 32):
            higher = key ^ ((rank * 0 + 1) << (31 - bit))
            reached = many * 0
            for place in range(0, tl.max(many, 0)):
                reached += ((place < many) & (keys_of(_listed(terms, place, many)) >= higher)).to(tl.int32)
            key = tl.where(reached >= rank, higher, key)
        cut = tl.where(longer, value_of(key), cut)
    return cut


@triton.jit
def _around(terms, many, cut, beside):
    """How many listed terms are above the cut, how many equal to it; the sum of those below it and above `beside`."""
    above = many * 0
    equal = above
    inner = cut * 0
    for r in range(0, tl.max(many, 0)):
        term = _listed(terms, r, many)
        above += (term > cut).to(tl.int32)
        equal += (term == cut).to(tl.int32)
        inner += tl.where((term < cut) & (term > beside), term, 0.0)
    return above, equal, inner


@triton.jit
def _list(listed, many, term, some, LIST: tl.constexpr):
    tl.store(listed + many * LANES, term, mask=some & (many < LIST))
    return many + some.to(tl.int32)


@kernel()
def cut_bands(
    weight, bound, x, panel, reach, zeros, lead_count, lead_index, lead_value, asked, counts, edges, sums,
    marked, bias, out, cuts, ties, tied, scratch, first, samples, chunk, rows, width, d, blocks, top, bottom, programs,
    LIST: tl.constexpr, LEADS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, SORT: tl.constexpr,
    MERGE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Lists the terms in each pair's bands, finds the cuts among them, and adds those between to the sum.

    tied: as the last two parts of the marks of `walk`. What defeats a band is done by the definition. The programs of a
    multiprocessor share samples, whose panel stays in its cache.
    """
    tiles = (chunk + LANES - 1) // LANES
    plane = rows * chunk
    # The lower band's terms with the other sign: what is said of the largest holds for both.
    upper_list = scratch + tl.program_id(0) * 2 * LIST * LANES + tl.arange(0, LANES)
    lower_list = upper_list + LIST * LANES
    outlying = tl.load(asked + 1)
    for unit in range(tl.program_id(0), tiles * rows, programs):
        row = unit % rows
        within = unit // rows * LANES + tl.arange(0, LANES)
        here = within < chunk
        lane = first + within
        cell = row * chunk + within
        outer_low = tl.load(edges + cell, mask=here, other=0.0)
        low = tl.load(edges + plane + cell, mask=here, other=0.0)
        high = tl.load(edges + 2 * plane + cell, mask=here, other=0.0)
        outer_high = tl.load(edges + 3 * plane + cell, mask=here, other=0.0)
        mine = panel + lane // LANES * d * LANES + lane % LANES
        many = tl.full((LANES,), 0, tl.int32)
        many2, both = many, many
        for begin in range(0, d, 32):
            bits = ~tl.load(marked + begin // 32 * plane + cell, mask=here, other=-1)
            bits = (bits << tl.maximum(begin + 32 - d, 0)).to(tl.uint32, bitcast=True)
            while any_of(bits != 0):
                lowest = bits & (bits ^ (bits - 1))
                i = begin + 158 - (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23)
                some = bits != 0
                w = tl.load(weight + row * d + i, mask=some, other=0.0)
                term = w * tl.load(mine + i * LANES, mask=some, other=0.0) + 0.0
                many = _list(upper_list, many, term, some & (term >= high), LIST)
                many2 = _list(lower_list, many2, 0.0 - term, some & (term <= low), LIST)
                both += some.to(tl.int32)
                bits ^= lowest
        far = tl.load(reach + lane, mask=here, other=0.0)
        largest = tl.load(bound + row * blocks)
        leads = tl.load(lead_count + lane, mask=here, other=0)
        none = tl.load(zeros + lane, mask=here, other=0) - leads
        value = tl.load(sums + cell, mask=here, other=0.0)
        above = tl.load(counts + cell, mask=here, other=0)
        below = d - above - both - tl.load(counts + plane + cell, mask=here, other=0)
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
                term = product_of(tl.load(weight + row * d + i, mask=q < leads, other=0.0), v)
                value += tl.where((q < leads) & (term < high) & (term > low), term, 0.0)
                above += ((q < leads) & (term > outer_high)).to(tl.int32)
                below += ((q < leads) & (term < outer_low)).to(tl.int32)
                some = (q < leads) & (term >= outer_low) & (term <= outer_high)
                many = _list(upper_list, many, term, some & (term >= high), LIST)
                many2 = _list(lower_list, many2, 0.0 - term, some & (term <= low), LIST)
                # It stays, if it is not removed: the sum is infinite.
                odd = odd | ((q < leads) & ~(tl.abs(term) <= LARGEST) & ((top == 0) | (bottom == 0)))
        tl.debug_barrier()
        odd = odd | (many > LIST) | (many2 > LIST)
        many, many2 = tl.minimum(many, LIST), tl.minimum(many2, LIST)
        # A band that ends at 0 tells how many terms are positive, or negative.
        tiny = _tiny(high)
        positive, negative = above + many, below + many2
        zero = (high == tiny) & (positive < top) & (top <= positive + none)
        zero2 = (low == 0.0 - tiny) & (negative < bottom) & (bottom <= negative + none)
        want, want2 = ~zero & (top > 0), ~zero2 & (bottom > 0)
        rank, rank2 = top - above, bottom - below
        ends = outer_low + low + high + outer_high
        odd = odd | (ends != ends) | ((zero | zero2) & ~(high > low))
        odd = odd | (want & ((rank < 1) | (rank > many))) | (want2 & ((rank2 < 1) | (rank2 > many2)))
        upper = tl.where(zero, 0.0, _ranked(upper_list, many, rank, SORT, MERGE, PLACES))
        lower = tl.where(zero2, 0.0, 0.0 - _ranked(lower_list, many2, rank2, SORT, MERGE, PLACES))
        upper = tl.where(top == 0, float("inf"), upper)
        lower = tl.where(bottom == 0, float("-inf"), lower)
        # Tied with both cuts: only zeros are so many as a rule.
        odd = odd | ((upper == lower) & ~(zero & zero2)) | (upper < lower)
        over, equal, inner = _around(upper_list, many, upper, lower)
        # What lies in both bands has been added.
        over2, equal2, inner2 = _around(lower_list, many2, 0.0 - lower, 0.0 - tl.minimum(upper, high))
        leave, leave2 = rank - over, rank2 - over2
        stay, stay2 = equal - leave, equal2 - leave2
        inner -= inner2
        inner += tl.where(want & (stay > 0), stay.to(tl.float32) * upper, 0.0)
        inner += tl.where(want2 & (stay2 > 0), stay2.to(tl.float32) * lower, 0.0)
        value += inner
        odd = (odd | ~(tl.abs(value) <= LARGEST)) & here & ~lost
        tl.debug_barrier()
        if HAS_BIAS:
            value += tl.load(bias + row)
        tl.store(out + lane * rows + row, tl.where(lost, float("nan"), value), mask=here & ~odd)
        place = row * samples
        bits = bits_of(odd)
        if bits != 0:
            by_definition(
                weight + row * d, x, bias + row, first + unit // rows * LANES, bits, d, top, bottom, out + row, rows,
                cuts + place, 1, rows * samples, ties + place, tied + row, tied + rows, HAS_BIAS, True, KEEP, 8,
            )  # fmt: skip
        if KEEP:
            good = here & ~odd
            tl.store(cuts + place + lane, tl.where(lost, float("nan"), upper), mask=good)
            tl.store(cuts + rows * samples + place + lane, lower, mask=good)
            tie = tl.where(zero, top - positive + 1, tl.where(want & (stay > 0), leave + 1, 0))
            tie2 = tl.where(zero2, bottom - negative + 1, tl.where(want2 & (stay2 > 0), leave2 + 1, 0))
            some = good & ~lost & ((tie > 0) | (tie2 > 0))
            if any_of(some):
                tl.store(ties + place + lane, tie, mask=some)
                tl.store(ties + rows * samples + place + lane, tie2, mask=some)
                tl.atomic_max(tied + row, 1)
                tl.atomic_max(tied + rows + lane, 1, mask=some)
