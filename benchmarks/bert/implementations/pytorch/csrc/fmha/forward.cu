/* Output and log-sums of attention; see fmha.h for an overview.

Each warp owns 32 of 128 queries at a time and loops over the keys in tiles of 64 with a running maximum and sum. Shared
memory:

    16 KiB      128 queries
    2 x 16 KiB  64 keys and 64 values; the next pair is copied while one is in use, also when moving to the next 128
                queries */
#include "dropout.cuh"
#include "tiles.cuh"

constexpr int QUERIES = 32 * WARPS, KEYS = 64;
constexpr int QUERY_BYTES = head_tile_bytes(QUERIES), KEY_BYTES = head_tile_bytes(KEYS), STAGE_BYTES = 2 * KEY_BYTES;
constexpr int FORWARD_BYTES = QUERY_BYTES + 2 * STAGE_BYTES;

/* A warp's 32 queries; this lane holds four rows: 16 i + g and 16 i + g + 8. */
struct Queries {
    int first;
    uint32_t hash[2];       /* as Dropout::flags_of_queries expects it, per group of 16 */
    float highest[2][2];    /* score so far, unscaled */
    float total[2][2];      /* this lane's part of sum(exp2(scaled score - scaled highest)) */
    Sums<HEAD_SIZE> result; /* the same weighted sum of values */
};

DEVICE int query_row(const Queries &queries, int group, int half) {
    return queries.first + 16 * group + threadIdx.x % 32 / 4 + 8 * half;
}

DEVICE void begin(Queries &queries, int length, const Dropout &dropout) {
#pragma unroll
    for (int group = 0; group < 2; group++) {
        const int row = query_row(queries, group, threadIdx.x % 2);
        queries.hash[group] = dropout.is_on && row < length ? dropout.row_hash(row) : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) queries.highest[group][half] = -INFINITY, queries.total[group][half] = 0.0f;
    }
    set_zero<HEAD_SIZE>(queries.result);
}

/* Add the bias and mask the keys past the end of the sequence. `slope` applies to unscaled scores. */
DEVICE void adjust_scores(Sums<KEYS> &scores, const Queries &queries, int first_key, int length, float slope) {
#pragma unroll
    for (int group = 0; group < 2; group++) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            const int key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const int distance = abs(query_row(queries, group, i % 4 / 2) - key);
            float &score = scores[group][i / 4][i % 4];
            score = key < length ? score - slope * static_cast<float>(distance) : -INFINITY;
        }
    }
}

/* Turn the scores of one group of rows into weights relative to the new maximum, and rescale the sums so far. */
DEVICE void weigh(Sums<KEYS> &scores, Queries &queries, int group) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = queries.highest[group][half];
        float highest = before;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) highest = fmaxf(highest, scores[group][i / 2][2 * half + i % 2]);
        highest = fmaxf(highest, exchange(highest, 1));
        highest = fmaxf(highest, exchange(highest, 2));
        /* For the first tile `before` is -inf: exp2(-inf) = 0 rescales sums that are zero anyway. */
        const float rescale = power_of_2((before - highest) * SCALE_LOG2), scaled = highest * SCALE_LOG2;
        float total = queries.total[group][half] * rescale;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            float &score = scores[group][i / 2][2 * half + i % 2];
            score = power_of_2(fmaf(score, SCALE_LOG2, -scaled));
            total += score;
        }
#pragma unroll
        for (int i = 0; i < HEAD_SIZE / 4; i++) queries.result[group][i / 2][2 * half + i % 2] *= rescale;
        queries.highest[group][half] = highest;
        queries.total[group][half] = total;
    }
}

template <Type TYPE>
DEVICE void add_keys(Queries &queries, HeadTile vectors, HeadTile keys, HeadTile values, int first_key, int length,
                     float slope, const Dropout &dropout) {
    Sums<KEYS> scores;
    set_zero<KEYS>(scores);
    add_scores<TYPE, KEYS>(scores, vectors, queries.first % QUERIES, keys, 0);
    if (slope != 0.0f || first_key + KEYS > length) adjust_scores(scores, queries, first_key, length, slope);
    Left<KEYS> weights;
#pragma unroll
    for (int group = 0; group < 2; group++) {
        weigh(scores, queries, group);
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            const float(&weight)[4] = scores[group][i];
            uint32_t upper = pack<TYPE>(weight[0], weight[1]), lower = pack<TYPE>(weight[2], weight[3]);
            if (dropout.is_on) {
                /* After the sum: dropout acts on normalized weights, so the divisor includes dropped ones. */
                const uint32_t flags = dropout.flags_of_queries(queries.hash[group], first_key + 8 * i);
                upper = Dropout::keep_pair(upper, flags, 0);
                lower = Dropout::keep_pair(lower, flags, 1);
            }
            set_left<KEYS>(weights, group, i, upper, lower);
        }
    }
    add_vectors<TYPE, KEYS>(queries.result, weights, values, 0);
}

