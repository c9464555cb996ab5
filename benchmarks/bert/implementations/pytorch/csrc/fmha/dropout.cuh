/* The dropout mask of mlbert/ops/dropout.py in the layout of a product's sums (`multiply_add`).

A mixed word holds the bytes of four neighboring keys. Lanes with the same four keys each mix the word of a different
row and exchange bytes, so that no word is mixed twice. */
#ifndef MLBERT_FMHA_DROPOUT_CUH
#define MLBERT_FMHA_DROPOUT_CUH

#include "sequence.cuh"

constexpr uint32_t GOLDEN = 0x9E3779B9u;

DEVICE uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Element c of the sums is kept if the top bit of byte c of a flag word is set. */
struct Dropout {
    bool is_on;
    uint32_t key, low_bits, is_low;
    const int32_t *rows; /* of the sequence's first token */
    float scale;         /* of kept elements */

    DEVICE Dropout(const fmha_problem &p, const Sequence &s) {
        is_on = p.threshold != 0;
        const uint32_t threshold = p.threshold;
        low_bits = (threshold & 127) * 0x01010101u;
        is_low = threshold < 128 ? ~0u : 0u;
        scale = 256.0f / static_cast<float>(256 - p.threshold);
        rows = is_on ? p.rows + s.start : nullptr;
        key = is_on ? mix32((p.key_place ? *p.key_place : p.key) + (s.head + 1) * GOLDEN) : 0;
    }

    DEVICE uint32_t row_hash(int query) const { return mix32(mix32(static_cast<uint32_t>(rows[query]) + GOLDEN) ^ key); }

    /* Rows of the sums are queries, columns are keys from `first_key`. hash: of query g + 8 (lane % 2). */
    DEVICE uint32_t flags_of_queries(uint32_t hash, int first_key) const {
        const int lane = threadIdx.x % 32;
        const uint32_t mine = word(hash, first_key / 4 + lane % 4 / 2);
        const uint32_t other = exchange(mine, 1);
        return flags(pick_bytes(mine, other, lane % 2 ? 0x3276 : 0x5410));
    }

    /* Rows of the sums are keys from `first_key`, columns are queries. hash: of query 2t + g % 2. */
    DEVICE uint32_t flags_of_keys(uint32_t hash, int first_key) const {
        const int lane = threadIdx.x % 32, g = lane / 4;
        /* Lanes g % 4 = 0 to 3 have the words of (query 2t, keys 0-3 or 4-7), (2t + 1, the same), (2t, keys 8 further),
        (2t + 1, the same), and each needs byte g % 4 of all four: transpose a 4 x 4 matrix of bytes. */
        const uint32_t mine = word(hash, first_key / 4 + g / 4 + g % 4 / 2 * 2);
        const uint32_t pairs = pick_bytes(mine, exchange(mine, 4), g % 2 ? 0x3715 : 0x6240);
        return flags(pick_bytes(pairs, exchange(pairs, 8), g % 4 / 2 ? 0x3276 : 0x5410));
    }

    /* A pair of 16-bit numbers, elements 2 i and 2 i + 1, with dropped ones set to 0. */
    static DEVICE uint32_t keep_pair(uint32_t pair, uint32_t flags, int i) {
        return pair & pick_bytes(flags, 0, i ? 0xBBAA : 0x9988);
    }

    static DEVICE bool keeps(uint32_t flags, int element) { return flags >> (8 * element + 7) & 1; }

  private:
    static DEVICE uint32_t word(uint32_t hash, int group) { return mix32(hash ^ (static_cast<uint32_t>(group) * GOLDEN)); }

    /* byte >= threshold, for four bytes at once. The top bit of `difference` compares the lower seven bits; OR it with
    the byte's top bit if threshold < 128, AND otherwise. */
    DEVICE uint32_t flags(uint32_t bytes) const {
        const uint32_t difference = (bytes | 0x80808080u) - low_bits;
        return (difference & bytes) | (is_low & (difference | bytes));
    }
};

#endif
