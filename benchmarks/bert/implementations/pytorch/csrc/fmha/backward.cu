/* Gradients of Q, K and V; see fmha.h for an overview.

Each warp owns 32 of 128 keys at a time, keeps the gradients of these keys and values in registers, and loops over the
queries in tiles of 32. Scores are computed transposed (keys are rows, queries columns), so that weights P and score
gradients dS can be used directly as left operands of the next products:

    P  = exp2(scaled scores - log-sum)                      K Q^T
    dS = P (dP - delta), dP = scaled where kept, else 0     V dO^T
    gradient of V += kept P dO,  of K += dS Q

with delta = sum(dO O), the sum over keys of P dP. The warps exchange dS of all 128 keys through shared memory, and each
computes 16 columns of the queries' gradient. If a sequence has more than 128 keys, that gradient is accumulated in
`d_query` in global memory, each element always by the same thread. Shared memory:

    2 x 16 KiB  128 keys and values
    2 x 8 KiB   32 queries and gradients of the output; the next are copied while these are in use
    8 KiB       dS, keys as rows and queries as columns
    6 KiB       per query: log-sum, delta, and the hash that seeds dropout */
#include "dropout.cuh"
#include "tiles.cuh"

constexpr int KEYS = FMHA_KEYS_AT_ONCE, QUERIES = 32, PART = 16, COLUMNS = HEAD_SIZE / WARPS;
static_assert(KEYS == 32 * WARPS && COLUMNS == 16, "the work of four warps");
constexpr int KEY_BYTES = head_tile_bytes(KEYS), QUERY_BYTES = head_tile_bytes(QUERIES), STAGE_BYTES = 2 * QUERY_BYTES;
constexpr int STATISTIC_BYTES = FMHA_MAX_LENGTH * 4;

/* Addresses in shared memory. */
constexpr int STAGES = 2 * KEY_BYTES, SCORES = STAGES + 2 * STAGE_BYTES, LOG_SUMS = SCORES + KEYS * QUERIES * 2;
constexpr int DELTAS = LOG_SUMS + STATISTIC_BYTES, HASHES = DELTAS + STATISTIC_BYTES;
constexpr int BACKWARD_BYTES = HASHES + STATISTIC_BYTES;
static_assert(BACKWARD_BYTES <= 99 * 1024, "what a block may have on every device");

using ScoreTile = Tile<QUERIES>;

struct Gradients {
    const uint16_t *out, *d_out; /* of this head's first token, like all pointers here */
    float *d_query;
    uint16_t *d_qkv;
};

/* Per-query values that need no product. Queries past the end get values that make their weights zero. */
template <Type TYPE>
DEVICE void find_statistics(uint32_t memory, const Gradients &g, const float *log_sums, const Sequence &s,
                            const Dropout &dropout) {
    constexpr int LANES = HEAD_SIZE / 8; /* each lane of a query reads 16 bytes */
    const int lane = threadIdx.x % LANES;
    for (int row = threadIdx.x / LANES; row < (s.length + QUERIES - 1) / QUERIES * QUERIES; row += THREADS / LANES) {
        const bool is_query = row < s.length;
        float delta = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int place = row * s.out_stride + lane * 8 + 2 * i;
            const float2 a = unpack<TYPE>(is_query ? *as_word(g.out + place) : 0);
            const float2 b = unpack<TYPE>(is_query ? *as_word(g.d_out + place) : 0);
            delta = fmaf(a.x, b.x, fmaf(a.y, b.y, delta));
        }
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) delta += exchange(delta, mask);
        if (lane) continue;
        store_float(memory + LOG_SUMS + row * 4, is_query ? log_sums[row] : INFINITY);
        store_float(memory + DELTAS + row * 4, delta);
        store_word(memory + HASHES + row * 4, is_query && dropout.is_on ? dropout.row_hash(row) : 0);
    }
}

