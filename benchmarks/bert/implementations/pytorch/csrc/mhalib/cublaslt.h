/* The part of NVIDIA's cublasLt interface (CUDA 12 and 13) that matmul.c uses, declared here so that building needs
 * only a C compiler. Opaque handles are void pointers and enumerations are plain integers. If NVIDIA's header exists,
 * tests/unit/ops/cublaslt_interface.c compares every line with it. */
#ifndef MHALIB_CUBLASLT_H
#define MHALIB_CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

typedef void *lt_handle, *lt_operation, *lt_layout, *lt_preference, *lt_stream;
typedef uint32_t lt_status;

enum lt_status_value {
    LT_SUCCESS = 0,
    LT_NOT_INITIALIZED = 1,
    LT_ALLOC_FAILED = 3,
    LT_INVALID_VALUE = 7,
    LT_NOT_SUPPORTED = 15,
};

enum lt_type { /* cudaDataType */
    LT_R_32F = 0,
    LT_R_16F = 2,
    LT_R_16BF = 14,
    LT_R_8F_E4M3 = 28,
    LT_R_8F_E5M2 = 29,
};

enum lt_compute { /* cublasComputeType_t */
    LT_COMPUTE_32F = 68,
    LT_COMPUTE_32F_FAST_TF32 = 77,
};

enum lt_transpose { LT_OP_N = 0, LT_OP_T = 1 };

enum lt_operation_attribute { /* cublasLtMatmulDescAttributes_t */
    LT_OPERATION_TRANSA = 3,           /* int32_t */
    LT_OPERATION_TRANSB = 4,           /* int32_t */
    LT_OPERATION_EPILOGUE = 7,         /* uint32_t */
    LT_OPERATION_BIAS_POINTER = 8,     /* void * */
    LT_OPERATION_AUX_POINTER = 11,     /* void * */
    LT_OPERATION_AUX_LD = 12,          /* int64_t */
    LT_OPERATION_A_SCALE_POINTER = 17, /* const void *, like all of these pointers */
    LT_OPERATION_B_SCALE_POINTER = 18,
    LT_OPERATION_D_SCALE_POINTER = 20,
    LT_OPERATION_AMAX_D_POINTER = 21,
    LT_OPERATION_AUX_DATA_TYPE = 22,  /* int32_t */
    LT_OPERATION_FAST_ACCUM = 25,     /* int8_t */
    LT_OPERATION_BIAS_DATA_TYPE = 26, /* int32_t */
};

enum lt_epilogue { /* cublasLtEpilogue_t */
    LT_EPILOGUE_DEFAULT = 1,
    LT_EPILOGUE_BIAS = 4,
    LT_EPILOGUE_GELU_BIAS = 36,
    LT_EPILOGUE_GELU_AUX_BIAS = 164,
    LT_EPILOGUE_DGELU_BGRAD = 208,
    LT_EPILOGUE_BGRADB = 512,
};

enum lt_preference_attribute { /* cublasLtMatmulPreferenceAttributes_t */
    LT_PREFERENCE_MAX_WORKSPACE_BYTES = 1,   /* uint64_t */
    LT_PREFERENCE_REDUCTION_SCHEME_MASK = 3, /* uint32_t */
    LT_PREFERENCE_MIN_ALIGNMENT_A_BYTES = 5, /* uint32_t, like the next three */
    LT_PREFERENCE_MIN_ALIGNMENT_B_BYTES = 6,
    LT_PREFERENCE_MIN_ALIGNMENT_C_BYTES = 7,
    LT_PREFERENCE_MIN_ALIGNMENT_D_BYTES = 8,
};

enum lt_reduction { LT_REDUCTION_COMPUTE_TYPE = 2 }; /* cublasLtReductionScheme_t */

typedef struct {
    uint64_t data[8];
} lt_algorithm; /* cublasLtMatmulAlgo_t */

typedef struct { /* cublasLtMatmulHeuristicResult_t */
    lt_algorithm algorithm;
    size_t workspace_bytes;
    lt_status state;
    float waves;
    int reserved[4];
} lt_heuristic;

/* name in cublasLt without its prefix, result, parameters */
#define LT_FUNCTIONS(DECLARE)                                                                                          \
    DECLARE(GetVersion, size_t, (void))                                                                                \
    DECLARE(Create, lt_status, (lt_handle * handle))                                                                   \
    DECLARE(Destroy, lt_status, (lt_handle handle))                                                                    \
    DECLARE(MatmulDescCreate, lt_status, (lt_operation * operation, uint32_t compute, uint32_t scale_type))            \
    DECLARE(MatmulDescDestroy, lt_status, (lt_operation operation))                                                    \
    DECLARE(MatmulDescSetAttribute, lt_status,                                                                         \
            (lt_operation operation, uint32_t attribute, const void *value, size_t bytes))                             \
    DECLARE(MatrixLayoutCreate, lt_status,                                                                             \
            (lt_layout * layout, uint32_t type, uint64_t rows, uint64_t columns, int64_t ld))                          \
    DECLARE(MatrixLayoutDestroy, lt_status, (lt_layout layout))                                                        \
    DECLARE(MatmulPreferenceCreate, lt_status, (lt_preference * preference))                                           \
    DECLARE(MatmulPreferenceDestroy, lt_status, (lt_preference preference))                                            \
    DECLARE(MatmulPreferenceSetAttribute, lt_status,                                                                   \
            (lt_preference preference, uint32_t attribute, const void *value, size_t bytes))                           \
    DECLARE(MatmulAlgoGetHeuristic, lt_status,                                                                         \
            (lt_handle handle, lt_operation operation, lt_layout a, lt_layout b, lt_layout c, lt_layout d,             \
             lt_preference preference, int wanted, lt_heuristic *results, int *found))                                 \
    DECLARE(Matmul, lt_status,                                                                                         \
            (lt_handle handle, lt_operation operation, const void *alpha, const void *a, lt_layout layout_a,           \
             const void *b, lt_layout layout_b, const void *beta, const void *c, lt_layout layout_c, void *d,          \
             lt_layout layout_d, const lt_algorithm *algorithm, void *workspace, size_t workspace_bytes,               \
             lt_stream stream))

#endif
