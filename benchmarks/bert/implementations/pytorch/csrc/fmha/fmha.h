/* Attention of at most 512 tokens a sequence with heads of 64, forward and backward: what the library offers.

The algorithm is FlashAttention's (Dao et al., arXiv 2205.14135 and 2307.08691) on the tensor cores of compute capability
8.0 and newer, in bfloat16 or float16 with float32 sums:

    forward.cu      out = dropout(softmax(Q K^T / 8 + bias)) V; also the logarithm of each softmax's sum
    backward.cu     the gradients of Q, K and V in one kernel, five products for each pair of tiles
    tiles.cuh       tiles in shared memory, and products of tiles
    dropout.cuh     the mask of mlbert/ops/dropout.py, bit for bit
    sequence.cuh    which sequence and head a block has
    device.cuh      the instructions of the GPU, one function each; emulation/device.h has the same for a CPU, and with
                    it these files compile as plain C++, to be tested where no GPU is

One block of 128 threads has one sequence and head; one block more for each head clears what lies behind the last
sequence. Each of the four warps owns 32 queries (forward) or 32 keys (backward) of a group of 128 and keeps their sums
in registers; the other side of the product comes by in tiles, copied into shared memory while the tile before it is at
work. No number is the sum of two blocks, so every run gives the same bits, and nothing waits for the host.

Scores are kept in units of log2, so that the exponential is the hardware's.

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
/* Up to here backward keeps the gradients of Q to itself; behind it needs `d_query`. */
#define FMHA_KEYS_AT_ONCE 128

/* What both directions read. Pointers are to device memory. */
typedef struct {
    const void *qkv;           /* [T, 3, N, 64] bfloat16 or float16 */
    const int32_t *cu_seqlens; /* [S + 1]; sequence s has the tokens cu_seqlens[s] to cu_seqlens[s + 1], at most 512 */
    const int32_t *rows;       /* [T] the mask's row of each query; null without dropout */
    const float *slopes;       /* [N] ALiBi: the bias of query i and key j is -slope |i - j|; null: none */
    const uint32_t *key_place; /* where the dropout key lies, or null: it is `key` */
    uint32_t key;
    int32_t threshold; /* bytes of 256 that dropout drops, 0 to 255 */
    int32_t num_tokens, num_sequences, num_heads;
    int32_t is_bfloat16;
} fmha_problem;

/* Each returns 0 or the error of CUDA's runtime that `fmha_error` has words for. They queue work and return. */

/* Whether the current device can run the kernels. */
int fmha_check(void);

/* out: [T, N, 64] of the type of qkv. log_sums: float32 [N, T], log2(sum(exp2(scores))); nothing behind the last sequence. */
int fmha_forward(const fmha_problem *problem, void *out, float *log_sums, void *stream);

/* d_out: [T, N, 64], as `out`. d_query: float32 [T, N, 64] scratch, null where no sequence is longer than
FMHA_KEYS_AT_ONCE. d_qkv: [T, 3, N, 64] of the type of qkv. */
int fmha_backward(const fmha_problem *problem, const void *out, const float *log_sums, const void *d_out, float *d_query,
                  void *d_qkv, void *stream);

const char *fmha_error(int error);

/* For callers that state the structure again. */
size_t fmha_problem_bytes(void);

#ifdef __cplusplus
}
#endif

#endif
