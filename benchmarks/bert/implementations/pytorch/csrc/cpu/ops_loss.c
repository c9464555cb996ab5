/* Cross-entropy of masked tokens. Forward computes the loss and the best class; backward overwrites the logits with
 * their gradient.
 *
 * Legend: M masked tokens, V vocabulary; a row of logits has `columns` >= V elements, float32 or bfloat16. */
#include <math.h>

#include "simd.h"

INLINE float row_maximum(const void *logits, int64_t start, int64_t classes, int is_bf16) {
    vec largest = splat(-INFINITY);
    EACH_VECTOR(c, count, classes, {
        vec x = load_elements(logits, start + c, count, is_bf16);
        for (int i = count; i < LANES; i++) x[i] = -INFINITY;
        largest = max_vec(x, largest);
    });
    return max_lanes(largest);
}

/* Summing in blocks keeps the rounding error of the long sum small. */
INLINE float row_sum_exp(const void *logits, int64_t start, int64_t classes, float top, int is_bf16) {
    const int64_t block = 32 * LANES;
    vec total = {0};
    for (int64_t first = 0; first < classes; first += block) {
        int64_t columns = classes - first < block ? classes - first : block;
        vec sum = {0};
        EACH_VECTOR(c, count, columns, {
            vec e = exp_vec(load_elements(logits, start + first + c, count, is_bf16) - top);
            for (int i = count; i < LANES; i++) e[i] = 0;
            sum += e;
        });
        total += sum;
    }
    return sum_lanes(total);
}

INLINE float element(const void *p, int64_t i, int is_bf16) { return load_elements(p, i, 1, is_bf16)[0]; }

/* True if the label is the row's maximum and no lower class equals it. */
INLINE int is_first_maximum(const void *logits, int64_t start, int64_t label, float top, int is_bf16) {
    if (element(logits, start + label, is_bf16) != top) return 0;
    for (int64_t c = 0; c < label; c++)
        if (element(logits, start + c, is_bf16) == top) return 0;
    return 1;
}

INLINE void forward_body(const void *logits, const int64_t *labels, int64_t rows, int64_t columns, int64_t classes,
                         int threads, float *statistics, float *losses, uint8_t *correct, int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t m = 0; m < rows; m++) {
        int64_t start = m * columns;
        float top = row_maximum(logits, start, classes, is_bf16);
        float sum = row_sum_exp(logits, start, classes, top, is_bf16);
        statistics[2 * m] = top, statistics[2 * m + 1] = 1.0f / sum;
        losses[m] = logf(sum) + (top - element(logits, start + labels[m], is_bf16));
        correct[m] = (uint8_t)is_first_maximum(logits, start, labels[m], top, is_bf16);
    }
}

/* Per row, over the first `classes` columns: maximum and 1 / sum of exponentials (statistics [M, 2]), loss,
 * and whether the label is the first maximum. */
void cross_entropy_forward(const void *logits, const int64_t *labels, int64_t rows, int64_t columns, int64_t classes,
                           int is_bf16, int threads, float *statistics, float *losses, uint8_t *correct) {
    if (is_bf16) forward_body(logits, labels, rows, columns, classes, threads, statistics, losses, correct, 1);
    else forward_body(logits, labels, rows, columns, classes, threads, statistics, losses, correct, 0);
}

INLINE void backward_body(void *logits, const int64_t *labels, int64_t rows, int64_t columns, int64_t classes,
                          float factor, int threads, const float *statistics, int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t m = 0; m < rows; m++) {
        int64_t start = m * columns, label = labels[m];
        float at_label = element(logits, start + label, is_bf16);
        float top = statistics[2 * m], inverse = statistics[2 * m + 1];
        EACH_VECTOR(c, count, classes, {
            vec p = exp_vec(load_elements(logits, start + c, count, is_bf16) - top) * inverse;
            store_elements(logits, start + c, count, p * factor, is_bf16);
        });
        vec p = exp_vec(splat(at_label - top)) * inverse - 1.0f;
        store_elements(logits, start + label, 1, p * factor, is_bf16);
        for (int64_t c = classes; c < columns; c++) store_elements(logits, start + c, 1, (vec){0}, is_bf16);
    }
}

/* Overwrite the logits with factor * (softmax - one-hot of the label); columns from `classes` on become 0. */
void cross_entropy_backward(void *logits, const int64_t *labels, int64_t rows, int64_t columns, int64_t classes,
                            float factor, int is_bf16, int threads, const float *statistics) {
    if (is_bf16) backward_body(logits, labels, rows, columns, classes, factor, threads, statistics, 1);
    else backward_body(logits, labels, rows, columns, classes, factor, threads, statistics, 0);
}
