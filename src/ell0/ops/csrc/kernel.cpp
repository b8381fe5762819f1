// The C ABI: plain pointers, row-major, int64 sizes. Compiled once for each instruction set, which NAME names
// (setup.py); every symbol carries that name and its dtype.
#include "backward.h"

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

// Orders each row by falling |w|, up to 6 bits of mantissa and 8 octaves: one counting sort. bound holds the exact largest |w| from
// each sixteenth position on, NaN first if the row has a NaN.
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

// out: the dense product with bias on entry. cuts, ties, walked may be null.
template <class T>
void forward(const T* x, const T* weight, const T* bias, const int32_t* order, const T* ranked, const T* bound,
             const T* limit, int64_t n, int64_t rows, int64_t d, int64_t top, int64_t bottom, T* out, T* cuts,
             int32_t* ties, int32_t* walked, int threads) {
    constexpr int L = LANES<T>, TILE = 16, TOGETHER = 4;
    constexpr int64_t PANEL_BYTES = 8 << 20;
    const Trim<T> trim{d, top, bottom, cuts != nullptr};
    const int64_t groups = (n + L - 1) / L, blocks = (d + 15) / 16, tiles = (rows + TILE - 1) / TILE;
    int64_t slab = PANEL_BYTES / (d * L * (int64_t)sizeof(T)) + 1;
    slab = slab < groups ? slab : groups;
    const bool walks = (top > bottom ? top : bottom) <= LISTED;
    Buffer<T> panels;
    panels.resize(slab * d * L);
    Buffer<int32_t> depths;
    depths.resize(walked ? slab * rows : 0);
    Group<T>* group = new Group<T>[slab];
    if (walked) std::memset(walked, 0, rows * sizeof *walked);
    for (int64_t g0 = 0; g0 < groups; g0 += slab) {
        const int64_t here = g0 + slab < groups ? slab : groups - g0;
#pragma omp parallel num_threads(threads)
        {
            Buffer<T> scratch;
            Buffer<V<T>> terms;
            scratch.resize(d);
            terms.resize(2 * d);
#pragma omp for schedule(dynamic)
            for (int64_t g = 0; g < here; ++g)
                group[g].pack(x, limit, n, d, (g0 + g) * L, top + bottom, walks, &panels[g * d * L], scratch.data);
            int64_t most = 0;
            for (int64_t g = 0; g < here; ++g) most = group[g].leads > most ? group[g].leads : most;
            Buffer<T> by_coordinate;
            Buffer<V<T>> leading;
            by_coordinate.resize(most ? d * TILE : 0);
            leading.resize(most * TILE);
#pragma omp for schedule(dynamic) collapse(2)
            for (int64_t pair = 0; pair < (here + TOGETHER - 1) / TOGETHER; ++pair)
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    const int64_t o0 = tile * TILE;
                    const int count = rows - o0 < TILE ? (int)(rows - o0) : TILE;
                    bool turned = false;
                for (int64_t g = pair * TOGETHER; g < here && g < (pair + 1) * TOGETHER; ++g) {
                    const int64_t first = (g0 + g) * L;
                    const int lanes = n - first < L ? (int)(n - first) : L;
                    if (group[g].leads) {
                        if (!turned) turn<TILE>(weight + o0 * d, count, d, by_coordinate.data);
                        turned = true;
                        for (int64_t r = 0; r < TILE; r += L)
                            group[g].leading_terms(&by_coordinate[r], TILE, &leading[r * group[g].leads]);
                    }
                    alignas(64) T value[TILE][L] = {};
                    const bool whole = lanes == L && count == TILE;
                    T* corner = out + first * rows + o0;
                    for (int r = 0; whole && r < TILE; r += L) {
                        V<T> v[L];
                        for (int l = 0; l < L; ++l) v[l] = load(corner + l * rows + r);
                        transpose<T>(v);
                        for (int i = 0; i < L; ++i) store(value[r + i], v[i]);
                    }
                    for (int l = 0; !whole && l < lanes; ++l)
                        for (int r = 0; r < count; ++r) value[r][l] = corner[l * rows + r];
                    typename Trim<T>::Cuts found{};
                    for (int r = 0; r < count; ++r) {
                        const int64_t o = o0 + r;
                        const Row<T> row{weight + o * d, ranked + o * d, bound + o * blocks, order + o * d,
                                         bias ? bias[o] : T(0), leading.data + r * group[g].leads};
                        // Rows lie far apart and only their beginnings are read.
                        for (int line = 0; line < 3 && o + 1 < rows; ++line) {
                            __builtin_prefetch((const char*)(row.ranked + d) + 64 * line);
                            __builtin_prefetch((const char*)(row.order + d) + 64 * line);
                            __builtin_prefetch((const char*)(row.bound + blocks) + 64 * line);
                        }
                        const bool undefined = row.bound[0] != row.bound[0];
                        V<T> v = load(value[r]);
                        int64_t depth = 0;
                        if (!undefined) depth = trim.row(row, group[g], terms.data, v, found);
                        if (cuts) {
                            V<T> span = group[g].span;
                            if (!undefined && row.bound[0] <= Lanes<T>::MAX)
                                depth = trim.depth(row, span, trim.narrower(found.high, found.low), 0);
                            else
                                depth = d;
                            depths[g * rows + o] = (int32_t)depth;
                        }
                        V<T> high = found.high;
                        const V<T> nan = all<T>(__builtin_nanf(""));
                        const M<T> lost = undefined ? M<T>{} == 0 : group[g].undefined;
                        v = lost ? nan : v;
                        high = lost ? nan : high;
                        store(value[r], v);
                        if (!cuts) continue;
                        const int64_t at = o * n + first, other = rows * n;
                        int32_t tied[2][L];
                        for (int l = 0; l < L; ++l) tied[0][l] = (int32_t)found.ties_high[l];
                        for (int l = 0; l < L; ++l) tied[1][l] = (int32_t)found.ties_low[l];
                        auto keep = [&](int count) {
                            std::memcpy(cuts + at, &high, count * sizeof(T));
                            std::memcpy(cuts + other + at, &found.low, count * sizeof(T));
                            std::memcpy(ties + at, tied[0], count * sizeof(int32_t));
                            std::memcpy(ties + other + at, tied[1], count * sizeof(int32_t));
                        };
                        lanes == L ? keep(L) : keep(lanes);
                    }
                    for (int r = 0; whole && r < TILE; r += L) {
                        V<T> v[L];
                        for (int i = 0; i < L; ++i) v[i] = load(value[r + i]);
                        transpose<T>(v);
                        for (int l = 0; l < L; ++l) store(corner + l * rows + r, v[l]);
                    }
                    for (int l = 0; !whole && l < lanes; ++l)
                        for (int r = 0; r < count; ++r) corner[l * rows + r] = value[r][l];
                }
                }
        }
        for (int64_t g = 0; walked && g < here; ++g)
            for (int64_t o = 0; o < rows; ++o)
                walked[o] = depths[g * rows + o] > walked[o] ? depths[g * rows + o] : walked[o];
    }
    delete[] group;
}

}  // namespace NAME

