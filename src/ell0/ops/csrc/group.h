// A group of samples laid out for the lanes, with the coordinates that must not go by the shared order set apart.
#pragma once
#include <cmath>
#include <cstdlib>
#include "keys.h"
#include "network.h"

namespace NAME {

// std::vector without its inline functions: those would be shared with code built for another instruction set.
template <class T> struct Buffer {
    T* data = nullptr;
    void resize(size_t n) {
        std::free(data);
        data = n ? static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64)) : nullptr;
    }
    T& operator[](size_t i) const { return data[i]; }
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data); }
};

// TILE rows by coordinate: out[i * TILE + r] = rows[r * d + i], zero for rows beyond count.
template <int TILE, class T> void turn(const T* rows, int count, int64_t d, T* out) {
    constexpr int L = LANES<T>;
    for (int64_t r0 = 0; r0 < TILE; r0 += L) {
        int64_t i = 0;
        for (; i + L <= d && r0 + L <= count; i += L) {
            V<T> v[L];
            for (int r = 0; r < L; ++r) v[r] = load(rows + (r0 + r) * d + i);
            transpose<T>(v);
            for (int c = 0; c < L; ++c) store(out + (i + c) * TILE + r0, v[c]);
        }
        for (; i < d; ++i)
            for (int64_t r = r0; r < r0 + L; ++r) out[i * TILE + r] = r < count ? rows[r * d + i] : T(0);
    }
}

// The n-th largest of v[0..size), by quickselect; reorders v.
template <class T> T nth_largest(T* v, int64_t size, int64_t n) {
    int64_t left = 0, right = size - 1;
    while (left < right) {
        T pivot = v[left + (right - left) / 2];
        int64_t i = left, j = right;
        while (i <= j) {
            while (v[i] > pivot) ++i;
            while (v[j] < pivot) --j;
            if (i <= j) {
                T t = v[i];
                v[i++] = v[j];
                v[j--] = t;
            }
        }
        if (n <= j) right = j;
        else if (n >= i) left = i;
        else break;
    }
    return v[n];
}

// Coordinates with |x| beyond the limit are outlying: they stay out of the dense product. NaN if the sample has one.
// At most OUTLYING finite coordinates can be: the limit is 8 times the magnitude that follows them.
constexpr int64_t OUTLYING = 64;
template <class T> struct Limit {
    T value;
    bool passed;  // some coordinate is outlying

    Limit(const T* x, int64_t d, T* scratch) {
        constexpr int L = LANES<T>;
        const V<T> most = all<T>(Lanes<T>::MAX);
        auto each = [&](auto visit) {
            int64_t i = 0;
            for (; i + L <= d; i += L) visit(magnitude<T>(load(x + i)));
            V<T> rest{};
            std::memcpy(&rest, x + i, (d - i) * sizeof(T));
            visit(magnitude<T>(rest));
        };
        V<T> highest{}, near{};
        M<T> undefined{}, infinite{};
        each([&](V<T> a) {
            undefined |= a != a;
            infinite |= a > most;
            highest = max(where<T>(a <= most, a), highest);
        });
        passed = any(infinite);
        value = any(undefined) ? T(__builtin_nanf("")) : Lanes<T>::MAX;
        const T peak = largest<T>(highest);
        each([&](V<T> a) { near += where<T>((a > peak / 8) & (a <= most), all<T>(1)); });
        if (any(undefined) || sum<T>(near) > OUTLYING || peak == 0) return;
        int64_t nonzero = 0;
        for (int64_t i = 0; i < d; ++i) {
            T a = std::fabs(x[i]);
            if (a != 0 && a <= Lanes<T>::MAX) scratch[nonzero++] = a;
        }
        int64_t n = nonzero / 2 < OUTLYING ? nonzero / 2 : OUTLYING;
        T limit = 8 * nth_largest(scratch, nonzero, n);
        if (limit < value) value = limit;
        passed |= peak > value;
    }
};

// Rounds of sixteen leading terms a lane may ask for when its largest coordinates stand out.
constexpr int64_t LEAD = 144;

