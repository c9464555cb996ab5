/* Interface of the library: attention forward and backward, at most 512 tokens per sequence, head size 64.

The algorithm is FlashAttention (Dao et al., arXiv 2205.14135 and 2307.08691) on tensor cores (compute capability 8.0
and newer), in bfloat16 or float16 with float32 sums:

    forward.cu      out = dropout(softmax(Q K^T / 8 + bias)) V; also the log-sum of each softmax
    backward.cu     the gradients of Q, K and V in one kernel, five products for each pair of tiles
    tiles.cuh       tiles in shared memory, and products of tiles
    dropout.cuh     the mask of mlbert/ops/dropout.py, bit for bit
    sequence.cuh    the sequence and head of a block
    device.cuh      GPU instructions, one function each; emulation/device.h implements them for a CPU, so that these
                    files compile as plain C++ and can be tested without a GPU

Each block of 128 threads handles one sequence and head; one extra block per head clears the tokens after the last
sequence. Each of the four warps owns 32 queries (forward) or 32 keys (backward) of a group of 128 and keeps their sums
in registers. The other operand is streamed in tiles, each copied into shared memory while the previous one is in use.
No element is summed over two blocks, so every run gives the same bits, and nothing waits for the host.

Scores are in units of log2, so that the exponential is the hardware instruction exp2.

Legend: S sequences, T tokens, N heads, H = 64 head size, L tokens of one sequence. */
#ifndef MLBERT_FMHA_H
#define MLBERT_FMHA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FMHA_HEAD_SIZE 64
#define FMHA_MAX_LENGTH 512
/* Backward needs `d_query` only for sequences longer than this. */
#define FMHA_KEYS_AT_ONCE 128

/* Inputs of both directions. Pointers are to device memory. */
typedef struct {
    const void *qkv;           /* [T, 3, N, 64] bfloat16 or float16 */
    const int32_t *cu_seqlens; /* [S + 1]; sequence s has the tokens [cu_seqlens[s], cu_seqlens[s + 1]), at most 512 */
    const int32_t *rows;       /* [T] dropout mask row of each query; null without dropout */
    const float *slopes;       /* [N] ALiBi: the bias of query i and key j is -slope |i - j|; null for none */
    const uint32_t *key_place; /* address of the dropout key; if null, `key` is used */
    uint32_t key;
    int32_t threshold; /* byte values out of 256 that are dropped, 0 to 255 */
    int32_t num_tokens, num_sequences, num_heads;
    int32_t is_bfloat16;
} fmha_problem;

/* Each function queues its work and returns 0 or a CUDA runtime error, which `fmha_error` describes. */

/* Return whether the current device can run the kernels. */
int fmha_check(void);

/* out: [T, N, 64] of the type of qkv. log_sums: float32 [N, T], log2(sum(exp2(scores))), not written past
the last sequence. */
int fmha_forward(const fmha_problem *problem, void *out, float *log_sums, void *stream);

/* d_out: [T, N, 64], like `out`. d_query: float32 [T, N, 64] scratch, null if no sequence is longer than
FMHA_KEYS_AT_ONCE. d_qkv: [T, 3, N, 64] of the type of qkv. */
int fmha_backward(const fmha_problem *problem, const void *out, const float *log_sums, const void *d_out, float *d_query,
                  void *d_qkv, void *stream);

const char *fmha_error(int error);

/* For callers that redeclare the structure. */
size_t fmha_problem_bytes(void);

#ifdef __cplusplus
}
#endif

#endif
