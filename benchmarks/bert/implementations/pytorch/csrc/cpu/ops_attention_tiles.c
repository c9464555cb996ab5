/* Attention in bfloat16 on AMX: the algorithm of ops_attention.c, with every product in 16 x 16 tiles of sums over 32
 * elements. Scores, softmax and sums are float32. Probabilities and score gradients are rounded to bfloat16 before they
 * are used as operands.
 *
 * Without AMX the tile instructions are emulated. That is slow; it lets tests cover everything but the instructions.
 * The head size must be a multiple of 32.
 *
 * The left operand of a product is row-major. The right operand is in panels of 16 columns, [depth / 2][16][2], with
 * pairs of rows interleaved. Legend: T tokens, N heads, H head size. */
#define _GNU_SOURCE /* syscall() */
#include <math.h>
#include <omp.h>
#include <unistd.h>

#include "attention.h"

#define STEP 32        /* rows, columns and depth of a product are multiples of this */
#define BLOCK_ROWS 128 /* queries per block: larger blocks move the sums of keys and values through cache less often */
#define LOCAL_BLOCK_ROWS 64 /* likewise, with a window: fewer hidden keys */

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#define HAVE_TILES 1
/* The compiler's tile loads are not declared as memory reads, so keep earlier stores from moving below them. */
#define MEMORY_BARRIER(p) __asm__ volatile("" ::"r"(p) : "memory")
#define TILE_FILE
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p, bytes) _tile_loadd(t, p, bytes)
#define TILE_STORE(t, p, bytes) _tile_stored(t, p, bytes)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

static void tiles_begin(void) {
    struct __attribute__((packed)) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
    MEMORY_BARRIER(&config);
    _tile_loadconfig(&config);
}

static void tiles_end(void) { _tile_release(); }
#else
#define HAVE_TILES 0
typedef struct {
    uint8_t row[16][64];
} Tile;
#define MEMORY_BARRIER(p) (void)(p)
#define TILE_FILE Tile tiles[8];
#define TILE_ZERO(t) memset(&tiles[t], 0, sizeof(Tile))
#define TILE_LOAD(t, p, bytes) emulate_move(tiles[t].row[0], 64, p, bytes)
#define TILE_STORE(t, p, bytes) emulate_move((uint8_t *)(p), bytes, tiles[t].row[0], 64)
#define TILE_DOT(c, a, b) emulate_dot(&tiles[c], &tiles[a], &tiles[b])

static void emulate_move(uint8_t *to, int64_t to_bytes, const void *from, int64_t from_bytes) {
    for (int r = 0; r < 16; r++) memcpy(to + r * to_bytes, (const uint8_t *)from + r * from_bytes, 64);
}

