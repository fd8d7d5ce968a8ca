// The instructions of sm_80 and later that have no name in C++, under names.
#pragma once

#include <cstdint>

namespace mha_deploy {

struct Half {};
struct BFloat16 {};

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, without waiting. Where `exists` is false nothing is read, and zeros
// are written.
__device__ __forceinline__ void copy_async(uint32_t to, void const* from, bool exists) {
    int const bytes = exists ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8x8 matrices; lanes 8i to 8i+7 give the addresses of the rows of matrix i. Of each matrix a lane
// receives two neighbours: row lane/4, columns 2*(lane%4) and +1.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// The same of the transposed matrices: column lane/4, rows 2*(lane%4) and +1.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// sums += a * b with a of 16x16 and b of 16x8. With g = lane/4 and t = lane%4 a lane holds
//   a:    rows g, g+8, g, g+8, columns 2t (+1), 2t (+1), 2t+8 (+1), 2t+8 (+1)
//   b:    rows 2t (+1) and 2t+8 (+1) of column g
//   sums: row g, columns 2t and 2t+1, then the same of row g+8
template <typename Type>
__device__ __forceinline__ void multiply_add(
    float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<Half>(
    float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<BFloat16>(
    float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers as 16 bits each, rounded to nearest: `low` in the lower half.
template <typename Type>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<Half>(float low, float high) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <typename Type>
__device__ __forceinline__ float to_float(uint16_t bits);

template <>
__device__ __forceinline__ float to_float<Half>(uint16_t bits) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
}

template <>
__device__ __forceinline__ float to_float<BFloat16>(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// 2^x; zero for minus infinity.
__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

}  // namespace mha_deploy
