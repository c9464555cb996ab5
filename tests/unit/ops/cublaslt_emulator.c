/* Emulate cublasLt on host memory, for tests without a GPU: the functions that csrc/mhalib calls, as naive loops.
 * Constants and structures follow NVIDIA's documentation and are not shared with the code under test. Unknown or
 * inconsistent arguments return a status, with the reason in `emulator_complaint`. Sums are in double, rounded once. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };
enum {
    DEFAULT = 1,
    BIAS = 4,
    GELU_BIAS = 36,
    GELU_AUX_BIAS = 164,
    DGELU = 192,
    DGELU_BGRAD = 208,
    BGRADA = 256,
    BGRADB = 512
};
#define ALGORITHM ((uint64_t)1 << 32) /* index from 0 on, in the bits above the epilogue's */
enum { OPERATION = 0x6f70, LAYOUT, PREFERENCE, HANDLE };

typedef struct {
    int magic, compute, scale_type, transpose[2], epilogue, bias_type, aux_type, fast;
    void *bias, *aux, *scale_a, *scale_b, *scale_d, *amax_d;
    int64_t aux_ld;
} operation_t;
typedef struct {
    int magic, type;
    uint64_t rows, columns;
    int64_t ld;
} layout_t;
typedef struct {
    int magic;
    uint64_t workspace;
    uint32_t reduction, alignment[4];
} preference_t;
typedef struct {
    uint64_t data[8];
} algorithm_t;
typedef struct {
    algorithm_t algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} heuristic_t;

/* Read and written by tests. */
int64_t emulator_heuristics, emulator_products, emulator_living;
int emulator_refused_epilogues[4]; /* the heuristic finds no algorithm for these */
int emulator_next_status;          /* error of the next product, or 0 */
int64_t emulator_algorithms = 1;   /* number that the heuristic finds per problem; the last of several is wrong */
int64_t emulator_algorithm;        /* index of the last product's algorithm */
char emulator_complaint[256];

static int complain(int status, const char *why) {
    snprintf(emulator_complaint, sizeof emulator_complaint, "%s", why);
    return status;
}
#define REQUIRE(condition)                                                                                             \
    if (!(condition)) return complain(INVALID_VALUE, #condition)

/* ---- numbers ---- */

/* Decode a float with these numbers of exponent and mantissa bits; `finite_only` (E4M3) has no infinity. */
static double decode(uint32_t bits, int exponent, int mantissa, int finite_only) {
    int top = (1 << exponent) - 1, bias = (1 << (exponent - 1)) - 1;
    int e = bits >> mantissa & top, m = bits & ((1 << mantissa) - 1);
    double sign = bits >> (exponent + mantissa) & 1 ? -1 : 1;
    if (e == top && (!finite_only || m == (1 << mantissa) - 1)) return m ? NAN : sign * INFINITY;
    return sign * (e ? ldexp(1 + ldexp(m, -mantissa), e - bias) : ldexp(m, 1 - bias - mantissa));
}

/* Round to nearest, ties to even. cublasLt saturates both FP8 types. */
static uint32_t encode(double x, int exponent, int mantissa, int finite_only, int saturates) {
    int top = (1 << exponent) - 1, bias = (1 << (exponent - 1)) - 1;
    uint32_t sign = (uint32_t)(signbit(x) != 0) << (exponent + mantissa), infinity = (uint32_t)top << mantissa;
    uint32_t nan = infinity | ((1u << mantissa) - 1), largest = finite_only ? nan - 1 : infinity - 1;
    if (isnan(x)) return sign | nan;
    x = fabs(x);
    double limit = decode(largest, exponent, mantissa, finite_only);
    if (isinf(x)) return sign | (saturates ? largest : infinity);
    int e;
    frexp(x, &e);
    e = e - 1 < 1 - bias ? 1 - bias : e - 1;
    double step = ldexp(1, e - mantissa), rounded = x == 0 ? 0 : nearbyint(x / step) * step;
    if (rounded > limit) return sign | (saturates ? largest : infinity);
    frexp(rounded, &e);
    e = rounded == 0 || e - 1 < 1 - bias ? 1 - bias : e - 1;
    uint32_t m = (uint32_t)ldexp(rounded, mantissa - e);
    return sign | (m >> mantissa ? (uint32_t)(e + bias) << mantissa | (m & ((1u << mantissa) - 1)) : m);
}

static double get(const void *data, int type, int64_t i) {
    switch (type) {
    case F32: return ((const float *)data)[i];
    case F16: return decode(((const uint16_t *)data)[i], 5, 10, 0);
    case BF16: { /* a fast path for the most common type, which is the upper half of a float32 */
        uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    case E4M3: return decode(((const uint8_t *)data)[i], 4, 3, 1);
    default: return decode(((const uint8_t *)data)[i], 5, 2, 0);
    }
}

static void put(void *data, int type, int64_t i, double x) {
    x = (float)x; /* epilogues work in float32 */
    switch (type) {
    case F32: ((float *)data)[i] = (float)x; break;
    case F16: ((uint16_t *)data)[i] = (uint16_t)encode(x, 5, 10, 0, 0); break;
    case BF16: ((uint16_t *)data)[i] = (uint16_t)encode(x, 8, 7, 0, 0); break;
    case E4M3: ((uint8_t *)data)[i] = (uint8_t)encode(x, 4, 3, 1, 1); break;
    default: ((uint8_t *)data)[i] = (uint8_t)encode(x, 5, 2, 0, 1);
    }
}

static double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) {
    double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x);
}

