// Gradients through the kept terms, given the cuts and the number of tied terms removed at each.
#pragma once
#include "trim.h"

namespace NAME {

// The cuts of one row and one group of samples, and how many tied terms each lane has still to remove.
template <class T> struct Sieve {
    static constexpr int L = LANES<T>;
    V<T> high, low, grad;
    M<T> left_high, left_low;
    bool simple;   // no term tied with a cut stays: the order of the terms does not matter
    bool at_zero;  // no term but a zero ties with a cut and stays; grad is finite

    Sieve() = default;
    // ties may be null: then no term tied with a cut stays.
    Sieve(const T* cuts, const int32_t* ties, const T* grads, int64_t n, int64_t rows, int64_t row, int64_t first) {
        high = all<T>(__builtin_inff());
        low = -high;
        grad = V<T>{};
        left_high = left_low = M<T>{};
        const int64_t at = row * n + first, other = rows * n;
        const int lanes = n - first < L ? (int)(n - first) : L;
        if (lanes == L) {
            high = load(cuts + at);
            low = load(cuts + other + at);
            grad = load(grads + at);
        } else {
            for (int l = 0; l < lanes; ++l) {
                high[l] = cuts[at + l];
                low[l] = cuts[other + at + l];
                grad[l] = grads[at + l];
            }
        }
        for (int l = 0; ties && l < lanes; ++l) {
            left_high[l] = ties[at + l];
            left_low[l] = ties[other + at + l];
        }
        simple = !any((left_high != 0) | (left_low != 0));
        at_zero = !any(((left_high != 0) & (high != 0)) | ((left_low != 0) & (low != 0)) |
                       ~(magnitude<T>(grad) <= Lanes<T>::MAX));
        left_high = left_high == 0 ? M<T>{} + INT32_MAX : left_high - 1;
        left_low = left_low == 0 ? M<T>{} + INT32_MAX : left_low - 1;
    }
    // Does the term stay? Terms must come by rising index.
    M<T> keeps(V<T> u) {
        M<T> tied_high = (u == high) & (left_high > 0);
        M<T> tied_low = (u == low) & (left_low > 0) & ~tied_high;
        left_high += tied_high;
        left_low += tied_low;
        return ~((u > high) | (u < low) | tied_high | tied_low);
    }
};

template <class T> struct Batch {
    static constexpr int L = LANES<T>;
    int64_t n, d, groups, words;
    Buffer<T> panel;            // (groups, d, L)
    Buffer<T> limit;            // (groups, L)
    Buffer<uint64_t> outlying;  // (groups, words): coordinates beyond the limit in some lane
    Buffer<uint8_t> special;    // (groups): there is one; 2: an infinite one
    Buffer<T> least;            // (groups): the least |x| that is not 0

    Batch(const T* x, const T* limits, int64_t n, int64_t d, int threads)
        : n(n), d(d), groups((n + L - 1) / L), words((d + 63) / 64) {
        panel.resize(groups * d * L);
        limit.resize(groups * L);
        outlying.resize(groups * words);
        special.resize(groups);
        least.resize(groups);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t g = 0; g < groups; ++g) {
            T* out = &panel[g * d * L];
            uint64_t* bits = &outlying[g * words];
            std::memset(bits, 0, words * sizeof *bits);
            special[g] = 0;
            const int count = n - g * L < L ? (int)(n - g * L) : L;
            turn<L>(x + g * L * d, count, d, out);
            for (int l = 0; l < L; ++l) limit[g * L + l] = l < count ? limits[g * L + l] : Lanes<T>::MAX;
            const V<T> lim = load(&limit[g * L]), most = all<T>(Lanes<T>::MAX);
            V<T> low = most;
            for (int64_t i = 0; i < d; ++i) {
                const V<T> a = magnitude<T>(load(out + i * L));
                low = a > 0 ? min(a, low) : low;
                if (!any(a > lim)) continue;
                bits[i / 64] |= uint64_t(1) << (i % 64);
                special[g] = special[g] == 2 || any(a > most) ? 2 : 1;
            }
            least[g] = -largest<T>(-low);
        }
    }
};

