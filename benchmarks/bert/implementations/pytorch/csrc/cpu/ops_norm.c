/* LayerNorm with dropout before it (and a residual) or after it; one pass over memory forward and one backward.
 *
 * Weight and bias gradients are summed over fixed chunks of tokens and then over the chunks in order, so they do not
 * depend on the number of threads.
 *
 * Legend: T tokens, D hidden. Activations are float32 or bfloat16, weights and statistics float32. */
#include <math.h>

#include "dropout.h"
#include "simd.h"

typedef struct {
    int64_t columns;
    uint32_t key;
    int threshold;
    const int32_t *rows; /* [T], dropout rows; not read if threshold is 0 */
} Dropout;

INLINE void draw(const Dropout *d, int64_t token, uint8_t *bytes) {
    if (d->threshold) dropout_bytes(row_hash(d->key, d->rows[token]), 0, d->columns, bytes);
}

INLINE vec drop(const Dropout *d, vec x, const uint8_t *bytes, float scale) {
    return d->threshold ? keep_or_zero(x * scale, bytes, d->threshold) : x;
}

/* Mean of `n` floats and the sum of squared distances to it. Two passes: the row is in cache. */
INLINE float variance(const float *x, int64_t n, float mean) {
    vec sum = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        vec d = load(x + c) - mean;
        sum += d * d;
    }
    float total = sum_lanes(sum);
    for (; c < n; c++) total += (x[c] - mean) * (x[c] - mean);
    return total / (float)n;
}

INLINE void forward_rows(const void *x, const float *x_bias, const void *residual, const float *weight,
                         const float *bias, Dropout d, int drop_output, int64_t tokens, float eps, int threads,
                         void *total, float *statistics, void *out, int is_bf16) {
    int64_t n = d.columns;
    float scale = 256.0f / (float)(256 - d.threshold);
#pragma omp parallel num_threads(threads)
    {
        float sums[n + LANES];
        uint32_t words[n / 4 + LANES];
        uint8_t *bytes = (uint8_t *)words;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            draw(&d, t, bytes);
            vec sum = {0};
            EACH_VECTOR(c, count, n, {
                vec value = load_elements(x, t * n + c, count, is_bf16);
                if (x_bias) value += load_elements(x_bias, c, count, 0);
                if (!drop_output) value = drop(&d, value, bytes + c, scale);
                if (residual) value += load_elements(residual, t * n + c, count, is_bf16);
                if (total) store_elements(total, t * n + c, count, value, is_bf16);
                store_elements(sums, c, count, value, 0);
                for (int i = count; i < LANES; i++) value[i] = 0;
                sum += value;
            });
            float mean = sum_lanes(sum) / (float)n;
            float inverse = 1.0f / sqrtf(variance(sums, n, mean) + eps);
            if (statistics) statistics[2 * t] = mean, statistics[2 * t + 1] = inverse;
            EACH_VECTOR(c, count, n, {
                vec normal = (load_elements(sums, c, count, 0) - mean) * inverse;
                vec gain = load_elements(weight, c, count, 0);
                vec y = bias ? normal * gain + load_elements(bias, c, count, 0) : normal * gain;
                if (drop_output) y = drop(&d, y, bytes + c, scale);
                store_elements(out, t * n + c, count, y, is_bf16);
            });
        }
    }
}

/* out = LayerNorm(residual + dropout(x + x_bias)), or dropout(LayerNorm(x + x_bias + residual)) if drop_output.
 * bias, x_bias, residual, total [T, D] (the normalized sum, for backward) and statistics [T, 2]
 * (mean, 1 / deviation) may be null. */
void norm_forward(const void *x, const float *x_bias, const void *residual, const float *weight, const float *bias,
                  const int32_t *rows, int64_t tokens, int64_t columns, float eps, uint32_t key, int threshold,
                  int drop_output, int is_bf16, int threads, void *total, float *statistics, void *out) {
    Dropout d = {columns, key, threshold, rows};
    if (is_bf16)
        forward_rows(x, x_bias, residual, weight, bias, d, drop_output, tokens, eps, threads, total, statistics, out,
                     1);
    else
        forward_rows(x, x_bias, residual, weight, bias, d, drop_output, tokens, eps, threads, total, statistics, out,
                     0);
}