#define EXPORT extern "C" __attribute__((visibility("default")))
#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define ENTRY(T, TYPE)                                                                                                \
    EXPORT void JOIN(ell0_prepare, TYPE, NAME)(const T* weight, int64_t rows, int64_t d, int32_t* order,           \
                                                   T* ranked, T* bound, int threads) {                                \
        NAME::prepare(weight, rows, d, order, ranked, bound, threads);                                                \
    }                                                                                                                 \
    EXPORT int64_t JOIN(ell0_limits, TYPE, NAME)(const T* x, int64_t n, int64_t d, T* limit, int threads) {        \
        return NAME::limits(x, n, d, limit, threads);                                                                 \
    }                                                                                                                 \
    EXPORT void JOIN(ell0_forward, TYPE, NAME)(                                                                   \
        const T* x, const T* weight, const T* bias, const int32_t* order, const T* ranked, const T* bound,            \
        const T* limit, int64_t n, int64_t rows, int64_t d, int64_t top, int64_t bottom, T* out, T* cuts,             \
        int32_t* ties, int32_t* walked, int threads) {                                                                \
        NAME::forward(x, weight, bias, order, ranked, bound, limit, n, rows, d, top, bottom, out, cuts, ties, walked, \
                      threads);                                                                                       \
    }                                                                                                                 \
    EXPORT void JOIN(ell0_weight_gradient, TYPE, NAME)(                                                           \
        const T* grad, const T* x, const T* weight, const int32_t* order, const int32_t* walked, const T* cuts,      \
        const int32_t* ties, const T* limit, int64_t n, int64_t rows, int64_t d, T* grad_weight, int threads) {       \
        NAME::weight_gradient(grad, x, weight, order, walked, cuts, ties, limit, n, rows, d, grad_weight, threads);  \
    }                                                                                                                 \
    EXPORT void JOIN(ell0_input_gradient, TYPE, NAME)(                                                            \
        const T* grad, const T* x, const T* weight, const T* cuts, const int32_t* ties, const T* limit, int64_t n,   \
        int64_t rows, int64_t d, T* grad_x, int threads) {                                                            \
        NAME::input_gradient(grad, x, weight, cuts, ties, limit, n, rows, d, grad_x, threads);                       \
    }
ENTRY(float, float32)
ENTRY(double, float64)

EXPORT int JOIN(ell0, can_run, NAME)() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
    return 1;
#endif
}
