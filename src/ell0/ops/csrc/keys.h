// Two vectors of terms as one vector of keys: small integers, which are cheaper to compare, in the order of the terms.
// Where there is no such key the terms are their own.
#pragma once
#include "lanes.h"

namespace NAME {

template <class T> struct Keys {
    struct Key {
        V<T> first, second;
    };
    typedef V<T> Pivot;
    typedef M<T> Tally;
    static constexpr bool ROUNDED = false;
    static constexpr int64_t PAIRS = INT32_MAX / 2;  // as many keys as a tally can count

    static Key pack(V<T> first, V<T> second, V<T>) { return {first, second}; }
    static Pivot pivot(V<T> at) { return at; }
    // n += keys above the pivot, or below it, lane by lane
    static void above(Tally& n, Key key, Pivot at) {
        tally(n, key.first, at);
        tally(n, key.second, at);
    }
    static void below(Tally& n, Key key, Pivot at) {
        tally(n, at, key.first);
        tally(n, at, key.second);
    }
    static M<T> total(Tally n) { return n; }
    // Does a key lie in [a, b] or in [c, d]?
    static bool within(Key key, Pivot a, Pivot b, Pivot c, Pivot d) {
        auto in = [&](V<T> v) { return ((v >= a) & (v <= b)) | ((v >= c) & (v <= d)); };
        return any(in(key.first) | in(key.second));
    }
};

#if defined(__AVX2__)
// 16 bits for each term. Terms beyond the range share the last key on their side; a NaN has the least one.
template <> struct Keys<float> {
    static constexpr bool ROUNDED = true;
    static constexpr int64_t PAIRS = UINT16_MAX;
#if defined(__AVX512F__)
    typedef __m512i Key;
    static Key packed(V<float> a, V<float> b) {
        return _mm512_packs_epi32(_mm512_cvtps_epi32((__m512)a), _mm512_cvtps_epi32((__m512)b));
    }
    static void above(Key& n, Key key, Key at) {
        n = _mm512_mask_add_epi16(n, _mm512_cmpgt_epi16_mask(key, at), n, _mm512_set1_epi16(1));
    }
    static M<float> total(Key n) {
        const Key zero = _mm512_setzero_si512();
        return (M<float>)_mm512_unpacklo_epi16(n, zero) + (M<float>)_mm512_unpackhi_epi16(n, zero);
    }
    static bool within(Key key, Key a, Key b, Key c, Key d) {
        const __mmask32 up = _mm512_mask_cmple_epi16_mask(_mm512_cmpge_epi16_mask(key, a), key, b);
        return up | _mm512_mask_cmple_epi16_mask(_mm512_cmpge_epi16_mask(key, c), key, d);
    }
#else
    typedef __m256i Key;
    static Key packed(V<float> a, V<float> b) {
        return _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)a), _mm256_cvtps_epi32((__m256)b));
    }
    static void above(Key& n, Key key, Key at) { n = _mm256_sub_epi16(n, _mm256_cmpgt_epi16(key, at)); }
    static M<float> total(Key n) {
        const Key zero = _mm256_setzero_si256();
        return (M<float>)_mm256_unpacklo_epi16(n, zero) + (M<float>)_mm256_unpackhi_epi16(n, zero);
    }
    static bool within(Key key, Key a, Key b, Key c, Key d) {
        const Key up = _mm256_or_si256(_mm256_cmpgt_epi16(a, key), _mm256_cmpgt_epi16(key, b));
        const Key down = _mm256_or_si256(_mm256_cmpgt_epi16(c, key), _mm256_cmpgt_epi16(key, d));
        return _mm256_movemask_epi8(_mm256_and_si256(up, down)) != -1;
    }
#endif
    typedef Key Pivot;
    typedef Key Tally;

    static Key pack(V<float> first, V<float> second, V<float> scale) {
        const V<float> most = all<float>(32767);  // min gives its second argument where that is a NaN
        return packed(min(most, first * scale), min(most, second * scale));
    }
    static Pivot pivot(V<float> at) { return pack(at, at, all<float>(1)); }
    static void below(Tally& n, Key key, Pivot at) { above(n, at, key); }
};
#endif

}  // namespace NAME
