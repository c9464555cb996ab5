/* Rotary position embeddings: rotate channel pairs of queries and keys by each token's angles, and copy the values.
 *
 * Legend: T tokens, N heads, H head size. qkv and out are [T, 3, N, H] float32 or bfloat16, rotations float32 [T, H]:
 * H/2 cosines, then H/2 sines. */
#include "simd.h"

INLINE void turn(const void *qkv, const float *cosines, const float *sines, int64_t start, int64_t half, float direction,
                 int is_bf16, void *out) {
    EACH_VECTOR(c, count, half, {
        vec a = load_elements(qkv, start + c, count, is_bf16), b = load_elements(qkv, start + half + c, count, is_bf16);
        vec cosine = load_elements(cosines, c, count, 0), sine = splat(direction) * load_elements(sines, c, count, 0);
        store_elements(out, start + c, count, a * cosine - b * sine, is_bf16);
        store_elements(out, start + half + c, count, b * cosine + a * sine, is_bf16);
    });
}

/* direction: 1 rotates, -1 rotates back. */
void rotary(const void *qkv, const float *rotations, int64_t tokens, int64_t heads, int64_t size, int direction,
            int is_bf16, int threads, void *out) {
    int64_t row = 3 * heads * size, bytes = is_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cosines = rotations + t * size, *sines = cosines + size / 2;
        for (int64_t h = 0; h < 2 * heads; h++) {
            int64_t start = t * row + h * size;
            if (is_bf16) turn(qkv, cosines, sines, start, size / 2, (float)direction, 1, out);
            else turn(qkv, cosines, sines, start, size / 2, (float)direction, 0, out);
        }
        int64_t values = (t * row + 2 * heads * size) * bytes;
        memcpy((char *)out + values, (const char *)qkv + values, (size_t)(heads * size * bytes));
    }
}
