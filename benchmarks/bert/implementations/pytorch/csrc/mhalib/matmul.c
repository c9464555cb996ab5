/* Matrix products with an epilogue through NVIDIA's cublasLt, for mlbert/ops/cublaslt_library.py.
 *
 * Host code only: cublasLt is opened at run time, so building needs no CUDA. `mhalib_matmul` computes, column-major,
 *
 *     d [m, n] = epilogue(scale_a scale_b op(a) [m, k] op(b) [k, n] + d, if it adds)
 *
 * with float32 sums. The algorithm that cublasLt's heuristic picks for a problem (sizes, types, transposes, epilogue,
 * alignment) is cached with its descriptors as a plan. A product with a cached plan only sets pointers and launches: it
 * does not allocate or synchronize, and can be captured in a CUDA graph. Split-K partial sums are float32 only.
 *
 * A context belongs to one device and is thread-safe. */
#include "cublaslt.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SETS 256 /* of plans; varying batch sizes keep adding plans, and the oldest of a set is evicted */
#define WAYS 8
#define LARGEST_ALIGNMENT 256
#define NO_ALGORITHM 1000 /* in addition to cublasLt's status codes */
#define CANDIDATES 8

/* One product; unused fields are zero or null. Mirrored in ops/cublaslt_library.py. */
struct product {
    int64_t m, n, k, lda, ldb, ldd; /* leading dimensions in elements; aux uses d's */
    int32_t type_a, type_b, type_d, type_bias, type_aux, compute;
    int32_t transpose_a, transpose_b, epilogue, fast_accumulation, adds;
    int32_t choice; /* 0: the heuristic's first choice; i: the i-th of its CANDIDATES */
    const void *a, *b;
    void *d, *bias, *aux;
    const void *scale_a, *scale_b, *scale_d;
    void *amax_d;
    void *workspace;
    uint64_t workspace_bytes;
    void *stream;
};

struct key {
    int64_t m, n, k, lda, ldb, ldd;
    int32_t type_a, type_b, type_d, type_bias, type_aux, compute;
    int32_t transpose_a, transpose_b, epilogue, fast_accumulation;
    int32_t choice, alignments[5], pointers;
    uint64_t workspace_bytes;
};

struct plan {
    struct key key;
    uint64_t used; /* the context's clock at the last use; 0 if empty */
    lt_status status;
    lt_operation operation;
    lt_layout a, b, c, d;
    lt_algorithm algorithm;
};

#define MEMBER(name, result, parameters) result(*name) parameters;
struct context {
    void *library;
    struct {
        LT_FUNCTIONS(MEMBER)
    } lt;
    lt_handle handle;
    pthread_mutex_t lock;
    uint64_t clock, plans_made;
    struct plan plans[SETS][WAYS];
};

/* Open cublasLt. Returns a context without a handle, or null with the reason in `message`. */
struct context *mhalib_open(const char *path, char *message, size_t message_bytes) {
    struct context *context = calloc(1, sizeof *context);
    if (!context) {
        snprintf(message, message_bytes, "out of memory");
        return NULL;
    }
    context->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!context->library) {
        snprintf(message, message_bytes, "%s", dlerror());
        free(context);
        return NULL;
    }
    const char *missing = NULL;
#define RESOLVE(name, result, parameters)                                                                              \
    *(void **)&context->lt.name = dlsym(context->library, "cublasLt" #name);                                           \
    if (!context->lt.name) missing = "cublasLt" #name;
    LT_FUNCTIONS(RESOLVE)
    if (missing) {
        snprintf(message, message_bytes, "%s has no %s", path, missing);
        dlclose(context->library);
        free(context);
        return NULL;
    }
    pthread_mutex_init(&context->lock, NULL);
    return context;
}

/* Return cublasLt's version: 10000 major + 100 minor + patch. */
uint64_t mhalib_version(const struct context *context) { return context->lt.GetVersion(); }

/* Create the handle, which belongs to the current device. */
lt_status mhalib_create_handle(struct context *context) { return context->lt.Create(&context->handle); }

/* Return the number of plans made so far. Repeated products make none. */
uint64_t mhalib_plans_made(const struct context *context) { return context->plans_made; }

size_t mhalib_product_bytes(void) { return sizeof(struct product); }

static void clear_plan(struct context *context, struct plan *plan) {
    if (plan->operation) context->lt.MatmulDescDestroy(plan->operation);
    lt_layout layouts[] = {plan->a, plan->b, plan->c, plan->d};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        if (layouts[i]) context->lt.MatrixLayoutDestroy(layouts[i]);
    memset(plan, 0, sizeof *plan);
}

