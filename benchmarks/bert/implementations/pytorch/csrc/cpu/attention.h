/* Shared by both attention kernels: the problem, rotations, softmax of one row (forward and
 * backward), small copies.
 *
 * Local attention: a block of queries has scores for the range of keys that any of them sees
 * (`Keys`), and a row's softmax runs over the keys that its query sees. Without a window both are the
 * whole sequence.
 *
 * Legend: T tokens, S sequences, N heads, H head size. */
#ifndef MLBERT_ATTENTION_H
#define MLBERT_ATTENTION_H

#include "dropout.h"
#include "simd.h"

typedef struct {
    const void *qkv;        /* [T, 3, N, H] */
    const int32_t *bounds;  /* [S+1] */
    const int32_t *rows;    /* [T], dropout rows */
    const float *slopes;    /* [N] ALiBi slopes, or NULL */
    const float *rotations; /* [T, H]: each token's H/2 cosines, then the sines; or NULL */
    int64_t window;         /* tokens that a query sees on each side; negative: the whole sequence */
    int64_t num_heads, head_size, max_length;
    uint32_t key;
    int threshold, is_bf16;
} Problem;

typedef float vec8 __attribute__((vector_size(32)));
typedef float vec8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(32)))){__VA_ARGS__})

/* out[c * out_step + r] = in[r * in_step + c] for an 8 x 8 block. */
INLINE void transpose_8x8(const float *in, int64_t in_step, float *out, int64_t out_step) {
    vec8 x[8], y[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) x[r] = *(const vec8_unaligned *)(in + r * in_step);
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
        y[r] = SHUFFLE(x[r], x[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[r + 1] = SHUFFLE(x[r], x[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            x[r + 2 * i] = SHUFFLE(y[r + i], y[r + 2 + i], 0, 1, 8, 9, 4, 5, 12, 13);
            x[r + 2 * i + 1] = SHUFFLE(y[r + i], y[r + 2 + i], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        y[r] = SHUFFLE(x[r], x[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[r + 4] = SHUFFLE(x[r], x[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) *(vec8_unaligned *)(out + r * out_step) = y[r];
}

INLINE void write_rows(const float *source, int64_t source_step, int64_t rows, int64_t head_size, float factor,
                       void *out, int64_t step, int is_bf16) {
    for (int64_t t = 0; t < rows; t++)
        EACH_VECTOR(h, count, head_size, {
            store_elements(out, t * step + h, count, load(source + t * source_step + h) * factor, is_bf16);
        });
}

/* Keys `first` to `first` + `count` of a sequence. */
typedef struct {
    int64_t first, count;
} Keys;

/* The keys that any of these queries sees; `first` is rounded down to a multiple of `step`. */
INLINE Keys keys_of_block(const Problem *p, int64_t query, int64_t num_queries, int64_t length, int64_t step) {
    if (p->window < 0) return (Keys){0, length};
    int64_t first = query > p->window ? (query - p->window) / step * step : 0;
    int64_t end = query + num_queries + p->window;
    return (Keys){first, (end < length ? end : length) - first};
}

/* Rotate the rows of `x` from `token` on in place; direction 1 rotates, -1 rotates back. */
INLINE void rotate_rows(const Problem *p, int64_t token, int64_t rows, float direction, void *x, int64_t step,
                        int is_bf16) {
    if (!p->rotations) return;
    int64_t half = p->head_size / 2;
    for (int64_t t = 0; t < rows; t++) {
        const float *cosines = p->rotations + (token + t) * p->head_size, *sines = cosines + half;
        EACH_VECTOR(c, count, half, {
            vec a = load_elements(x, t * step + c, count, is_bf16);
            vec b = load_elements(x, t * step + half + c, count, is_bf16);
            vec cosine = load_elements(cosines, c, count, 0);
            vec sine = splat(direction) * load_elements(sines, c, count, 0);
            store_elements(x, t * step + c, count, a * cosine - b * sine, is_bf16);
            store_elements(x, t * step + half + c, count, b * cosine + a * sine, is_bf16);
        });
    }
}

/* ALiBi: subtract slope * |query - j| from the scaled scores of one query. `scores` are unscaled, so the slope is
 * divided by `root`. Writes up to a full vector; softmax_row overwrites the part past the sequence. */
INLINE void alibi_row(const Problem *p, int64_t head, float *scores, int64_t query, int64_t length, float root) {
    if (!p->slopes) return;
    float step = p->slopes[head] / root;
    vec lane;
    for (int i = 0; i < LANES; i++) lane[i] = (float)i;
    for (int64_t j = 0; j < length; j += LANES) {
        vec distance = (vec)((ivec)(lane + (float)(j - query)) & 0x7fffffff); /* without the sign bit */
        store(scores + j, load(scores + j) - step * distance);
    }
}

/* Replace scores by exp(root * score - max), or 0 if dropped. statistics: max and 1 / sum of exponentials, kept apart
 * because their log-sum-exp would round large scores. `root` is 1 / sqrt(H). */
INLINE void softmax_row(float *scores, int64_t length, float root, const uint8_t *bytes, int threshold,
                        float *statistics) {
    int64_t end = round_up(length, LANES);
    for (int64_t j = length; j < end; j++) scores[j] = -1e30f;
    vec largest = splat(-1e30f);
    for (int64_t j = 0; j < end; j += LANES) largest = max_vec(load(scores + j), largest);
    float top = root * max_lanes(largest);
    vec sum = {0};
    for (int64_t j = 0; j < end; j += LANES) {
        vec e = exp_vec(root * load(scores + j) - top);
        sum += e;
        store(scores + j, keep_or_zero(e, bytes + j, threshold));
    }
    statistics[0] = top;
    statistics[1] = 1.0f / sum_lanes(sum);
}

/* scores -> dropped probabilities, d_scores (gradient of those) -> gradient of the scores. */
INLINE void softmax_row_backward(float *scores, float *d_scores, int64_t length, float root,
                                 const float *statistics, const uint8_t *bytes, int threshold) {
    int64_t end = round_up(length, LANES);
    float scale = 256.0f / (float)(256 - threshold);
    for (int64_t j = length; j < end; j++) scores[j] = -1e30f, d_scores[j] = 0;
    vec sum = {0};
    for (int64_t j = 0; j < end; j += LANES) {
        vec p = exp_vec(root * load(scores + j) - statistics[0]) * statistics[1];
        vec d = keep_or_zero(load(d_scores + j) * scale, bytes + j, threshold);
        sum += p * d;
        store(scores + j, p);
        store(d_scores + j, d);
    }
    float mean = sum_lanes(sum);
    for (int64_t j = 0; j < end; j += LANES) {
        vec p = load(scores + j);
        store(d_scores + j, p * (load(d_scores + j) - mean));
        store(scores + j, keep_or_zero(p * scale, bytes + j, threshold));
    }
}

/* One query and the part of its block's scores that it sees: `start` to `end`, `start` a multiple of
 * LANES. The first `hidden` of these are not seen. */
typedef struct {
    int64_t query, start, end, hidden;
} Row;

INLINE Row row_of(const Problem *p, int64_t query, Keys keys) {
    if (p->window < 0) return (Row){query, 0, keys.count, 0};
    int64_t first = query - p->window - keys.first, end = query + p->window + 1 - keys.first;
    if (first < 0) first = 0;
    int64_t start = first / LANES * LANES;
    return (Row){query - keys.first - start, start, end < keys.count ? end : keys.count, first - start};
}

/* What both directions need before the softmax of a row: its mask, its bias, and no hidden keys. */
INLINE void prepare_row(const Problem *p, uint32_t key, int64_t head, int64_t token, Row row, Keys keys, float root,
                        uint8_t *bytes, float *scores) {
    int64_t count = row.end - row.start;
    if (p->threshold)
        dropout_bytes(row_hash(key, p->rows[token]), keys.first + row.start, round_up(count, LANES), bytes);
    alibi_row(p, head, scores + row.start, row.query, count, root);
    for (int64_t j = 0; j < row.hidden; j++) scores[row.start + j] = -1e30f;
}

/* Zero what a query does not see, up to `columns`, where other queries of the block have scores. */
INLINE void clear_hidden(const Problem *p, Row row, int64_t columns, float *scores) {
    if (p->window < 0) return;
    memset(scores, 0, sizeof(float) * (size_t)(row.start + row.hidden));
    memset(scores + row.end, 0, sizeof(float) * (size_t)(columns - row.end));
}

#endif
