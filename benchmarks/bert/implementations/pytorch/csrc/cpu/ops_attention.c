/* Attention over a flat token stream: one task per (sequence, head), with the scores of one block of queries in cache.
 *
 * Each task packs its operands into panels of TILE_COLUMNS columns, so every product runs on TILE_ROWS x TILE_COLUMNS
 * register tiles. Backward recomputes the scores and normalizes them with the saved row statistics. One thread runs
 * each task in a fixed order, so results do not depend on the number of threads.
 *
 * Legend: T tokens, S sequences, N heads, H head size, L tokens of one sequence. */
#include <math.h>
#include <omp.h>

#include "attention.h"

#define TILE_VECTORS 2
#define TILE_COLUMNS (TILE_VECTORS * LANES)
#if VECTOR_BYTES == 64
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif
#define BLOCK_ROWS 48 /* queries per block: a multiple of both values of TILE_ROWS */
#define LOCAL_BLOCK_ROWS 24 /* likewise, with a window: fewer hidden keys */

#define PREFETCH_ROWS 6

/* c[r][.] = or += sum over k of a[r * row_step + k * depth_step] * panel[k][.] for TILE_ROWS rows. */
INLINE void tile(const float *a, int64_t row_step, int64_t depth_step, const float *panel, int64_t depth, float *c,
                 int64_t c_step, int accumulate) {
    vec sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++)
            sum[r][v] = accumulate ? load(c + r * c_step + v * LANES) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec b0 = load(panel), b1 = load(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < TILE_ROWS; r++) {
            vec x = splat(a[r * row_step]);
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
        panel += TILE_COLUMNS;
        a += depth_step;
    }
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++) store(c + r * c_step + v * LANES, sum[r][v]);
}

/* C [rows, columns] = or += A B, B in `depth` rows of panels of `panel_rows`; C and A must be readable
 * up to full tiles. */
static void product(const float *a, int64_t row_step, int64_t depth_step, const float *panels, int64_t panel_rows,
                    int64_t rows, int64_t columns, int64_t depth, float *c, int64_t c_step, int accumulate) {
    for (int64_t j = 0; j < columns; j += TILE_COLUMNS, panels += panel_rows * TILE_COLUMNS)
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            const float *a_tile = a + r * row_step;
            float *c_tile = c + r * c_step + j;
            if (accumulate) tile(a_tile, row_step, depth_step, panels, depth, c_tile, c_step, 1);
            else tile(a_tile, row_step, depth_step, panels, depth, c_tile, c_step, 0);
        }
}

/* One of q, k, v (or a gradient) of one head: row t at source + t * step, as floats. */
INLINE void copy_rows(const void *source, int64_t step, int64_t rows, int64_t head_size, float *out, int64_t out_step,
                      int is_bf16) {
    const int64_t line = 64 / (is_bf16 ? 2 : 4);
    for (int64_t t = 0; t < rows; t++) {
        /* Rows of one head are far apart, so the hardware prefetcher misses the next one. */
        if (t + PREFETCH_ROWS < rows)
            for (int64_t h = 0; h < head_size; h += line)
                __builtin_prefetch(at(source, (t + PREFETCH_ROWS) * step + h, is_bf16));
        EACH_VECTOR(h, count, head_size, {
            store_elements(out, t * out_step + h, count, load_elements(source, t * step + h, count, is_bf16), 0);
        });
    }
}

/* Panels over columns of a row-major matrix: panel p holds [rows][TILE_COLUMNS]; columns fill whole panels. */
static void pack_columns(const float *matrix, int64_t step, int64_t rows, int64_t columns, float *panels) {
    for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
        for (int64_t t = 0; t < rows; t++, panels += TILE_COLUMNS)
            for (int v = 0; v < TILE_VECTORS; v++) store(panels + v * LANES, load(matrix + t * step + j + v * LANES));
}

/* Panels of the transpose: panel p holds [columns][TILE_COLUMNS]; its columns are the rows from p * TILE_COLUMNS.
 * `matrix` must be readable up to full panels of rows and a multiple of 8 columns. */
static void pack_rows(const float *matrix, int64_t step, int64_t rows, int64_t columns, float *panels) {
    for (int64_t t = 0; t < rows; t += TILE_COLUMNS, panels += columns * TILE_COLUMNS)
        for (int64_t i = 0; i < TILE_COLUMNS; i += 8)
            for (int64_t c = 0; c < columns; c += 8)
                transpose_8x8(matrix + (t + i) * step + c, step, panels + c * TILE_COLUMNS + i, TILE_COLUMNS);
}

