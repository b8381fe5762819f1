// What is learnt of a weight or a batch before any product: the order of each row, the limit of each sample.
#pragma once
#include "group.h"

namespace NAME {

template <class T> inline uint32_t high_bits(T v) {
    if (sizeof(T) == 4) {
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        return (bits & 0x7fffffff) >> 17;
    }
    uint64_t bits;
    std::memcpy(&bits, &v, 8);
    return (uint32_t)((bits & 0x7fffffffffffffffull) >> 46);
}

// Orders each row by falling |w|, up to 6 bits of mantissa and 8 octaves: one counting sort. bound holds the exact
// largest |w| from each sixteenth position on, NaN first if the row has a NaN.
template <class T>
void prepare(const T* weight, int64_t rows, int64_t d, int32_t* order, T* ranked, T* bound, int threads) {
    constexpr uint32_t BUCKETS = 512;
    const int64_t blocks = (d + 15) / 16;
#pragma omp parallel num_threads(threads)
    {
        Buffer<uint16_t> bucket;
        bucket.resize(d);
#pragma omp for schedule(static)
        for (int64_t o = 0; o < rows; ++o) {
            const T* w = weight + o * d;
            uint32_t start[BUCKETS + 1] = {0}, most = 0;
            bool undefined = false;
            for (int64_t i = 0; i < d; ++i) {
                uint32_t bits = high_bits(w[i]);
                most = bits > most ? bits : most;
                undefined |= w[i] != w[i];
            }
            for (int64_t i = 0; i < d; ++i) {
                uint32_t below = most - high_bits(w[i]);
                bucket[i] = (uint16_t)(below < BUCKETS ? below : BUCKETS - 1);
            }
            for (int64_t i = 0; i < d; ++i) ++start[bucket[i] + 1];
            for (uint32_t k = 1; k < BUCKETS; ++k) start[k] += start[k - 1];
            int32_t* place = order + o * d;
            T* sorted = ranked + o * d;
            for (int64_t i = 0; i < d; ++i) {
                uint32_t at = start[bucket[i]]++;
                place[at] = (int32_t)i;
                sorted[at] = w[i];
            }
            T largest = 0;
            for (int64_t block = blocks - 1; block >= 0; --block) {
                int64_t stop = block * 16 + 16 < d ? block * 16 + 16 : d;
                for (int64_t j = block * 16; j < stop; ++j) {
                    T a = std::fabs(sorted[j]);
                    largest = a > largest ? a : largest;
                }
                bound[o * blocks + block] = largest;
            }
            if (undefined) bound[o * blocks] = __builtin_nanf("");
        }
    }
}

template <class T> int64_t limits(const T* x, int64_t n, int64_t d, T* limit, int threads) {
    int64_t outlying = 0;
#pragma omp parallel num_threads(threads) reduction(+ : outlying)
    {
        Buffer<T> scratch;
        scratch.resize(d);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < n; ++b) {
            limit[b] = outlying_limit(x + b * d, d, scratch.data);
            for (int64_t i = 0; i < d; ++i) outlying += std::fabs(x[b * d + i]) > limit[b];
        }
    }
    return outlying;
}

}  // namespace NAME