template <Type TYPE>
DEVICE void finish(const Queries &queries, const Sequence &s, float scale, uint16_t *out, float *log_sums) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int group = i / 2, half = i % 2, row = query_row(queries, group, half);
        float total = queries.total[group][half];
        total += exchange(total, 1);
        total += exchange(total, 2);
        if (row >= s.length) continue;
        if (t == 0) log_sums[row] = queries.highest[group][half] * SCALE_LOG2 + log_2(total);
        const float factor = scale / total;
#pragma unroll
        for (int j = 0; j < HEAD_SIZE / 8; j++) {
            const float(&result)[4] = queries.result[group][j];
            *as_word(out + row * s.out_stride + 8 * j + 2 * t) =
                pack<TYPE>(result[2 * half] * factor, result[2 * half + 1] * factor);
        }
    }
}

DEVICE void copy_keys(uint32_t stage, const uint16_t *k, const Sequence &s, int first_key) {
    const uint16_t *first = k + first_key * s.qkv_stride;
    copy_tile<KEYS>({stage}, first, s.qkv_stride, s.length - first_key);
    copy_tile<KEYS>({stage + KEY_BYTES}, first + s.out_stride, s.qkv_stride, s.length - first_key);
}

template <Type TYPE> KERNEL(THREADS, 2) forward_kernel(fmha_problem p, uint16_t *out, float *log_sums) {
    const Sequence s = sequence_of_block(p);
    out += s.out_place;
    if (s.is_tail) return clear(out, s.out_stride, s.length);
    log_sums += static_cast<size_t>(s.head) * p.num_tokens + s.start;
    const uint16_t *q = static_cast<const uint16_t *>(p.qkv) + s.qkv_place, *k = q + s.out_stride;
    const float slope = p.slopes ? p.slopes[s.head] / SCALE : 0.0f;
    const Dropout dropout(p, s);
    const HeadTile vectors = {shared_memory()};
    uint32_t stage = vectors.address + QUERY_BYTES, other = stage + STAGE_BYTES;
    Queries queries;
    if (s.length) copy_keys(stage, k, s, 0);
    for (int block = 0; block < s.length; block += QUERIES) {
        queries.first = block + static_cast<int>(threadIdx.x) / 32 * 32;
        begin(queries, s.length, dropout);
        if (block) __syncthreads(); /* no thread still reads the previous queries */
        copy_tile<QUERIES>(vectors, q + block * s.qkv_stride, s.qkv_stride, s.length - block);
        for (int key = 0; key < s.length; key += KEYS) {
            /* After the barrier this tile is complete, and no thread still reads the previous one. */
            wait_for_copies();
            __syncthreads();
            const bool more_keys = key + KEYS < s.length;
            if (more_keys || block + QUERIES < s.length) copy_keys(other, k, s, more_keys ? key + KEYS : 0);
            if (queries.first < s.length) {
                add_keys<TYPE>(queries, vectors, {stage}, {stage + KEY_BYTES}, key, s.length, slope, dropout);
            }
            const uint32_t swap = stage;
            stage = other, other = swap;
        }
        finish<TYPE>(queries, s, dropout.scale, out, log_sums);
    }
}

extern "C" int fmha_forward(const fmha_problem *p, void *out, float *log_sums, void *stream) {
    auto kernel = p->is_bfloat16 ? forward_kernel<Type::BFLOAT16> : forward_kernel<Type::FLOAT16>;
    return launch(kernel, number_of_blocks(*p), THREADS, FORWARD_BYTES, stream, *p, static_cast<uint16_t *>(out),
                  log_sums);
}

int check_forward() {
    const int error = check(forward_kernel<Type::BFLOAT16>);
    return error ? error : check(forward_kernel<Type::FLOAT16>);
}