// grad (n, rows) turned over: (rows, n), so that a row's samples lie in the lanes.
template <class T> struct Turned {
    static constexpr int L = LANES<T>;
    Buffer<T> data;
    Turned(const T* grad, int64_t n, int64_t rows, int threads) {
        data.resize(n * rows);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t o = 0; o < rows; o += L)
            for (int64_t b = 0; b < n; b += L) {
                if (o + L <= rows && b + L <= n) {
                    V<T> v[L];
                    for (int l = 0; l < L; ++l) v[l] = load(grad + (b + l) * rows + o);
                    transpose<T>(v);
                    for (int l = 0; l < L; ++l) store(&data[(o + l) * n + b], v[l]);
                } else {
                    for (int64_t r = o; r < rows && r < o + L; ++r)
                        for (int64_t c = b; c < n && c < b + L; ++c) data[r * n + c] = grad[c * rows + r];
                }
            }
    }
};

template <class T> inline V<T> term_of(T w, V<T> x, bool plain) {
    return plain ? w * x : Trim<T>::safe_product(all<T>(w), x);
}

// The walked positions of one row, by rising index, and what their kept terms add up to.
template <class T> struct Prefix {
    static constexpr int L = LANES<T>;
    const T* w;
    T* out;
    int64_t count = 0;
    bool finite = true;
    T least;  // |w|
    Buffer<uint64_t> bits;
    Buffer<int32_t> place;
    Buffer<V<T>> total, part;  // part: since the last flush, so that long sums round little

    void start(const T* weight, T* grad_weight, const int32_t* order, int64_t walked, int64_t words) {
        w = weight;
        out = grad_weight;
        count = 0;
        finite = true;
        std::memset(bits.data, 0, words * sizeof(uint64_t));
        for (int64_t j = 0; j < walked; ++j) bits[order[j] / 64] |= uint64_t(1) << (order[j] % 64);
        for (int64_t word = 0; word < words; ++word)
            for (uint64_t left = bits[word]; left; left &= left - 1)
                place[count++] = (int32_t)(word * 64 + __builtin_ctzll(left));
        least = Lanes<T>::MAX;
        for (int64_t t = 0; t < count; ++t) {
            const T a = std::fabs(w[place[t]]);
            finite &= a <= Lanes<T>::MAX;
            least = a < least ? a : least;
        }
        std::memset((void*)total.data, 0, count * sizeof(V<T>));
        std::memset((void*)part.data, 0, count * sizeof(V<T>));
    }
    void flush() {
        for (int64_t t = 0; t < count; ++t) {
            total[t] += part[t];
            part[t] = V<T>{};
        }
    }
    // Whether terms may be added in any order. A zero that ties with a cut has no share if its x is 0.
    bool easy(const Batch<T>& batch, int64_t g, const Sieve<T>& sieve) const {
        const bool no_share = !batch.special[g] && sieve.at_zero && least * batch.least[g] >= Lanes<T>::LEAST;
        return finite && batch.special[g] < 2 && (sieve.simple || no_share);
    }
    // Of N groups.
    template <int N> void add_easily(const Batch<T>& batch, int64_t g, const Sieve<T>* sieve) {
        const T* panel = &batch.panel[g * batch.d * L];
        for (int64_t t = 0; t < count; ++t) {
            V<T> sum = part[t];
#pragma GCC unroll 4
            for (int r = 0; r < N; ++r) {
                const V<T> v = load(panel + (r * batch.d + place[t]) * L);
                add_between(sum, v, sieve[r].grad, w[place[t]] * v, sieve[r].low, sieve[r].high);
            }
            part[t] = sum;
        }
    }
    // What is left of a group: its outlying coordinates, which are not in the dense product, so that their kept terms
    // are added wherever they lie, and if its order matters the walked ones too.
    void add(const Batch<T>& batch, int64_t g, Sieve<T> sieve, bool done) {
        if (done && !batch.special[g]) return;
        const T* panel = &batch.panel[g * batch.d * L];
        const bool plain = finite && batch.special[g] < 2;
        const uint64_t* outlying = &batch.outlying[g * batch.words];
        V<T> limit = load(&batch.limit[g * L]);
        int64_t t = 0;
        for (int64_t word = 0; word < batch.words; ++word)
            for (uint64_t left = done ? outlying[word] & ~bits[word] : bits[word] | outlying[word]; left;
                 left &= left - 1) {
                int bit = __builtin_ctzll(left);
                int64_t i = word * 64 + bit;
                V<T> v = load(panel + i * L);
                V<T> share = where<T>(sieve.keeps(term_of(w[i], v, plain)), sieve.grad * v);
                if (bits[word] >> bit & 1) part[t++] += share;
                else out[i] += sum<T>(where<T>(magnitude<T>(v) > limit, share));
            }
    }
    void finish() {
        flush();
        for (int64_t t = 0; t < count; t += L) {
            V<T> v[L] = {}, sums{};
            const int many = count - t < L ? (int)(count - t) : L;
            for (int l = 0; l < many; ++l) v[l] = total[t + l];
            transpose<T>(v);
            for (int l = 0; l < L; ++l) sums += v[l];
            for (int l = 0; l < many; ++l) out[place[t + l]] = sums[l];
        }
    }
};