void mhalib_close(struct context *context) {
    for (int set = 0; set < SETS; set++)
        for (int way = 0; way < WAYS; way++) clear_plan(context, &context->plans[set][way]);
    if (context->handle) context->lt.Destroy(context->handle);
    pthread_mutex_destroy(&context->lock);
    dlclose(context->library);
    free(context);
}

/* Alignment of the address in bytes. */
static int32_t alignment(const void *pointer) {
    uintptr_t bits = (uintptr_t)pointer | LARGEST_ALIGNMENT;
    return (int32_t)(bits & -bits);
}

static struct key key_of(const struct product *p) {
    struct key key;
    memset(&key, 0, sizeof key); /* compared as bytes */
    key.m = p->m, key.n = p->n, key.k = p->k, key.lda = p->lda, key.ldb = p->ldb, key.ldd = p->ldd;
    key.type_a = p->type_a, key.type_b = p->type_b, key.type_d = p->type_d;
    key.type_bias = p->type_bias, key.type_aux = p->type_aux, key.compute = p->compute;
    key.transpose_a = p->transpose_a, key.transpose_b = p->transpose_b;
    key.epilogue = p->epilogue, key.fast_accumulation = p->fast_accumulation, key.choice = p->choice;
    const void *aligned[] = {p->a, p->b, p->d, p->bias, p->aux};
    for (int i = 0; i < 5; i++) key.alignments[i] = alignment(aligned[i]);
    const void *optional[] = {p->bias, p->aux, p->scale_a, p->scale_b, p->scale_d, p->amax_d};
    for (int i = 0; i < 6; i++) key.pointers |= (optional[i] != NULL) << i;
    key.workspace_bytes = p->workspace_bytes;
    return key;
}

/* FNV-1a */
static uint64_t hash(const struct key *key) {
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t state = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *key; i++) state = (state ^ bytes[i]) * 0x100000001b3u;
    return state ^ state >> 32;
}

/* Return from the function with the first status that is not success. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        lt_status status_ = (call);                                                                                    \
        if (status_ != LT_SUCCESS) return status_;                                                                     \
    } while (0)
#define SET(attribute, value) TRY(context->lt.MatmulDescSetAttribute(operation, attribute, &(value), sizeof(value)))

static lt_status set_pointers(struct context *context, lt_operation operation, const struct product *p) {
    if (p->bias) SET(LT_OPERATION_BIAS_POINTER, p->bias);
    if (p->aux) SET(LT_OPERATION_AUX_POINTER, p->aux);
    if (p->scale_a) SET(LT_OPERATION_A_SCALE_POINTER, p->scale_a);
    if (p->scale_b) SET(LT_OPERATION_B_SCALE_POINTER, p->scale_b);
    if (p->scale_d) SET(LT_OPERATION_D_SCALE_POINTER, p->scale_d);
    if (p->amax_d) SET(LT_OPERATION_AMAX_D_POINTER, p->amax_d);
    return LT_SUCCESS;
}

static lt_status describe(struct context *context, struct plan *plan, const struct product *p) {
    TRY(context->lt.MatmulDescCreate(&plan->operation, (uint32_t)p->compute, LT_R_32F));
    lt_operation operation = plan->operation;
    SET(LT_OPERATION_TRANSA, p->transpose_a);
    SET(LT_OPERATION_TRANSB, p->transpose_b);
    uint32_t epilogue = (uint32_t)p->epilogue;
    SET(LT_OPERATION_EPILOGUE, epilogue);
    if (p->bias) SET(LT_OPERATION_BIAS_DATA_TYPE, p->type_bias);
    if (p->aux) {
        SET(LT_OPERATION_AUX_LD, p->ldd);
        SET(LT_OPERATION_AUX_DATA_TYPE, p->type_aux);
    }
    if (p->fast_accumulation) {
        int8_t yes = 1;
        SET(LT_OPERATION_FAST_ACCUM, yes);
    }
    TRY(set_pointers(context, operation, p)); /* the heuristic depends on their alignment */
    uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k;
    int swap_a = p->transpose_a == LT_OP_T, swap_b = p->transpose_b == LT_OP_T;
    /* c is d, and is read when accumulating. FP8 results never accumulate, and c has no FP8 type. */
    int is_fp8 = p->type_d == LT_R_8F_E4M3 || p->type_d == LT_R_8F_E5M2;
    uint32_t type_c = is_fp8 ? LT_R_16BF : (uint32_t)p->type_d;
    TRY(context->lt.MatrixLayoutCreate(&plan->a, (uint32_t)p->type_a, swap_a ? k : m, swap_a ? m : k, p->lda));
    TRY(context->lt.MatrixLayoutCreate(&plan->b, (uint32_t)p->type_b, swap_b ? n : k, swap_b ? k : n, p->ldb));
    TRY(context->lt.MatrixLayoutCreate(&plan->c, type_c, m, n, p->ldd));
    return context->lt.MatrixLayoutCreate(&plan->d, (uint32_t)p->type_d, m, n, p->ldd);
}

