// A vector whose lanes are samples: WIDTH bytes of float or double, by GCC's vector extensions.
// Only what the extensions do not turn into one instruction is spelt out for each instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace NAME {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(WIDTH)));
    typedef int32_t M __attribute__((vector_size(WIDTH)));
    typedef int16_t H __attribute__((vector_size(WIDTH / 2)));
    typedef uint16_t N __attribute__((vector_size(WIDTH / 2)));
    typedef int32_t I;
    static constexpr int32_t MAGNITUDE = 0x7fffffff;
    static constexpr float LEAST = 1.17549435e-38f;  // the least normal number
    static constexpr float MAX = 3.4028234663852886e38f;
};
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(WIDTH)));
    typedef int64_t M __attribute__((vector_size(WIDTH)));
    typedef int16_t H __attribute__((vector_size(WIDTH / 4)));
    typedef uint16_t N __attribute__((vector_size(WIDTH / 4)));
    typedef int64_t I;
    static constexpr int64_t MAGNITUDE = 0x7fffffffffffffffll;
    static constexpr double LEAST = 2.2250738585072014e-308;
    static constexpr double MAX = 1.7976931348623157e308;
};
template <class T> using V = typename Lanes<T>::V;
template <class T> using M = typename Lanes<T>::M;
template <class T> constexpr int LANES = WIDTH / (int)sizeof(T);