/* Convert a warp's scores and products dO V to kept weights and score gradients, as operands. */
template <Type TYPE>
DEVICE void differentiate(Left<PART> &kept, Left<PART> &d_scores, Sums<PART> &scores, Sums<PART> &d_weights,
                          uint32_t memory, int first_key, int first_query, int length, float slope,
                          const Dropout &dropout) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < PART / 8; j++) {
        const int query = first_query + 8 * j + 2 * t;
        const float2 log_sum = load_floats(memory + LOG_SUMS + query * 4);
        const float2 delta = load_floats(memory + DELTAS + query * 4);
        const uint32_t hash = dropout.is_on ? load_word(memory + HASHES + (query + g % 2) * 4) : 0;
#pragma unroll
        for (int group = 0; group < 2; group++) {
            const uint32_t flags = dropout.is_on ? dropout.flags_of_keys(hash, first_key + 16 * group) : ~0u;
            float(&score)[4] = scores[group][j], (&d_weight)[4] = d_weights[group][j];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first_key + 16 * group + g + i / 2 * 8;
                if (slope != 0.0f) score[i] -= slope * static_cast<float>(abs(query + i % 2 - key));
                const float weight = power_of_2(fmaf(score[i], SCALE_LOG2, i % 2 ? -log_sum.y : -log_sum.x));
                /* Weights past the end are unbounded, and infinity times a zero key would not be zero. */
                score[i] = key < length ? weight : 0.0f;
                d_weight[i] = Dropout::keeps(flags, i) ? d_weight[i] * dropout.scale : 0.0f;
                d_weight[i] = score[i] * (d_weight[i] - (i % 2 ? delta.y : delta.x));
            }
            set_left<PART>(kept, group, j, Dropout::keep_pair(pack<TYPE>(score[0], score[1]), flags, 0),
                              Dropout::keep_pair(pack<TYPE>(score[2], score[3]), flags, 1));
            set_left<PART>(d_scores, group, j, pack<TYPE>(d_weight[0], d_weight[1]),
                              pack<TYPE>(d_weight[2], d_weight[3]));
        }
    }
}

/* Store a warp's score gradients in shared memory: keys from `row`, queries from `column`. */
DEVICE void share(ScoreTile tile, int row, int column, const Left<PART> &d_scores) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < PART / 8 * 4; i++) {
        const int group = i / (PART / 4), j = i / 2 % (PART / 8), half = i % 2;
        tile.store(row + 16 * group + 8 * half + g, column + 8 * j + 2 * t, d_scores[group][j / 2][j % 2 * 2 + half]);
    }
}

/* Accumulate in `d_query`, or store, a warp's columns of the gradient of 32 queries. */
template <Type TYPE>
DEVICE void put_query_gradient(const Sums<COLUMNS> &sums, const Gradients &gradients, const Sequence &s, int first_query,
                               bool is_first, bool is_last) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4 * COLUMNS / 8; i++) {
        const int group = i / 4, half = i / 2 % 2, j = i % 2;
        const int row = first_query + 16 * group + 8 * half + g;
        if (row >= s.length) continue;
        const int column = threadIdx.x / 32 * COLUMNS + 8 * j + 2 * t;
        float2 *gathered = reinterpret_cast<float2 *>(gradients.d_query + row * s.out_stride + column);
        float2 sum = {sums[group][j][2 * half], sums[group][j][2 * half + 1]};
        if (!is_first) sum = {sum.x + gathered->x, sum.y + gathered->y};
        if (is_last) {
            *as_word(gradients.d_qkv + row * s.qkv_stride + column) = pack<TYPE>(sum.x * SCALE, sum.y * SCALE);
        } else {
            *gathered = sum;
        }
    }
}

/* Add 32 rows [32, KEYS] of the transposed tile times 16 columns of the keys; `count` keys are valid. */
template <Type TYPE> DEVICE void add_query_gradient(Sums<COLUMNS> &sums, ScoreTile d_scores, HeadTile keys, int count) {
    const int column = threadIdx.x / 32 * COLUMNS;
    for (int key = 0; key < count; key += 16) {
        uint32_t upper[4], lower[4], operand[4];
        load_left_transposed(upper, d_scores, key, 0);
        load_left_transposed(lower, d_scores, key, 16);
        load_right_transposed(operand, keys, key, column);
        add_products<TYPE, COLUMNS>(sums, upper, lower, operand, 0);
    }
}

/* The valid rows of a warp's 32 keys. */
template <Type TYPE>
DEVICE void put_rows(uint16_t *to, const Sums<HEAD_SIZE> &sums, float scale, const Sequence &s, int first) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 8 * 4; i++) {
        const int group = i / 2 % 2, half = i % 2, j = i / 4, row = first + 16 * group + 8 * half + g;
        const float(&sum)[4] = sums[group][j];
        if (row >= s.length) continue;
        *as_word(to + row * s.qkv_stride + 8 * j + 2 * t) = pack<TYPE>(sum[2 * half] * scale, sum[2 * half + 1] * scale);
    }
}

DEVICE void copy_queries(uint32_t stage, const uint16_t *q, const Gradients &gradients, const Sequence &s, int first) {
    copy_tile<QUERIES>({stage}, q + first * s.qkv_stride, s.qkv_stride, s.length - first);
    copy_tile<QUERIES>({stage + QUERY_BYTES}, gradients.d_out + first * s.out_stride, s.out_stride, s.length - first);
}