static lt_status prefer(struct context *context, lt_preference preference, const struct product *p) {
#define PREFER(attribute, value)                                                                                       \
    TRY(context->lt.MatmulPreferenceSetAttribute(preference, attribute, &(value), sizeof(value)))
    uint32_t reduction = LT_REDUCTION_COMPUTE_TYPE;
    uint32_t a = (uint32_t)alignment(p->a), b = (uint32_t)alignment(p->b), d = (uint32_t)alignment(p->d);
    PREFER(LT_PREFERENCE_MAX_WORKSPACE_BYTES, p->workspace_bytes);
    PREFER(LT_PREFERENCE_REDUCTION_SCHEME_MASK, reduction);
    PREFER(LT_PREFERENCE_MIN_ALIGNMENT_A_BYTES, a);
    PREFER(LT_PREFERENCE_MIN_ALIGNMENT_B_BYTES, b);
    PREFER(LT_PREFERENCE_MIN_ALIGNMENT_C_BYTES, d);
    PREFER(LT_PREFERENCE_MIN_ALIGNMENT_D_BYTES, d);
    return LT_SUCCESS;
}

static lt_status choose(struct context *context, struct plan *plan, const struct product *p) {
    lt_preference preference;
    TRY(context->lt.MatmulPreferenceCreate(&preference));
    lt_status status = prefer(context, preference, p);
    lt_heuristic answers[CANDIDATES] = {{.state = LT_SUCCESS}};
    int place = p->choice ? p->choice - 1 : 0, wanted = p->choice ? CANDIDATES : 1, found = 0;
    if (place < 0 || place >= CANDIDATES) status = NO_ALGORITHM;
    if (status == LT_SUCCESS)
        status = context->lt.MatmulAlgoGetHeuristic(context->handle, plan->operation, plan->a, plan->b, plan->c,
                                                    plan->d, preference, wanted, answers, &found);
    context->lt.MatmulPreferenceDestroy(preference);
    if (status == LT_NOT_SUPPORTED ||
        (status == LT_SUCCESS && (found <= place || answers[place].state != LT_SUCCESS)))
        return NO_ALGORITHM;
    if (status == LT_SUCCESS) plan->algorithm = answers[place].algorithm;
    return status;
}

/* Return the plan of a product, making it if new. Its status holds any error. */
static struct plan *find_plan(struct context *context, const struct product *p) {
    struct key key = key_of(p);
    struct plan *set = context->plans[hash(&key) % SETS], *oldest = set;
    for (int way = 0; way < WAYS; way++) {
        if (set[way].used && memcmp(&set[way].key, &key, sizeof key) == 0) return &set[way];
        if (set[way].used < oldest->used) oldest = &set[way];
    }
    clear_plan(context, oldest);
    oldest->key = key;
    context->plans_made++;
    oldest->status = describe(context, oldest, p);
    if (oldest->status == LT_SUCCESS) oldest->status = choose(context, oldest, p);
    return oldest;
}

static lt_status multiply(struct context *context, const struct product *p) {
    struct plan *plan = find_plan(context, p);
    plan->used = ++context->clock;
    if (plan->status != LT_SUCCESS) {
        lt_status status = plan->status;
        if (status != NO_ALGORITHM) clear_plan(context, plan); /* may be temporary, such as out of memory */
        return status;
    }
    TRY(set_pointers(context, plan->operation, p));
    const float one = 1, beta = p->adds ? 1 : 0;
    lt_status status =
        context->lt.Matmul(context->handle, plan->operation, &one, p->a, plan->a, p->b, plan->b, &beta, p->d, plan->c,
                           p->d, plan->d, &plan->algorithm, p->workspace, p->workspace_bytes, p->stream);
    /* It may refuse what its heuristic has offered, such as FP8 with scales at addresses that 16 does not divide. */
    if (status == LT_NOT_SUPPORTED) status = plan->status = NO_ALGORITHM;
    return status;
}

/* Queue one product on its stream. Returns cublasLt's status, or NO_ALGORITHM if it has none for this problem; then
 * nothing is queued, and later calls return the same at once. No size may be 0. */
lt_status mhalib_matmul(struct context *context, const struct product *p) {
    pthread_mutex_lock(&context->lock);
    lt_status status = multiply(context, p);
    pthread_mutex_unlock(&context->lock);
    return status;
}
