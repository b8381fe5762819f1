// The C ABI: plain pointers, row-major, int64 sizes. Compiled once for each instruction set, which NAME names
// (setup.py); every symbol carries that name and its dtype.
#include "backward.h"
#include "forward.h"
#include "prepare.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define ENTRY(T, TYPE)                                                                                                \
    EXPORT void JOIN(ell0_prepare, TYPE, NAME)(const T* weight, int64_t rows, int64_t d, int32_t* order,              \
                                                   T* ranked, T* bound, int threads) {                                \
        NAME::prepare(weight, rows, d, order, ranked, bound, threads);                                                \
    }                                                                                                                 \
    EXPORT int64_t JOIN(ell0_limits, TYPE, NAME)(const T* x, int64_t n, int64_t d, T* limit, int threads) {           \
        return NAME::limits(x, n, d, limit, threads);                                                                 \
    }                                                                                                                 \
    EXPORT void JOIN(ell0_forward, TYPE, NAME)(                                                                       \
        const T* x, const T* weight, const T* bias, const int32_t* order, const T* ranked, const T* bound,            \
        const T* limit, int64_t n, int64_t rows, int64_t d, int64_t top, int64_t bottom, T* out, T* cuts,             \
        int32_t* ties, int32_t* walked, int threads) {                                                                \
        NAME::Forward<T>{x, weight, bias, order,  ranked, bound, limit, n,     rows,                                  \
                         d, top,    bottom, out, cuts,   ties,  walked}                                               \
            .run(threads);                                                                                            \
    }                                                                                                                 \
    EXPORT void JOIN(ell0_weight_gradient, TYPE, NAME)(                                                               \
        const T* grad, const T* x, const T* weight, const int32_t* order, const int32_t* walked, const T* cuts,       \
        const int32_t* ties, const T* limit, int64_t n, int64_t rows, int64_t d, T* grad_weight, int threads) {       \
        NAME::weight_gradient(grad, x, weight, order, walked, cuts, ties, limit, n, rows, d, grad_weight, threads);   \
    }                                                                                                                 \
    EXPORT void JOIN(ell0_input_gradient, TYPE, NAME)(                                                                \
        const T* grad, const T* x, const T* weight, const int32_t* walked, const T* cuts, const int32_t* ties,        \
        const T* limit, int64_t n, int64_t rows, int64_t d, T* grad_x, int threads) {                                 \
        NAME::input_gradient(grad, x, weight, walked, cuts, ties, limit, n, rows, d, grad_x, threads);                \
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
