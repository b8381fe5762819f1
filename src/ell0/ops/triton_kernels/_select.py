"""Many removed terms, or few terms at all: cuts are found by counting."""

import triton
import triton.language as tl

from ._definition import by_definition
from ._language import LANES, LARGEST, any_of, bits_of, first_unit, kernel, lead, next_unit, terms_at
from ._networks import backwards, join, merged, network, size_of, within

CANDIDATES = tl.constexpr(32)  # terms around a cut that are told apart by sorting
AROUND = tl.constexpr(12.0)  # terms to either side of where a cut should be: less than half as many
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _lead(walker, lead_index, lead_value, r, width, count):
    """One outlying term of each lane; NaN, which is never counted, where there are fewer."""
    return tl.where(r < count, lead(walker, lead_index, lead_value, r, width, count), float("nan"))


@triton.jit
def _begin(cap, cut, gap, k):
    """An interval (a, b] that holds the cut, empty if nothing leaves, and two pivots around where it may be."""
    b = tl.where(k > 0, cap, float("inf"))
    ahead = tl.minimum(AROUND, 0.45 * k) * gap
    return tl.where(k > 0, float("-inf"), b), b, cut - ahead, cut + ahead


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
def _closer(interval, pivot, above, k):
    """Moves the end of (a, b] to a pivot inside of it: k terms or more lie above a, fewer above b."""
    a, b, above_a, above_b = interval
    raised = (above >= k) & (pivot > a)
    lowered = (above < k) & (pivot < b)
    a, above_a = tl.where(raised, pivot, a), tl.where(raised, above, above_a)
    b, above_b = tl.where(lowered, pivot, b), tl.where(lowered, above, above_b)
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
    # Where the distances mislead, thirds.
    third = (b - a) * (1 / 3)
    astray = closed & (~((middle > a) & (middle < b)) | (step % 4 == 3))
    near = tl.where(astray, a + third, middle - spread)
    far = tl.where(astray, b - third, middle + spread)
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
    return network(v, SORT, True)


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
    a, b = _half(found, listed, 0, SORT), _half(found, listed, 16, SORT)
    larger = merged(join(a, b, 16, True), MERGE, PLACES, True)
    smaller = merged(join(a, backwards(b), 16, False), MERGE, PLACES, True)
    total, size, cut, after = _taken(larger, m, cut, after, 0)
    total2, size2, cut, after = _taken(smaller, m, cut, after, 16)
    tie = tl.full((LANES,), 0, tl.int32)
    if any_of(cut == after):
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
    unit = first_unit(sms, GPU)
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
            guess = (tl.full((), 0, tl.int32), nothing, nothing, nothing, nothing)
            waiting = guess
            begin = first + share * SHARE
            for row in range(begin, tl.minimum(tl.minimum(begin + SHARE, first + per_part), rows)):
                for pair in range(PAIRS):
                    if PAIRS == 2:
                        guess, waiting = waiting, guess  # each pair has its own
                    guess = _counted(
                        row, tile, pair, guess, order, bound, weight, mine, far, x, count, lead_index, lead_value, bias,
                        out, cuts, ties, marks, found, rows, samples, width, d, blocks,
                        tl.where(pair == 0, top, top2), tl.where(pair == 0, bottom, bottom2),
                        KEEP, HAS_BIAS, SHORT, EXACT, PASSES, SORT, MERGE, PLACES,
                    )  # fmt: skip
            share = tl.atomic_add(tickets + unit, 1)
        unit = next_unit(unit, tickets, shares, units, sms)


