"""Many removed terms: the cuts are found by counting, at a price that does not grow with how many leave.

A guess from the terms' moments is a pair's first pivot on each side. Passes over all terms count what lies beyond the
pivots and move them; the last count is exact. From its pivots on a band is laid over each cut. One more pass adds up
what lies between the bands and marks, a bit for each term, what lies in them; `cut_bands` finds the cuts there.
"""

import triton
import triton.language as tl

from ._definition import by_definition
from ._language import LANES, LARGEST, any_of, bits_of, kernel, product_of

TINY = tl.constexpr(1.401298464324817e-45)  # the smallest number above 0


@triton.jit
def _beyond(difference):
    """1 where it is negative."""
    return difference.to(tl.uint32, bitcast=True) >> 31


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
def _gap(gap, pivot, count, k, last_pivot, last_count, mask):
    """How far apart terms lie, by what lies between this pivot and the last one."""
    way = pivot - tl.load(last_pivot, mask=mask, other=0.0)
    passed = tl.load(last_count, mask=mask, other=0).to(tl.float32) - count
    seen = way / tl.where(passed == 0, 1.0, passed)
    far = (passed == 0) & (way != 0) & (tl.abs(count - k) > 3)
    known = (tl.abs(passed) >= 4) & (seen > 0)
    return tl.where(known, tl.minimum(tl.maximum(seen, 0.25 * gap), 4 * gap), tl.where(far, 2 * gap, gap))


@triton.jit
def _moved(pivot, count, k, zeros, gap):
    """The next pivot; one at a cut of 0 stays, and none goes past zeros."""
    done = (pivot == 0) & (count < k) & (k <= count + zeros)
    next_ = pivot + (count - k) * gap
    past = (zeros > 8) & (((pivot > 0) & (next_ < 0)) | ((pivot < 0) & (next_ > 0)))
    return tl.where(done | past, 0.0, next_)


@triton.jit
def _band(pivot, count, k, zeros, gap):
    """From where to where the k-th largest term lies, with one end at the pivot; empty, beside 0, if it is 0.

    It ends before 0 if zeros would fill it.
    """
    off = tl.abs(count - k)
    reach = (1.2 * off + 3 * tl.sqrt(off) + 8) * gap
    from_ = tl.where(count >= k, pivot, pivot - reach)
    from_ = tl.where((zeros > 8) & (pivot > 0), tl.maximum(from_, TINY), from_)
    to = tl.where(count >= k, pivot + reach, pivot)
    at_zero = (pivot == 0) & (count < k) & (k <= count + zeros)
    none = k == 0
    from_ = tl.where(none, float("inf"), tl.where(at_zero, 0.0, from_))
    return from_, tl.where(none, float("inf"), tl.where(at_zero, -TINY, to))