/* Sizes of one thread's scratch arrays, in floats. */
typedef struct {
    int64_t width;       /* padded head size */
    int64_t length;      /* padded tokens of a sequence: full panels and full tiles */
    int64_t block_rows;  /* queries per block */
    int64_t score_step;  /* from one row of scores to the next */
    int64_t matrix, block, scores, bytes;
} Layout;

static Layout layout_of(int64_t max_length, int64_t head_size, int64_t window) {
    const int64_t full = TILE_COLUMNS > 16 ? 96 : 48; /* a multiple of TILE_COLUMNS and TILE_ROWS */
    Layout l;
    l.width = round_up(head_size, TILE_COLUMNS);
    l.length = round_up(max_length, full);
    l.block_rows = BLOCK_ROWS;
    int64_t keys = l.length;
    if (window >= 0) {
        l.length += TILE_ROWS; /* a block's keys start at a panel, not at a tile */
        l.block_rows = LOCAL_BLOCK_ROWS;
        int64_t seen = round_up(LOCAL_BLOCK_ROWS + 2 * window + TILE_COLUMNS, full);
        if (seen < keys) keys = seen;
    }
    l.score_step = keys + 16; /* not a power of two, so rows map to different cache sets */
    l.matrix = l.length * l.width;
    l.block = l.block_rows * l.width;
    l.scores = l.block_rows * l.score_step;
    l.bytes = l.score_step / 4 + 16;
    return l;
}

int64_t attention_scratch_floats(int64_t max_length, int64_t head_size, int64_t window) {
    Layout l = layout_of(max_length, head_size, window);
    return round_up(7 * l.matrix + 6 * l.block + 2 * l.scores + l.bytes, 1024);
}

/* Where queries, keys and values are, or their gradients. Query i, in the order of the tokens, is row rows[i] of
 * `queries`, of the outputs and of the statistics, and token tokens[i]; without `bounds`, every token is a query, and i
 * is its row and token. Elements from one row to the next: query_step, key_step. A token's values follow its keys. */
typedef struct {
    const void *queries, *keys;
    int64_t query_step, key_step;
    const int32_t *bounds; /* [S+1]: the queries of each sequence */
    const int32_t *rows, *tokens;
} Source;

static Source every_token(const void *qkv, int64_t num_heads, int64_t head_size, int is_bf16) {
    int64_t width = num_heads * head_size;
    return (Source){qkv, at(qkv, width, is_bf16), 3 * width, 3 * width, NULL, NULL, NULL};
}

static Source some_tokens(const void *queries, const void *keys_and_values, int64_t num_heads, int64_t head_size,
                          const int32_t *bounds, const int32_t *rows, const int32_t *tokens) {
    int64_t width = num_heads * head_size;
    return (Source){queries, keys_and_values, width, 2 * width, bounds, rows, tokens};
}

INLINE int64_t row_of_query(const Source *s, int64_t i) { return s->bounds ? s->rows[i] : i; }
INLINE int64_t token_of_query(const Source *s, int64_t i) { return s->bounds ? s->tokens[i] : i; }

/* Rows of `source`, whose step is `step`, for `count` queries from query i on, as floats. */
INLINE void copy_queries(const Source *s, const void *source, int64_t step, int64_t i, int64_t count, int64_t head_size,
                         float *out, int64_t out_step, int is_bf16) {
    if (!s->bounds) {
        copy_rows(at(source, i * step, is_bf16), step, count, head_size, out, out_step, is_bf16);
        return;
    }
    for (int64_t j = 0; j < count; j++)
        copy_rows(at(source, s->rows[i + j] * step, is_bf16), step, 1, head_size, out + j * out_step, out_step,
                  is_bf16);
}

INLINE void rotate_queries(const Problem *p, const Source *s, int64_t i, int64_t count, float direction, float *x,
                           int64_t step) {
    for (int64_t j = 0; p->rotations && j < count; j++)
        rotate_rows(p, token_of_query(s, i + j), 1, direction, x + j * step, step, 0);
}

/* The keys that these queries of one sequence see. */
INLINE Keys keys_of_queries(const Problem *p, const Source *s, int64_t i, int64_t count, int64_t start,
                            int64_t length) {
    int64_t first = token_of_query(s, i) - start, last = token_of_query(s, i + count - 1) - start;
    return keys_of_block(p, first, last - first + 1, length, TILE_COLUMNS);
}

