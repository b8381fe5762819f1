// The cuts of many terms: the top-th largest and the bottom-th smallest of each lane, at a price that does not grow
// with top and bottom.
//
// Passes over the terms' keys count what lies beyond a pivot, until each cut is known to lie in a bracket with few
// terms; the last rows' cuts are the first pivots. The keys in the brackets are copied out and counted on, and at last
// the terms of those still in doubt. `down` stands for the smallest terms: all its values have the other sign.
#pragma once
#include <initializer_list>
#include "group.h"
#include "keys.h"

namespace NAME {

// What is known of one row and one group.
template <class T> struct Cuts {
    V<T> high, low;
    V<T> ties_high, ties_low;  // 0 where every tied term leaves, else 1 + how many do; if the backward pass asks
};

// A row's norm, and how far its cuts lay from the guess in the last group, for weights of norm 1.
template <class T> struct Weights {
    T size, shift_high, shift_low;
};

// What the rows before tell of the next one's cuts, for weights of norm 1: where they lie, how many terms lie in a unit
// about each.
template <class T> struct Guess {
    V<T> high, low, high_density, low_density;
    M<T> zero_high, zero_low;  // the last cut was 0
    bool made;

    // In keys.
    Guess of(const Weights<T>& row, V<T> scale) const {
        const V<T> unit = row.size * scale, density = 1 / unit;
        return {(high + row.shift_high) * unit, (low + row.shift_low) * unit, high_density * density,
                low_density * density,          zero_high,                    zero_low,
                made};
    }
    void learn(const Cuts<T>& cuts, Weights<T>& row) {
        auto mix = [&](V<T>& mean, V<T> cut) {
            V<T> away = cut / row.size - mean;
            away = where<T>(magnitude<T>(away) <= Lanes<T>::MAX, away);
            mean += away / 4;
            return sum<T>(away) / LANES<T>;
        };
        row.shift_high = mix(high, cuts.high);
        row.shift_low = mix(low, cuts.low);
        zero_high = cuts.high == 0;
        zero_low = cuts.low == 0;
    }
};

// The terms of one row and one group among which a cut is sought: the leading ones, then those of the largest weights,
// or of all in their own order. A NaN is no term.
template <class T> struct Terms {
    static constexpr int L = LANES<T>;
    const V<T>* leading;
    int64_t leads;
    const T* weight;       // in the row's order
    const int32_t* order;  // null for their own
    const T* panel;
    bool finite;  // the weights are
    int64_t number = 0;

    V<T> ordered(int64_t j, bool finite) const {
        const V<T> w = all<T>(weight[j]), x = load(panel + (order ? (int64_t)order[j] : j) * L);
        return finite ? w * x : ((w == 0) & (x == x)) | (x == 0) ? V<T>{} : w * x;
    }
    V<T> operator[](int64_t i) const { return i < leads ? leading[i] : ordered(i - leads, finite); }
    // Visits term and chain, 0 or 1: additions of one chain would wait for each other.
    template <class F> void each(F visit) const {
        const int64_t n = number - leads;
        int64_t j = 0;
        for (int64_t q = 0; q < leads; ++q) visit(leading[q], 0);
        for (; finite && j + 2 <= n; j += 2)
            for (int c = 0; c < 2; ++c) visit(ordered(j + c, true), c);
        for (; j < n; ++j) visit(ordered(j, finite), 0);
    }
};

// The k-th largest value of each lane lies in [a, b]. `above_b` values lie above b; `above_a` above a, or at it if a is
// a term.
template <class T> struct Bracket {
    V<T> a, b;
    M<T> above_a, above_b{}, rank;

    Bracket(M<T> number, int64_t k)
        : a(all<T>(-__builtin_inff())), b(k ? -a : a), above_a(number), rank(every<T>(k)) {}

    bool open() const { return any(a < b); }
    // Does a lane hold more than so many keys?
    bool crowded(int few) const { return any((a < b) & (above_a - above_b > few)); }
    // Even though counting could part them? About 0 it could not: many terms may be 0.
    bool wide(int few) const {
        const M<T> zeros = (a >= -APART - 1) & (b <= APART);
        return any((b - a > 1) & (above_a - above_b > few) & ~zeros);
    }

    // Where the k-th largest lies if values are spread evenly, `off` values beyond it. While one end is not known: by
    // the density, `far` values beyond.
    V<T> even(T off, V<T> density, T far) const {
        const V<T> more = real<T>(above_a - rank), less = real<T>(rank - above_b);
        const V<T> at = a + (b - a) * ((more + off) / (more + less));
        return b > Lanes<T>::MAX ? a + (more + far) / density : a < -Lanes<T>::MAX ? b - (less + far) / density : at;
    }
    V<T> inside(V<T> at) const { return ((at >= a) & (at < b)) ? at : midpoint<T>(a, b); }

    void narrow(V<T> at, M<T> above) {
        const M<T> fits = (at >= a) & (at < b);
        set(fits & (above >= rank), fits & (above < rank), at, at, above);
    }
    // next: the least term above the pivot, last: the greatest not above it.
    void close(M<T> above, V<T> next, V<T> last) {
        const M<T> raise = (a < b) & (above >= rank);
        set(raise, (a < b) & (above < rank), next, last, above);
        b = raise & (above == rank) ? a : b;
    }
    // Zeros may be many: a bracket that holds them is parted next to them, and one with an open end grows up to them.
    void part(V<T>* at) const {
        const V<T> before = all<T>(APART), after = all<T>(-APART - 1);
        const M<T> over = b > before, under = a < after, holds = (a < before) & (b > after);
        const M<T> open_a = a < -Lanes<T>::MAX, open_b = b > Lanes<T>::MAX;
        const M<T> grows_down = holds & over & open_a, grows_up = holds & under & open_b;
        for (int c = 0; c < 2; ++c) {
            at[c] = grows_down ? max(at[c], before) : at[c];
            at[c] = grows_up ? min(at[c], after) : at[c];
        }
        at[0] = holds & over & ~(grows_down | grows_up) ? before : at[0];
        at[1] = holds & under & ~(grows_down | grows_up) ? after : at[1];
    }
    // Only so many values above b are looked at from now on.
    void forget(M<T> seen) {
        const M<T> gone = above_b - seen;
        rank -= gone;
        above_a -= gone;
        above_b = seen;
    }
    void drop(M<T> lanes) {
        const V<T> inf = all<T>(__builtin_inff());
        a = lanes ? inf : a;
        b = lanes ? -inf : b;
    }

  private:
    void set(M<T> raise, M<T> lower, V<T> low, V<T> high, M<T> above) {
        a = raise ? low : a;
        above_a = raise ? above : above_a;
        b = lower ? high : b;
        above_b = lower ? above : above_b;
    }
};

// Vectors of keys, and the number of holes among them: these have the least key.
template <class T> struct Pool {
    const Key* keys;
    int64_t vectors;
    M<T> holes;
};

// What a thread finds cuts in, for up to so many terms.
template <class T> struct Tray {
    Buffer<int16_t> keys, weights;
    Buffer<Key> some;
    Buffer<int32_t> place, again;  // where some came from: in keys, and in what an earlier call left of them
    Buffer<V<T>> terms;

    void resize(int64_t most) {
        const int64_t room = (most + 7) / 8 * 8;
        keys.resize((room + 8) * LANES<T>);
        weights.resize(room + 32);
        some.resize(room / PER<T> + 1);
        place.resize(room / PER<T> + 1);
        again.resize(room / PER<T> + 1);
        terms.resize(room);
    }
};

template <class T> struct Select {
    static constexpr int L = LANES<T>;
    static constexpr int FEW = 24, LAST = 6;  // terms of a bracket whose keys, and which themselves, are worth copying
    static constexpr double OFF = 0.8;        // deviations between the guess and the first pivots

    int64_t d, top, bottom;
    Terms<T> terms;
    const Group<T>& group;
    Tray<T>& tray;
    T weight_scale;  // keys to a unit of the weights
    V<T> scale{};    // keys to a unit; 0 where all keys are
    M<T> holes{};

    // Terms tied with a cut, and how many of them leave.
    struct Ties {
        V<T> at_high, at_low, leave_high, leave_low;
    };

    Select(int64_t d, int64_t top, int64_t bottom, Terms<T> terms, T largest, const Group<T>& group, Tray<T>& tray)
        : d(d), top(top), bottom(bottom), terms(terms), group(group), tray(tray) {
        weight_scale = KEYS / largest;
        scale = group.scale * (weight_scale / (KEYS + 1));
        if (any(~((scale >= T(1e-30)) & (scale <= T(1e30))) & (group.scale != 0)) || !(weight_scale <= Lanes<T>::MAX)) {
            weight_scale = 0;
            scale = V<T>{};
        }
        const V<T> most = all<T>(KEYS - 1);  // as far as the other keys go
        for (int64_t q = 0; q < terms.leads; ++q)
            write_keys<T>(&tray.keys[q * L], scale != 0 ? min(max(terms.leading[q] * scale, -most), most) : V<T>{});
        this->terms.number = terms.leads;
    }

    // Takes in the row's order as far as this, or all weights in their own.
    void extend(int64_t wanted, const T* weight) {
        if (wanted == d) {
            terms.weight = weight;
            terms.order = nullptr;
            terms.number = terms.leads;
        }
        const int64_t done = terms.number - terms.leads;
        int16_t *keys = &tray.keys[terms.number * L], *w = tray.weights.data;
        if (weight_scale == 0) {
            std::memset(keys, 0, (wanted - done) * L * sizeof *keys);
        } else {
            int64_t j = done;
            for (; j + L <= wanted; j += L) write_keys<T>(w + j, load(terms.weight + j) * weight_scale);
            if (j < wanted) {
                V<T> rest{};
                std::memcpy(&rest, terms.weight + j, (wanted - j) * sizeof(T));
                write_keys<T>(w + j, rest * weight_scale);
            }
            if (terms.order) multiply_keys<T>(keys, group.keys, terms.order + done, w + done, wanted - done);
            else multiply_keys<T>(keys, group.keys, w, d);
        }
        // The leading terms leave holes where they came from.
        if (!terms.order) {
            holes = every<T>(terms.leads);
            for (int64_t q = 0; q < terms.leads * L; ++q) keys[group.index[q] * (int64_t)L + q % L] = INT16_MIN;
        }
        for (int64_t j = done; terms.order && terms.leads && j < wanted; ++j) {
            const V<T> x = load(terms.panel + (int64_t)terms.order[j] * L);
            holes -= x != x;
            drop_keys<T>(keys + (j - done) * L, x != x);
        }
        terms.number = terms.leads + wanted;
    }

    Ties find(Weights<T>& row, Guess<T>& guess, Cuts<T>& cuts) {
        const V<T> inf = all<T>(__builtin_inff()), zero{};
        const int64_t vectors = (terms.number + PER<T> - 1) / PER<T>, spare = vectors * PER<T> - terms.number;
        for (int64_t i = 0; i < spare; ++i) drop_keys<T>(&tray.keys[(terms.number + i) * L], zero == zero);
        const M<T> number = every<T>(terms.number) - holes;
        const Pool<T> keys{(const Key*)tray.keys.data, vectors, holes + every<T>(spare)};
        Bracket<T> up(number, top), down(number, bottom);
        if (!guess.made) make(row.size, guess);
        const Guess<T> near = guess.of(row, scale);
        start(keys, near, up, down);
        narrow(keys, near, FEW, 3, up, down);
        remember(up, row.size, guess.high_density);
        remember(down, row.size, guess.low_density);

        // Where many terms cannot be parted they are zeros, as a rule: then no other is looked at.
        M<T> positive{}, negative{}, zero_high{}, zero_low{};
        if (up.crowded(FEW) || down.crowded(FEW)) {
            M<T> over[2] = {}, under[2] = {};
            terms.each([&](V<T> v, int c) {
                tally(over[c], v, zero);
                tally(under[c], zero, v);
            });
            positive = over[0] + over[1];
            negative = under[0] + under[1];
            zero_high = (up.rank > positive) & (up.rank <= number - negative) & (up.rank > 0);
            zero_low = (down.rank > negative) & (down.rank <= number - positive) & (down.rank > 0);
            up.drop(zero_high);
            down.drop(zero_low);
        }
        const Pool<T> some = doubt<false>(keys, up, down);
        narrow(some, near, LAST, 1, up, down);
        const int64_t left = doubt<true>(some, up, down).vectors;
        int64_t n = 0;
        for (int64_t i = 0; i < left; ++i)
            for (int64_t j = (int64_t)tray.place[i] * PER<T>, stop = j + PER<T>; j < stop && j < terms.number; ++j)
                tray.terms[n++] = terms[j];
        close(n, up, down);

        cuts.high = top ? zero_high ? zero : up.a : inf;
        cuts.low = bottom ? zero_low ? zero : -down.a : -inf;
        // Every term at a cut is among those left. As many of them leave as the terms beyond the cut do not fill.
        M<T> at_high{}, at_low{}, leave_high = up.rank, leave_low = down.rank;
        for (int64_t i = 0; i < n; ++i) {
            const V<T> v = tray.terms[i];
            leave_high += v > cuts.high;
            leave_low += v < cuts.low;
            at_high -= v == cuts.high;
            at_low -= v == cuts.low;
        }
        // The cut of a side where none leaves is infinite.
        if (!top || !bottom) {
            M<T> most{}, least{};
            terms.each([&](V<T> v, int) {
                most -= v == inf;
                least -= v == -inf;
            });
            at_high = top ? at_high : most;
            at_low = bottom ? at_low : least;
        }
        const M<T> zeros = number - positive - negative;
        at_high = zero_high ? zeros : at_high;
        at_low = zero_low ? zeros : at_low;
        leave_high = zero_high ? every<T>(top) - positive : leave_high;
        leave_low = zero_low ? every<T>(bottom) - negative : leave_low;
        guess.learn(cuts, row);
        return {real<T>(at_high), real<T>(at_low), top ? real<T>(leave_high) : zero,
                bottom ? real<T>(leave_low) : zero};
    }

  private:
    // As if the terms were normal.
    void make(T size, Guess<T>& guess) const {
        V<T> squares{}, spread{};
        terms.each([&](V<T> v, int) { squares += where<T>(magnitude<T>(v) <= Lanes<T>::MAX, v * v); });
        for (int l = 0; l < L; ++l) spread[l] = (T)__builtin_sqrt(squares[l] / (T)d);
        spread = spread / size;
        spread = ((spread > 0) & (spread <= Lanes<T>::MAX)) ? spread : all<T>(1);
        auto quantile = [&](int64_t k) {
            const int64_t less = 2 * k < d ? k : d - k;
            const double t = __builtin_sqrt(-2 * __builtin_log((double)(less < 1 ? 1 : less) / (double)d));
            const double z = t - (2.308 + 0.271 * t) / (1 + 0.992 * t + 0.045 * t * t);
            return (T)(2 * k < d ? z : -z);
        };
        auto density = [&](T z) { return (T)(0.4 * (double)d * __builtin_exp(-(double)z * z / 2)) / spread; };
        const T above = quantile(top), below = quantile(bottom);
        guess = {above * spread, -below * spread, density(above), density(below), M<T>{}, M<T>{}, true};
    }

    // A pivot; none lies so near to 0 that zeros, which may be many, would stay in doubt.
    static V<T> whole(V<T> v) {
        v = (v > -APART - 1) & (v < APART) ? v < 0 ? all<T>(-APART - 1) : all<T>(APART) : v;
        v = min(max(v, all<T>(-KEYS)), all<T>(KEYS - 1));
        return real<T>(__builtin_convertvector(v, M<T>));
    }
    void remember(const Bracket<T>& side, T size, V<T>& density) const {
        const M<T> number = side.above_a - side.above_b;
        const V<T> now = real<T>(number) * scale * size / (side.b - side.a);
        density = (now > 0) & (now <= Lanes<T>::MAX) & (number <= 4 * FEW) ? density + (now - density) / 4 : density;
    }

    // Counts the keys beyond two pivots of each side.
    static void count(const Pool<T>& pool, const V<T>* over, const V<T>* under, Bracket<T>& up, Bracket<T>& down) {
        constexpr int N = 2;
        const Key* keys = pool.keys;
        Key high[N], low[N];
        M<T> above[N] = {}, below[N];
        for (int c = 0; c < N; ++c) {
            high[c] = spread<T>(over[c]);
            low[c] = spread<T>(-under[c]);
            below[c] = -pool.holes;
        }
        for (int64_t i = 0; i < pool.vectors;) {
            Key ups[N] = {}, downs[N] = {};
#pragma GCC unroll 4
            for (const int64_t stop = pool.vectors - i > TALLY ? i + TALLY : pool.vectors; i < stop; ++i)
#pragma GCC unroll 2
                for (int c = 0; c < N; ++c) {
                    ups[c] -= keys[i] > high[c];
                    downs[c] -= low[c] > keys[i];
                }
            for (int c = 0; c < N; ++c) {
                above[c] += total<T>(ups[c]);
                below[c] += total<T>(downs[c]);
            }
        }
        for (int c = 0; c < N; ++c) {
            up.narrow(over[c], above[c]);
            down.narrow(under[c], below[c]);
        }
    }

    // On both sides of the guess, as far off as cuts of random terms are; of 0 where the last cut was.
    void start(const Pool<T>& keys, const Guess<T>& near, Bracket<T>& up, Bracket<T>& down) const {
        V<T> over[2], under[2];
        auto about = [&](int64_t k, V<T> at, V<T> density, M<T> zero, V<T>* pivots) {
            const V<T> off = (T)(OFF * __builtin_sqrt((double)k * (double)(d - k) / (double)d)) / density;
            pivots[0] = whole(zero ? all<T>(APART) : at - off);
            pivots[1] = whole(zero ? all<T>(-APART - 1) : at + off);
        };
        about(top, near.high, near.high_density, near.zero_high, over);
        about(bottom, -near.low, near.low_density, near.zero_low, under);
        count(keys, over, under, up, down);
    }

    // Until few keys are left in each bracket, or a few passes show that they stay.
    static void narrow(const Pool<T>& keys, const Guess<T>& near, int few, T off, Bracket<T>& up, Bracket<T>& down) {
        V<T> over[2], under[2];
        for (int pass = 1; pass < 5 && (up.wide(few) || down.wide(few)); ++pass) {
            for (int c = 0; c < 2; ++c) {
                const T side = c ? off : -off, far = (T)((c ? 4 : 1) << 2 * pass);
                over[c] = whole(up.inside(up.even(side, near.high_density, far)));
                under[c] = whole(down.inside(down.even(side, near.low_density, far)));
            }
            if (pass > 1) {
                up.part(over);
                down.part(under);
            }
            count(keys, over, under, up, down);
        }
    }

    // Copies the keys that may be those of a cut, and where they are from.
    template <bool AGAIN> Pool<T> doubt(const Pool<T>& pool, Bracket<T>& up, Bracket<T>& down) const {
        const Steps a = (Steps)spread<T>(up.a - APART), b = (Steps)spread<T>(max(up.a, up.b) + APART);
        const Steps c = (Steps)spread<T>(-max(down.a, down.b) - APART), e = (Steps)spread<T>(APART - down.a);
        const Window largest{a + 1, b - a}, smallest{c, e - c};
        Key* some = tray.some.data;
        int32_t *place = tray.place.data, *at = AGAIN ? tray.again.data : place;
        int64_t left = 0;
#pragma GCC unroll 4
        for (int64_t i = 0; i < pool.vectors; ++i) {
            at[left] = (int32_t)i;
            left += any_within(pool.keys[i], largest, smallest);
        }
        // How many lie beyond the brackets and are left, and how many holes.
        const Key high = spread<T>(up.b), low = spread<T>(-down.b), least = spread<T>(all<T>(-KEYS));
        M<T> above{}, below{}, holes{};
        for (int64_t i = 0; i < left;) {
            Key ups{}, downs{}, gaps{};
            for (const int64_t stop = left - i > TALLY ? i + TALLY : left; i < stop; ++i) {
                const Key key = pool.keys[at[i]];
                if (AGAIN) place[i] = place[at[i]];
                else some[i] = key;
                ups -= key > high;
                downs -= low > key;
                gaps -= least > key;
            }
            above += total<T>(ups);
            below += total<T>(downs);
            holes += total<T>(gaps);
        }
        up.forget(above);
        down.forget(below - (down.b <= KEYS ? holes : M<T>{}));
        return {some, left, holes};
    }

    // Closes both brackets, on terms.
    void close(int64_t n, Bracket<T>& up, Bracket<T>& down) const {
        const V<T> inf = all<T>(__builtin_inff());
        const V<T>* u = tray.terms.data;
        for (Bracket<T>* side : {&up, &down}) {
            // The last key on a side stands for all terms beyond it.
            side->a = side->a - APART > 1 - KEYS ? (side->a - APART) / scale : -inf;
            side->b = side->b + APART < KEYS - 1 ? (side->b + APART) / scale : side->a < inf ? inf : -inf;
        }
        for (int pass = 0; up.open() || down.open(); ++pass) {
            auto aim = [&](const Bracket<T>& side) {
                return pass % 4 == 3 ? midpoint<T>(side.a, side.b) : side.inside(side.even(0, V<T>{}, 0));
            };
            const V<T> over = aim(up), under = -aim(down);
            M<T> above{}, below{};
            V<T> next_up = inf, last_up = -inf, next_down = -inf, last_down = inf;
            for (int64_t i = 0; i < n; ++i) {  // min and max pass over a NaN in their first argument
                const V<T> v = u[i];
                const M<T> is_over = v > over, is_under = v < under;
                above -= is_over;
                below -= is_under;
                next_up = min(is_over ? v : inf, next_up);
                last_up = max(is_over ? -inf : v, last_up);
                next_down = max(is_under ? v : -inf, next_down);
                last_down = min(is_under ? inf : v, last_down);
            }
            up.close(above, next_up, last_up);
            down.close(below, -next_down, -last_down);
        }
    }
};

}  // namespace NAME
