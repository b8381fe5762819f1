// One row and one group of samples: the sum of w[o, i] x[b, i] without its top largest and bottom smallest terms.
//
// A row is walked from its largest |w|: once |w| max|x| cannot pass a cut of any lane, nothing further can. Few removed
// terms are kept in lists by sorting networks and taken out of the dense product, which comes in; where that would
// cancel, the kept terms are added up instead. So they are where many leave, whose cuts are found by counting.
#pragma once
#include "select.h"

namespace NAME {

constexpr int64_t PART = 32;    // terms added up before they join a longer sum
constexpr int64_t LISTED = 16;  // more removed terms than this are counted
constexpr int PLACES = 20;      // of the longest list

constexpr int TILE = 16;        // rows that are taken together

// How far a row is walked; a mark on it (the complement) says that some term tied with a cut stays.
inline int32_t depth_of(int32_t walked) { return walked < 0 ? ~walked : walked; }

template <class T> struct Row {
    const T *weight, *ranked, *bound;
    const int32_t* order;
    T bias;
    Leading<T, TILE>* leads;  // of the row's tile
    int place;                // in the tile
    Weights<T>* about;

    const V<T>* leading() const { return leads->terms(place); }
};

template <class T> struct Trim {
    static constexpr int L = LANES<T>;
    int64_t d, top, bottom;
    bool strict;  // ties with a cut must be inside the walk: the backward pass counts them

    static V<T> safe_product(V<T> w, V<T> x) {
        V<T> u = w * x;
        return where<T>((w != 0) & (x != 0), u);
    }
    static V<T> term(const Row<T>& row, const Group<T>& group, int64_t j, bool finite) {
        V<T> x = load(group.panel + (int64_t)row.order[j] * L);
        return finite ? row.ranked[j] * x : safe_product_or_nan(row.ranked[j], x);
    }
    // Keeps the NaN that marks a leading coordinate.
    static V<T> safe_product_or_nan(T w, V<T> x) {
        V<T> u = safe_product(all<T>(w), x);
        return x == x ? u : x;
    }
    V<T> narrower(V<T> high, V<T> low) const {
        if (!top) return -low;
        if (!bottom) return high;
        return min(high, -low);
    }
    // May a term at or after position j reach a cut?
    bool reachable(const Row<T>& row, V<T> reach, V<T> cut, int64_t j) const {
        V<T> u = row.bound[j / 16] * reach;
        return strict ? any(u >= cut) : any(u > cut);
    }

    // The first multiple of 16 from which no term can reach the cuts.
    int64_t depth(const Row<T>& row, V<T> reach, V<T> cut, int64_t j) const {
        while (j < d && reachable(row, reach, cut, j)) j += 16;
        return j < d ? j : d;
    }

    template <int P>
    int64_t walk(const Row<T>& row, const Group<T>& group, Extremes<T, P>& found) const {
        V<T> b[16];
        if (group.outlying) {
            // These terms are wanted one by one in the end, so their lists were not made.
            const V<T>* leading = row.leading();
            if (d < 16) found.clear();
            int64_t q = 0;
            for (; q + 16 <= group.leads; q += 16) {
                for (int r = 0; r < 16; ++r) b[r] = leading[q + r];
                if (q) found.absorb16(b);
                else found.start16(b);
            }
            for (; q < group.leads; ++q) found.absorb(leading[q]);
        } else if (group.leads) {
            const V<T>* lists = &row.leads->lists[row.place * 2 * P];
            for (int i = 0; i < P; ++i) found.largest[i] = lists[i];
            for (int i = 0; i < P; ++i) found.smallest[i] = lists[P + i];
        } else if (d < 16) {
            found.clear();  // else the first sixteen terms fill the lists
        }
        V<T> high = all<T>(__builtin_inff()), low = -high;
        bool up = true, down = true;
        for (int64_t j = 0;; j += 16) {
            if (j >= d) return d;
            if (j || group.leads) {
                if (top) high = found.largest[top - 1];
                if (bottom) low = found.smallest[bottom - 1];
                up = top && reachable(row, group.reach, high, j);
                down = bottom && reachable(row, group.reach, -low, j);
                if (!up && !down) return j;
            }
            int count = d - j < 16 ? (int)(d - j) : 16;
            const int32_t* order = row.order + j;
            const T* w = row.ranked + j;
            if (count == 16) {
#pragma GCC unroll 16
                for (int r = 0; r < 16; ++r) b[r] = w[r] * load(group.panel + (int64_t)order[r] * L);
            } else {
                for (int r = 0; r < count; ++r) b[r] = w[r] * load(group.panel + (int64_t)order[r] * L);
            }
            // Deep in a walk most blocks hold nothing new. (min and max pass over a NaN in their first argument.)
            if (count == 16 && (group.leads || j >= 128)) {
                V<T> most = all<T>(-__builtin_inff()), least = -most;
#pragma GCC unroll 16
                for (int r = 0; r < 16; ++r) {
                    most = max(b[r], most);
                    least = min(b[r], least);
                }
                up = up && any(most >= high);
                down = down && any(least <= low);
                if (!up && !down) continue;
            }
            // A leading coordinate was seen already. The leads are at least top + bottom terms, so a value between
            // the cuts changes neither list.
            if (group.leads) {
                const V<T> middle = min(max(V<T>{}, low), high);
                for (int r = 0; r < count; ++r) b[r] = b[r] == b[r] ? b[r] : middle;
            }
            if (count == 16 && !j && !group.leads) found.start16(b);
            else if (count == 16 && !down) found.template absorb16<true, false>(b);
            else if (count == 16 && !up) found.template absorb16<false, true>(b);
            else if (count == 16) found.absorb16(b);
            else
                for (int r = 0; r < count; ++r) found.absorb(b[r]);
        }
    }

    // What the terms tied with a cut add up to that stay; leaves the ties of the backward pass.
    V<T> stays(const typename Select<T>::Ties& ties, Cuts<T>& cuts) const {
        // Counted once where both cuts are one value.
        V<T> stay_high = ties.at_high - ties.leave_high, stay_low = ties.at_low - ties.leave_low;
        const M<T> one_value = cuts.high == cuts.low;
        stay_high -= where<T>(one_value, ties.leave_low);
        stay_low = where<T>(~one_value, stay_low);
        if (strict) {
            cuts.ties_high = where<T>(stay_high > 0, ties.leave_high + 1);
            cuts.ties_low = where<T>((stay_low > 0) | one_value, ties.leave_low + 1);
        }
        return where<T>(stay_high > 0, stay_high * cuts.high) + where<T>(stay_low > 0, stay_low * cuts.low);
    }

    // The trimmed sum and its cuts, by counting: every kept term is added up.
    V<T> counted(const Row<T>& row, const Group<T>& group, bool finite, Tray<T>& tray, Guess<T>& guess,
                          Cuts<T>& cuts) const {
        const V<T>* leading = group.leads ? row.leading() : nullptr;
        int64_t done = 0, wanted = finite ? (5 * (top + bottom) / 4 + 15) / 16 * 16 : d;
        // The last rows' cuts tell about how deep this one must go.
        if (finite && guess.made) {
            const Weights<T>& about = *row.about;
            const V<T> near = about.size * narrower(guess.high + about.shift_high, guess.low + about.shift_low);
            // All of them, in their own order, cost no more than most of them.
            const int64_t most = group.leads ? d / 3 : 3 * d / 4;
            const bool nearly_all = reachable(row, group.reach, T(0.75) * near, most);
            const int64_t likely = nearly_all ? d : depth(row, group.reach, T(0.75) * near, 0);
            wanted = likely > wanted ? likely : wanted;
            if (wanted > most) wanted = d;
        }
        const Terms<T> terms{leading, group.leads, row.ranked, row.order, group.panel, finite};
        Select<T> select(d, top, bottom, terms, row.bound[0], group, tray);
        V<T> kept{};
        while (done < wanted) {
            done = wanted < d ? wanted : d;
            select.extend(done, row.weight);
            kept = stays(select.find(*row.about, guess, cuts), cuts);
            // Terms tied with a cut are among those looked at.
            wanted = Trim{d, top, bottom, true}.depth(row, group.reach, narrower(cuts.high, cuts.low), done);
        }
        // Two levels of partial sums keep the rounding of long rows small.
        auto add = [&](int64_t n, auto term) {
            for (int64_t i = 0; i < n;) {
                V<T> part[4] = {};  // four chains of additions: one would wait for itself
                for (const int64_t stop = i + 4 * PART < n ? i + 4 * PART : n; i + 4 <= stop; i += 4)
#pragma GCC unroll 4
                    for (int c = 0; c < 4; ++c) add_between(part[c], term(i + c), cuts.low, cuts.high);
                for (; n - i < 4 && i < n; ++i) add_between(part[0], term(i), cuts.low, cuts.high);
                kept += (part[0] + part[1]) + (part[2] + part[3]);
            }
        };
        add(group.leads, [&](int64_t q) { return leading[q]; });
        if (finite) add(d, [&](int64_t i) { return row.weight[i] * load(group.panel + i * L); });
        else add(d, [&](int64_t i) { return safe_product_or_nan(row.weight[i], load(group.panel + i * L)); });
        return kept + row.bias;
    }

    // Value and tied removals when the lists alone do not give them: adds up kept terms, subtracts none that is
    // outlying.
    V<T> finish(const Row<T>& row, const Group<T>& group, bool finite, int64_t walked, V<T> dense,
                Cuts<T>& cuts) const {
        const V<T> one = all<T>(1), high = cuts.high, low = cuts.low;
        V<T> kept{}, kept_size{}, seen{}, seen_size{}, above{}, below{}, at_high{}, at_low{};
        V<T> far{};
        // Two levels of partial sums keep the rounding of long rows small.
        V<T> part{}, seen_part{};
        auto visit = [&](V<T> u, M<T> in_dense) {
            M<T> inside = (u < high) & (u > low);
            part += where<T>(inside, u);
            kept_size += where<T>(inside & in_dense, magnitude<T>(u));
            seen_part += where<T>(in_dense, u);
            seen_size += where<T>(in_dense, magnitude<T>(u));
            above += where<T>(u > high, one);
            below += where<T>(u < low, one);
            at_high += where<T>(u == high, one);
            at_low += where<T>(u == low, one);
        };
        const V<T>* leading = group.leads ? row.leading() : nullptr;
        for (int64_t q = 0; q < group.leads; ++q)
            visit(leading[q], magnitude<T>(load(&group.value[q * L])) <= group.limit);
        for (int64_t j = 0;;) {
            kept += part;
            seen += seen_part;
            part = seen_part = V<T>{};
            if (j == walked) break;
            for (int64_t stop = j + PART < walked ? j + PART : walked; j < stop; ++j) {
                V<T> u = term(row, group, j, finite);
                visit(u, u == u);
            }
        }
        const V<T> leave_high = top ? (T)top - above : V<T>{}, leave_low = bottom ? (T)bottom - below : V<T>{};
        const V<T> tied = stays({at_high, at_low, leave_high, leave_low}, cuts);
        kept += tied;
        kept_size += magnitude<T>(tied);
        // The dense product of a row with an infinite weight is of no use to a sample with a zero there.
        const V<T> sound = all<T>(finite ? Lanes<T>::MAX : T(-1));
        const M<T> whole = magnitude<T>(dense) <= Lanes<T>::MAX;
        auto cancels = [&] { return ~((seen_size <= 5 * kept_size) & (seen_size <= sound) & whole); };
        for (int64_t j = walked; j < d && any(cancels());) {
            part = V<T>{};
            for (int64_t stop = j + PART < d ? j + PART : d; j < stop; ++j) {
                V<T> u = term(row, group, j, finite);
                u = where<T>(u == u, u);
                part += u;
                kept_size += magnitude<T>(u);
            }
            far += part;
        }
        return cancels() ? kept + far + row.bias : dense - seen + kept;
    }

    // 1 + how many of a list's first `removed` entries equal the cut; 0 where no tied term stays, as the next entry
    // shows.
    template <int P> V<T> tied(const V<T>* list, V<T> cut, int64_t removed) const {
        M<T> stays = removed < P ? list[removed] == cut : M<T>{} == 0;
        if (!any(stays)) return V<T>{};
        V<T> count = all<T>(1);
        for (int64_t i = 0; i < removed; ++i) count += where<T>(list[i] == cut, all<T>(1));
        return where<T>(stays, count);
    }

    template <int P>
    bool listed(const Row<T>& row, const Group<T>& group, V<T>& value, Cuts<T>& cuts, int64_t& walked) const {
        Extremes<T, P> found;
        walked = walk<P>(row, group, found);
        cuts.high = top ? found.largest[top - 1] : all<T>(__builtin_inff());
        cuts.low = bottom ? found.smallest[bottom - 1] : all<T>(-__builtin_inff());
        if (group.outlying) return false;
        V<T> removed{}, size{}, spare{};
        for (int i = 0; i < top; ++i) removed += found.largest[i];
        for (int i = 0; i < bottom; ++i) removed += found.smallest[i];
        if (top) size += (T)top * max(magnitude<T>(found.largest[0]), magnitude<T>(cuts.high));
        if (bottom) size += (T)bottom * max(magnitude<T>(found.smallest[0]), magnitude<T>(cuts.low));
        // What the lists hold between the cuts stays, and so does everything after the walk: its size tells whether
        // the subtraction below is safe. A term may stand in both lists, so half of them count.
        auto between = [&](V<T> u) { return where<T>((u < cuts.high) & (u > cuts.low), magnitude<T>(u)); };
        if (walked >= 16 || group.leads >= 16) {
            for (int64_t i = top; i < P; ++i) spare += between(found.largest[i]);
            for (int64_t i = bottom; i < P; ++i) spare += between(found.smallest[i]);
        }
        V<T> kept_size = spare / 2;
        auto unsafe = [&] { return any(~(size <= 4 * kept_size)); };
        if (unsafe()) {
            size = V<T>{};
            for (int i = 0; i < top; ++i) size += magnitude<T>(found.largest[i]);
            for (int i = 0; i < bottom; ++i) size += magnitude<T>(found.smallest[i]);
        }
        for (int64_t j = walked, tried = 0; unsafe(); tried += 8) {
            if (j == d && (tried > 64 || !group.leads)) return false;
            if (group.leads && (tried == 64 || j == d)) {
                const V<T>* leading = row.leading();
                V<T> leads_size{};
                for (int64_t q = 0; q < group.leads; ++q) leads_size += between(leading[q]);
                kept_size += leads_size - spare / 2;
                tried = 64;
            }
            for (int64_t stop = j + 8 < d ? j + 8 : d; j < stop; ++j) {
                V<T> u = row.ranked[j] * load(group.panel + (int64_t)row.order[j] * L);
                kept_size += where<T>(u == u, magnitude<T>(u));
            }
        }
        if (any(~((size <= Lanes<T>::MAX) & (magnitude<T>(value) <= Lanes<T>::MAX)))) return false;
        if (strict) {
            cuts.ties_high = tied<P>(found.largest, cuts.high, top);
            cuts.ties_low = tied<P>(found.smallest, cuts.low, bottom);
        }
        value -= removed;
        return true;
    }

    // What the rows of a tile need of a group's leading terms.
    void lead(const Group<T>& group, const T* by_coordinate, Leading<T, TILE>& leads) const {
        int64_t places = listing();
        if (places <= 4) leads.template start<4>(group, by_coordinate);
        else if (places <= 8) leads.template start<8>(group, by_coordinate);
        else if (places <= 12) leads.template start<12>(group, by_coordinate);
        else if (places <= 16) leads.template start<16>(group, by_coordinate);
        else leads.template start<PLACES>(group, by_coordinate);
    }

    int64_t longest() const { return top > bottom ? top : bottom; }

    // Places that a list should have: where ties count, one more shows that the last removed term has none.
    int64_t listing() const { return longest() + strict; }

    // value: the dense product with bias on entry, the trimmed one on return.
    void row(const Row<T>& row, const Group<T>& group, Tray<T>& tray, V<T>& value, Guess<T>& guess,
             Cuts<T>& cuts) const {
        int64_t walked = 0;
        bool finite = row.bound[0] <= Lanes<T>::MAX;
        int64_t places = listing();
        bool done = false;
        if (finite && longest() <= LISTED) {
            if (places <= 4) done = listed<4>(row, group, value, cuts, walked);
            else if (places <= 8) done = listed<8>(row, group, value, cuts, walked);
            else if (places <= 12) done = listed<12>(row, group, value, cuts, walked);
            else if (places <= 16) done = listed<16>(row, group, value, cuts, walked);
            else done = listed<PLACES>(row, group, value, cuts, walked);
        } else {
            value = counted(row, group, finite, tray, guess, cuts);
            return;
        }
        if (!done) value = finish(row, group, finite, walked, value, cuts);
    }
};

}  // namespace NAME
