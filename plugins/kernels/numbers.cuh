// FP16 and BF16 numbers to FP32 and back, rounded to nearest: what every kernel computes in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

}  // namespace mha_deploy