@kernel("moments", "pivots")
def guess_pivots(
    moments, zeros, lead_count, pivots, gaps, first, chunk, rows, d, top, bottom, SIZE: tl.constexpr
):  # fmt: skip
    """Both pivots ``(2, rows, chunk)``, as far as the terms' moments tell, and the gaps between terms there.

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
    tl.store(pivots + cell, up, mask=here)
    tl.store(gaps + cell, gap, mask=here)
    down, gap = _guess(bottom, none, d, -mean, spread, tail)
    tl.store(pivots + plane + cell, -down, mask=here)
    tl.store(gaps + plane + cell, gap, mask=here)


@kernel("inner", "turned", "pivots", "edges", "first", "chunk", "width", "rows", "d")
def count_terms(
    inner, turned, weight, zeros, lead_count, lead_index, lead_value, asked, pivots, gaps, counts, edges,
    first, chunk, rows, width, d, top, bottom,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Counts the terms beyond both pivots of each pair, for `chunk` samples from `first` on, and moves the pivots.

    inner ``(d, width)`` and turned ``(d, rows)``: samples and weight.  LAST: counts are those of the rounded terms, and
    the edges of the bands ``(4, rows, chunk)`` are laid instead.
    """
    tiles = (chunk + WIDTH - 1) // WIDTH
    lane = (tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH))[None, :]
    row = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS))[:, None]
    here, there = lane < chunk, row < rows
    both = here & there
    cell = row * chunk + lane
    plane = rows * chunk
    sample = first + lane
    leads = tl.load(lead_count + sample, mask=here, other=0)
    none = (tl.load(zeros + sample, mask=here, other=0) - leads).to(tl.float32)
    up = tl.load(pivots + cell, mask=both, other=0.0)
    down = tl.load(pivots + plane + cell, mask=both, other=0.0)
    above = tl.full((ROWS, WIDTH), 0, tl.uint32)
    below = above
    for i in tl.range(0, d, loop_unroll_factor=UNROLL):
        x = tl.load(inner + i * width + sample, mask=here, other=0.0)
        w = tl.load(turned + i * rows + row, mask=there, other=0.0)
        if LAST:
            term = x * w
            above += _beyond(up - term)
            below += _beyond(term - down)
        else:
            above += _beyond(tl.fma(-x, w, up))
            below += _beyond(tl.fma(x, w, -down))
    # In the panel outlying coordinates are zeros.
    more = above.to(tl.int32) - tl.where(up < 0, leads, 0)
    less = below.to(tl.int32) - tl.where(down > 0, leads, 0)
    if tl.load(asked + 1) > 0:
        for q in range(0, tl.minimum(tl.max(tl.max(leads, 1), 0), LEADS)):
            present = (q < leads) & both
            index = tl.load(lead_index + q * width + sample, mask=q < leads, other=0)
            v = tl.load(lead_value + q * width + sample, mask=q < leads, other=0.0)
            outlying = product_of(
                tl.load(weight + row * d + index, mask=present, other=0.0), tl.broadcast_to(v, (ROWS, WIDTH))
            )
            more += (present & (outlying > up)).to(tl.int32)
            less += (present & (outlying < down)).to(tl.int32)
    up_gap = tl.load(gaps + cell, mask=both, other=0.0)
    down_gap = tl.load(gaps + plane + cell, mask=both, other=0.0)
    up_count, down_count = more.to(tl.float32), less.to(tl.float32)
    if not FIRST:
        # Where the last pivots were, and what lay beyond them.
        up_gap = _gap(up_gap, up, up_count, top, edges + cell, counts + cell, both)
        down_gap = _gap(down_gap, -down, down_count, bottom, edges + plane + cell, counts + plane + cell, both)
    tl.store(counts + cell, more, mask=both)
    tl.store(counts + plane + cell, less, mask=both)
    if LAST:
        high, outer_high = _band(up, up_count, top, none, up_gap)
        low, outer_low = _band(-down, down_count, bottom, none, down_gap)
        low, outer_low = -low, -outer_low
        # Bands that meet are one.
        meet = (low >= high) & (outer_high >= high) & (outer_low <= low)
        tl.store(edges + cell, tl.where(meet, tl.minimum(outer_low, high), outer_low), mask=both)
        tl.store(edges + plane + cell, low, mask=both)
        tl.store(edges + 2 * plane + cell, high, mask=both)
        tl.store(edges + 3 * plane + cell, tl.where(meet, tl.maximum(outer_high, low), outer_high), mask=both)
    else:
        tl.store(edges + cell, up, mask=both)
        tl.store(edges + plane + cell, -down, mask=both)
        tl.store(gaps + cell, up_gap, mask=both)
        tl.store(gaps + plane + cell, down_gap, mask=both)
        up = _moved(up, up_count, top, none, up_gap)
        down = -_moved(-down, down_count, bottom, none, down_gap)
        tl.store(pivots + cell, up, mask=both)
        tl.store(pivots + plane + cell, down, mask=both)