/* ---- descriptors ---- */
size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtCreate(int **handle) {
    *handle = malloc(sizeof **handle);
    **handle = HANDLE;
    emulator_living++;
    return SUCCESS;
}
int cublasLtDestroy(int *handle) {
    REQUIRE(handle && *handle == HANDLE);
    free(handle);
    emulator_living--;
    return SUCCESS;
}

int cublasLtMatmulDescCreate(operation_t **out, int compute, int scale_type) {
    operation_t fresh = {.magic = OPERATION, .compute = compute, .scale_type = scale_type};
    fresh.epilogue = DEFAULT, fresh.bias_type = fresh.aux_type = -1;
    *out = malloc(sizeof **out);
    **out = fresh;
    emulator_living++;
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(operation_t *o) {
    REQUIRE(o && o->magic == OPERATION);
    o->magic = 0;
    free(o);
    emulator_living--;
    return SUCCESS;
}
int cublasLtMatmulDescSetAttribute(operation_t *o, int attribute, const void *value, size_t bytes) {
    REQUIRE(o && o->magic == OPERATION && value);
    struct {
        int attribute;
        void *place;
        size_t bytes;
    } known[] = {
        {3, &o->transpose[0], 4}, {4, &o->transpose[1], 4}, {7, &o->epilogue, 4},   {8, &o->bias, 8},
        {11, &o->aux, 8},         {12, &o->aux_ld, 8},      {17, &o->scale_a, 8},   {18, &o->scale_b, 8},
        {20, &o->scale_d, 8},     {21, &o->amax_d, 8},      {22, &o->aux_type, 4},  {25, &o->fast, 1},
        {26, &o->bias_type, 4},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute) {
            REQUIRE(bytes == known[i].bytes);
            memcpy(known[i].place, value, bytes);
            return SUCCESS;
        }
    return complain(INVALID_VALUE, "unknown attribute of an operation");
}

int cublasLtMatrixLayoutCreate(layout_t **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    layout_t fresh = {LAYOUT, type, rows, columns, ld};
    *out = malloc(sizeof **out);
    **out = fresh;
    emulator_living++;
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(layout_t *l) {
    REQUIRE(l && l->magic == LAYOUT);
    l->magic = 0;
    free(l);
    emulator_living--;
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(preference_t **out) {
    preference_t fresh = {.magic = PREFERENCE, .reduction = 7, .alignment = {256, 256, 256, 256}};
    *out = malloc(sizeof **out);
    **out = fresh;
    emulator_living++;
    return SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(preference_t *p) {
    REQUIRE(p && p->magic == PREFERENCE);
    p->magic = 0;
    free(p);
    emulator_living--;
    return SUCCESS;
}
int cublasLtMatmulPreferenceSetAttribute(preference_t *p, int attribute, const void *value, size_t bytes) {
    REQUIRE(p && p->magic == PREFERENCE && value);
    void *place = NULL;
    if (attribute == 1) place = &p->workspace;
    if (attribute == 3) place = &p->reduction;
    if (attribute >= 5 && attribute <= 8) place = &p->alignment[attribute - 5];
    REQUIRE(place && bytes == (attribute == 1 ? 8 : 4));
    memcpy(place, value, bytes);
    return SUCCESS;
}

/* ---- products ---- */
typedef struct {
    uint64_t m, n, k;
} sizes_t;

static int is_small(int type) { return type == E4M3 || type == E5M2; }

static int check(const operation_t *o, const layout_t *a, const layout_t *b, const layout_t *c, const layout_t *d,
                 sizes_t *s) {
    REQUIRE(o && o->magic == OPERATION);
    const layout_t *layouts[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        const layout_t *layout = layouts[i];
        REQUIRE(layout && layout->magic == LAYOUT);
        REQUIRE(layout->rows > 0 && layout->columns > 0 && layout->ld >= (int64_t)layout->rows);
    }
    s->m = o->transpose[0] ? a->columns : a->rows, s->k = o->transpose[0] ? a->rows : a->columns;
    s->n = o->transpose[1] ? b->rows : b->columns;
    REQUIRE(s->k == (o->transpose[1] ? b->columns : b->rows));
    REQUIRE(d->rows == s->m && d->columns == s->n && c->rows == s->m && c->columns == s->n && c->ld == d->ld);
    REQUIRE((o->compute == 68 || (o->compute == 77 && a->type == F32)) && o->scale_type == F32);
    int small = is_small(a->type);
    REQUIRE(small == is_small(b->type) && (small || a->type == b->type));
    if (small) {
        REQUIRE(o->transpose[0] == 1 && o->transpose[1] == 0 && !(a->type == E5M2 && b->type == E5M2));
        REQUIRE(s->m % 16 == 0 && s->k % 16 == 0 && a->ld % 16 == 0 && b->ld % 16 == 0);
        REQUIRE(c->type == (is_small(d->type) ? BF16 : d->type));
    } else {
        REQUIRE(!o->scale_a && !o->scale_b && !o->fast && c->type == d->type && (d->type == a->type || d->type == F32));
    }
    REQUIRE(is_small(d->type) || (!o->scale_d && !o->amax_d));
    int kind = o->epilogue, wide_type = is_small(d->type) ? BF16 : d->type;
    int has_bias = kind != DEFAULT && kind != DGELU;
    int has_aux = kind == GELU_AUX_BIAS || kind == DGELU || kind == DGELU_BGRAD;
    REQUIRE(!has_bias || has_aux || kind == BIAS || kind == GELU_BIAS || kind == BGRADA || kind == BGRADB);
    REQUIRE(!has_bias || (o->bias && (o->bias_type == -1 ? d->type : o->bias_type) == wide_type));
    REQUIRE(!has_aux || (o->aux && o->aux_ld >= (int64_t)s->m && o->aux_ld % 8 == 0));
    REQUIRE(!has_aux || (o->aux_type == -1 ? d->type : o->aux_type) == wide_type);
    return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(int *handle, operation_t *o, layout_t *a, layout_t *b, layout_t *c, layout_t *d,
                                   preference_t *p, int wanted, heuristic_t *results, int *found) {
    *found = 0;
    if (!handle || *handle != HANDLE) return complain(NOT_INITIALIZED, "no handle");
    sizes_t s;
    int status = check(o, a, b, c, d, &s);
    if (status) return status;
    REQUIRE(wanted > 0 && p && p->magic == PREFERENCE);
    emulator_heuristics++;
    for (int i = 0; i < 4; i++)
        if (o->epilogue == emulator_refused_epilogues[i]) return i % 2 ? SUCCESS : NOT_SUPPORTED; /* either means no */
    *found = wanted < emulator_algorithms ? wanted : (int)emulator_algorithms;
    memset(results, 0, (size_t)*found * sizeof *results);
    /* The algorithm contains the problem that it was chosen for; cublasLtMatmul rejects any other. */
    uint64_t types = (uint64_t)a->type << 16 | (uint64_t)d->type, epilogue = (uint64_t)o->epilogue;
    uint64_t chosen[8] = {s.m, s.n, s.k, epilogue, types, p->alignment[0], p->alignment[1], p->alignment[3]};
    for (int i = 0; i < *found; i++, chosen[3] += ALGORITHM) {
        memcpy(results[i].algorithm.data, chosen, sizeof chosen);
        results[i].workspace = p->workspace;
    }
    return SUCCESS;
}

static int is_aligned(const void *pointer, uint64_t bytes) { return bytes && (uintptr_t)pointer % bytes == 0; }

/* Return A[i, l] and B[l, j] of the product's operands after transposition. */
static double a_at(const operation_t *o, const layout_t *a, const void *data, uint64_t i, uint64_t l) {
    return get(data, a->type, o->transpose[0] ? (int64_t)l + (int64_t)i * a->ld : (int64_t)i + (int64_t)l * a->ld);
}
static double b_at(const operation_t *o, const layout_t *b, const void *data, uint64_t l, uint64_t j) {
    return get(data, b->type, o->transpose[1] ? (int64_t)j + (int64_t)l * b->ld : (int64_t)l + (int64_t)j * b->ld);
}

int cublasLtMatmul(int *handle, operation_t *o, const void *alpha, const void *a_data, layout_t *a, const void *b_data,
                   layout_t *b, const void *beta, const void *c_data, layout_t *c, void *d_data, layout_t *d,
                   const algorithm_t *algorithm, void *workspace, size_t workspace_bytes, void *stream) {
    (void)stream;
    if (!handle || *handle != HANDLE) return complain(NOT_INITIALIZED, "no handle");
    if ((uintptr_t)o->scale_a % 16 || (uintptr_t)o->scale_b % 16) return NOT_SUPPORTED; /* unlike the heuristic */
    sizes_t s;
    int status = check(o, a, b, c, d, &s);
    if (status) return status;
    if (emulator_next_status) {
        status = emulator_next_status, emulator_next_status = 0;
        return complain(status, "requested by the test");
    }
    float adds = *(const float *)beta; /* c is added before the epilogue */
    REQUIRE(*(const float *)alpha == 1 && (adds == 0 || (adds == 1 && c_data && !is_small(d->type))) && a_data && b_data && d_data && algorithm);
    const uint64_t *chosen = algorithm->data;
    REQUIRE(chosen[0] == s.m && chosen[1] == s.n && chosen[2] == s.k && chosen[3] % ALGORITHM == (uint64_t)o->epilogue);
    REQUIRE(is_aligned(a_data, chosen[5]) && is_aligned(b_data, chosen[6]) && is_aligned(d_data, chosen[7]));
    REQUIRE(workspace && workspace_bytes >= 32u << 20 && is_aligned(workspace, 16));
    REQUIRE(!is_small(a->type) || (is_aligned(a_data, 16) && is_aligned(b_data, 16) && is_aligned(d_data, 16)));
    emulator_products++;
    emulator_algorithm = (int64_t)(chosen[3] / ALGORITHM);
    int is_wrong = emulator_algorithm > 0 && emulator_algorithm == emulator_algorithms - 1;
    int kind = o->epilogue, wide_type = is_small(d->type) ? BF16 : d->type;
    double scale = (o->scale_a ? *(float *)o->scale_a : 1.0) * (o->scale_b ? *(float *)o->scale_b : 1.0);
    double scale_d = o->scale_d ? *(float *)o->scale_d : 1.0, amax = 0;
    for (uint64_t i = 0; i < s.m; i++) {
        double bias_gradient = 0;
        for (uint64_t j = 0; j < s.n; j++) {
            double sum = 0;
            for (uint64_t l = 0; l < s.k; l++) sum += a_at(o, a, a_data, i, l) * b_at(o, b, b_data, l, j);
            double y = sum * scale;
            if (is_wrong) y *= 2;
            if (adds) y += get(c_data, c->type, (int64_t)i + (int64_t)j * c->ld);
            if (kind == BIAS || kind == GELU_BIAS || kind == GELU_AUX_BIAS) y += get(o->bias, wide_type, (int64_t)i);
            int64_t aux_place = (int64_t)i + (int64_t)j * o->aux_ld;
            if (kind == GELU_AUX_BIAS) put(o->aux, wide_type, aux_place, y);
            if (kind == GELU_BIAS || kind == GELU_AUX_BIAS) y = gelu(y);
            if (kind == DGELU || kind == DGELU_BGRAD) y *= gelu_slope(get(o->aux, wide_type, aux_place));
            bias_gradient += y;
            amax = fabs(y) > amax ? fabs(y) : amax;
            put(d_data, d->type, (int64_t)i + (int64_t)j * d->ld, y * scale_d);
        }
        if (kind == DGELU_BGRAD) put(o->bias, wide_type, (int64_t)i, bias_gradient);
    }
    uint64_t vectors = kind == BGRADA ? s.m : kind == BGRADB ? s.n : 0;
    for (uint64_t i = 0; i < vectors; i++) {
        double sum = 0;
        for (uint64_t l = 0; l < s.k; l++)
            sum += kind == BGRADA ? a_at(o, a, a_data, i, l) : b_at(o, b, b_data, l, i);
        put(o->bias, wide_type, (int64_t)i, sum);
    }
    if (o->amax_d) *(float *)o->amax_d = (float)amax;
    return SUCCESS;
}
