/* Vectors of floats through compiler vector extensions, loads and stores of float32 and bfloat16, and exp.
 * The width follows the target (AVX-512, AVX2, otherwise 16 bytes), and it builds for any GCC target.
 * The only intrinsic is a conversion that GCC 12 would split into scalars. */
#ifndef MLBERT_SIMD_H
#define MLBERT_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(VECTOR_BYTES) /* set on the command line to test a width that the processor does not have */
#elif defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / 4)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef float vec_unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t uvec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t half_uvec __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint8_t byte_vec __attribute__((vector_size(LANES)));

INLINE vec splat(float x) { return x - (vec){0}; } /* x - 0 is a broadcast; 0 + x would be an addition */
INLINE vec load(const float *p) { return *(const vec_unaligned *)p; }
INLINE void store(float *p, vec x) { *(vec_unaligned *)p = x; }
INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }

INLINE float sum_lanes(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE float max_lanes(vec x) {
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

INLINE vec widen_bf16(half_uvec x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

/* LANES bytes as integers. */
INLINE ivec widen_bytes(const uint8_t *p) {
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VECTOR_BYTES == 32 && defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    byte_vec x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, ivec);
#endif
}

/* Round to nearest even; a NaN stays a NaN. */
INLINE half_uvec narrow_bf16(vec x) {
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uvec is_nan = (uvec)((bits & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded), half_uvec);
}

/* `count` (1 to LANES) elements at index i of an array of float32, or of bfloat16 if is_bf16; other lanes are 0. */
INLINE vec load_elements(const void *p, int64_t i, int count, int is_bf16) {
    if (is_bf16) {
        half_uvec x = {0};
        if (count == LANES) memcpy(&x, (const uint16_t *)p + i, sizeof x);
        else memcpy(&x, (const uint16_t *)p + i, 2 * (size_t)count);
        return widen_bf16(x);
    }
    if (count == LANES) return load((const float *)p + i);
    vec x = {0};
    memcpy(&x, (const float *)p + i, 4 * (size_t)count);
    return x;
}

INLINE void store_elements(void *p, int64_t i, int count, vec x, int is_bf16) {
    if (is_bf16) {
        half_uvec narrow = narrow_bf16(x);
        if (count == LANES) memcpy((uint16_t *)p + i, &narrow, sizeof narrow);
        else memcpy((uint16_t *)p + i, &narrow, 2 * (size_t)count);
    } else if (count == LANES) store((float *)p + i, x);
    else memcpy((float *)p + i, &x, 4 * (size_t)count);
}

/* Run the statements for c = 0, LANES, ... below n, with `count` elements each: a constant except in the last pass. */
#define EACH_VECTOR(c, count, n, ...)                      \
    do {                                                   \
        int64_t c = 0;                                     \
        for (; c + LANES <= (n); c += LANES) {             \
            enum { count = LANES };                        \
            __VA_ARGS__                                    \
        }                                                  \
        if (c < (n)) {                                     \
            const int count = (int)((n) - c);              \
            __VA_ARGS__                                    \
        }                                                  \
    } while (0)

INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE const void *at(const void *p, int64_t i, int is_bf16) { return (const char *)p + i * (is_bf16 ? 2 : 4); }
INLINE void *at_mut(void *p, int64_t i, int is_bf16) { return (char *)p + i * (is_bf16 ? 2 : 4); }

/* Sum many rows in small blocks, so that the rounding error grows far slower than the number of rows. */
#define SUM_BLOCK 8

/* total[i] += block[i], then block[i] = 0. */
INLINE void flush_block(float *total, float *block, int64_t n) {
    for (int64_t i = 0; i < n; i++) total[i] += block[i], block[i] = 0;
}

/* exp within about 1 ulp: 2^n times the Cephes polynomial on [-ln2/2, ln2/2]. The argument is clamped to
 * [-87.3, 88.3], which avoids infinities and denormals; a NaN stays a NaN. */
INLINE vec exp_vec(vec x) {
    x = select_vec(x < -87.3f, splat(-87.3f), x);
    x = select_vec(x > 88.3f, splat(88.3f), x);
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

#endif