static void forward_task(const Problem *p, const Source *s, int64_t sequence, int64_t head, float *scratch,
                         float *statistics, void *out) {
    int64_t start = p->bounds[sequence], length = p->bounds[sequence + 1] - start;
    int64_t first_query = s->bounds ? s->bounds[sequence] : start;
    int64_t end_query = s->bounds ? s->bounds[sequence + 1] : start + length;
    if (first_query == end_query) return;
    int64_t size = p->head_size, width = p->num_heads * size, step = s->key_step;
    int bf16 = p->is_bf16;
    Layout l = layout_of(p->max_length, size, p->window);
    float *rows = scratch, *keys = rows + l.matrix, *values = keys + l.matrix;
    float *queries = values + l.matrix, *outputs = queries + l.block, *scores = outputs + l.block;
    uint8_t *bytes = (uint8_t *)(scores + l.scores);
    const void *head_keys = at(s->keys, start * step + head * size, bf16);
    const void *head_queries = at(s->queries, head * size, bf16);
    uint32_t key = head_key(p->key, (uint32_t)head);
    float scale = 256.0f / (float)(256 - p->threshold), root = 1.0f / sqrtf((float)size);

    /* Keys as columns for Q K^T, values as rows for P V; packed once and read by every block of queries. */
    copy_rows(head_keys, step, length, size, rows, l.width, bf16);
    rotate_rows(p, start, length, 1, rows, l.width, 0);
    pack_rows(rows, l.width, length, size, keys);
    copy_rows(at(head_keys, width, bf16), step, length, size, rows, l.width, bf16);
    pack_columns(rows, l.width, length, size, values);
    for (int64_t first = first_query; first < end_query; first += l.block_rows) {
        int64_t count = end_query - first < l.block_rows ? end_query - first : l.block_rows;
        Keys seen = keys_of_queries(p, s, first, count, start, length);
        copy_queries(s, head_queries, s->query_step, first, count, size, queries, l.width, bf16);
        rotate_queries(p, s, first, count, 1, queries, l.width);
        product(queries, l.width, 1, keys + seen.first * size, size, count, seen.count, size, scores, l.score_step, 0);
        float row_statistics[BLOCK_ROWS][2];
        for (int64_t i = 0; i < count; i++) {
            int64_t token = token_of_query(s, first + i);
            float *row_scores = scores + i * l.score_step;
            Row row = row_of(p, token - start, seen);
            prepare_row(p, key, head, token, row, seen, root, bytes, row_scores);
            softmax_row(row_scores + row.start, row.end - row.start, root, bytes, p->threshold, row_statistics[i]);
            clear_hidden(p, row, l.score_step, row_scores);
            memcpy(statistics + 2 * (row_of_query(s, first + i) * p->num_heads + head), row_statistics[i],
                   sizeof(float[2]));
        }
        /* Rows of `scores` are not normalized: the output is multiplied once by 1 / sum and the dropout scale. */
        product(scores, l.score_step, 1, values + seen.first * TILE_COLUMNS, length, count, size, seen.count, outputs,
                l.width, 0);
        for (int64_t i = 0; i < count; i++)
            write_rows(outputs + i * l.width, l.width, 1, size, scale * row_statistics[i][1],
                       at_mut(out, row_of_query(s, first + i) * width + head * size, bf16), 0, bf16);
    }
}

