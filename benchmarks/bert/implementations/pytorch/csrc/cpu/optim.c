/*
 * CPU optimizers on flat float32 buffers. Called through ctypes from mlbert/optim/compiled.py. The formulas are in
 * mlbert/optim: adam.py (with LAMB and StableAdamW), acclip.py, madgrad.py and sgd.py.
 *
 * The buffers are processed in blocks that never cross a parameter ("owner"). The sums of each block are stored and
 * then added in block order, so results do not depend on the number of threads.
 */
#include <math.h>
#include <stdint.h>

enum { FORMULAS_ADAM, FORMULAS_ACCLIP, FORMULAS_MADGRAD, FORMULAS_SGD }; /* mlbert.optim.compiled.Formulas */
enum { SCALE_NONE, SCALE_TRUST_RATIO, SCALE_RMS };                       /* mlbert.optim.compiled.Scaling */

struct scalars {
    double beta_1, beta_2; /* double: 1 - 0.999f has a relative error of 1.3e-5 */
    float lr, grad_scale, correction_1, correction_2, eps, weight_decay;
    int64_t scaling;
};

struct blocks {
    const int64_t *offset;            /* [num_blocks] first element */
    const int64_t *length;            /* [num_blocks] elements */
    const int64_t *owner;             /* [num_blocks] ascending */
    const int64_t *decay;             /* [num_blocks] 0: no decay and no trust ratio */
    const int64_t *owner_first_block; /* [num_owners + 1] */
    const int64_t *group_first_block; /* [num_groups + 1] */
    int64_t num_groups;
};

/* Return the sum of squares of x[n], in double. sums[ceil(n / block)] is scratch. */
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

/* Adam's direction, from the moments after this step's gradient. */
static inline float direction(float m, float v, const struct scalars *s)
{
    return m * s->correction_1 / (sqrtf(v * s->correction_2) + s->eps);
}

/* Update the moments and weights of one block in one pass. decay: the weight decay or 0. */
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

/* First half of LAMB: moments, and the sums of squares of weights and update. The update is not stored: recomputing it
 * from weights and moments takes less memory traffic than writing and reading it. */
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

/* First half of StableAdamW: moments, and the sum of g^2 / max(corrected v, eps^2). */
static double moments_and_rms(const float *restrict g, float *restrict m, float *restrict v, int64_t n,
                              const struct scalars *s)
{
    const struct scalars k = *s;
    const float beta_1 = (float)k.beta_1, beta_2 = (float)k.beta_2;
    const float alpha_1 = (float)(1.0 - k.beta_1), alpha_2 = (float)(1.0 - k.beta_2);
    const float least = k.eps * k.eps;
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * k.grad_scale;
        const float v_new = beta_2 * v[i] + alpha_2 * grad * grad;
        const float corrected = v_new * k.correction_2;
        m[i] = beta_1 * m[i] + alpha_1 * grad;
        v[i] = v_new;
        sum += (double)(grad * grad / (corrected > least ? corrected : least));
    }
    return sum;
}

/* Second half. rate: the learning rate times the parameter's scale; decay: the weight decay or 0. */
static void apply_block(float *restrict w, const float *restrict m, const float *restrict v, int64_t n,
                        const struct scalars *s, float rate, float decay)
{
    const struct scalars k = *s;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
        w[i] -= rate * (direction(m[i], v[i], &k) + decay * w[i]);
}

static inline int is_scaled(const struct scalars *s, int64_t decay)
{
    return s->scaling == SCALE_RMS || (s->scaling == SCALE_TRUST_RATIO && decay);
}

/* The full update of an unscaled block; only the moments and sums of a scaled one. */
static void first_pass(float *w, const float *g, float *m, float *v, const struct blocks *t, const struct scalars *s,
                       int64_t b, double *sums_1, double *sums_2)
{
    const int64_t o = t->offset[b], n = t->length[b];
    if (!is_scaled(s, t->decay[b])) {
        update_block(w + o, g + o, m + o, v + o, n, s, t->decay[b] ? s->weight_decay : 0.0f);
    } else if (s->scaling == SCALE_RMS) {
        sums_1[b] = (double)n;
        sums_2[b] = moments_and_rms(g + o, m + o, v + o, n, s);
    } else {
        moments_and_norms(w + o, g + o, m + o, v + o, n, s, &sums_1[b], &sums_2[b]);
    }
}

/* Scale factor of a parameter's update, from its two sums. */
static float scale_of(const struct scalars *s, double sum_1, double sum_2)
{
    if (s->scaling == SCALE_RMS && sum_2 < sum_1)
        return 1.0f;
    return sum_1 > 0.0 && sum_2 > 0.0 ? (float)(sqrt(sum_1) / sqrt(sum_2)) : 1.0f;
}

static void second_pass(float *w, const float *m, const float *v, const struct blocks *t, const struct scalars *s,
                        int64_t b, float scale)
{
    const int64_t o = t->offset[b];
    apply_block(w + o, m + o, v + o, t->length[b], s, s->lr * scale, t->decay[b] ? s->weight_decay : 0.0f);
}

/* One update of w, m, v [sum of lengths], which hold every parameter in full. sums_1 and sums_2 [num_blocks] are
 * scratch. */