template <class T> inline V<T> all(T value) { return value - V<T>{}; }
template <class T> inline V<T> load(const T* p) {
    V<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T> inline void store(T* p, V<T> v) { std::memcpy(p, &v, sizeof v); }

#if defined(__AVX512F__)
inline V<float> min(V<float> a, V<float> b) { return (V<float>)_mm512_min_ps((__m512)a, (__m512)b); }
inline V<float> max(V<float> a, V<float> b) { return (V<float>)_mm512_max_ps((__m512)a, (__m512)b); }
inline V<double> min(V<double> a, V<double> b) { return (V<double>)_mm512_min_pd((__m512d)a, (__m512d)b); }
inline V<double> max(V<double> a, V<double> b) { return (V<double>)_mm512_max_pd((__m512d)a, (__m512d)b); }
inline bool any(M<float> m) { return _mm512_test_epi32_mask((__m512i)m, (__m512i)m) != 0; }
inline bool any(M<double> m) { return _mm512_test_epi64_mask((__m512i)m, (__m512i)m) != 0; }
#elif defined(__AVX2__)
inline V<float> min(V<float> a, V<float> b) { return (V<float>)_mm256_min_ps((__m256)a, (__m256)b); }
inline V<float> max(V<float> a, V<float> b) { return (V<float>)_mm256_max_ps((__m256)a, (__m256)b); }
inline V<double> min(V<double> a, V<double> b) { return (V<double>)_mm256_min_pd((__m256d)a, (__m256d)b); }
inline V<double> max(V<double> a, V<double> b) { return (V<double>)_mm256_max_pd((__m256d)a, (__m256d)b); }
inline bool any(M<float> m) { return _mm256_movemask_ps((__m256)m) != 0; }
inline bool any(M<double> m) { return _mm256_movemask_pd((__m256d)m) != 0; }
#else
template <class U> inline U min(U a, U b) { return a < b ? a : b; }
template <class U> inline U max(U a, U b) { return a > b ? a : b; }
inline bool any(M<float> m) { return m[0] | m[1] | m[2] | m[3]; }
inline bool any(M<double> m) { return m[0] | m[1]; }
#endif

// n += a > b, lane by lane.
#if defined(__AVX512F__)
inline void tally(M<float>& n, V<float> a, V<float> b) {
    const __mmask16 more = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
    n = (M<float>)_mm512_mask_add_epi32((__m512i)n, more, (__m512i)n, _mm512_set1_epi32(1));
}
inline void tally(M<double>& n, V<double> a, V<double> b) {
    const __mmask8 more = _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ);
    n = (M<double>)_mm512_mask_add_epi64((__m512i)n, more, (__m512i)n, _mm512_set1_epi64(1));
}
// sum += v where low < v < high.
inline void add_between(V<float>& sum, V<float> v, V<float> low, V<float> high) {
    const __mmask16 m = _mm512_cmp_ps_mask((__m512)v, (__m512)low, _CMP_GT_OQ);
    const __mmask16 both = _mm512_mask_cmp_ps_mask(m, (__m512)v, (__m512)high, _CMP_LT_OQ);
    sum = (V<float>)_mm512_mask_add_ps((__m512)sum, both, (__m512)sum, (__m512)v);
}
inline void add_between(V<double>& sum, V<double> v, V<double> low, V<double> high) {
    const __mmask8 m = _mm512_cmp_pd_mask((__m512d)v, (__m512d)low, _CMP_GT_OQ);
    const __mmask8 both = _mm512_mask_cmp_pd_mask(m, (__m512d)v, (__m512d)high, _CMP_LT_OQ);
    sum = (V<double>)_mm512_mask_add_pd((__m512d)sum, both, (__m512d)sum, (__m512d)v);
}
// sum += a * b where low < v < high.
inline void add_between(V<float>& sum, V<float> a, V<float> b, V<float> v, V<float> low, V<float> high) {
    const __mmask16 m = _mm512_cmp_ps_mask((__m512)v, (__m512)low, _CMP_GT_OQ);
    const __mmask16 both = _mm512_mask_cmp_ps_mask(m, (__m512)v, (__m512)high, _CMP_LT_OQ);
    sum = (V<float>)_mm512_mask3_fmadd_ps((__m512)a, (__m512)b, (__m512)sum, both);
}
inline void add_between(V<double>& sum, V<double> a, V<double> b, V<double> v, V<double> low, V<double> high) {
    const __mmask8 m = _mm512_cmp_pd_mask((__m512d)v, (__m512d)low, _CMP_GT_OQ);
    const __mmask8 both = _mm512_mask_cmp_pd_mask(m, (__m512d)v, (__m512d)high, _CMP_LT_OQ);
    sum = (V<double>)_mm512_mask3_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum, both);
}
#else
template <class U, class N> inline void tally(N& n, U a, U b) { n -= a > b; }
template <class U> inline void add_between(U& sum, U v, U low, U high) {
    auto inside = (v > low) & (v < high);
    sum += (U)((decltype(inside))v & inside);
}
#if defined(__AVX2__)
inline V<float> multiply_add(V<float> a, V<float> b, V<float> c) {
    return (V<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline V<double> multiply_add(V<double> a, V<double> b, V<double> c) {
    return (V<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
template <class U> inline U multiply_add(U a, U b, U c) { return a * b + c; }
#endif
template <class U> inline void add_between(U& sum, U a, U b, U v, U low, U high) {
    auto inside = (v > low) & (v < high);
    sum = multiply_add(a, (U)((decltype(inside))b & inside), sum);
}
#endif

template <class T> inline V<T> magnitude(V<T> v) { return (V<T>)((M<T>)v & Lanes<T>::MAGNITUDE); }
template <class T> inline V<T> where(M<T> m, V<T> a) { return (V<T>)((M<T>)a & m); }
template <class T> inline M<T> every(int64_t n) { return M<T>{} + (typename Lanes<T>::I)n; }
template <class T> inline V<T> real(M<T> m) { return __builtin_convertvector(m, V<T>); }
template <class T> inline T sum(V<T> v) {
    T total = 0;
    for (int l = 0; l < LANES<T>; ++l) total += v[l];
    return total;
}

template <class T> inline T largest(V<T> v) {
    alignas(WIDTH) T lane[LANES<T>];
    store(lane, v);
#pragma GCC unroll 4
    for (int half = LANES<T> / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int l = 0; l < half; ++l) lane[l] = lane[l + half] > lane[l] ? lane[l + half] : lane[l];
    return lane[0];
}

// A square of L vectors, turned over: log2(L) rounds of interleaving.
template <class T> inline __attribute__((always_inline)) void transpose(V<T>* v) {
    constexpr int L = LANES<T>;
    M<T> low, high;
    for (int l = 0; l < L; ++l) {
        low[l] = l / 2 + (l % 2) * L;
        high[l] = low[l] + L / 2;
    }
    V<T> next[L];
#pragma GCC unroll 4
    for (int round = 1; round < L; round *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < L / 2; ++i) {
            next[2 * i] = __builtin_shuffle(v[i], v[i + L / 2], low);
            next[2 * i + 1] = __builtin_shuffle(v[i], v[i + L / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) v[i] = next[i];
    }
}

// A float's place among the floats, as an integer; -0 and 0 share one. Halving an interval of places always ends.
template <class T> inline M<T> place(V<T> v) {
    M<T> bits = (M<T>)v, sign = bits < 0;
    return ((bits & Lanes<T>::MAGNITUDE) ^ sign) - sign;
}
template <class T> inline V<T> midpoint(V<T> a, V<T> b) {
    M<T> pa = place<T>(a), pb = place<T>(b);
    M<T> half = (pa & pb) + ((pa ^ pb) >> 1), sign = half < 0;
    return (V<T>)(((half ^ sign) - sign) | (sign & ~Lanes<T>::MAGNITUDE));
}

}  // namespace NAME