/* `d` has the layout of `s`. */
static void backward_task(const Problem *p, const Source *s, const Source *d, int64_t sequence, int64_t head,
                          float *scratch, const float *statistics, const void *d_out) {
    int64_t start = p->bounds[sequence], length = p->bounds[sequence + 1] - start;
    int64_t first_query = s->bounds ? s->bounds[sequence] : start;
    int64_t end_query = s->bounds ? s->bounds[sequence + 1] : start + length;
    int64_t size = p->head_size, width = p->num_heads * size, step = s->key_step;
    int bf16 = p->is_bf16;
    Layout l = layout_of(p->max_length, size, p->window);
    float *rows = scratch, *keys_by_row = rows + l.matrix, *keys_by_column = keys_by_row + l.matrix;
    float *values_by_row = keys_by_column + l.matrix, *d_keys = values_by_row + l.matrix;
    float *d_values = d_keys + l.matrix, *queries = d_values + l.matrix, *d_outputs = queries + l.block;
    float *query_panels = d_outputs + l.block, *d_output_panels = query_panels + l.block;
    float *d_queries = d_output_panels + l.block, *scores = d_queries + l.block, *d_scores = scores + l.scores;
    uint8_t *bytes = (uint8_t *)(d_scores + l.scores);
    const void *head_keys = at(s->keys, start * step + head * size, bf16);
    const void *head_queries = at(s->queries, head * size, bf16);
    void *head_d_keys = at_mut((void *)d->keys, start * step + head * size, bf16);
    void *head_d_queries = at_mut((void *)d->queries, head * size, bf16);
    const void *head_d_out = at(d_out, head * size, bf16);
    uint32_t key = head_key(p->key, (uint32_t)head);
    float root = 1.0f / sqrtf((float)size);

    /* `rows` is scratch for packing. Keys are packed both ways (for the scores and for dQ), values one way. */
    copy_rows(head_keys, step, length, size, rows, l.width, bf16);
    rotate_rows(p, start, length, 1, rows, l.width, 0);
    pack_rows(rows, l.width, length, size, keys_by_row);
    pack_columns(rows, l.width, length, size, keys_by_column);
    copy_rows(at(head_keys, width, bf16), step, length, size, rows, l.width, bf16);
    pack_rows(rows, l.width, length, size, values_by_row);
    if (p->window >= 0 || first_query == end_query) {
        memset(d_keys, 0, sizeof(float) * (size_t)(length * l.width));
        memset(d_values, 0, sizeof(float) * (size_t)(length * l.width));
    }
    for (int64_t first = first_query; first < end_query; first += l.block_rows) {
        int64_t count = end_query - first < l.block_rows ? end_query - first : l.block_rows;
        Keys seen = keys_of_queries(p, s, first, count, start, length);
        copy_queries(s, head_queries, s->query_step, first, count, size, queries, l.width, bf16);
        rotate_queries(p, s, first, count, 1, queries, l.width);
        copy_queries(s, head_d_out, width, first, count, size, d_outputs, l.width, bf16);
        product(queries, l.width, 1, keys_by_row + seen.first * size, size, count, seen.count, size, scores,
                l.score_step, 0);
        product(d_outputs, l.width, 1, values_by_row + seen.first * size, size, count, seen.count, size, d_scores,
                l.score_step, 0);
        for (int64_t i = 0; i < count; i++) {
            int64_t token = token_of_query(s, first + i);
            float *row_scores = scores + i * l.score_step, *row_d_scores = d_scores + i * l.score_step;
            Row row = row_of(p, token - start, seen);
            prepare_row(p, key, head, token, row, seen, root, bytes, row_scores);
            for (int64_t j = 0; j < row.hidden; j++) row_d_scores[row.start + j] = 0;
            softmax_row_backward(row_scores + row.start, row_d_scores + row.start, row.end - row.start, root,
                                 statistics + 2 * (row_of_query(s, first + i) * p->num_heads + head), bytes,
                                 p->threshold);
            clear_hidden(p, row, l.score_step, row_scores);
            clear_hidden(p, row, l.score_step, row_d_scores);
        }
        pack_columns(queries, l.width, count, size, query_panels);
        pack_columns(d_outputs, l.width, count, size, d_output_panels);
        /* dQ = dS K; dK += dS^T Q and dV += P^T dO read the transposes by swapping the steps. Without a
         * window, the first block of queries overwrites, later ones add. */
        int adds = first > first_query || p->window >= 0;
        float *seen_d_keys = d_keys + seen.first * l.width, *seen_d_values = d_values + seen.first * l.width;
        product(d_scores, l.score_step, 1, keys_by_column + seen.first * TILE_COLUMNS, length, count, size, seen.count,
                d_queries, l.width, 0);
        product(d_scores, 1, l.score_step, query_panels, count, seen.count, size, count, seen_d_keys, l.width, adds);
        product(scores, 1, l.score_step, d_output_panels, count, seen.count, size, count, seen_d_values, l.width, adds);
        rotate_queries(p, s, first, count, -1, d_queries, l.width);
        for (int64_t i = 0; i < count; i++)
            write_rows(d_queries + i * l.width, l.width, 1, size, root,
                       at_mut(head_d_queries, row_of_query(s, first + i) * s->query_step, bf16), 0, bf16);
    }
    rotate_rows(p, start, length, -1, d_keys, l.width, 0);
    write_rows(d_keys, l.width, length, size, root, head_d_keys, step, bf16);
    write_rows(d_values, l.width, length, size, 1.0f, at_mut(head_d_keys, width, bf16), step, bf16);
}

static void run_forward(const Problem *p, const Source *s, const int32_t *order, int64_t num_sequences, int threads,
                        float *scratch, float *statistics, void *out) {
#pragma omp parallel num_threads(threads)
    {
        int64_t floats = attention_scratch_floats(p->max_length, p->head_size, p->window);
        float *own = scratch + omp_get_thread_num() * floats;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_sequences * p->num_heads; i++)
            forward_task(p, s, order[i / p->num_heads], i % p->num_heads, own, statistics, out);
    }
}