void optim_update(float *w, const float *g, float *m, float *v, const struct blocks *t, const struct scalars *s,
                  double *sums_1, double *sums_2, int threads)
{
#pragma omp parallel num_threads(threads)
    for (int64_t group = 0; group < t->num_groups; ++group) {
        const int64_t first = t->group_first_block[group], end = t->group_first_block[group + 1];
#pragma omp for schedule(static) /* implicit barrier at the end: the sums of the group are complete */
        for (int64_t b = first; b < end; ++b)
            first_pass(w, g, m, v, t, s, b, sums_1, sums_2);
        int64_t known = -1;
        float scale = 1.0f;
#pragma omp for schedule(static) nowait /* the next group touches other elements */
        for (int64_t b = first; b < end; ++b) {
            if (!is_scaled(s, t->decay[b]))
                continue;
            if (t->owner[b] != known) { /* a thread's blocks are consecutive: once per parameter, not per block */
                known = t->owner[b];
                double sum_1 = 0.0, sum_2 = 0.0;
                for (int64_t i = t->owner_first_block[known]; i < t->owner_first_block[known + 1]; ++i) {
                    sum_1 += sums_1[i];
                    sum_2 += sums_2[i];
                }
                scale = scale_of(s, sum_1, sum_2);
            }
            second_pass(w, m, v, t, s, b, scale);
        }
    }
}

/* The two halves of a shard's update, each for the blocks [first, end). Between them the caller adds the sums of each
 * parameter over the ranks. */
void optim_first_pass(float *w, const float *g, float *m, float *v, const struct blocks *t, const struct scalars *s,
                      int64_t first, int64_t end, double *sums_1, double *sums_2, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = first; b < end; ++b)
        first_pass(w, g, m, v, t, s, b, sums_1, sums_2);
}

/* totals [2][num_owners]: the sums over all ranks. */
void optim_second_pass(float *w, const float *m, const float *v, const struct blocks *t, const struct scalars *s,
                       int64_t first, int64_t end, const double *totals, int64_t num_owners, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = first; b < end; ++b) {
        if (is_scaled(s, t->decay[b]))
            second_pass(w, m, v, t, s, b, scale_of(s, totals[t->owner[b]], totals[num_owners + t->owner[b]]));
    }
}

static void acclip_block(float *restrict w, const float *restrict g, float *restrict m, float *restrict tau, int64_t n,
                         const struct scalars *s, float decay)
{
    const struct scalars k = *s;
    const float beta_1 = (float)k.beta_1, beta_2 = (float)k.beta_2;
    const float alpha_1 = (float)(1.0 - k.beta_1), alpha_2 = (float)(1.0 - k.beta_2);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * k.grad_scale;
        const float m_new = beta_1 * m[i] + alpha_1 * grad;
        const float tau_new = beta_2 * tau[i] + alpha_2 * fabsf(grad);
        const float ratio = tau_new / (fabsf(m_new) + k.eps);
        m[i] = m_new;
        tau[i] = tau_new;
        w[i] -= k.lr * ((ratio < 1.0f ? ratio : 1.0f) * m_new + decay * w[i]);
    }
}

/* Cube root of x >= 0 to one unit in the last place; unlike cbrtf, compilers can vectorise it. Dividing the exponent by
 * three gives an error of at most 3.3 %, which three Newton steps reduce to 1e-3, 1e-6 and rounding. For subnormal x
 * the error is at most 1e-13. */
static inline float cube_root(float x)
{
    union {
        float value;
        uint32_t bits;
    } y = {x};
    y.bits = y.bits / 3 + 0x2a5119f2u;
    for (int step = 0; step < 3; ++step)
        y.value -= (y.value - x / (y.value * y.value)) * (1.0f / 3.0f);
    return x < INFINITY ? y.value : x;
}

/* The rate in the scalars is lambda. */
static void madgrad_block(float *restrict w, const float *restrict g, float *restrict sum, float *restrict sum_sq,
                          const float *restrict start, int64_t n, const struct scalars *s, float decay)
{
    const struct scalars k = *s;
    const float momentum = (float)k.beta_1, share = (float)(1.0 - k.beta_1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i] * k.grad_scale + decay * w[i];
        const float sum_new = sum[i] + k.lr * grad;
        const float sum_sq_new = sum_sq[i] + k.lr * (grad * grad);
        sum[i] = sum_new;
        sum_sq[i] = sum_sq_new;
        w[i] = momentum * w[i] + share * (start[i] - sum_new / (cube_root(sum_sq_new) + k.eps));
    }
}

static void sgd_block(float *restrict w, const float *restrict g, float *restrict m, int64_t n, const struct scalars *s,
                      float decay)
{
    const struct scalars k = *s;
    const float momentum = (float)k.beta_1;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float m_new = momentum * m[i] + g[i] * k.grad_scale;
        m[i] = m_new;
        w[i] -= k.lr * (m_new + decay * w[i]);
    }
}

/* One update of the blocks [first, end) by an element-wise method. Its state is in state_1 and, if the method needs
 * them, state_2 and state_3. */
void optim_one_pass(float *w, const float *g, float *state_1, float *state_2, const float *state_3,
                    const struct blocks *t, const struct scalars *s, int64_t first, int64_t end, int formulas,
                    int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = first; b < end; ++b) {
        const int64_t o = t->offset[b], n = t->length[b];
        const float decay = t->decay[b] ? s->weight_decay : 0.0f;
        if (formulas == FORMULAS_ACCLIP)
            acclip_block(w + o, g + o, state_1 + o, state_2 + o, n, s, decay);
        else if (formulas == FORMULAS_MADGRAD)
            madgrad_block(w + o, g + o, state_1 + o, state_2 + o, state_3 + o, n, s, decay);
        else if (formulas == FORMULAS_SGD)
            sgd_block(w + o, g + o, state_1 + o, n, s, decay);
    }
}
