/* device.cuh for a CPU: the same functions, implemented from the PTX ISA on emulated threads and shared memory. */
#ifndef MLBERT_FMHA_EMULATION_DEVICE_H
#define MLBERT_FMHA_EMULATION_DEVICE_H

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "memory.h"

#define DEVICE inline
#define KERNEL(threads, blocks) void
#define threadIdx emulation::thread_index()
#define blockIdx emulation::block_index
#define __syncthreads() emulation::barrier(emulation::Place::here())

enum class Type { BFLOAT16, FLOAT16 };

struct float2 {
    float x, y;
};

namespace emulation {

inline uint32_t bits(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

inline float number(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

template <Type TYPE> float widen(uint16_t half) {
    if constexpr (TYPE == Type::BFLOAT16) return number(static_cast<uint32_t>(half) << 16);
    _Float16 value;
    memcpy(&value, &half, sizeof value);
    return value;
}

template <Type TYPE> uint16_t narrow(float value) {
    if constexpr (TYPE == Type::BFLOAT16) {
        const uint32_t word = bits(value);
        if (value != value) return 0x7FFF;
        return (word + 0x7FFF + (word >> 16 & 1)) >> 16;
    }
    const _Float16 rounded = static_cast<_Float16>(value);
    uint16_t half;
    memcpy(&half, &rounded, sizeof half);
    return half;
}

/* Element `i` of the 16-bit pairs in `words`. */
template <Type TYPE> float half_of(uint32_t word, int i) { return widen<TYPE>(word >> 16 * i); }

/* given: 4 sums, 4 words of the left operand, 2 of the right one; taken: the sums. */
template <Type TYPE> void multiply_add_warp(Thread *lanes) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 8; i++) {
            left[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = half_of<TYPE>(lanes[lane].given[4 + i / 2], i % 2);
        }
        for (int i = 0; i < 4; i++) {
            right[2 * t + i % 2 + i / 2 * 8][g] = half_of<TYPE>(lanes[lane].given[8 + i / 2], i % 2);
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = number(lanes[lane].given[i]);
            for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
            lanes[lane].taken[i] = bits(sum);
        }
    }
}

/* given: the address of row lane % 8 of matrix lane / 8, and the caller's location; taken: a pair from each matrix. */
template <bool TRANSPOSED> void load_matrices_warp(Thread *lanes) {
    uint16_t rows[LANES][8] = {};
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t row = lanes[lane].given[0];
        if (note_read(row, 16, MANY, lanes[lane].place)) memcpy(rows[lane], byte_at(row), 16);
    }
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, t = lane % 4 * 2;
        for (int matrix = 0; matrix < 4; matrix++) {
            const auto *m = &rows[8 * matrix];
            const uint16_t first = TRANSPOSED ? m[t][g] : m[g][t], second = TRANSPOSED ? m[t + 1][g] : m[g][t + 1];
            lanes[lane].taken[matrix] = first | static_cast<uint32_t>(second) << 16;
        }
    }
}

/* given: a word and a mask of lane bits; taken: the word of the other lane. */
inline void exchange_warp(Thread *lanes) {
    for (int lane = 0; lane < LANES; lane++) lanes[lane].taken[0] = lanes[lane ^ lanes[lane].given[1]].given[0];
}

template <bool TRANSPOSED> void load_four(uint32_t (&to)[4], uint32_t row, Place place) {
    me().given[0] = row;
    together(load_matrices_warp<TRANSPOSED>, place);
    memcpy(to, me().taken, sizeof to);
}

} // namespace emulation

using emulation::Place;
using std::min;

inline uint32_t shared_memory() { return emulation::FIRST_ADDRESS; }

inline uint32_t load_word(uint32_t from, Place place = Place::here()) { return emulation::load<uint32_t>(from, place); }
inline float2 load_floats(uint32_t from, Place place = Place::here()) { return emulation::load<float2>(from, place); }
inline void store_word(uint32_t to, uint32_t value, Place place = Place::here()) { emulation::store(to, value, place); }
inline void store_float(uint32_t to, float value, Place place = Place::here()) { emulation::store(to, value, place); }

inline void copy_async(uint32_t to, const void *from, bool wanted, Place place = Place::here()) {
    emulation::start_copy(to, wanted ? from : nullptr, place);
}

inline void wait_for_copies(Place place = Place::here()) { emulation::finish_copies(place); }

inline void load_matrices(uint32_t (&to)[4], uint32_t row, Place place = Place::here()) {
    emulation::load_four<false>(to, row, place);
}

inline void load_transposed(uint32_t (&to)[4], uint32_t row, Place place = Place::here()) {
    emulation::load_four<true>(to, row, place);
}

template <Type TYPE>
void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t low, uint32_t high, Place place = Place::here()) {
    emulation::Thread &lane = emulation::me();
    for (int i = 0; i < 4; i++) lane.given[i] = emulation::bits(sum[i]), lane.given[4 + i] = left[i];
    lane.given[8] = low, lane.given[9] = high;
    emulation::together(emulation::multiply_add_warp<TYPE>, place);
    for (int i = 0; i < 4; i++) sum[i] = emulation::number(lane.taken[i]);
}

inline uint32_t exchange(uint32_t value, int mask, Place place = Place::here()) {
    emulation::me().given[0] = value, emulation::me().given[1] = mask;
    emulation::together(emulation::exchange_warp, place);
    return emulation::me().taken[0];
}

inline float exchange(float value, int mask, Place place = Place::here()) {
    return emulation::number(exchange(emulation::bits(value), mask, place));
}

template <Type TYPE> uint32_t pack(float first, float second) {
    return emulation::narrow<TYPE>(first) | static_cast<uint32_t>(emulation::narrow<TYPE>(second)) << 16;
}

template <Type TYPE> float2 unpack(uint32_t pair) {
    return {emulation::half_of<TYPE>(pair, 0), emulation::half_of<TYPE>(pair, 1)};
}

inline uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    uint32_t picked = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t digit = selector >> 4 * i & 15, byte = both >> 8 * (digit & 7) & 0xFF;
        picked |= (digit < 8 ? byte : byte & 0x80 ? 0xFFu : 0u) << 8 * i;
    }
    return picked;
}

inline float power_of_2(float x) {
    const float power = exp2f(x);
    return power < FLT_MIN ? 0.0f : power; /* and NaN is kept */
}

inline float log_2(float x) { return log2f(x); }

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void *,
           const Arguments &...arguments) {
    for (int64_t i = 0; i < blocks; i++) {
        emulation::new_memory(shared_bytes);
        if (!emulation::run_block(i, threads, [&] { kernel(arguments...); })) return 1;
    }
    return 0;
}

template <class... Parameters> int check(void (*)(Parameters...)) { return 0; }

inline const char *error_words(int error) { return error ? "the emulation has reports" : "no error"; }

#endif
