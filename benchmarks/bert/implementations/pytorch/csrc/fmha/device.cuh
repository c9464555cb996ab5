/* One function for each PTX instruction that the kernels need (PTX ISA, sections on cp.async, ldmatrix, mma).

Shared memory is addressed by 32-bit byte addresses, as the instructions require. All accesses go through the functions
here, so that emulation/device.h sees every one. */
#ifndef MLBERT_FMHA_DEVICE_CUH
#define MLBERT_FMHA_DEVICE_CUH

#ifndef __CUDACC__
#include "emulation/device.h"
#else

#include <cstdint>
#include <cuda_runtime.h>

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)

enum class Type { BFLOAT16, FLOAT16 };

/* Address of the first byte of the block's shared memory. */
DEVICE uint32_t shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
}

DEVICE uint32_t load_word(uint32_t from) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

DEVICE float2 load_floats(uint32_t from) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
    return value;
}

DEVICE void store_word(uint32_t to, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

DEVICE void store_float(uint32_t to, float value) { store_word(to, __float_as_uint(value)); }

/* Start copying 16 bytes of global memory. If `wanted` is false, write zeros and read nothing. */
DEVICE void copy_async(uint32_t to, const void *from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}

/* Wait for the copies that this thread has started. A barrier must follow before other threads read them. */
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Load four 8 x 8 matrices of 16-bit numbers. Lane l gives the address of row l % 8 of matrix l / 8, and gets from each
matrix the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. */
DEVICE void load_matrices(uint32_t (&to)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

/* The same for the transposed matrices. */
DEVICE void load_transposed(uint32_t (&to)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

/* sum [16, 8] += left [16, 16] right [16, 8]. With g = lane / 4 and t = lane % 4 a lane holds

    sum     (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
    left    pairs of columns from (g, 2t) (g+8, 2t) (g, 2t+8) (g+8, 2t+8)
    right   pairs of rows from (2t, g) (2t+8, g) */
template <Type TYPE> DEVICE void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t low, uint32_t high) {
#define MULTIPLY_ADD(type)                                                                                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                                 \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                              \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                       \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high))
    if constexpr (TYPE == Type::BFLOAT16) {
        MULTIPLY_ADD("bf16");
    } else {
        MULTIPLY_ADD("f16");
    }
#undef MULTIPLY_ADD
}

/* Return the value of lane (own lane ^ mask). */
template <class Value> DEVICE Value exchange(Value value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

/* Pack two numbers, rounded to nearest, the first in the lower half. */
template <Type TYPE> DEVICE uint32_t pack(float first, float second) {
    uint32_t pair;
    if constexpr (TYPE == Type::BFLOAT16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    }
    return pair;
}

template <Type TYPE> DEVICE float2 unpack(uint32_t pair) {
    if constexpr (TYPE == Type::BFLOAT16) {
        return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
    } else {
        float2 values;
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
            : "=f"(values.x), "=f"(values.y)
            : "r"(pair));
        return values;
    }
}

/* Select four of the eight bytes of (low, high), one per selector digit; digit + 8 replicates that byte's sign bit. */
DEVICE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
    return picked;
}

DEVICE float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

DEVICE float log_2(float x) {
    float logarithm;
    asm("lg2.approx.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
}

/* Queue a kernel. */
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void *stream,
           const Arguments &...arguments) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess || blocks == 0) return error;
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    return cudaGetLastError();
}

/* Return whether the library contains the kernel for the current device. */
template <class... Parameters> int check(void (*kernel)(Parameters...)) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
}

inline const char *error_words(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

#endif
#endif
