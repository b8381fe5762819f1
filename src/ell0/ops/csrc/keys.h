// Terms as small integers, which are cheaper to compare: with |x| and |w| at most 32767 in units of their own, rounded,
// a term's key is x w / 32768, rounded again.
#pragma once
#include "lanes.h"

namespace NAME {

constexpr int KEY_BYTES = WIDTH < 32 ? WIDTH : 32;
typedef int16_t Key __attribute__((vector_size(KEY_BYTES)));  // of one coordinate, or of PER of them
typedef uint16_t Steps __attribute__((vector_size(KEY_BYTES)));
template <class T> constexpr int PER = KEY_BYTES / 2 / LANES<T>;

constexpr int KEYS = 32767;   // the largest
constexpr int TALLY = 65535;  // as many as a tally can count
// Three times rounded by half, a key and its term are less than 1.6 apart, and so are the k-th largest key and the k-th
// largest term: no term at a cut has a key further than this from the cut of the keys.
constexpr int APART = 3;

// The rounded keys of v, whose magnitudes are at most KEYS; a NaN has key 0.
template <class T> inline void write_keys(int16_t* out, V<T> v) {
    typedef typename Lanes<T>::H H;
    const V<T> half = (V<T>)(((M<T>)v & ~Lanes<T>::MAGNITUDE) | (M<T>)all<T>(T(0.5)));
    const H keys = __builtin_convertvector(__builtin_convertvector(where<T>(v == v, v + half), M<T>), H);
    std::memcpy(out, &keys, sizeof keys);
}

// out[j][l] = x[order[j]][l] w[j] / 32768, rounded, for the lanes of n coordinates.
template <class T>
inline void multiply_keys(int16_t* out, const int16_t* x, const int32_t* order, const int16_t* w, int64_t n) {
    constexpr int L = LANES<T>;
    for (int64_t j = 0; j < n; ++j, out += L) {
        const int16_t* from = x + (int64_t)order[j] * L;
#if defined(__AVX2__)
        if constexpr (L == 16) {
            const __m256i v = _mm256_loadu_si256((const __m256i*)from);
            _mm256_storeu_si256((__m256i*)out, _mm256_mulhrs_epi16(v, _mm256_set1_epi16(w[j])));
            continue;
        }
        if constexpr (L == 8) {
            const __m128i v = _mm_loadu_si128((const __m128i*)from);
            _mm_storeu_si128((__m128i*)out, _mm_mulhrs_epi16(v, _mm_set1_epi16(w[j])));
            continue;
        }
#endif
        for (int l = 0; l < L; ++l) out[l] = (int16_t)((from[l] * w[j] + 16384) >> 15);
    }
}
// The same in the order of the coordinates; may read and write up to a vector more.
template <class T> inline void multiply_keys(int16_t* out, const int16_t* x, const int16_t* w, int64_t n) {
    constexpr int L = LANES<T>;
#if defined(__AVX2__)
    Key half;
    for (int e = 0; e < 16; ++e) half[e] = (int16_t)(2 * (e / L) * 257 + 256);  // the bytes of a coordinate's weight
#pragma GCC unroll 4
    for (int64_t j = 0; j < n; j += PER<T>, out += 16, x += 16) {
        int64_t some;
        std::memcpy(&some, w + j, sizeof some);
        const __m256i weights = _mm256_shuffle_epi8(_mm256_set1_epi64x(some), (__m256i)half);
        _mm256_storeu_si256((__m256i*)out, _mm256_mulhrs_epi16(_mm256_loadu_si256((const __m256i*)x), weights));
    }
#else
    for (int64_t j = 0; j < n; ++j, out += L, x += L)
        for (int l = 0; l < L; ++l) out[l] = (int16_t)((x[l] * w[j] + 16384) >> 15);
#endif
}

// The least key, which no term has, in some lanes of one coordinate.
template <class T> inline void drop_keys(int16_t* out, M<T> lanes) {
    typedef typename Lanes<T>::H H;
    H keys;
    std::memcpy(&keys, out, sizeof keys);
    keys = __builtin_convertvector(lanes, H) ? H{} + INT16_MIN : keys;
    std::memcpy(out, &keys, sizeof keys);
}

// The pivots of the lanes, once for each coordinate of a vector of keys.
template <class T> inline Key spread(V<T> at) {
    typedef typename Lanes<T>::H H;
    const V<T> most = all<T>(KEYS);
    const H lanes = __builtin_convertvector(__builtin_convertvector(min(max(at, -most - 1), most), M<T>), H);
    Key key{}, lane;
    std::memcpy(&key, &lanes, sizeof lanes);
    for (int e = 0; e < KEY_BYTES / 2; ++e) lane[e] = (int16_t)(e % LANES<T>);
    return __builtin_shuffle(key, lane);  // a key made in pieces would stay in memory
}

// The counts of the lanes.
template <class T> inline M<T> total(Key n) {
    typedef typename Lanes<T>::N N;
    M<T> sum{};
    for (int c = 0; c < PER<T>; ++c) {
        N lanes;
        std::memcpy(&lanes, (char*)&n + c * sizeof lanes, sizeof lanes);
        sum += __builtin_convertvector(lanes, M<T>);
    }
    return sum;
}

// The keys that are fewer steps from one than the span; steps wrap.
struct Window {
    Steps from, span;
};

inline bool any_within(Key key, Window one, Window other) {
    const Steps steps = (Steps)key - one.from, more = (Steps)key - other.from;
#if defined(__AVX2__)
    const __m256i within = _mm256_subs_epu16((__m256i)one.span, (__m256i)steps);
    const __m256i in = _mm256_or_si256(within, _mm256_subs_epu16((__m256i)other.span, (__m256i)more));
    return !_mm256_testz_si256(in, in);
#else
    const auto in = (steps < one.span) | (more < other.span);
    int64_t halves[2];
    std::memcpy(halves, &in, sizeof halves);
    return (halves[0] | halves[1]) != 0;
#endif
}

}  // namespace NAME
