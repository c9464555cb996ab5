/* Compile only if csrc/mhalib/cublaslt.h agrees with NVIDIA's cublasLt.h: constants, sizes, offsets, and parameters,
 * which every function below passes on. With -Wconversion -Werror, integer widths must be the same, too. */
#include <cublasLt.h>
#include <stddef.h>

#include "cublaslt.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours)

SAME(LT_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME(LT_NOT_INITIALIZED, CUBLAS_STATUS_NOT_INITIALIZED);
SAME(LT_ALLOC_FAILED, CUBLAS_STATUS_ALLOC_FAILED);
SAME(LT_INVALID_VALUE, CUBLAS_STATUS_INVALID_VALUE);
SAME(LT_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED);

SAME(LT_R_32F, CUDA_R_32F);
SAME(LT_R_16F, CUDA_R_16F);
SAME(LT_R_16BF, CUDA_R_16BF);
SAME(LT_R_8F_E4M3, CUDA_R_8F_E4M3);
SAME(LT_R_8F_E5M2, CUDA_R_8F_E5M2);

SAME(LT_COMPUTE_32F, CUBLAS_COMPUTE_32F);
SAME(LT_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(LT_OP_N, CUBLAS_OP_N);
SAME(LT_OP_T, CUBLAS_OP_T);

SAME(LT_OPERATION_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(LT_OPERATION_TRANSB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(LT_OPERATION_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(LT_OPERATION_BIAS_POINTER, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(LT_OPERATION_AUX_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(LT_OPERATION_AUX_LD, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(LT_OPERATION_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
SAME(LT_OPERATION_B_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
SAME(LT_OPERATION_D_SCALE_POINTER, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER);
SAME(LT_OPERATION_AMAX_D_POINTER, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER);
SAME(LT_OPERATION_AUX_DATA_TYPE, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE);
SAME(LT_OPERATION_FAST_ACCUM, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
SAME(LT_OPERATION_BIAS_DATA_TYPE, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);

SAME(LT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_DEFAULT);
SAME(LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS);
SAME(LT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_BIAS);
SAME(LT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
SAME(LT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_DGELU_BGRAD);
SAME(LT_EPILOGUE_BGRADB, CUBLASLT_EPILOGUE_BGRADB);

SAME(LT_PREFERENCE_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(LT_PREFERENCE_REDUCTION_SCHEME_MASK, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(LT_PREFERENCE_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(LT_PREFERENCE_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(LT_PREFERENCE_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(LT_PREFERENCE_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(LT_REDUCTION_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);

SAME(sizeof(lt_algorithm), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(lt_heuristic), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(lt_heuristic, algorithm), offsetof(cublasLtMatmulHeuristicResult_t, algo));
SAME(offsetof(lt_heuristic, workspace_bytes), offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
SAME(offsetof(lt_heuristic, state), offsetof(cublasLtMatmulHeuristicResult_t, state));
SAME(offsetof(lt_heuristic, waves), offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));
SAME(sizeof(lt_status), sizeof(cublasStatus_t));
SAME(sizeof(int32_t), sizeof(cublasOperation_t));
SAME(sizeof(uint32_t), sizeof(cublasLtEpilogue_t));
SAME(sizeof(uint32_t), sizeof(cudaDataType));
SAME(sizeof(uint32_t), sizeof(cublasComputeType_t));

/* Each has our parameters, as checked by the pointers to them below, and passes them to NVIDIA's function. */
static size_t GetVersion(void) { return cublasLtGetVersion(); }
static lt_status Create(lt_handle *handle) { return cublasLtCreate((cublasLtHandle_t *)handle); }
static lt_status Destroy(lt_handle handle) { return cublasLtDestroy(handle); }
static lt_status MatmulDescCreate(lt_operation *operation, uint32_t compute, uint32_t scale_type) {
    return cublasLtMatmulDescCreate((cublasLtMatmulDesc_t *)operation, compute, scale_type);
}
static lt_status MatmulDescDestroy(lt_operation operation) { return cublasLtMatmulDescDestroy(operation); }
static lt_status MatmulDescSetAttribute(lt_operation operation, uint32_t attribute, const void *value, size_t bytes) {
    return cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes);
}
static lt_status MatrixLayoutCreate(lt_layout *layout, uint32_t type, uint64_t rows, uint64_t columns, int64_t ld) {
    return cublasLtMatrixLayoutCreate((cublasLtMatrixLayout_t *)layout, type, rows, columns, ld);
}
static lt_status MatrixLayoutDestroy(lt_layout layout) { return cublasLtMatrixLayoutDestroy(layout); }
static lt_status MatmulPreferenceCreate(lt_preference *preference) {
    return cublasLtMatmulPreferenceCreate((cublasLtMatmulPreference_t *)preference);
}
static lt_status MatmulPreferenceDestroy(lt_preference preference) {
    return cublasLtMatmulPreferenceDestroy(preference);
}
static lt_status MatmulPreferenceSetAttribute(lt_preference preference, uint32_t attribute, const void *value,
                                              size_t bytes) {
    return cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes);
}
static lt_status MatmulAlgoGetHeuristic(lt_handle handle, lt_operation operation, lt_layout a, lt_layout b, lt_layout c,
                                        lt_layout d, lt_preference preference, int wanted, lt_heuristic *results,
                                        int *found) {
    return cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, c, d, preference, wanted,
                                          (cublasLtMatmulHeuristicResult_t *)results, found);
}
static lt_status Matmul(lt_handle handle, lt_operation operation, const void *alpha, const void *a, lt_layout layout_a,
                        const void *b, lt_layout layout_b, const void *beta, const void *c, lt_layout layout_c, void *d,
                        lt_layout layout_d, const lt_algorithm *algorithm, void *workspace, size_t workspace_bytes,
                        lt_stream stream) {
    return cublasLtMatmul(handle, operation, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d,
                          (const cublasLtMatmulAlgo_t *)algorithm, workspace, workspace_bytes, stream);
}

#define POINTER(name, result, parameters) result(*pointer_##name) parameters = name;
LT_FUNCTIONS(POINTER)
