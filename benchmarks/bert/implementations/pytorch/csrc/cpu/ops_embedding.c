/* The sum of three embeddings, and its gradient.
 *
 * Threads split the columns, never the tokens. One thread sums each table element in token order, so the cost is T * D
 * and the result does not depend on the number of threads.
 *
 * Legend: T tokens, D hidden, V vocabulary. Tables are float32, the sum float32 or bfloat16. */
#include "simd.h"

#define MIN_COLUMNS 32 /* a narrower slice wastes cache lines */

void embedding_forward(const int64_t *words, const int64_t *positions, const int64_t *segments, const float *word,
                       const float *position, const float *segment, int64_t tokens, int64_t columns, int is_bf16,
                       int threads, void *out) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++) {
        const float *a = word + words[t] * columns, *b = position + positions[t] * columns;
        const float *s = segment + segments[t] * columns;
        EACH_VECTOR(c, count, columns, {
            vec sum = load_elements(a, c, count, 0) + load_elements(b, c, count, 0) + load_elements(s, c, count, 0);
            if (is_bf16) store_elements(out, t * columns + c, count, sum, 1);
            else store_elements(out, t * columns + c, count, sum, 0);
        });
    }
}

INLINE void add_elements(float *row, int count, vec x) {
    store_elements(row, 0, count, load_elements(row, 0, count, 0) + x, 0);
}

/* Add d_out [T, D] to the gradients of the three tables. The caller zeroes them first. */
void embedding_backward(const int64_t *words, const int64_t *positions, const int64_t *segments, const void *d_out,
                        int64_t tokens, int64_t columns, int is_bf16, int threads, float *d_word, float *d_position,
                        float *d_segment) {
    int64_t slices = columns / MIN_COLUMNS < threads ? columns / MIN_COLUMNS : threads;
    if (slices < 1) slices = 1;
    int64_t width = round_up((columns + slices - 1) / slices, LANES);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < columns; first += width) {
        int64_t stop = first + width < columns ? first + width : columns;
        for (int64_t t = 0; t < tokens; t++) {
            float *of_word = d_word + words[t] * columns + first;
            float *of_position = d_position + positions[t] * columns + first;
            float *of_segment = d_segment + segments[t] * columns + first;
            EACH_VECTOR(c, count, stop - first, {
                int64_t i = t * columns + first + c;
                vec x = is_bf16 ? load_elements(d_out, i, count, 1) : load_elements(d_out, i, count, 0);
                add_elements(of_word + c, count, x);
                add_elements(of_position + c, count, x);
                add_elements(of_segment + c, count, x);
            });
        }
    }
}