static float bf16_at(const uint8_t *p) {
    uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static void emulate_dot(Tile *c, const Tile *a, const Tile *b) {
    for (int m = 0; m < 16; m++) {
        float sums[16];
        memcpy(sums, c->row[m], 64);
        for (int k = 0; k < 32; k++)
            for (int n = 0; n < 16; n++)
                sums[n] += bf16_at(a->row[m] + 2 * k) * bf16_at(b->row[k / 2] + 4 * n + 2 * (k % 2));
        memcpy(c->row[m], sums, 64);
    }
}

static void tiles_begin(void) {}
static void tiles_end(void) {}
#endif

/* Return 1 if the kernels below run on AMX: compiled for it, and the system lets this process use it. */
int attention_tiles_available(void) {
#if HAVE_TILES
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}

/* C [rows, columns] = or += A B, B in `depth` rows of panels of `panel_rows`; all sizes multiples of
 * STEP. */
static __attribute__((noinline)) void product(const uint16_t *a, int64_t a_step, const uint16_t *b, int64_t panel_rows,
                                              int64_t rows, int64_t columns, int64_t depth, float *c, int64_t c_step,
                                              int accumulate) {
    TILE_FILE
    MEMORY_BARRIER(a);
    for (int64_t j = 0; j < columns; j += 32) {
        const uint16_t *left_panel = b + j * panel_rows, *right_panel = left_panel + 16 * panel_rows;
        for (int64_t r = 0; r < rows; r += 32) {
            float *upper = c + r * c_step + j, *lower = upper + 16 * c_step;
            if (accumulate) {
                TILE_LOAD(0, upper, 4 * c_step);
                TILE_LOAD(1, upper + 16, 4 * c_step);
                TILE_LOAD(2, lower, 4 * c_step);
                TILE_LOAD(3, lower + 16, 4 * c_step);
            } else {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_ZERO(2);
                TILE_ZERO(3);
            }
            for (int64_t k = 0; k < depth; k += 32) {
                TILE_LOAD(4, a + r * a_step + k, 2 * a_step);
                TILE_LOAD(5, a + (r + 16) * a_step + k, 2 * a_step);
                TILE_LOAD(6, left_panel + 16 * k, 64);
                TILE_LOAD(7, right_panel + 16 * k, 64);
                TILE_DOT(0, 4, 6);
                TILE_DOT(1, 4, 7);
                TILE_DOT(2, 5, 6);
                TILE_DOT(3, 5, 7);
            }
            TILE_STORE(0, upper, 4 * c_step);
            TILE_STORE(1, upper + 16, 4 * c_step);
            TILE_STORE(2, lower, 4 * c_step);
            TILE_STORE(3, lower + 16, 4 * c_step);
        }
    }
    MEMORY_BARRIER(c);
}

/* Copy `rows` rows of one head contiguously, then zeros up to `padded` rows. */
static void gather(const uint16_t *source, int64_t step, int64_t rows, int64_t padded, int64_t size, uint16_t *out) {
    for (int64_t t = 0; t < rows; t++) memcpy(out + t * size, source + t * step, 2 * (size_t)size);
    memset(out + rows * size, 0, 2 * (size_t)((padded - rows) * size));
}

/* Right operand M: panels of its columns from row-major M [rows, columns]. */
static void pack(const uint16_t *matrix, int64_t rows, int64_t columns, uint16_t *panels) {
    for (int64_t j = 0; j < columns; j += 16)
        for (int64_t t = 0; t < rows; t += 2, panels += 32)
            for (int64_t i = 0; i < 16; i++) {
                panels[2 * i] = matrix[t * columns + j + i];
                panels[2 * i + 1] = matrix[(t + 1) * columns + j + i];
            }
}

/* Right operand M^T from row-major M [rows, columns]: a transpose of pairs of elements. */
static void pack_transposed(const uint16_t *matrix, int64_t rows, int64_t columns, uint16_t *panels) {
    const float *pairs = (const float *)(const void *)matrix;
    float *out = (float *)(void *)panels;
    int64_t step = columns / 2;
    for (int64_t t = 0; t < rows; t += 16, out += step * 16)
        for (int64_t i = 0; i < 16; i += 8)
            for (int64_t c = 0; c < step; c += 8)
                transpose_8x8(pairs + (t + i) * step + c, step, out + c * 16 + i, 16);
}

/* Left operand M^T [columns, rows] from row-major M. */
static void transpose(const uint16_t *matrix, int64_t rows, int64_t columns, uint16_t *out) {
    for (int64_t c = 0; c < columns; c++)
        for (int64_t t = 0; t < rows; t++) out[c * rows + t] = matrix[t * columns + c];
}

/* float32 rows to bfloat16, zeros from row `count` to `padded`. */
static void narrow(const float *source, int64_t step, int64_t count, int64_t padded, int64_t columns, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        EACH_VECTOR(j, lanes, columns, {
            store_elements(out, i * columns + j, lanes, load(source + i * step + j), 1);
        });
    memset(out + count * columns, 0, 2 * (size_t)((padded - count) * columns));
}

/* Row-major [columns, rows] to `rows` rows of the gradient of one head, from `token` on; rotated back
 * if `rotated`. */
static void scatter_transposed(const Problem *p, const float *matrix, int64_t step, int64_t token, int64_t rows,
                               int rotated, float factor, float *scratch, uint16_t *out, int64_t out_step) {
    int64_t size = p->head_size;
    for (int64_t t = 0; t < rows; t += 8) {
        int64_t count = rows - t < 8 ? rows - t : 8;
        for (int64_t h = 0; h < size; h += 8) transpose_8x8(matrix + h * step + t, step, scratch + h, size);
        if (rotated) rotate_rows(p, token + t, count, -1, scratch, size, 0);
        write_rows(scratch, size, count, size, factor, out + t * out_step, out_step, 1);
    }
}

/* Scratch arrays of one thread. Sizes are in floats, for the longest sequence. */
typedef struct {
    float *scores, *d_scores, *d_keys, *d_values, *rows;
    uint16_t *matrix, *keys, *values, *keys_by_column, *queries, *d_outputs, *transposed;
    uint16_t *row_major, *panels;
    uint8_t *bytes;
} Scratch;

/* Queries per block, and the most keys that a block sees. */
static int64_t block_rows_of(int64_t window) { return window < 0 ? BLOCK_ROWS : LOCAL_BLOCK_ROWS; }

static int64_t keys_at_once(int64_t max_length, int64_t window) {
    int64_t length = round_up(max_length, STEP), seen = round_up(LOCAL_BLOCK_ROWS + 2 * window + STEP, STEP);
    return window < 0 || seen > length ? length : seen;
}

static int64_t carve(Scratch *s, float *start, int64_t max_length, int64_t size, int64_t window) {
    int64_t length = round_up(max_length, STEP), rows = block_rows_of(window), block = rows * size;
    int64_t scores = rows * keys_at_once(max_length, window);
    float *p = start;
    float **singles[] = {&s->scores, &s->d_scores, &s->d_keys, &s->d_values, &s->rows};
    int64_t single_sizes[] = {scores, scores, size * length, size * length, block};
    for (int i = 0; i < 5; i++) *singles[i] = p, p += single_sizes[i];
    uint16_t **halves[] = {&s->matrix,    &s->keys,       &s->values,    &s->keys_by_column, &s->queries,
                           &s->d_outputs, &s->transposed, &s->row_major, &s->panels};
    int64_t half_sizes[] = {size * length, size * length, size * length, size * length, block, block, block,
                            scores,        scores};
    for (int i = 0; i < 9; i++) *halves[i] = (uint16_t *)p, p += half_sizes[i] / 2;
    s->bytes = (uint8_t *)p;
    return p - start + length / 4 + LANES;
}

int64_t attention_tiles_scratch_floats(int64_t max_length, int64_t head_size, int64_t window) {
    Scratch s;
    return round_up(carve(&s, NULL, max_length, head_size, window), 1024);
}

static void forward_task(const Problem *p, int64_t sequence, int64_t head, Scratch s, float *statistics, void *out) {
    int64_t start = p->bounds[sequence], length = p->bounds[sequence + 1] - start;
    int64_t size = p->head_size, out_step = p->num_heads * size, step = 3 * out_step, keys = round_up(length, STEP);
    const uint16_t *head_qkv = (const uint16_t *)p->qkv + start * step + head * size;
    uint16_t *head_out = (uint16_t *)out + (start * p->num_heads + head) * size;
    uint32_t key = head_key(p->key, (uint32_t)head);
    float scale = 256.0f / (float)(256 - p->threshold), root = 1.0f / sqrtf((float)size);
    int64_t block_rows = block_rows_of(p->window);

    gather(head_qkv + out_step, step, length, keys, size, s.matrix);
    rotate_rows(p, start, length, 1, s.matrix, size, 1);
    pack_transposed(s.matrix, keys, size, s.keys);
    gather(head_qkv + 2 * out_step, step, length, keys, size, s.matrix);
    pack(s.matrix, keys, size, s.values);
    for (int64_t first = 0; first < length; first += block_rows) {
        int64_t count = length - first < block_rows ? length - first : block_rows, padded = round_up(count, STEP);
        Keys seen = keys_of_block(p, first, count, length, STEP);
        int64_t columns = round_up(seen.count, STEP);
        gather(head_qkv + first * step, step, count, padded, size, s.queries);
        rotate_rows(p, start + first, count, 1, s.queries, size, 1);
        product(s.queries, size, s.keys + seen.first * size, size, padded, columns, size, s.scores, columns, 0);
        for (int64_t i = 0; i < count; i++) {
            float *scores = s.scores + i * columns;
            int64_t token = start + first + i;
            Row row = row_of(p, first + i, seen);
            prepare_row(p, key, head, token, row, seen, root, s.bytes, scores);
            softmax_row(scores + row.start, row.end - row.start, root, s.bytes, p->threshold,
                        statistics + 2 * (token * p->num_heads + head));
            clear_hidden(p, row, columns, scores);
        }
        /* Unnormalized probabilities as bfloat16 operands; rows from `count` on are zero. */
        narrow(s.scores, columns, count, padded, columns, s.row_major);
        product(s.row_major, columns, s.values + 16 * seen.first, keys, padded, size, columns, s.rows, size, 0);
        for (int64_t i = 0; i < count; i++)
            write_rows(s.rows + i * size, size, 1, size,
                       scale * statistics[2 * ((start + first + i) * p->num_heads + head) + 1],
                       head_out + (first + i) * out_step, out_step, 1);
    }
}

static void backward_task(const Problem *p, int64_t sequence, int64_t head, Scratch s, const float *statistics,
                          const void *d_out, void *d_qkv) {
    int64_t start = p->bounds[sequence], length = p->bounds[sequence + 1] - start;
    int64_t size = p->head_size, out_step = p->num_heads * size, step = 3 * out_step, keys = round_up(length, STEP);
    const uint16_t *head_qkv = (const uint16_t *)p->qkv + start * step + head * size;
    const uint16_t *head_d_out = (const uint16_t *)d_out + (start * p->num_heads + head) * size;
    uint16_t *head_d_qkv = (uint16_t *)d_qkv + start * step + head * size;
    uint32_t key = head_key(p->key, (uint32_t)head);
    float root = 1.0f / sqrtf((float)size);
    int64_t block_rows = block_rows_of(p->window);

    gather(head_qkv + out_step, step, length, keys, size, s.matrix);
    rotate_rows(p, start, length, 1, s.matrix, size, 1);
    pack_transposed(s.matrix, keys, size, s.keys);
    pack(s.matrix, keys, size, s.keys_by_column);
    gather(head_qkv + 2 * out_step, step, length, keys, size, s.matrix);
    pack_transposed(s.matrix, keys, size, s.values);
    if (p->window >= 0) {
        memset(s.d_keys, 0, sizeof(float) * (size_t)(size * keys));
        memset(s.d_values, 0, sizeof(float) * (size_t)(size * keys));
    }
    for (int64_t first = 0; first < length; first += block_rows) {
        int64_t count = length - first < block_rows ? length - first : block_rows, padded = round_up(count, STEP);
        Keys seen = keys_of_block(p, first, count, length, STEP);
        int64_t columns = round_up(seen.count, STEP);
        gather(head_qkv + first * step, step, count, padded, size, s.queries);
        rotate_rows(p, start + first, count, 1, s.queries, size, 1);
        gather(head_d_out + first * out_step, out_step, count, padded, size, s.d_outputs);
        product(s.queries, size, s.keys + seen.first * size, size, padded, columns, size, s.scores, columns, 0);
        product(s.d_outputs, size, s.values + seen.first * size, size, padded, columns, size, s.d_scores, columns, 0);
        for (int64_t i = 0; i < count; i++) {
            int64_t token = start + first + i;
            float *scores = s.scores + i * columns, *d_scores = s.d_scores + i * columns;
            Row row = row_of(p, first + i, seen);
            prepare_row(p, key, head, token, row, seen, root, s.bytes, scores);
            for (int64_t j = 0; j < row.hidden; j++) d_scores[row.start + j] = 0;
            softmax_row_backward(scores + row.start, d_scores + row.start, row.end - row.start, root,
                                 statistics + 2 * (token * p->num_heads + head), s.bytes, p->threshold);
            clear_hidden(p, row, columns, scores);
            clear_hidden(p, row, columns, d_scores);
        }
        /* dV^T += dO^T P and dK^T += Q^T dS: sums [H, L], transposed once after the loop. Without a
         * window, the first block of queries overwrites. */
        int adds = first > 0 || p->window >= 0;
        narrow(s.scores, columns, count, padded, columns, s.row_major);
        pack(s.row_major, padded, columns, s.panels);
        transpose(s.d_outputs, padded, size, s.transposed);
        product(s.transposed, padded, s.panels, padded, size, columns, padded, s.d_values + seen.first, keys, adds);
        narrow(s.d_scores, columns, count, padded, columns, s.row_major);
        pack(s.row_major, padded, columns, s.panels);
        transpose(s.queries, padded, size, s.transposed);
        product(s.transposed, padded, s.panels, padded, size, columns, padded, s.d_keys + seen.first, keys, adds);
        product(s.row_major, columns, s.keys_by_column + 16 * seen.first, keys, padded, size, columns, s.rows, size,
                0);
        rotate_rows(p, start + first, count, -1, s.rows, size, 0);
        write_rows(s.rows, size, count, size, root, head_d_qkv + first * step, step, 1);
    }
    scatter_transposed(p, s.d_keys, keys, start, length, 1, root, s.rows, head_d_qkv + out_step, step);
    scatter_transposed(p, s.d_values, keys, start, length, 0, 1.0f, s.rows, head_d_qkv + 2 * out_step, step);
}

/* Same arguments as attention_forward; all activations are bfloat16 (is_bf16 is ignored). */
void attention_tiles_forward(const void *qkv, const int32_t *bounds, const int32_t *order, const int32_t *rows,
                             const float *slopes, const float *rotations, int64_t num_sequences, int64_t num_heads,
                             int64_t head_size, int64_t max_length, int64_t window, uint32_t key, int threshold,
                             int is_bf16, int threads, float *scratch, float *statistics, void *out) {
    Problem p = {qkv,       bounds,    rows,       slopes, rotations, window,
                 num_heads, head_size, max_length, key,    threshold, is_bf16};
#pragma omp parallel num_threads(threads)
    {
        Scratch own;
        int64_t floats = attention_tiles_scratch_floats(max_length, head_size, window);
        carve(&own, scratch + omp_get_thread_num() * floats, max_length, head_size, window);
        tiles_begin();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_sequences * num_heads; i++)
            forward_task(&p, order[i / num_heads], i % num_heads, own, statistics, out);
        tiles_end();
    }
}

/* Same arguments as attention_backward; all activations are bfloat16. */
void attention_tiles_backward(const void *qkv, const int32_t *bounds, const int32_t *order, const int32_t *rows,
                              const float *slopes, const float *rotations, int64_t num_sequences, int64_t num_heads,
                              int64_t head_size, int64_t max_length, int64_t window, uint32_t key, int threshold,
                              int is_bf16, int threads, float *scratch, const float *statistics, const void *d_out,
                              void *d_qkv) {
    Problem p = {qkv,       bounds,    rows,       slopes, rotations, window,
                 num_heads, head_size, max_length, key,    threshold, is_bf16};
#pragma omp parallel num_threads(threads)
    {
        Scratch own;
        int64_t floats = attention_tiles_scratch_floats(max_length, head_size, window);
        carve(&own, scratch + omp_get_thread_num() * floats, max_length, head_size, window);
        tiles_begin();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_sequences * num_heads; i++)
            backward_task(&p, order[i / num_heads], i % num_heads, own, statistics, d_out, d_qkv);
        tiles_end();
    }
}
