// The cuts of many terms: the top-th largest and the bottom-th smallest of each lane, at a price that does not grow with
// top and bottom.
//
// Passes over the terms' keys count what lies beyond a pivot, until each cut is known to lie in a bracket with few
// terms; the last row's cuts are the first pivots. The terms in the brackets are copied out, and the cuts found among
// these. `down` stands for the smallest terms: all its values have the other sign.
#pragma once
#include <initializer_list>
#include "keys.h"

namespace NAME {

// What is known of one row and one group.
template <class T> struct Cuts {
    V<T> high, low;
    V<T> ties_high, ties_low;  // 0 where every tied term leaves, else 1 + how many do; if the backward pass asks
    // The cuts are also a guess for the next row, with how many terms lie in a unit about each.
    V<T> high_density, low_density;
    bool guessed;
};

// The k-th largest value of each lane lies in [a, b]. `above_b` values lie above b; `above_a` above a, or at it if a is
// a term.
template <class T> struct Bracket {
    V<T> a, b;
    M<T> above_a, above_b{}, rank;

    Bracket(int64_t number, int64_t k)
        : a(all<T>(-__builtin_inff())), b(k ? -a : a), above_a(every<T>(number)), rank(every<T>(k)) {}

    bool open() const { return any(a < b); }
    // Does a lane hold more than so many values, although counting could part them?
    bool wide(int few) const { return any((b - a > T(Keys<T>::ROUNDED)) & (above_a - above_b > few)); }
    bool crowded(int few) const { return any((a < b) & (above_a - above_b > few)); }

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
    // So many values above b are looked at no more.
    void forget(M<T> gone) {
        rank -= gone;
        above_a -= gone;
        above_b -= gone;
    }

  private:
    void set(M<T> raise, M<T> lower, V<T> low, V<T> high, M<T> above) {
        a = raise ? low : a;
        above_a = raise ? above : above_a;
        b = lower ? high : b;
        above_b = lower ? above : above_b;
    }
};

template <class T> struct Select {
    typedef typename Keys<T>::Key Key;
    static constexpr int L = LANES<T>;
    static constexpr int FEW = 24;  // terms of a bracket that are worth copying

    int64_t d, top, bottom;

    // Terms tied with a cut, and how many of them leave.
    struct Ties {
        V<T> at_high, at_low, leave_high, leave_low;
    };

    // u: n terms, an even number, with room for 4.5 times as many. A NaN is no term; holes: others than the last may be
    // one.  infinite: some terms may be.
    Ties find(V<T>* u, int64_t n, bool holes, bool infinite, Cuts<T>& cuts) const {
        if (!cuts.guessed) guess(u, n, cuts);
        const V<T> scale = scale_of(cuts), inf = all<T>(__builtin_inff()), zero{};
        Key* keys = (Key*)(u + n);
        M<T> undefined{};
        for (int64_t i = 0; i < n; i += 2) {
            keys[i / 2] = Keys<T>::pack(u[i], u[i + 1], scale);
            if (holes) undefined -= (u[i] != u[i]) + (u[i + 1] != u[i + 1]);
        }
        if (!holes) undefined -= u[n - 1] != u[n - 1];
        const M<T> number = every<T>(n) - undefined;
        Bracket<T> up(n, top), down(n, bottom);
        start(keys, n / 2, undefined, cuts, scale, up, down);
        narrow(keys, n / 2, undefined, FEW, 3, cuts, scale, up, down);
        remember(up, scale, cuts.high_density);
        remember(down, scale, cuts.low_density);

        // Where many terms cannot be parted they are zeros, as a rule: then no other is looked at.
        M<T> positive{}, negative{}, zero_high{}, zero_low{};
        if (up.crowded(FEW) || down.crowded(FEW)) {
            for (int64_t i = 0; i < n; ++i) {
                tally(positive, u[i], zero);
                tally(negative, zero, u[i]);
            }
            zero_high = (up.rank > positive) & (up.rank <= number - negative) & (up.rank > 0);
            zero_low = (down.rank > negative) & (down.rank <= number - positive) & (down.rank > 0);
            up.a = zero_high ? inf : up.a;
            up.b = zero_high ? -inf : up.b;
            down.a = zero_low ? inf : down.a;
            down.b = zero_low ? -inf : down.b;
        }

        V<T>* some = u + 2 * n;
        Key* some_keys = (Key*)(u + 3 * n);
        int32_t* found = (int32_t*)(u + 4 * n);
        int64_t left = copy(u, keys, n / 2, found, up, down, some, some_keys, undefined);
        if (Keys<T>::ROUNDED && left > 16) {
            narrow(some_keys, left, undefined, 3, 1, cuts, scale, up, down);
            left = copy(some, some_keys, left, found, up, down, some, some_keys, undefined);
        }
        left = terms_of(some, 2 * left, scale, up, down);
        close(some, left, up, down);

        cuts.high = top ? zero_high ? zero : up.a : inf;
        cuts.low = bottom ? zero_low ? zero : -down.a : -inf;
        // Every term at a cut is among those left. As many of them leave as the terms beyond the cut do not fill.
        M<T> at_high{}, at_low{}, leave_high = up.rank, leave_low = down.rank;
        for (int64_t i = 0; i < left; ++i) {
            leave_high += some[i] > cuts.high;
            leave_low += some[i] < cuts.low;
            if (top) at_high -= some[i] == cuts.high;
            if (bottom) at_low -= some[i] == cuts.low;
        }
        // The cut of a side where none leaves is infinite.
        for (int64_t i = 0; infinite && i < n; ++i) {
            if (!top) at_high -= u[i] == inf;
            if (!bottom) at_low -= u[i] == -inf;
        }
        const M<T> zeros = number - positive - negative;
        at_high = zero_high ? zeros : at_high;
        at_low = zero_low ? zeros : at_low;
        leave_high = zero_high ? every<T>(top) - positive : leave_high;
        leave_low = zero_low ? every<T>(bottom) - negative : leave_low;
        return {real<T>(at_high), real<T>(at_low), top ? real<T>(leave_high) : zero, bottom ? real<T>(leave_low) : zero};
    }

  private:
    // As if the terms were normal.
    void guess(const V<T>* u, int64_t n, Cuts<T>& cuts) const {
        V<T> squares{}, spread{};
        for (int64_t i = 0; i < n; ++i) squares += where<T>(magnitude<T>(u[i]) <= Lanes<T>::MAX, u[i] * u[i]);
        for (int l = 0; l < L; ++l) spread[l] = (T)__builtin_sqrt(squares[l] / (T)d);
        spread = ((spread > 0) & (spread <= Lanes<T>::MAX)) ? spread : all<T>(1);
        auto quantile = [&](int64_t k) {
            const int64_t less = 2 * k < d ? k : d - k;
            const double t = __builtin_sqrt(-2 * __builtin_log((double)(less < 1 ? 1 : less) / (double)d));
            const double z = t - (2.308 + 0.271 * t) / (1 + 0.992 * t + 0.045 * t * t);
            return (T)(2 * k < d ? z : -z);
        };
        auto density = [&](T z) { return (T)(0.4 * (double)d * __builtin_exp(-(double)z * z / 2)) / spread; };
        const T above = quantile(top), below = quantile(bottom);
        cuts.high = above * spread;
        cuts.low = -below * spread;
        cuts.high_density = density(above);
        cuts.low_density = density(below);
        cuts.guessed = true;
    }

    // Keys to a unit: about 64 between neighbours at a cut, and both cuts in range.
    V<T> scale_of(const Cuts<T>& cuts) const {
        if (!Keys<T>::ROUNDED) return all<T>(1);
        const V<T> none{};
        const V<T> dense = max(top ? cuts.high_density : none, bottom ? cuts.low_density : none);
        const V<T> far = max(top ? magnitude<T>(cuts.high) : none, bottom ? magnitude<T>(cuts.low) : none);
        const V<T> scale = min(64 * dense, T(16000) / far);
        return ((scale > 0) & (scale <= T(1e30))) ? scale : all<T>(1);
    }
    static V<T> whole(V<T> v) {
        if (!Keys<T>::ROUNDED) return v;
        v = min(max(v, all<T>(-32767)), all<T>(32766));
        return real<T>(__builtin_convertvector(v, M<T>));
    }
    static void remember(const Bracket<T>& side, V<T> scale, V<T>& density) {
        const M<T> number = side.above_a - side.above_b;
        const V<T> now = real<T>(number) * scale / (side.b - side.a);
        density = (now > 0) & (now <= Lanes<T>::MAX) & (number <= 4 * FEW) ? now : density;
    }

    // The end of what a tally can count from i on.
    static int64_t stretch(int64_t i, int64_t pairs) {
        return pairs - i > Keys<T>::PAIRS ? i + Keys<T>::PAIRS : pairs;
    }

    // Counts the keys beyond N pivots of each side.
    template <int N>
    static void count(const Key* keys, int64_t pairs, M<T> undefined, const V<T>* over, const V<T>* under, Bracket<T>& up,
                      Bracket<T>& down, M<T>* above, M<T>* below) {
        typename Keys<T>::Pivot high[N], low[N];
        for (int c = 0; c < N; ++c) {
            high[c] = Keys<T>::pivot(over[c]);
            low[c] = Keys<T>::pivot(-under[c]);
            above[c] = below[c] = M<T>{};
        }
        for (int64_t i = 0; i < pairs;) {
            typename Keys<T>::Tally ups[N] = {}, downs[N] = {};
            for (const int64_t stop = stretch(i, pairs); i < stop; ++i)
#pragma GCC unroll 2
                for (int c = 0; c < N; ++c) {
                    Keys<T>::above(ups[c], keys[i], high[c]);
                    Keys<T>::below(downs[c], keys[i], low[c]);
                }
            for (int c = 0; c < N; ++c) {
                above[c] += Keys<T>::total(ups[c]);
                below[c] += Keys<T>::total(downs[c]);
            }
        }
        for (int c = 0; c < N; ++c) {
            if (Keys<T>::ROUNDED) below[c] -= undefined;
            up.narrow(over[c], above[c]);
            down.narrow(under[c], below[c]);
        }
    }

    // At the last row's cuts, then on both sides of where that count points.
    static void start(const Key* keys, int64_t pairs, M<T> undefined, const Cuts<T>& last, V<T> scale, Bracket<T>& up,
                      Bracket<T>& down) {
        M<T> above[2], below[2];
        V<T> over[2] = {whole(last.high * scale)}, under[2] = {whole(-last.low * scale)};
        const V<T> first_over = over[0], first_under = under[0];
        const M<T> zero_high = last.high == 0, zero_low = last.low == 0;
        if (any(zero_high | zero_low)) {
            // A cut at 0 is likely to come again: the first pivots enclose it.
            const V<T> below_zero = all<T>(Keys<T>::ROUNDED ? T(-1) : -Lanes<T>::LEAST);
            over[1] = zero_high ? below_zero : over[0];
            under[1] = zero_low ? below_zero : under[0];
            count<2>(keys, pairs, undefined, over, under, up, down, above, below);
        } else {
            count<1>(keys, pairs, undefined, over, under, up, down, above, below);
        }
        if (!up.wide(FEW) && !down.wide(FEW)) return;
        auto about = [](V<T> first, M<T> beyond, V<T> density, V<T>* at) {
            const V<T> shift = real<T>(beyond) / density, width = magnitude<T>(shift) / 4 + 4 / density;
            at[0] = whole(first + shift - width);
            at[1] = whole(first + shift + width);
        };
        about(first_over, above[0] - up.rank, last.high_density / scale, over);
        about(first_under, below[0] - down.rank, last.low_density / scale, under);
        count<2>(keys, pairs, undefined, over, under, up, down, above, below);
    }

    // Until few keys are left in each bracket, or a few passes show that they stay.
    static void narrow(const Key* keys, int64_t pairs, M<T> undefined, int few, T off, const Cuts<T>& last, V<T> scale,
                       Bracket<T>& up, Bracket<T>& down) {
        M<T> above[2], below[2];
        V<T> over[2], under[2];
        for (int pass = 1; pass < 5 && (up.wide(few) || down.wide(few)); ++pass) {
            for (int c = 0; c < 2; ++c) {
                const T side = c ? off : -off, far = (T)((c ? 8 : 2) << pass);
                over[c] = whole(up.inside(up.even(side, last.high_density / scale, far)));
                under[c] = whole(down.inside(down.even(side, last.low_density / scale, far)));
            }
            over[0] = (up.a < 0) & (up.b > 0) ? V<T>{} : over[0];  // many terms may be 0
            under[0] = (down.a < 0) & (down.b > 0) ? V<T>{} : under[0];
            count<2>(keys, pairs, undefined, over, under, up, down, above, below);
        }
    }

    // Copies the pairs with a key inside a bracket, in place if asked. Returns their number; undefined: the NaN in them.
    static int64_t copy(const V<T>* u, const Key* keys, int64_t pairs, int32_t* found, Bracket<T>& up, Bracket<T>& down,
                        V<T>* out, Key* out_keys, M<T>& undefined) {
        typedef typename Keys<T>::Pivot Pivot;
        const T step = Keys<T>::ROUNDED;  // the key that is sought lies above a
        const Pivot a = Keys<T>::pivot(up.a + step), b = Keys<T>::pivot(up.b);
        const Pivot c = Keys<T>::pivot(-down.b), e = Keys<T>::pivot(-down.a - step);
        int64_t left = 0;
        for (int64_t i = 0; i < pairs; ++i) {
            found[left] = (int32_t)i;
            left += Keys<T>::within(keys[i], a, b, c, e);
        }
        M<T> over{}, here{};
        undefined = M<T>{};
        for (int64_t i = 0; i < left;) {
            typename Keys<T>::Tally above{}, below{};
            for (const int64_t stop = stretch(i, left); i < stop; ++i) {
                const V<T> first = u[2 * found[i]], second = u[2 * found[i] + 1];
                const Key key = keys[found[i]];
                Keys<T>::above(above, key, b);
                Keys<T>::below(below, key, c);
                undefined -= (first != first) + (second != second);
                out[2 * i] = first;
                out[2 * i + 1] = second;
                out_keys[i] = key;
            }
            over += Keys<T>::total(above);
            here += Keys<T>::total(below);
        }
        if (Keys<T>::ROUNDED) here -= undefined & (down.b <= Lanes<T>::MAX);  // a NaN lies below every pivot but this
        up.forget(up.above_b - over);
        down.forget(down.above_b - here);
        return left;
    }

    // Turns brackets of keys into brackets of terms, and keeps the vectors with a term inside one.
    static int64_t terms_of(V<T>* u, int64_t n, V<T> scale, Bracket<T>& up, Bracket<T>& down) {
        if (Keys<T>::ROUNDED)
            for (Bracket<T>* side : {&up, &down}) {
                side->a = side->a / scale;
                side->b = (side->b + 1) / scale;
            }
        const V<T> a = up.a, b = up.b, c = -down.b, e = -down.a;
        M<T> gone_above{}, gone_below{};
        int64_t left = 0;
        for (int64_t i = 0; i < n; ++i) {
            const V<T> v = u[i];
            if (any(((v >= a) & (v <= b)) | ((v >= c) & (v <= e)))) {
                u[left++] = v;
            } else {
                tally(gone_above, v, b);
                tally(gone_below, c, v);
            }
        }
        up.forget(gone_above);
        down.forget(gone_below);
        return left;
    }

    // Closes both brackets, on terms.
    static void close(const V<T>* u, int64_t n, Bracket<T>& up, Bracket<T>& down) {
        const V<T> inf = all<T>(__builtin_inff());
        for (int pass = 0; up.open() || down.open(); ++pass) {
            auto aim = [&](const Bracket<T>& side) {
                return pass % 4 == 3 ? midpoint<T>(side.a, side.b) : side.inside(side.even(0, V<T>{}, 0));
            };
            const V<T> over = aim(up), under = -aim(down);
            M<T> above{}, below{};
            V<T> next_up = inf, last_up = -inf, next_down = inf, last_down = -inf;
            for (int64_t i = 0; i < n; ++i) {
                const V<T> v = u[i];
                const M<T> is_over = v > over, is_under = v < under;
                above -= is_over;
                below -= is_under;
                next_up = min(is_over ? v : inf, next_up);
                last_up = max(v <= over ? v : -inf, last_up);
                next_down = min(is_under ? -v : inf, next_down);
                last_down = max(v >= under ? -v : -inf, last_down);
            }
            up.close(above, next_up, last_up);
            down.close(below, next_down, last_down);
        }
    }
};

}  // namespace NAME
