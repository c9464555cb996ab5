/*
 * LAMB and AdamW on flat float32 buffers, for CPUs. Called through ctypes from mlbert/optim/kernels.py; the formulas
 * are in mlbert/optim/lamb.py and adamw.py.
 *
 * The buffers are walked in blocks that never cross a segment (one parameter tensor). Each block's sums are stored and
 * later added in block order, so results do not depend on how many threads there are.
 */
#include <math.h>
#include <stdint.h>

struct scalars {
    double beta_1, beta_2; /* double: 1 - 0.999f is off by 1.3e-5 of its value */
    float lr, grad_scale, correction_1, correction_2, eps, weight_decay;
};

struct blocks {
    const int64_t *offset;              /* [num_blocks] first element */
    const int64_t *length;              /* [num_blocks] elements */
    const int64_t *segment;             /* [num_blocks] owner */
    const int64_t *segment_first_block; /* [num_segments + 1] */
    const int64_t *segment_decay;       /* [num_segments] 0: neither decay nor trust ratio */
    const int64_t *group_first_block;   /* [num_groups + 1] */
    int64_t num_blocks, num_groups;
};

/* Sum of squares of x[n], in double; sums[ceil(n / block)] is scratch. */
double optim_sum_squares(const float *restrict x, int64_t n, int64_t block, double *restrict sums, int threads)
{
    const int64_t num_blocks = (n + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t end = (b + 1) * block < n ? (b + 1) * block : n;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * block; i < end; ++i)
            sum += (double)x[i] * (double)x[i];
        sums[b] = sum;
    }
    double total = 0.0;
    for (int64_t b = 0; b < num_blocks; ++b)
        total += sums[b];
    return total;
}

/* Adam's direction from the moments as they are after this step's gradient. */
static inline float direction(float m, float v, const struct scalars *s)
{
    return m * s->correction_1 / (sqrtf(v * s->correction_2) + s->eps);
}

/* Moments and weights of one block in one pass; decay is the weight decay or 0. */
static void update_block(float *restrict w, const float *restrict g, float *restrict m, float *restrict v, int64_t n,
                         const struct scalars *s, float decay)
{
    const struct scalars k = *s;
    const float beta_1 = (float)k.beta_1, beta_2 = (float)k.beta_2;
    const float alpha_1 = (float)(1.0 - k.beta_1), alpha_2 = (float)(1.0 - k.beta_2);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * k.grad_scale;
        const float m_new = beta_1 * m[i] + alpha_1 * grad;
        const float v_new = beta_2 * v[i] + alpha_2 * grad * grad;
        m[i] = m_new;
        v[i] = v_new;
        w[i] -= k.lr * (direction(m_new, v_new, &k) + decay * w[i]);
    }
}

/* First half of LAMB: moments, and the sums of squares of weights and update. The update itself is not stored: to
 * compute it again from weights and moments costs less memory traffic than to write and read it. */
static void moments_and_norms(const float *restrict w, const float *restrict g, float *restrict m, float *restrict v,
                              int64_t n, const struct scalars *s, double *weight_sum, double *update_sum)
{
    const struct scalars k = *s;
    const float beta_1 = (float)k.beta_1, beta_2 = (float)k.beta_2;
    const float alpha_1 = (float)(1.0 - k.beta_1), alpha_2 = (float)(1.0 - k.beta_2);
    double sum_w = 0.0, sum_u = 0.0;
#pragma omp simd reduction(+ : sum_w, sum_u)
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * k.grad_scale;
        const float m_new = beta_1 * m[i] + alpha_1 * grad;
        const float v_new = beta_2 * v[i] + alpha_2 * grad * grad;
        m[i] = m_new;
        v[i] = v_new;
        const float u = direction(m_new, v_new, &k) + k.weight_decay * w[i];
        sum_w += (double)w[i] * (double)w[i];
        sum_u += (double)u * (double)u;
    }
    *weight_sum = sum_w;
    *update_sum = sum_u;
}

/* Second half of LAMB: rate is learning rate times trust ratio. */
static void apply_block(float *restrict w, const float *restrict m, const float *restrict v, int64_t n,
                        const struct scalars *s, float rate)
{
    const struct scalars k = *s;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
        w[i] -= rate * (direction(m[i], v[i], &k) + k.weight_decay * w[i]);
}

static float trust_ratio(const struct blocks *t, int64_t segment, const double *weight_sums, const double *update_sums)
{
    double weight = 0.0, update = 0.0;
    for (int64_t b = t->segment_first_block[segment]; b < t->segment_first_block[segment + 1]; ++b) {
        weight += weight_sums[b];
        update += update_sums[b];
    }
    return weight > 0.0 && update > 0.0 ? (float)(sqrt(weight) / sqrt(update)) : 1.0f;
}

/* One LAMB update of w, m, v [sum of lengths]; weight_sums and update_sums [num_blocks] are scratch. */
void optim_lamb(float *w, const float *g, float *m, float *v, const struct blocks *t, const struct scalars *s,
                double *weight_sums, double *update_sums, int threads)
{
#pragma omp parallel num_threads(threads)
    for (int64_t group = 0; group < t->num_groups; ++group) {
        const int64_t first = t->group_first_block[group], end = t->group_first_block[group + 1];
#pragma omp for schedule(static) /* waits at its end: the sums of the group are complete */
        for (int64_t b = first; b < end; ++b) {
            const int64_t o = t->offset[b];
            if (t->segment_decay[t->segment[b]])
                moments_and_norms(w + o, g + o, m + o, v + o, t->length[b], s, &weight_sums[b], &update_sums[b]);
            else
                update_block(w + o, g + o, m + o, v + o, t->length[b], s, 0.0f);
        }
        int64_t known = -1;
        float rate = 0.0f;
#pragma omp for schedule(static) nowait /* the next group touches other elements */
        for (int64_t b = first; b < end; ++b) {
            const int64_t segment = t->segment[b], o = t->offset[b];
            if (!t->segment_decay[segment])
                continue;
            if (segment != known) {
                rate = s->lr * trust_ratio(t, segment, weight_sums, update_sums);
                known = segment;
            }
            apply_block(w + o, m + o, v + o, t->length[b], s, rate);
        }
    }
}

/* One AdamW update of w, m, v [sum of lengths]. */
void optim_adamw(float *w, const float *g, float *m, float *v, const struct blocks *t, const struct scalars *s,
                 int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < t->num_blocks; ++b) {
        const int64_t o = t->offset[b];
        const float decay = t->segment_decay[t->segment[b]] ? s->weight_decay : 0.0f;
        update_block(w + o, g + o, m + o, v + o, t->length[b], s, decay);
    }
}
