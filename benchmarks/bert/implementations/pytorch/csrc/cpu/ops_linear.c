/* Element-wise operations around matrix products: bias with tanh-GELU, forward and backward, and sums over tokens.
 *
 * gelu(x) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form without cancellation.
 *
 * Legend: T tokens, F columns. Activations are float32 or bfloat16, biases and sums float32. */
#include "simd.h"

#define TWO_ROOT_2_OVER_PI 1.5957691216057308f
#define CUBE 0.044715f
#define NEGLIGIBLE_BELOW -10.0f /* sigmoid(2 u) is below 1e-37 at this point */

INLINE void forward_body(const void *pre, const float *bias, int64_t tokens, int64_t columns, int threads, void *out,
                         int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++)
        EACH_VECTOR(c, count, columns, {
            vec x = load_elements(pre, t * columns + c, count, is_bf16) + load_elements(bias, c, count, 0);
            vec e = exp_vec(-TWO_ROOT_2_OVER_PI * (x + CUBE * (x * x * x)));
            vec y = select_vec(x < NEGLIGIBLE_BELOW, splat(0), x / (e + 1.0f));
            store_elements(out, t * columns + c, count, y, is_bf16);
        });
}

/* out = gelu(pre + bias); out may alias pre. */
void bias_gelu_forward(const void *pre, const float *bias, int64_t tokens, int64_t columns, int is_bf16, int threads,
                       void *out) {
    if (is_bf16) forward_body(pre, bias, tokens, columns, threads, out, 1);
    else forward_body(pre, bias, tokens, columns, threads, out, 0);
}

INLINE void backward_body(const void *d_out, const void *pre, const float *bias, int64_t tokens, int64_t columns,
                          int64_t chunk, int threads, void *d_pre, float *partial, int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < tokens; first += chunk) {
        int64_t stop = first + chunk < tokens ? first + chunk : tokens;
        float *own = partial + first / chunk * columns;
        float block[columns];
        memset(own, 0, sizeof block);
        memset(block, 0, sizeof block);
        for (int64_t t = first; t < stop; t++) {
            EACH_VECTOR(c, count, columns, {
                vec x = load_elements(pre, t * columns + c, count, is_bf16) + load_elements(bias, c, count, 0);
                vec square = x * x;
                vec e = exp_vec(-TWO_ROOT_2_OVER_PI * (x + CUBE * (square * x)));
                vec sigmoid = select_vec(x < NEGLIGIBLE_BELOW, splat(0), 1.0f / (e + 1.0f));
                vec slope = TWO_ROOT_2_OVER_PI * (1.0f + (3 * CUBE) * square);
                vec g = load_elements(d_out, t * columns + c, count, is_bf16);
                vec bend = x * slope * (sigmoid * (e * sigmoid));
                g *= sigmoid + select_vec(square > NEGLIGIBLE_BELOW * NEGLIGIBLE_BELOW, splat(0), bend);
                store_elements(d_pre, t * columns + c, count, g, is_bf16);
                store_elements(block, c, count, load_elements(block, c, count, 0) + g, 0);
            });
            if ((t - first) % SUM_BLOCK == SUM_BLOCK - 1 || t == stop - 1) flush_block(own, block, columns);
        }
    }
}

/* d_pre = d_out * gelu'(pre + bias); d_pre may alias pre. partial [ceil(T / chunk), F]: its sums over token chunks. */
void bias_gelu_backward(const void *d_out, const void *pre, const float *bias, int64_t tokens, int64_t columns,
                        int64_t chunk, int is_bf16, int threads, void *d_pre, float *partial) {
    if (is_bf16) backward_body(d_out, pre, bias, tokens, columns, chunk, threads, d_pre, partial, 1);
    else backward_body(d_out, pre, bias, tokens, columns, chunk, threads, d_pre, partial, 0);
}

INLINE void sum_body(const void *x, int64_t tokens, int64_t columns, int64_t chunk, int threads, float *partial,
                     int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < tokens; first += chunk) {
        int64_t stop = first + chunk < tokens ? first + chunk : tokens;
        float *own = partial + first / chunk * columns;
        float block[columns];
        memset(own, 0, sizeof block);
        memset(block, 0, sizeof block);
        for (int64_t t = first; t < stop; t++) {
            EACH_VECTOR(c, count, columns, {
                vec sum = load_elements(block, c, count, 0) + load_elements(x, t * columns + c, count, is_bf16);
                store_elements(block, c, count, sum, 0);
            });
            if ((t - first) % SUM_BLOCK == SUM_BLOCK - 1 || t == stop - 1) flush_block(own, block, columns);
        }
    }
}

/* partial [ceil(T / chunk), F]: sums of x [T, F] over chunks of tokens. */
void sum_tokens(const void *x, int64_t tokens, int64_t columns, int64_t chunk, int is_bf16, int threads,
                float *partial) {
    if (is_bf16) sum_body(x, tokens, columns, chunk, threads, partial, 1);
    else sum_body(x, tokens, columns, chunk, threads, partial, 0);
}

/* out [F] = the sum of the first F columns of partial [chunks, step] over the chunks, or out += that sum. */
void sum_chunks(const float *partial, int64_t chunks, int64_t step, int64_t columns, int adds, float *out) {
    EACH_VECTOR(c, count, columns, {
        vec sum = {0};
        for (int64_t i = 0; i < chunks; i++) sum += load_elements(partial, i * step + c, count, 0);
        if (adds) sum += load_elements(out, c, count, 0);
        store_elements(out, c, count, sum, 0);
    });
}