@triton.jit
def _counted(
    row, tile, pair, guess, order, bound, weight, mine, far, x, count, lead_index, lead_value, bias,
    out, cuts, ties, marks, found, rows, samples, width, d, blocks, k, k2,
    KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, SHORT: tl.constexpr, EXACT: tl.constexpr, PASSES: tl.constexpr,
    SORT: tl.constexpr, MERGE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row and 32 samples. guess: how far to look and where the cuts may be, from the row before; returned anew.

    For each cut an interval (a, b] that holds it is narrowed, until few terms lie in it. These are listed and sorted.
    Downwards all is negated.
    """
    depth, up, up_gap, down, down_gap = guess
    lane = tile * LANES + tl.arange(0, LANES)
    here = lane < samples
    places, steps, raw = order + row * d, bound + row * blocks, weight + row * d
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
    upper, lower = infinite, -infinite
    no = tl.full((LANES,), 0, tl.int32)
    tie, tie2 = no, no
    walked = d
    if not SHORT:
        most = tl.minimum(tl.max(count, 0), 16)
        found2 = found + CANDIDATES * LANES
        leads, values = lead_index + lane, lead_value + lane
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
        found_up, found_down = odd, odd
        size, seen, narrow, b, b2 = nothing, nothing, nothing, infinite, infinite
        go = 1
        while go > 0:
            a, b, p, q = _begin(cap, up, up_gap, k)
            a2, b2, p2, q2 = _begin(cap, down, down_gap, k2)
            above_a, above_b, above_a2, above_b2 = nothing, nothing, nothing, nothing
            step = 0
            open_ = 1
            while open_ > 0:
                near, distant, near2, distant2 = nothing, nothing, nothing, nothing
                for n in range(most):
                    v = (_lead(raw, leads, values, n, width, count),)
                    near, distant = _count(v, p, q, near, distant, True)
                    near2, distant2 = _count(v, p2, q2, near2, distant2, False)
                    above_b = tl.where((step == 0) & (v[0] > b), above_b + 1.0, above_b)
                    above_b2 = tl.where((step == 0) & (v[0] < -b2), above_b2 + 1.0, above_b2)
                for j in range(0, depth, 16):
                    v = terms_at(places, mine, j, d, float("nan"), 16, EXACT)
                    near, distant = _count(v, p, q, near, distant, True)
                    near2, distant2 = _count(v, p2, q2, near2, distant2, False)
                one, other = (a, b, above_a, above_b), (a2, b2, above_a2, above_b2)
                a, b, above_a, above_b = _closer(_closer(one, p, near, k), q, distant, k)
                a2, b2, above_a2, above_b2 = _closer(_closer(other, p2, near2, k2), q2, distant2, k2)
                found_up = (a > -LARGEST) & (above_a - above_b <= CANDIDATES)
                found_down = (a2 > -LARGEST) & (above_a2 - above_b2 <= CANDIDATES)
                step += 1
                # Between -TINY and 0 lie zeros, however many: nothing is left to tell apart.
                settled = found_up | ((a == -TINY) & (b == 0))
                settled = settled & (found_down | ((a2 == -TINY) & (b2 == 0)))
                open_ = tl.max((defined & ~settled).to(tl.int32), 0)
                if step == PASSES:
                    open_ = 0
                p, q, up_gap = _aim(a, b, above_a, above_b, up_gap, k, step)
                p2, q2, down_gap = _aim(a2, b2, above_a2, above_b2, down_gap, k2, step)
            # Where too many are left to be listed, none are.
            floor, floor2 = tl.where(found_up, a, b), tl.where(found_down, a2, b2)
            listed, listed2 = no, no
            for n in range(most):
                v = (_lead(raw, leads, values, n, width, count),)
                listed, _ = _collect(v, floor, b, found, listed, nothing, True)
                listed2, _ = _collect(v, floor2, b2, found2, listed2, nothing, False)
            seen, gone, gone2 = nothing, nothing, nothing
            for j in range(0, depth, 8):
                v = terms_at(places, mine, j, d, float("nan"), 8, EXACT)
                seen += size_of(v if EXACT else within(v, cap, 8), 8)
                listed, gone = _collect(v, floor, b, found, listed, gone, True)
                listed2, gone2 = _collect(v, floor2, b2, found2, listed2, gone2, False)
            listed, listed2 = listed // LANES, listed2 // LANES
            removed, size = gone + gone2, gone - gone2
            alike, alike2, tie, tie2 = no > 0, no > 0, no, no
            known = found_up & (listed == (above_a - above_b).to(tl.int32))
            known2 = found_down & (listed2 == (above_a2 - above_b2).to(tl.int32))
            m, m2 = k - above_b.to(tl.int32), k2 - above_b2.to(tl.int32)
            rare = ~(known & known2) | (b < 0) | (b2 < 0)
            if any_of(defined & rare):
                # Terms of both signs may leave on one side. And if all terms of an interval are one value, it is the
                # cut: some of them leave and some stay.
                size = nothing
                low, high, low2, high2 = infinite, -infinite, infinite, -infinite
                for j in range(0, depth, 4):
                    v = terms_at(places, mine, j, d, float("nan"), 4, EXACT)
                    for r in tl.static_range(4):
                        size = tl.where((v[r] > b) | (v[r] < -b2), size + tl.abs(v[r]), size)
                        between = (v[r] > a) & (v[r] <= b)
                        low = tl.where(between, tl.minimum(low, v[r]), low)
                        high = tl.where(between, tl.maximum(high, v[r]), high)
                        between = (v[r] < -a2) & (v[r] >= -b2)
                        low2 = tl.where(between, tl.minimum(low2, -v[r]), low2)
                        high2 = tl.where(between, tl.maximum(high2, -v[r]), high2)
                upper, lower = low, low2
                alike = ~known & (low == high) & (a > -LARGEST) & (count == 0)
                alike2 = ~known2 & (low2 == high2) & (a2 > -LARGEST) & (count == 0)
                tie, tie2 = tl.where(alike, m, 0), tl.where(alike2, m2, 0)
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
            known, known2 = known | alike, known2 | alike2
            odd = ~(known & known2)
            # No term after the depth may reach a cut. More terms only move the cuts away from zero.
            narrow = tl.minimum(tl.where(k > 0, upper, cap), tl.where(k2 > 0, lower, cap))
            need = depth
            while (need < d) & any_of(defined & ~odd & (tl.load(steps + need // 16, mask=need < d) * far >= narrow)):
                need += 16
            if (need < whole) & any_of(defined & odd):
                # Perhaps there are too few terms.
                need = tl.maximum(need, tl.minimum(2 * depth, whole))
            go = (need > depth).to(tl.int32)
            depth = need
            up, down = tl.where(known, upper, up), tl.where(known2, lower, down)
            lower = -lower
        # Further terms tell whether the subtraction is sound.
        j = depth
        while (j < d) & any_of(defined & ~odd & ~(size <= 5 * (seen - size))):
            seen += size_of(terms_at(places, mine, j, d, 0.0, 4, EXACT), 4)
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
            # Nor may so many lie beyond the panel's reach that the cut does, where it was not looked for.
            wrong = wrong | ((k > 0) & (count >= k)) | ((k2 > 0) & (count >= k2))
            # An infinite term that stays is tied with a cut at infinity.
            wrong = wrong | (((k == 0) | (k2 == 0)) & ~(tl.abs(removed) <= LARGEST))
            odd = odd | ((count > 0) & wrong)
        odd = odd & here & ~lost
        walked = tl.minimum(depth, d)
        # For the next row. One that needs a little more than it is given costs twice: some is kept in hand.
        spare = -32
        sound = defined & ~odd
        while (depth - spare > 96) & ~any_of(sound & (tl.load(steps + (depth - spare - 48) // 16) * far >= narrow)):
            spare += 16
        depth -= tl.maximum(spare, 0) // 32 * 16
    tl.store(at, tl.where(lost, float("nan"), dense - removed), mask=here & ~odd)
    cell = pair * 2 * rows * samples + row * samples
    noted = marks + pair * (2 * rows + samples)
    bits = bits_of(odd)
    if bits != 0:
        walked = d
        by_definition(
            raw, x, bias + row, tile * LANES, bits, d, k, k2, out + pair * samples * rows + row, rows,
            cuts + cell, 1, rows * samples, ties + cell, noted + rows + row, noted + 2 * rows,
            HAS_BIAS, True, KEEP,
        )  # fmt: skip
    if KEEP:
        fine = here & ~odd
        tl.store(cuts + cell + lane, tl.where(lost, float("nan"), upper), mask=fine)
        tl.store(cuts + rows * samples + cell + lane, lower, mask=fine)
        some = fine & ~lost & ((tie > 0) | (tie2 > 0))
        if any_of(some):
            tl.store(ties + cell + lane, tl.where(tie > 0, tie + 1, 0), mask=some)
            tl.store(ties + rows * samples + cell + lane, tl.where(tie2 > 0, tie2 + 1, 0), mask=some)
            tl.atomic_max(noted + rows + row, 1)
            tl.atomic_max(noted + 2 * rows + lane, 1, mask=some)
        tl.atomic_max(noted + row, walked)
    return depth, up, up_gap, down, down_gap
