// What is learnt of a weight or a batch before any product: the order of each row, the limit of each sample.
#pragma once
#include "group.h"

namespace NAME {

// The bits of |v|, which order as the magnitudes do.
template <class T> struct Bits;
template <> struct Bits<float> {
    typedef uint32_t U;
    static constexpr U INFINITE = 0x7f800000u;
    static constexpr int LOW = 17;  // what lies below six bits of mantissa
};
template <> struct Bits<double> {
    typedef uint64_t U;
    static constexpr U INFINITE = 0x7ff0000000000000ull;
    static constexpr int LOW = 46;
};
template <class T> inline typename Bits<T>::U bits_of(T v) {
    typename Bits<T>::U bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits & (typename Bits<T>::U)Lanes<T>::MAGNITUDE;
}

// Orders each row by falling |w|, up to 6 bits of mantissa and 8 octaves: one counting sort. bound holds the exact
// largest |w| from each sixteenth position on, NaN first if the row has a NaN.
template <class T>
void prepare(const T* weight, int64_t rows, int64_t d, int32_t* order, T* ranked, T* bound, int threads) {
    constexpr uint32_t BUCKETS = 512;
    constexpr int L = LANES<T>, LOW = Bits<T>::LOW;
    const int64_t blocks = (d + 15) / 16;
#pragma omp parallel num_threads(threads)
    {
        Buffer<uint16_t> bucket;
        bucket.resize(d);
#pragma omp for schedule(static)
        for (int64_t o = 0; o < rows; ++o) {
            const T* w = weight + o * d;
            typename Bits<T>::U most = 0;
            for (int64_t i = 0; i < d; ++i) most = bits_of(w[i]) > most ? bits_of(w[i]) : most;
            for (int64_t i = 0; i < d; ++i) {
                uint32_t below = (uint32_t)((most >> LOW) - (bits_of(w[i]) >> LOW));
                bucket[i] = (uint16_t)(below < BUCKETS ? below : BUCKETS - 1);
            }
            uint32_t start[BUCKETS + 1] = {0};
            for (int64_t i = 0; i < d; ++i) ++start[bucket[i] + 1];
            for (uint32_t k = 1; k < BUCKETS; ++k) start[k] += start[k - 1];
            int32_t* place = order + o * d;
            T* sorted = ranked + o * d;
            for (int64_t i = 0; i < d; ++i) {
                uint32_t at = start[bucket[i]]++;
                place[at] = (int32_t)i;
                sorted[at] = w[i];
            }
            V<T> far{};  // the largest |w| from here on, over the lanes
            for (int64_t block = blocks - 1; block >= 0; --block) {
                const int64_t stop = block * 16 + 16 < d ? block * 16 + 16 : d;
                int64_t j = block * 16;
                for (; j + L <= stop; j += L) far = max(magnitude<T>(load(sorted + j)), far);
                for (; j < stop; ++j) far[0] = std::fabs(sorted[j]) > far[0] ? std::fabs(sorted[j]) : far[0];
                bound[o * blocks + block] = largest<T>(far);
            }
            if (most > Bits<T>::INFINITE) bound[o * blocks] = __builtin_nanf("");
        }
    }
}

// Each sample's limit; whether any coordinate lies beyond its own.
template <class T> int64_t limits(const T* x, int64_t n, int64_t d, T* limit, int threads) {
    int64_t outlying = 0;
#pragma omp parallel num_threads(threads) reduction(+ : outlying)
    {
        Buffer<T> scratch;
        scratch.resize(d);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < n; ++b) {
            const Limit<T> found(x + b * d, d, scratch.data);
            limit[b] = found.value;
            outlying += found.passed;
        }
    }
    return outlying;
}

}  // namespace NAME