// grad_weight (rows, d) holds the dense product of grad and x without its outlying coordinates. A position that no
// sample walked keeps that value; a walked one is added up from its kept terms alone.
template <class T>
void weight_gradient(const T* grad, const T* x, const T* weight, const int32_t* order, const int32_t* walked,
                     const T* cuts, const int32_t* ties, const T* limits, int64_t n, int64_t rows, int64_t d,
                     T* grad_weight, int threads) {
    constexpr int L = LANES<T>;
    constexpr int TILE = 8;      // rows that share a pass over the panels
    constexpr int TOGETHER = 4;  // groups that share a pass over a row
    Batch<T> batch(x, limits, n, d, threads);
    Turned<T> turned(grad, n, rows, threads);
    const T* grads = turned.data.data;
#pragma omp parallel num_threads(threads)
    {
        Prefix<T> prefix[TILE];
        for (Prefix<T>& row : prefix) {
            row.bits.resize(batch.words);
            row.place.resize(d);
            row.total.resize(d);
            row.part.resize(d);
        }
#pragma omp for schedule(dynamic)
        for (int64_t o0 = 0; o0 < rows; o0 += TILE) {
            const int64_t stop = o0 + TILE < rows ? o0 + TILE : rows;
            for (int64_t o = o0; o < stop; ++o)
                prefix[o - o0].start(weight + o * d, grad_weight + o * d, order + o * d, depth_of(walked[o]),
                                     batch.words);
            for (int64_t g = 0; g < batch.groups; g += TOGETHER)
                for (int64_t o = o0; o < stop; ++o) {
                    Prefix<T>& row = prefix[o - o0];
                    Sieve<T> sieve[TOGETHER];
                    const int many = batch.groups - g < TOGETHER ? (int)(batch.groups - g) : TOGETHER;
                    bool easy[TOGETHER], all = many == TOGETHER;
                    for (int r = 0; r < many; ++r) {
                        sieve[r] = Sieve<T>(cuts, walked[o] < 0 ? ties : nullptr, grads, n, rows, o, (g + r) * L);
                        easy[r] = row.easy(batch, g + r, sieve[r]);
                        all &= easy[r];
                    }
                    if (all) row.template add_easily<TOGETHER>(batch, g, sieve);
                    for (int r = 0; r < many; ++r) {
                        if (easy[r] && !all) row.template add_easily<1>(batch, g + r, &sieve[r]);
                        row.add(batch, g + r, sieve[r], easy[r]);
                    }
                    if ((g + TOGETHER) % PART == 0) row.flush();
                }
            for (int64_t o = o0; o < stop; ++o) prefix[o - o0].finish();
        }
    }
}

