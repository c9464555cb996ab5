/* Counter-based dropout masks; the definition is in mlbert/ops/dropout.py and must agree bit for bit. */
#ifndef MLBERT_DROPOUT_H
#define MLBERT_DROPOUT_H

#include "simd.h"

#define GOLDEN 0x9E3779B9u

INLINE uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

INLINE uint32_t head_key(uint32_t key, uint32_t head) { return mix32(key + (head + 1) * GOLDEN); }
INLINE uint32_t row_hash(uint32_t key, int32_t row) { return mix32(mix32((uint32_t)row + GOLDEN) ^ key); }

/* The mask bytes of `columns` elements of a row from column `first`, a multiple of 4; `columns` is
 * rounded up to a multiple of 4. The bytes are in little-endian order. */
static inline void dropout_bytes(uint32_t hash, int64_t first, int64_t columns, uint8_t *bytes) {
    uint32_t *words = (uint32_t *)bytes;
    uint32_t before = (uint32_t)(first / 4);
    int64_t groups = (columns + 3) / 4;
#pragma omp simd
    for (int64_t g = 0; g < groups; g++)
        words[g] = mix32(hash ^ (((uint32_t)g + before) * GOLDEN));
}

/* x if the byte keeps it, 0 if it is dropped. Reads LANES bytes. */
INLINE vec keep_or_zero(vec x, const uint8_t *bytes, int threshold) {
    return (vec)((widen_bytes(bytes) >= threshold) & (ivec)x);
}

#endif
