// The P largest and P smallest of a stream of values in each lane, sixteen values at a time, by sorting networks.
#pragma once
#include "lanes.h"

namespace NAME {

template <class T> inline __attribute__((always_inline)) void order(V<T>& larger, V<T>& smaller) {
    V<T> low = min(larger, smaller);
    larger = max(larger, smaller);
    smaller = low;
}

// Green's network: sixteen values, sixty comparisons, largest first.
template <class T> inline __attribute__((always_inline)) void sort16(V<T>* b) {
#define C(i, j) order<T>(b[i], b[j]);
    C(0, 1) C(2, 3) C(4, 5) C(6, 7) C(8, 9) C(10, 11) C(12, 13) C(14, 15)
    C(0, 2) C(4, 6) C(8, 10) C(12, 14) C(1, 3) C(5, 7) C(9, 11) C(13, 15)
    C(0, 4) C(8, 12) C(1, 5) C(9, 13) C(2, 6) C(10, 14) C(3, 7) C(11, 15)
    C(0, 8) C(1, 9) C(2, 10) C(3, 11) C(4, 12) C(5, 13) C(6, 14) C(7, 15)
    C(5, 10) C(6, 9) C(3, 12) C(13, 14) C(4, 8) C(7, 11) C(1, 2)
    C(1, 4) C(7, 13) C(2, 8) C(11, 14)
    C(2, 4) C(5, 6) C(9, 10) C(11, 13) C(3, 8) C(7, 12)
    C(6, 8) C(10, 12) C(3, 5) C(7, 9)
    C(3, 4) C(5, 6) C(7, 8) C(9, 10) C(11, 12)
    C(6, 7) C(8, 9)
#undef C
}

// Sorts P values that fall and then rise, largest first (FALLING) or smallest first; or that rise and then fall.
template <class T, int P, bool FALLING> inline __attribute__((always_inline)) void merge(V<T>* m) {
    auto sort = [&](int i, int j) __attribute__((always_inline)) {
        if (FALLING) order<T>(m[i], m[j]);
        else order<T>(m[j], m[i]);
    };
    // Four more than a power of two are sorted as twice that power would be, of which the others come first.
    constexpr int more = P == 12 || P == 20 ? 4 : 0;
#pragma GCC unroll 4
    for (int i = 0; i < more; ++i) sort(i, i + P - 4);
#pragma GCC unroll 5
    for (int step = (P - more) / 2; step; step /= 2)
#pragma GCC unroll 20
        for (int i = step > 2 ? more : 0; i < P; ++i)
            if (!((i - more) & step)) sort(i, i + step);
}

template <class T, int P> struct Extremes {
    V<T> largest[P];   // falling
    V<T> smallest[P];  // rising

    void clear() {
        for (int i = 0; i < P; ++i) {
            largest[i] = all<T>(-__builtin_inff());
            smallest[i] = all<T>(__builtin_inff());
        }
    }
    // The first sixteen values.
    inline __attribute__((always_inline)) void start16(V<T>* b) {
        sort16<T>(b);
#pragma GCC unroll 20
        for (int i = 0; i < P; ++i) {
            largest[i] = i < 16 ? b[i] : all<T>(-__builtin_inff());
            smallest[i] = i < 16 ? b[15 - i] : all<T>(__builtin_inff());
        }
    }
    // Sixteen more; a side that none of them can enter may be left alone.
    template <bool UP = true, bool DOWN = true> void absorb16(V<T>* b) {
        sort16<T>(b);
        V<T> m[P];
        if (UP) {
#pragma GCC unroll 20
            for (int i = 0; i < P; ++i) m[i] = P - 1 - i < 16 ? max(largest[i], b[P - 1 - i]) : largest[i];
            merge<T, P, true>(m);
#pragma GCC unroll 20
            for (int i = 0; i < P; ++i) largest[i] = m[i];
        }
        if (DOWN) {
#pragma GCC unroll 20
            for (int i = 0; i < P; ++i) m[i] = P - 1 - i < 16 ? min(smallest[i], b[16 - P + i]) : smallest[i];
            merge<T, P, false>(m);
#pragma GCC unroll 20
            for (int i = 0; i < P; ++i) smallest[i] = m[i];
        }
    }
    void absorb(V<T> value) {
        V<T> up = value, down = value;
        for (int i = 0; i < P; ++i) {
            order<T>(largest[i], up);
            order<T>(down, smallest[i]);
        }
    }
};

}  // namespace NAME