// grad_x (n, d): every kept term added up, none subtracted.
template <class T>
void input_gradient(const T* grad, const T* x, const T* weight, const int32_t* walked, const T* cuts,
                    const int32_t* ties, const T* limits, int64_t n, int64_t rows, int64_t d, T* grad_x, int threads) {
    constexpr int L = LANES<T>, TOGETHER = 4;  // rows that share a pass over the panel
    Batch<T> batch(x, limits, n, d, threads);
    Turned<T> turned(grad, n, rows, threads);
    const T* grads = turned.data.data;
    int64_t shares = batch.groups >= threads ? 1 : (threads + batch.groups - 1) / batch.groups;
    Buffer<V<T>> totals;
    totals.resize(batch.groups * shares * 2 * d);
    Buffer<uint8_t> finite;
    finite.resize(rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < rows; ++o) {
        int64_t infinite = 0;
        for (int64_t i = 0; i < d; ++i) infinite += std::fabs(weight[o * d + i]) > Lanes<T>::MAX;
        finite[o] = infinite == 0;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2)
    for (int64_t g = 0; g < batch.groups; ++g)
        for (int64_t s = 0; s < shares; ++s) {
            V<T>* sum = &totals[(g * shares + s) * 2 * d];
            V<T>* total = sum + d;  // since the last flush, so that long sums round little
            std::memset((void*)sum, 0, 2 * d * sizeof(V<T>));
            auto flush = [&] {
                for (int64_t i = 0; i < d; ++i) {
                    sum[i] += total[i];
                    total[i] = V<T>{};
                }
            };
            const T* panel = &batch.panel[g * d * L];
            const int64_t stop = rows * (s + 1) / shares;
            int64_t since = 0;
            for (int64_t o = rows * s / shares; o < stop;) {
                if ((since += TOGETHER) > PART) flush();
                if (since > PART) since = TOGETHER;
                const T* w = weight + o * d;
                Sieve<T> sieve[TOGETHER];
                const bool whole = o + TOGETHER <= stop;
                bool simple = whole, plain = whole && batch.special[g] < 2;
                for (int r = 0; r < TOGETHER && o + r < stop; ++r) {
                    sieve[r] = Sieve<T>(cuts, walked[o + r] < 0 ? ties : nullptr, grads, n, rows, o + r, g * L);
                    simple &= sieve[r].simple && finite[o + r] && (batch.special[g] < 2 || sieve[r].at_zero);
                    plain &= finite[o + r] != 0;
                }
                // Here 0 times infinity may be a NaN, which is not kept: its share is 0, as grad is finite.
                for (int64_t i = 0; simple && i < d; ++i) {
                    const V<T> x = load(panel + i * L);
                    V<T> sum = total[i];
#pragma GCC unroll 4
                    for (int r = 0; r < TOGETHER; ++r) {
                        const V<T> v = all<T>(w[r * d + i]);
                        add_between(sum, v, sieve[r].grad, v * x, sieve[r].low, sieve[r].high);
                    }
                    total[i] = sum;
                }
                // Two rows at a time: their cuts and ties fit into the registers.
                for (int r = 0; !simple && plain && r < TOGETHER; r += 2) {
                    Sieve<T> one = sieve[r], other = sieve[r + 1];
                    const T *v = w + r * d, *u = v + d;
                    for (int64_t i = 0; i < d; ++i) {
                        const V<T> x = load(panel + i * L);
                        const V<T> sum = total[i] + where<T>(one.keeps(v[i] * x), one.grad * v[i]);
                        total[i] = sum + where<T>(other.keeps(u[i] * x), other.grad * u[i]);
                    }
                }
                for (int r = 0; r < TOGETHER && o < stop; ++r, ++o, w += d)
                    for (int64_t i = 0; !simple && !plain && i < d; ++i) {
                        M<T> keeps = sieve[r].keeps(term_of(w[i], load(panel + i * L), false));
                        total[i] += where<T>(keeps, sieve[r].grad * w[i]);
                    }
            }
            flush();
        }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t g = 0; g < batch.groups; ++g)
        for (int64_t i = 0; i < d; ++i) {
            V<T> total = totals[g * shares * 2 * d + i];
            for (int64_t s = 1; s < shares; ++s) total += totals[(g * shares + s) * 2 * d + i];
            for (int l = 0; l < L && g * L + l < n; ++l) grad_x[(g * L + l) * d + i] = total[l];
        }
}

}  // namespace NAME