static void run_backward(const Problem *p, const Source *s, const Source *d, const int32_t *order,
                         int64_t num_sequences, int threads, float *scratch, const float *statistics,
                         const void *d_out) {
#pragma omp parallel num_threads(threads)
    {
        int64_t floats = attention_scratch_floats(p->max_length, p->head_size, p->window);
        float *own = scratch + omp_get_thread_num() * floats;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_sequences * p->num_heads; i++)
            backward_task(p, s, d, order[i / p->num_heads], i % p->num_heads, own, statistics, d_out);
    }
}

/* out [T, N, H] and statistics [T, N, 2]; scratch has attention_scratch_floats() floats per thread. */
void attention_forward(const void *qkv, const int32_t *bounds, const int32_t *order, const int32_t *rows,
                       const float *slopes, const float *rotations, int64_t num_sequences, int64_t num_heads,
                       int64_t head_size, int64_t max_length, int64_t window, uint32_t key, int threshold, int is_bf16,
                       int threads, float *scratch, float *statistics, void *out) {
    Problem p = {qkv,       bounds,    rows,       slopes, rotations, window,
                 num_heads, head_size, max_length, key,    threshold, is_bf16};
    Source s = every_token(qkv, num_heads, head_size, is_bf16);
    run_forward(&p, &s, order, num_sequences, threads, scratch, statistics, out);
}

/* d_qkv [T, 3, N, H] from d_out [T, N, H] and the forward's statistics. */
void attention_backward(const void *qkv, const int32_t *bounds, const int32_t *order, const int32_t *rows,
                        const float *slopes, const float *rotations, int64_t num_sequences, int64_t num_heads,
                        int64_t head_size, int64_t max_length, int64_t window, uint32_t key, int threshold,
                        int is_bf16, int threads, float *scratch, const float *statistics, const void *d_out,
                        void *d_qkv) {
    Problem p = {qkv,       bounds,    rows,       slopes, rotations, window,
                 num_heads, head_size, max_length, key,    threshold, is_bf16};
    Source s = every_token(qkv, num_heads, head_size, is_bf16);
    Source d = every_token(d_qkv, num_heads, head_size, is_bf16);
    run_backward(&p, &s, &d, order, num_sequences, threads, scratch, statistics, d_out);
}

/* Attention of some tokens to all: out [R, N, H] and statistics [R, N, 2] of queries [R, N, H], for keys and values
 * [T, 2, N, H]. query_bounds [S+1]: the queries of each sequence, in the order of the tokens; query_rows and
 * query_tokens [R]: the row and the token of each. */
void attention_queries_forward(const void *queries, const int32_t *bounds, const int32_t *order, const int32_t *rows,
                               const float *slopes, const float *rotations, int64_t num_sequences, int64_t num_heads,
                               int64_t head_size, int64_t max_length, int64_t window, uint32_t key, int threshold,
                               int is_bf16, int threads, float *scratch, const void *keys_and_values,
                               const int32_t *query_bounds, const int32_t *query_rows, const int32_t *query_tokens,
                               float *statistics, void *out) {
    Problem p = {queries,   bounds,    rows,       slopes, rotations, window,
                 num_heads, head_size, max_length, key,    threshold, is_bf16};
    Source s = some_tokens(queries, keys_and_values, num_heads, head_size, query_bounds, query_rows, query_tokens);
    run_forward(&p, &s, order, num_sequences, threads, scratch, statistics, out);
}

/* d_queries [R, N, H] and d_keys_and_values [T, 2, N, H] from d_out [R, N, H] and the forward's statistics. */
void attention_queries_backward(const void *queries, const int32_t *bounds, const int32_t *order, const int32_t *rows,
                                const float *slopes, const float *rotations, int64_t num_sequences, int64_t num_heads,
                                int64_t head_size, int64_t max_length, int64_t window, uint32_t key, int threshold,
                                int is_bf16, int threads, float *scratch, const void *keys_and_values,
                                const int32_t *query_bounds, const int32_t *query_rows, const int32_t *query_tokens,
                                const float *statistics, const void *d_out, void *d_queries, void *d_keys_and_values) {
    Problem p = {queries,   bounds,    rows,       slopes, rotations, window,
                 num_heads, head_size, max_length, key,    threshold, is_bf16};
    Source s = some_tokens(queries, keys_and_values, num_heads, head_size, query_bounds, query_rows, query_tokens);
    Source d = some_tokens(d_queries, d_keys_and_values, num_heads, head_size, query_bounds, query_rows, query_tokens);
    run_backward(&p, &s, &d, order, num_sequences, threads, scratch, statistics, d_out);
}