INLINE void backward_row(const void *d_out, const void *d_twin, const void *total, const float *weight, const float *statistics,
                         const Dropout *d, int drop_output, int64_t t, float scale, const uint8_t *bytes, float *normal,
                         float *gradient, void *d_total, void *d_x, float *d_weight, float *d_bias, float *d_x_bias,
                         int is_bf16) {
    int64_t n = d->columns;
    float mean = statistics[2 * t], inverse = statistics[2 * t + 1];
    vec sum = {0}, product = {0};
    EACH_VECTOR(c, count, n, {
        vec g = load_elements(d_out, t * n + c, count, is_bf16);
        if (d_twin) g += load_elements(d_twin, t * n + c, count, is_bf16);
        if (drop_output) g = drop(d, g, bytes + c, scale);
        vec x = (load_elements(total, t * n + c, count, is_bf16) - mean) * inverse;
        store_elements(d_weight, c, count, load_elements(d_weight, c, count, 0) + g * x, 0);
        store_elements(d_bias, c, count, load_elements(d_bias, c, count, 0) + g, 0);
        g *= load_elements(weight, c, count, 0);
        store_elements(normal, c, count, x, 0);
        store_elements(gradient, c, count, g, 0);
        sum += g;
        product += g * x;
    });
    float mean_g = sum_lanes(sum) / (float)n, mean_product = sum_lanes(product) / (float)n;
    EACH_VECTOR(c, count, n, {
        vec g = load_elements(gradient, c, count, 0), x = load_elements(normal, c, count, 0);
        g = inverse * (g - mean_g - x * mean_product);
        store_elements(d_total, t * n + c, count, g, is_bf16);
        if (!drop_output) g = drop(d, g, bytes + c, scale);
        if (d_x) store_elements(d_x, t * n + c, count, g, is_bf16);
        if (d_x_bias) store_elements(d_x_bias, c, count, load_elements(d_x_bias, c, count, 0) + g, 0);
    });
}

INLINE void backward_rows(const void *d_out, const void *d_twin, const void *total, const float *weight,
                          const float *statistics, Dropout d, int drop_output, int64_t tokens, int64_t chunk, int threads, void *d_total,
                          void *d_x, float *partial, int partials, int is_bf16) {
    int64_t n = d.columns;
    float scale = 256.0f / (float)(256 - d.threshold);
#pragma omp parallel num_threads(threads)
    {
        float normal[n + LANES], gradient[n + LANES], block[partials * n];
        float *of_norm = partials > 2 ? block + n : block;
        memset(block, 0, sizeof block);
        uint32_t words[n / 4 + LANES];
        uint8_t *bytes = (uint8_t *)words;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < tokens; first += chunk) {
            int64_t stop = first + chunk < tokens ? first + chunk : tokens;
            float *own = partial + first / chunk * partials * n;
            memset(own, 0, sizeof(float) * (size_t)(partials * n));
            for (int64_t t = first; t < stop; t++) {
                draw(&d, t, bytes);
                backward_row(d_out, d_twin, total, weight, statistics, &d, drop_output, t, scale, bytes, normal, gradient,
                             d_total, d_x, of_norm, of_norm + n, partials > 2 ? block : NULL, is_bf16);
                if ((t - first) % SUM_BLOCK == SUM_BLOCK - 1 || t == stop - 1) flush_block(own, block, partials * n);
            }
        }
    }
}

/* Gradients of norm_forward, whose output has the gradient d_out, or d_out + d_twin unless d_twin is null: d_total [T, D] (of the residual), d_x [T, D] (of x; null unless dropout makes it differ
 * from d_total) and partial [ceil(T / chunk), partials, D] (sums over a chunk's tokens for x_bias, if there are 3, for
 * weight and for bias). */
void norm_backward(const void *d_out, const void *d_twin, const void *total, const float *weight,
                   const float *statistics, const int32_t *rows, int64_t tokens, int64_t columns, int64_t chunk, uint32_t key, int threshold,
                   int drop_output, int is_bf16, int threads, void *d_total, void *d_x, float *partial, int partials) {
    Dropout d = {columns, key, threshold, rows};
    if (is_bf16)
        backward_rows(d_out, d_twin, total, weight, statistics, d, drop_output, tokens, chunk, threads, d_total, d_x, partial,
                      partials, 1);
    else
        backward_rows(d_out, d_twin, total, weight, statistics, d, drop_output, tokens, chunk, threads, d_total, d_x, partial,
                      partials, 0);
}
