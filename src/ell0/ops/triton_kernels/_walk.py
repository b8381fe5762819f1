"""Few removed terms: the walk."""

import triton
import triton.language as tl

from ._definition import by_definition
from ._language import INFINITE, LANES, LARGEST, any_of, bits_of, first_unit, kernel, lead, next_unit, terms_at
from ._networks import backwards, equal_to, join, least_of, merged, network, size_of, sum_of, within


@triton.jit
def _bar(order, j, d, far, low):
    """What no term from place j on can pass. The load fetches the line of the order that is walked next."""
    both = tl.load(order + j, mask=j < d, other=0)
    largest = tl.minimum((both.to(tl.int32) & 0x7FFFFFFF) | low, INFINITE).to(tl.float32, bitcast=True)
    return tl.where(j < d, largest, 0.0) * far


@triton.jit
def _pair(
    walker, tile, order, bound, walkers_raw, panel, far, lanes_raw, count, lead_index, lead_value, bias,
    out, cuts, ties, marks, lanes, width, d, blocks, samples, rows, low,
    K: tl.constexpr, KEEP: tl.constexpr, BY_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, STEP: tl.constexpr,
    EXACT: tl.constexpr, SORT: tl.constexpr, SORT8: tl.constexpr, MERGE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One walker and 32 lanes."""
    SIZE: tl.constexpr = len(PLACES)
    lane = tile * LANES + tl.arange(0, LANES)
    here = lane < lanes
    places = order + walker * d
    largest = tl.load(bound + walker * blocks)
    bar = _bar(places, 32, d, far, low)
    at = out + lane * rows + walker if BY_WEIGHT else out + walker * rows + lane
    value = tl.load(at, mask=here, other=0.0)
    cap = largest * far
    most = tl.max(count, 0)
    a = terms_at(places, panel, 0, d, 0.0, 16, True)
    b = terms_at(places, panel, 16, d, 0.0, 16, True)
    seen = size_of(a, 16) + size_of(b, 16)
    a, b = network(a, SORT, True), network(b, SORT, True)
    up = join(a, b, SIZE, True)
    upper, last = least_of(up, SIZE, KEEP, True)
    down = join(backwards(a), b, SIZE, False)
    lower, last2 = least_of(down, SIZE, KEEP, False)
    added = tl.full((LANES,), 0.0, tl.float32)
    if BY_WEIGHT:
        if most > 0:
            # Outlying terms are not in the dense product: those that stay are added. The ones beyond all others rank by
            # themselves; the rest are added here and, if they leave, taken out with the removed terms.
            v = ()
            for r in tl.static_range(16):
                at_most = tl.minimum(count, 16)
                v = v + (lead(walkers_raw + walker * d, lead_index + lane, lead_value + lane, r, width, at_most),)
            v = network(v, SORT, True)
            seen += size_of(within(v, cap, 16), 16)
            for i in tl.static_range(16):
                stays = tl.abs(v[i]) <= cap
                if i >= K:
                    stays = stays | (v[i] > cap)
                if i < 16 - K:
                    stays = stays | (v[i] < -cap)
                added += tl.where(stays, v[i], 0.0)
            up = join(merged(up, MERGE, PLACES, True), v, SIZE, True)
            upper, last = least_of(up, SIZE, KEEP, True)
            down = join(merged(down, MERGE, PLACES, False), v, SIZE, False)
            lower, last2 = least_of(down, SIZE, KEEP, False)
    j = 32
    narrow = tl.minimum(upper, -lower)
    open_ = (bar >= narrow) if KEEP else (bar > narrow)
    more = any_of(open_ & here) & (j < d)
    while more:
        # What lies between the cuts enters no list.
        beyond = 0.5 * upper + 0.5 * lower
        v = terms_at(places, panel, j, d, beyond, STEP, EXACT)
        if EXACT:
            seen += size_of(v, STEP)
        else:
            seen += size_of(within(v, cap, STEP), STEP)
            seen -= tl.where(tl.abs(beyond) <= cap, tl.abs(beyond), 0.0) * tl.maximum(j + STEP - d, 0).to(tl.float32)
        v = network(v, SORT if STEP == 16 else SORT8, True)
        j += STEP
        bar = _bar(places, j, d, far, low)
        up = join(merged(up, MERGE, PLACES, True), v, SIZE, True)
        upper, last = least_of(up, SIZE, KEEP, True)
        down = join(merged(down, MERGE, PLACES, False), v, SIZE, False)
        lower, last2 = least_of(down, SIZE, KEEP, False)
        narrow = tl.minimum(upper, -lower)
        open_ = (bar >= narrow) if KEEP else (bar > narrow)
        more = any_of(open_ & here) & (j < d)
    depth = tl.minimum(j, d)
    removed = tl.full((LANES,), 0.0, tl.float32)
    size = removed
    for side in tl.static_range(2):
        inner = down if side else up
        edge = last2 if side else last
        if most > 0:
            inner = within(inner, cap, SIZE)
            edge = tl.where(tl.abs(edge) <= cap, edge, 0.0)
        removed += sum_of(inner, SIZE) - edge if KEEP else sum_of(inner, SIZE)
        size += size_of(inner, SIZE) - tl.abs(edge) if KEEP else size_of(inner, SIZE)
    # What stays must not be small against what is taken out of the sum.
    lost = (far != far) | (tl.full((LANES,), 0.0, tl.float32) + largest != largest)
    defined = here & ~lost
    while any_of(defined & ~(size <= 5 * (seen - size))) & (j < d):
        seen += size_of(terms_at(places, panel, j, d, 0.0, STEP, EXACT), STEP)
        j += STEP
    # Zeros stand for outlying terms in the panel, and for those that other lanes have: they must lie between the cuts.
    odd = (count > 16) | ~(cap <= LARGEST) | (upper == lower)
    odd = odd | ((most > 0) & ~(upper > 0)) | ((most > 0) & ~(lower < 0))
    unsound = ~(size <= 5 * (seen - size)) | ~(tl.abs(value) <= LARGEST)
    odd = (odd | (unsound & (count > 0))) & defined
    value += added - removed
    unsound = unsound & defined & ~odd
    if any_of(unsound):
        # The cuts are right: the kept terms are added up instead.
        kept = tl.full((LANES,), 0.0, tl.float32)
        stay, stay2 = kept, kept
        for i in range(0, d, STEP):
            v = terms_at(places, panel, i, d, float("nan"), STEP, EXACT)
            part = tl.full((LANES,), 0.0, tl.float32)
            for r in tl.static_range(STEP):
                part += tl.where((v[r] < upper) & (v[r] > lower), v[r], 0.0)
                stay += (v[r] == upper).to(tl.float32)
                stay2 += (v[r] == lower).to(tl.float32)
            kept += part
        stay -= (equal_to(up, upper, SIZE) - (upper == last).to(tl.int32) * KEEP).to(tl.float32)
        kept += stay * upper
        stay2 -= (equal_to(down, lower, SIZE) - (lower == last2).to(tl.int32) * KEEP).to(tl.float32)
        kept += stay2 * lower
        if HAS_BIAS:
            kept += tl.load(bias + tl.where(here, lane, 0) * (not BY_WEIGHT) + walker * BY_WEIGHT)
        value = tl.where(unsound, kept, value)
    tl.store(at, tl.where(lost, float("nan"), value), mask=here & ~odd)
    cell, stride = (walker * samples, 1) if BY_WEIGHT else (walker, samples)
    bits = bits_of(odd)
    if bits != 0:
        depth = d
        by_definition(
            walkers_raw + walker * d, lanes_raw, bias + walker * BY_WEIGHT, tile * LANES, bits,
            d, K, K, out + walker * (1 if BY_WEIGHT else rows), rows if BY_WEIGHT else 1,
            cuts + cell, stride, rows * samples, ties + cell,
            marks + rows + walker + rows * (not BY_WEIGHT), marks + rows + rows * BY_WEIGHT,
            HAS_BIAS, BY_WEIGHT, KEEP,
        )  # fmt: skip
    if KEEP:
        fine = here & ~odd
        tl.store(cuts + cell + lane * stride, tl.where(lost, float("nan"), upper), mask=fine)
        tl.store(cuts + rows * samples + cell + lane * stride, lower, mask=fine)
        some = ((upper == last) | (lower == last2)) & fine & ~lost
        if any_of(some):
            # One more than is removed is listed, and equals the cut: as many tied terms leave as do so, less one.
            tie = tl.where(upper == last, equal_to(up, upper, SIZE), 0)
            tl.store(ties + cell + lane * stride, tie, mask=some)
            tie2 = tl.where(lower == last2, equal_to(down, lower, SIZE), 0)
            tl.store(ties + rows * samples + cell + lane * stride, tie2, mask=some)
            tl.atomic_max(marks + rows + walker + rows * (not BY_WEIGHT), 1)
            tl.atomic_max(marks + rows + rows * BY_WEIGHT + lane, 1, mask=some)
        if BY_WEIGHT:
            tl.atomic_max(marks + walker, depth)
        else:
            tl.atomic_max(marks + lane, d, mask=here)


@kernel()
def walk(
    order, bound, walkers_raw, panel, reach, lanes_raw, votes, lead_count, lead_index, lead_value, bias,
    out, cuts, ties, marks, tickets, asked, walkers, lanes, width, d, blocks, parts, units, sms, share_size,
    samples, rows,
    K: tl.constexpr, KEEP: tl.constexpr, BY_WEIGHT: tl.constexpr, ASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, EXACT: tl.constexpr, SORT: tl.constexpr, SORT8: tl.constexpr,
    MERGE: tl.constexpr, PLACES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Takes the removed terms out of the dense product: ``out (samples, rows)``, cuts and ties ``(2, rows, samples)``.

    K: terms removed on each side.  ASK: each 32 samples have voted for the side that is walked.
    marks: of each row of the weight, to which depth of its order a term of its panel may have been removed; of each
    row, then of each sample, whether some term tied with a cut stays.
    """
    low = WIDTH - 1  # what `order_rows` takes no account of
    if not BY_WEIGHT:
        if tl.load(asked) == 0:
            return
    groups = walkers if BY_WEIGHT else (walkers + LANES - 1) // LANES
    per_part = (groups + parts - 1) // parts
    shares = (per_part + share_size - 1) // share_size
    unit = first_unit(sms, GPU)
    while unit < units:
        tile = unit // parts
        lane = tile * LANES + tl.arange(0, LANES)
        far = tl.load(reach + lane)
        mine = panel + tile * d * LANES + tl.arange(0, LANES)
        first = unit % parts * per_part
        if BY_WEIGHT:
            count = tl.load(lead_count + lane)
            if ASK:
                # Not ours: all tickets are drawn at once.
                if tl.min(tl.load(votes + lane), 0) > 0:
                    tl.atomic_max(tickets + unit, shares)
        share = tl.atomic_add(tickets + unit, 1)
        while share < shares:
            following = tl.atomic_add(tickets + unit, 1)
            begin = first + share * share_size
            end = tl.minimum(tl.minimum(begin + share_size, first + per_part), groups)
            if BY_WEIGHT:
                from_, to = begin, end
            else:
                count = tl.full((LANES,), 0, tl.int32)
                group = begin * LANES
                present = (begin < end) & (group < walkers)
                vote = tl.min(tl.load(votes + group + tl.arange(0, LANES), mask=present, other=0), 0)
                from_, to = group, tl.where(vote > 0, tl.minimum(group + LANES, walkers), 0)
            for walker in range(from_, to):
                _pair(
                    walker, tile, order, bound, walkers_raw, mine, far, lanes_raw, count, lead_index, lead_value, bias,
                    out, cuts, ties, marks, lanes, width, d, blocks, samples, rows, low,
                    K, KEEP, BY_WEIGHT, HAS_BIAS, STEP, EXACT, SORT, SORT8, MERGE, PLACES,
                )  # fmt: skip
            share = following
        unit = next_unit(unit, tickets, shares, units, sms)