template <class T> struct Group {
    static constexpr int L = LANES<T>;
    const T* panel;           // (d, L); NaN at a lane's leading coordinates
    const int16_t* keys;      // (d, L): the panel times scale, rounded, if it was asked for
    V<T> scale{};             // 0 where all keys are
    int64_t leads = 0;        // leading coordinates of each lane: the ones with the largest |x|
    Buffer<int32_t> index;    // (leads, L)
    Buffer<T> value;          // (leads, L)
    bool outlying = false;    // some lane has a coordinate beyond its limit
    V<T> limit, reach, span;  // outlying beyond it; largest |x| that does not lead; largest |x| not outlying
    M<T> undefined;           // the sample holds a NaN

    // Copies samples first .. first + L of x (n, d) into the panel. `least`: leads that the walk needs at least.
    void pack(const T* x, const T* limits, int64_t n, int64_t d, int64_t first, int64_t least, bool walks, T* out,
              T* scratch) {
        panel = out;
        leads = 0;
        outlying = false;
        const int count = n - first < L ? (int)(n - first) : L;
        turn<L>(x + first * d, count, d, out);
        int some = -1;
        for (int l = 0; l < L; ++l) {
            limit[l] = l < count ? limits[first + l] : __builtin_nanf("");
            if (limit[l] == limit[l]) some = l;
        }
        undefined = limit != limit;
        // A stand-in for an undefined or missing sample: any other one costs no walk of its own.
        if (any(undefined))
            for (int64_t i = 0; i < d; ++i) {
                V<T> v = load(out + i * L);
                store(out + i * L, undefined ? all<T>(some < 0 ? T(0) : v[some]) : v);
            }
        limit = undefined ? all<T>(some < 0 ? Lanes<T>::MAX : limit[some]) : limit;
        V<T> largest{}, beyond{}, near{};
        for (int64_t i = 0; i < d; ++i) {
            V<T> a = magnitude<T>(load(out + i * L));
            M<T> inside = a <= limit;
            beyond += where<T>(~inside, all<T>(1));
            largest = max(where<T>(inside, a), largest);
        }
        for (int64_t i = 0; i < d; ++i)
            near += where<T>(magnitude<T>(load(out + i * L)) > largest * T(0.75), all<T>(1));
        span = reach = largest;
        const bool stands_out = walks && d >= 4 * LEAD && any(near < 48);
        int64_t most = 0;
        for (int l = 0; l < L; ++l) most = beyond[l] > most ? (int64_t)beyond[l] : most;
        outlying = most > 0;
        if (!outlying && !stands_out) return;
        leads = walks ? (most > least ? most : least) : most;
        if (stands_out && leads < LEAD) leads = LEAD;
        leads = walks ? (leads + 15) / 16 * 16 : leads;
        leads = leads < d ? leads : d;
        index.resize(leads * L);
        value.resize(leads * L);
        for (int l = 0; l < L; ++l) lead(l, d, out, scratch);
    }

    void quantize(int64_t d, int16_t* out) {
        keys = out;
        scale = KEYS / reach;
        scale = scale <= Lanes<T>::MAX ? scale : V<T>{};
        for (int64_t i = 0; i < d; ++i) write_keys<T>(out + i * L, load(panel + i * L) * scale);
    }

    // The leading terms of L rows, given their weights by coordinate: out[r * leads + q] for row r.
    void leading_terms(const T* by_coordinate, int64_t stride, V<T>* out) const {
        for (int64_t q = 0; q < leads; ++q) {
            V<T> w[L], x = load(&value[q * L]);
            for (int l = 0; l < L; ++l) w[l] = load(by_coordinate + index[q * L + l] * stride);
            transpose<T>(w);
            for (int r = 0; r < L; ++r) out[r * leads + q] = where<T>((w[r] != 0) & (x != 0), w[r] * x);
        }
    }
    // Their P largest and P smallest, out[r * 2P + i], if none is outlying. Found with rows in the lanes, so that a
    // sample's coordinate is one load, and turned over at the end.
    template <int P> void leading_lists(const T* by_coordinate, int64_t stride, V<T>* out) const {
        V<T> lists[L][2 * P];
        for (int l = 0; l < L; ++l) {
            auto term = [&](int64_t q) {
                return load(by_coordinate + index[q * L + l] * stride) * value[q * L + l];
            };
            Extremes<T, P> found;
            for (int64_t q = 0; q < leads; q += 16) {  // without outlying coordinates leads come by the sixteen
                V<T> b[16];
                for (int r = 0; r < 16; ++r) b[r] = term(q + r);
                if (q) found.absorb16(b);
                else found.start16(b);
            }
            for (int i = 0; i < P; ++i) {
                lists[l][i] = found.largest[i];
                lists[l][P + i] = found.smallest[i];
            }
        }
        for (int i = 0; i < 2 * P; ++i) {
            V<T> v[L];
            for (int l = 0; l < L; ++l) v[l] = lists[l][i];
            transpose<T>(v);
            for (int r = 0; r < L; ++r) out[r * 2 * P + i] = v[r];
        }
    }

  private:
    void lead(int l, int64_t d, T* out, T* scratch) {
        for (int64_t i = 0; i < d; ++i) scratch[i] = std::fabs(out[i * L + l]);
        T last = nth_largest(scratch, d, leads - 1);
        int64_t q = 0, beyond = 0;
        for (int64_t i = 0; i < d; ++i) beyond += std::fabs(out[i * L + l]) > last;
        int64_t ties = leads - beyond;
        T rest = 0;
        for (int64_t i = 0; i < d; ++i) {
            T v = out[i * L + l], a = std::fabs(v);
            bool leads_here = a > last || (a == last && ties > 0);
            ties -= a == last;
            if (leads_here) {
                index[q * L + l] = (int32_t)i;
                value[q++ * L + l] = v;
                out[i * L + l] = __builtin_nanf("");
            } else {
                rest = a > rest ? a : rest;
            }
        }
        reach[l] = rest;
    }
};

// The leading terms of a tile of rows and one group: lists of their extremes, and the terms themselves if asked for.
template <class T, int TILE> struct Leading {
    static constexpr int L = LANES<T>;
    const Group<T>* group = nullptr;
    const T* by_coordinate;
    Buffer<V<T>> buffer, lists;
    bool ready;

    template <int P> void start(const Group<T>& of, const T* weights) {
        group = &of;
        by_coordinate = weights;
        ready = false;
        for (int r = 0; r < TILE && !of.outlying; r += L)
            of.template leading_lists<P>(weights + r, TILE, &lists[r * 2 * P]);
    }
    const V<T>* terms(int row) {
        if (!ready)
            for (int r = 0; r < TILE; r += L)
                group->leading_terms(by_coordinate + r, TILE, &buffer[r * group->leads]);
        ready = true;
        return &buffer[row * group->leads];
    }
};

}  // namespace NAME