@kernel("inner", "turned", "edges", "marked", "first", "chunk", "width", "rows", "d")
def sum_between(
    inner, turned, edges, sums, marked, first, chunk, rows, width, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Adds up the terms between a pair's bands, and marks those that lie in one.

    marked ``(words, rows, chunk)``: 0 for a term in a band; the last term of 32 is the lowest bit.
    """
    tiles = (chunk + WIDTH - 1) // WIDTH
    lane = (tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH))[None, :]
    row = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS))[:, None]
    here, there = lane < chunk, row < rows
    both = here & there
    cell = row * chunk + lane
    plane = rows * chunk
    sample = first + lane
    outer_low = tl.load(edges + cell, mask=both, other=0.0)
    low = tl.load(edges + plane + cell, mask=both, other=0.0)
    high = tl.load(edges + 2 * plane + cell, mask=both, other=0.0)
    outer_high = tl.load(edges + 3 * plane + cell, mask=both, other=0.0)
    total = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    for begin in range(0, d, 32):
        part = tl.full((ROWS, WIDTH), 0.0, tl.float32)
        bits = tl.full((ROWS, WIDTH), 0, tl.uint32)
        for i in tl.range(begin, tl.minimum(begin + 32, d), loop_unroll_factor=UNROLL):
            x = tl.load(inner + i * width + sample, mask=here, other=0.0)
            w = tl.load(turned + i * rows + row, mask=there, other=0.0)
            term = x * w
            # The sign of a difference is that of the comparison.
            between = (term - high).to(tl.uint32, bitcast=True) & (low - term).to(tl.uint32, bitcast=True)
            beyond = (term - outer_low).to(tl.uint32, bitcast=True) | (outer_high - term).to(tl.uint32, bitcast=True)
            bits = (bits << 1) | ((between | beyond) >> 31)
            part = tl.where(between.to(tl.int32, bitcast=True) < 0, part + term, part)
        total += part
        tl.store(marked + begin // 32 * plane + cell, bits.to(tl.int32, bitcast=True), mask=both)
    tl.store(sums + cell, total, mask=both)


@triton.jit
def _listed(terms, r, many):
    return tl.load(terms + r * LANES, mask=r < many, other=float("-inf"))


@triton.jit
def _around(terms, pivot, many):
    """How many listed terms are above a finite pivot, how many equal to it."""
    above = tl.full((LANES,), 0, tl.int32)
    equal = above
    for r in range(0, tl.max(many, 0)):
        term = _listed(terms, r, many)
        above += (term > pivot).to(tl.int32)
        equal += (term == pivot).to(tl.int32)
    return above, equal


@triton.jit
def _ranked(terms, many, rank, low, high, wanted):
    """The rank-th largest listed term of the wanted lanes, from `low` to `high`; how many are above it, or equal."""
    end = high
    for _ in range(5):
        middle = 0.5 * low + 0.5 * high
        more, same = _around(terms, middle, many)
        enough = more + same >= rank
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    # Fewer than `rank` terms reach this.
    border = tl.where(high < end, high, float("inf"))
    cut = tl.full((LANES,), float("nan"), tl.float32)
    above, equal = many * 0, many * 0
    left = wanted
    while any_of(left):
        following = tl.full((LANES,), float("-inf"), tl.float32)
        for r in range(0, tl.max(many, 0)):
            term = _listed(terms, r, many)
            following = tl.maximum(following, tl.where(term < border, term, float("-inf")))
        left = left & (following > float("-inf"))
        more, same = _around(terms, following, many)
        found = left & (more + same >= rank)
        cut = tl.where(found, following, cut)
        above = tl.where(found, more, above)
        equal = tl.where(found, same, equal)
        left = left & ~found
        border = following
    return cut, above, equal


@kernel()
def cut_bands(
    weight, bound, x, panel, reach, zeros, lead_count, lead_index, lead_value, asked, pivots, counts, edges, sums,
    marked, bias, out, cuts, ties, tied, scratch, first, samples, chunk, rows, width, d, blocks, top, bottom, programs,
    LIST: tl.constexpr, LEADS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Lists the terms in each pair's bands, finds the cuts among them, and adds those between to the sum.

    tied: as the last two parts of the marks of `walk`. What defeats a band is done by the definition.
    """
    tiles = (chunk + LANES - 1) // LANES
    plane = rows * chunk
    listed = scratch + tl.program_id(0) * LIST * LANES + tl.arange(0, LANES)
    most = tl.load(asked + 1)
    for unit in range(tl.program_id(0), tiles * rows, programs):
        row = unit // tiles
        within = unit % tiles * LANES + tl.arange(0, LANES)
        here = within < chunk
        lane = first + within
        cell = row * chunk + within
        far = tl.load(reach + lane, mask=here, other=0.0)
        largest = tl.load(bound + row * blocks)
        leads = tl.load(lead_count + lane, mask=here, other=0)
        none = tl.load(zeros + lane, mask=here, other=0) - leads
        lost = (far != far) | (largest + 0.0 * none.to(tl.float32) != largest)
        up = tl.load(pivots + cell, mask=here, other=0.0)
        down = tl.load(pivots + plane + cell, mask=here, other=0.0)
        above = tl.load(counts + cell, mask=here, other=0)
        below = tl.load(counts + plane + cell, mask=here, other=0)
        outer_low = tl.load(edges + cell, mask=here, other=0.0)
        low = tl.load(edges + plane + cell, mask=here, other=0.0)
        high = tl.load(edges + 2 * plane + cell, mask=here, other=0.0)
        outer_high = tl.load(edges + 3 * plane + cell, mask=here, other=0.0)
        value = tl.load(sums + cell, mask=here, other=0.0)
        mine = panel + lane // LANES * d * LANES + lane % LANES
        many = tl.full((LANES,), 0, tl.int32)
        for begin in range(0, d, 32):
            bits = ~tl.load(marked + begin // 32 * plane + cell, mask=here, other=-1)
            bits = (bits << tl.maximum(begin + 32 - d, 0)).to(tl.uint32, bitcast=True)
            while any_of(bits != 0):
                lowest = bits & (bits ^ (bits - 1))
                place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                i = begin + 31 - place
                some = bits != 0
                w = tl.load(weight + row * d + i, mask=some, other=0.0)
                term = w * tl.load(mine + i * LANES, mask=some, other=0.0) + 0.0
                tl.store(listed + many * LANES, term, mask=some & (many < LIST))
                many += some.to(tl.int32)
                bits ^= lowest
        odd = (leads > LEADS) | ~(largest * far <= LARGEST)
        if most > 0:
            for q in range(0, tl.minimum(tl.max(leads, 0), LEADS)):
                i = tl.load(lead_index + q * width + lane, mask=q < leads, other=0)
                v = tl.load(lead_value + q * width + lane, mask=q < leads, other=0.0)
                term = product_of(tl.load(weight + row * d + i, mask=q < leads, other=0.0), v)
                between = (term < high) & (term > low)
                value += tl.where((q < leads) & between, term, 0.0)
                some = (q < leads) & ~between & (term >= outer_low) & (term <= outer_high)
                tl.store(listed + many * LANES, term, mask=some & (many < LIST))
                many += some.to(tl.int32)
                # It stays, if it is not removed: the sum is infinite.
                odd = odd | ((q < leads) & ~(tl.abs(term) <= LARGEST) & ((top == 0) | (bottom == 0)))
            # A zero that stands for an outlying term must not be listed.
            odd = odd | ((leads > 0) & (outer_low <= 0) & (outer_high >= 0) & ~((low < 0) & (high > 0)))
        tl.debug_barrier()
        odd = odd | (many > LIST)
        many = tl.minimum(many, LIST)
        before, _ = _around(listed, up, many)
        after, at_down = _around(listed, down, many)
        rank = before + top - above
        rank2 = after + at_down + below - bottom + 1  # the bottom-th smallest, counted from the largest
        # A pivot or a band that ends at 0 tells how many terms are positive, or negative.
        positive, negative = above, below
        if any_of((high == TINY) | (low == -TINY)):
            more, _ = _around(listed, high * 0, many)
            least, zeros_ = _around(listed, low * 0, many)
            positive = tl.where(high == TINY, above - before + more, positive)
            less = many - after - at_down
            negative = tl.where(low == -TINY, below - less + many - least - zeros_, negative)
        zero = ((up == 0) | (high == TINY)) & (positive < top) & (top <= positive + none)
        zero2 = ((down == 0) | (low == -TINY)) & (negative < bottom) & (bottom <= negative + none)
        want, want2 = ~zero & (top > 0), ~zero2 & (bottom > 0)
        ends = outer_low + low + high + outer_high + up + down
        odd = odd | (ends != ends) | ((zero | zero2) & (want | want2) & ~(high > low))
        odd = odd | (want & ((rank < 1) | (rank > many))) | (want2 & ((rank2 < 1) | (rank2 > many)))
        fine = here & ~lost & ~odd
        upper, over, equal = _ranked(listed, many, rank, high, outer_high, want & fine)
        lower, over2, equal2 = _ranked(listed, many, rank2, outer_low, low, want2 & fine)
        apart = high > low
        odd = odd | (want & ~((upper >= high) | ~apart)) | (want2 & ~((lower <= low) | ~apart))
        leave, stay = rank - over, equal - (rank - over)
        leave2, stay2 = equal2 - (rank2 - over2) + 1, rank2 - over2 - 1
        upper = tl.where(top == 0, float("inf"), tl.where(zero, 0.0, upper))
        lower = tl.where(bottom == 0, float("-inf"), tl.where(zero2, 0.0, lower))
        # Tied with both cuts: only zeros are so many as a rule.
        odd = (
            (odd | ((upper == lower) & ~(zero & zero2)) | (upper < lower) | ~(tl.abs(value) <= LARGEST)) & here & ~lost
        )
        inner = value * 0
        for r in range(0, tl.max(many, 0)):
            term = _listed(listed, r, many)
            inner += tl.where((term < upper) & (term > lower), term, 0.0)
        inner += tl.where(want & (stay > 0), stay.to(tl.float32) * upper, 0.0)
        inner += tl.where(want2 & (stay2 > 0), stay2.to(tl.float32) * lower, 0.0)
        value += inner
        tl.debug_barrier()
        if HAS_BIAS:
            value += tl.load(bias + row)
        tl.store(out + lane * rows + row, tl.where(lost, float("nan"), value), mask=here & ~odd)
        place = row * samples
        bits = bits_of(odd)
        if bits != 0:
            by_definition(
                weight + row * d, x, bias + row, first + unit % tiles * LANES, bits, d, top, bottom, out + row, rows,
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