/* Gradients from KEYS keys starting at `block`: those of the keys and values, and their part of the queries'. */
template <Type TYPE>
DEVICE void add_keys(uint32_t memory, const uint16_t *q, const Gradients &gradients, const Sequence &s, int block,
                     float slope, const Dropout &dropout) {
    const HeadTile keys = {memory}, values = {memory + KEY_BYTES};
    const ScoreTile shared_scores = {memory + SCORES};
    const int own = static_cast<int>(threadIdx.x) / 32 * 32, count = min(KEYS, s.length - block);
    uint32_t stage = memory + STAGES, other = stage + STAGE_BYTES;
    copy_tile<KEYS>(keys, q + s.out_stride + block * s.qkv_stride, s.qkv_stride, count);
    copy_tile<KEYS>(values, q + 2 * s.out_stride + block * s.qkv_stride, s.qkv_stride, count);
    copy_queries(stage, q, gradients, s, 0);
    Sums<HEAD_SIZE> d_keys, d_values;
    set_zero<HEAD_SIZE>(d_keys);
    set_zero<HEAD_SIZE>(d_values);
    for (int query = 0; query < s.length; query += QUERIES) {
        /* After the barrier these tiles are complete, and no thread still reads the previous ones or their dS. */
        wait_for_copies();
        __syncthreads();
        if (query + QUERIES < s.length) copy_queries(other, q, gradients, s, query + QUERIES);
        if (own < count) {
            const HeadTile queries = {stage}, d_out = {stage + QUERY_BYTES};
#pragma unroll 1 /* two parts at once would not fit in registers */
            for (int part = 0; part < QUERIES; part += PART) {
                Sums<PART> scores, d_weights;
                set_zero<PART>(scores);
                set_zero<PART>(d_weights);
                add_scores<TYPE, PART>(scores, keys, own, queries, part);
                add_scores<TYPE, PART>(d_weights, values, own, d_out, part);
                Left<PART> kept, d_scores;
                differentiate<TYPE>(kept, d_scores, scores, d_weights, memory, block + own, query + part, s.length, slope,
                                    dropout);
                share(shared_scores, own, part, d_scores);
                add_vectors<TYPE, PART>(d_values, kept, d_out, part);
                add_vectors<TYPE, PART>(d_keys, d_scores, queries, part);
            }
        }
        __syncthreads(); /* dS is complete */
        Sums<COLUMNS> d_query;
        set_zero<COLUMNS>(d_query);
        add_query_gradient<TYPE>(d_query, shared_scores, keys, count);
        put_query_gradient<TYPE>(d_query, gradients, s, query, block == 0, block + KEYS >= s.length);
        const uint32_t swap = stage;
        stage = other, other = swap;
    }
    put_rows<TYPE>(gradients.d_qkv + s.out_stride, d_keys, SCALE, s, block + own);
    put_rows<TYPE>(gradients.d_qkv + 2 * s.out_stride, d_values, dropout.scale, s, block + own);
}

template <Type TYPE>
KERNEL(THREADS, 2)
backward_kernel(fmha_problem p, const float *log_sums, Gradients gradients) {
    const Sequence s = sequence_of_block(p);
    gradients.d_qkv += s.qkv_place;
    if (s.is_tail) {
        for (int i = 0; i < 3; i++) clear(gradients.d_qkv + i * s.out_stride, s.qkv_stride, s.length);
        return;
    }
    gradients.out += s.out_place, gradients.d_out += s.out_place, gradients.d_query += s.out_place;
    log_sums += static_cast<size_t>(s.head) * p.num_tokens + s.start;
    const uint16_t *q = static_cast<const uint16_t *>(p.qkv) + s.qkv_place;
    const float slope = p.slopes ? p.slopes[s.head] / SCALE : 0.0f;
    const Dropout dropout(p, s);
    const uint32_t memory = shared_memory();
    find_statistics<TYPE>(memory, gradients, log_sums, s, dropout);
    for (int block = 0; block < s.length; block += KEYS) {
        if (block) __syncthreads(); /* no thread still reads the previous keys */
        add_keys<TYPE>(memory, q, gradients, s, block, slope, dropout);
    }
}

extern "C" int fmha_backward(const fmha_problem *p, const void *out, const float *log_sums, const void *d_out,
                             float *d_query, void *d_qkv, void *stream) {
    const Gradients gradients = {static_cast<const uint16_t *>(out), static_cast<const uint16_t *>(d_out), d_query,
                                 static_cast<uint16_t *>(d_qkv)};
    auto kernel = p->is_bfloat16 ? backward_kernel<Type::BFLOAT16> : backward_kernel<Type::FLOAT16>;
    return launch(kernel, number_of_blocks(*p), THREADS, BACKWARD_BYTES, stream, *p, log_sums, gradients);
}

int check_backward() {
    const int error = check(backward_kernel<Type::BFLOAT16>);
    return error ? error : check(backward_kernel<Type::FLOAT16>);
}
