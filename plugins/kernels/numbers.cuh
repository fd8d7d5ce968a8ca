// FP16 and BF16 numbers to FP32 and back, rounded to nearest: what every kernel computes in. And FP8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace mha_deploy {

inline __device__ float to_float(__half x) {
    return __half2float(x);
}
inline __device__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
inline __device__ void from_float(float x, __half& y) {
    y = __float2half_rn(x);
}
inline __device__ void from_float(float x, __nv_bfloat16& y) {
    y = __float2bfloat16_rn(x);
}

// Eight numbers times a factor in FP8; beyond its range the last ones.
inline __device__ uint2 to_fp8(float const (&values)[8], float factor) {
    unsigned pairs[4];
    for (int i = 0; i < 4; ++i) {
        float2 const two = make_float2(values[2 * i] * factor, values[2 * i + 1] * factor);
        pairs[i] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
    }
    return make_uint2(pairs[0] | pairs[1] << 16U, pairs[2] | pairs[3] << 16U);
}

inline __device__ void from_fp8(uint2 bytes, float (&values)[8]) {
    for (int i = 0; i < 8; ++i) {
        unsigned const word = i < 4 ? bytes.x : bytes.y;
        auto const byte = static_cast<__nv_fp8_storage_t>(word >> (8 * (i % 4)) & 0xffU);
        values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
    }
}

}  // namespace mha_deploy
