/* The sequence and head of a block, and the offsets of its data. */
#ifndef MLBERT_FMHA_SEQUENCE_CUH
#define MLBERT_FMHA_SEQUENCE_CUH

#include "device.cuh"
#include "fmha.h"

constexpr int HEAD_SIZE = FMHA_HEAD_SIZE;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr float LOG2_E = 1.44269504088896f;
/* 1 / sqrt(H), and the same for scores in units of log2. */
constexpr float SCALE = 0.125f, SCALE_LOG2 = SCALE * LOG2_E;

struct Sequence {
    int head;
    int start, length; /* tokens */
    bool is_tail;      /* the tokens after the last sequence; their results are zero */
    int qkv_stride, out_stride;    /* elements from one token to the next in [T, 3, N, H] and [T, N, H] */
    size_t qkv_place, out_place;   /* of the first token's first element of this head (of Q) */
};

DEVICE Sequence sequence_of_block(const fmha_problem &p) {
    Sequence s;
    const int index = static_cast<int>(blockIdx.x) / p.num_heads;
    s.head = static_cast<int>(blockIdx.x) % p.num_heads;
    s.is_tail = index == p.num_sequences;
    s.start = p.cu_seqlens[index];
    s.length = (s.is_tail ? p.num_tokens : p.cu_seqlens[index + 1]) - s.start;
    s.out_stride = p.num_heads * HEAD_SIZE;
    s.qkv_stride = 3 * s.out_stride;
    s.out_place = static_cast<size_t>(s.start) * s.out_stride + s.head * HEAD_SIZE;
    s.qkv_place = static_cast<size_t>(s.start) * s.qkv_stride + s.head * HEAD_SIZE;
    return s;
}

inline int64_t number_of_blocks(const fmha_problem &p) {
    return p.num_tokens ? static_cast<int64_t>(p.num_sequences + 1) * p.num_heads : 0;
}

/* Write zeros for `length` tokens of one head. */
DEVICE void clear(uint16_t *first, int stride, int length) {
    constexpr int WORDS = HEAD_SIZE / 2;
    for (int i = threadIdx.x; i < length * WORDS; i += THREADS) {
        reinterpret_cast<uint32_t *>(first + static_cast<size_t>(i / WORDS) * stride)[i % WORDS] = 0;
    }
}

DEVICE uint32_t *as_word(uint16_t *pair) { return reinterpret_cast<uint32_t *>(pair); }
DEVICE const uint32_t *as_word(const uint16_t *pair) { return reinterpret_cast<const uint32_t *>(pair); }

#endif
