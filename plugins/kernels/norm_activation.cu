// Residual and normalisation in one kernel, and activations: what stands between the GEMMs of a block.
#include "../src/norm_activation_kernels.h"
#include "numbers.cuh"

namespace {

using mha_deploy::ActivationCall;
using mha_deploy::NormCall;
using mha_deploy::from_float;
using mha_deploy::to_fp8;
using mha_deploy::to_float;

template <typename T>
__device__ void load(uint4 const* address, float (&values)[8]) {
    uint4 const bytes = *address;
    T const* const each = reinterpret_cast<T const*>(&bytes);
    for (int i = 0; i < 8; ++i) {
        values[i] = to_float(each[i]);
    }
}

template <typename T>
__device__ void store(uint4* address, float const (&values)[8]) {
    uint4 bytes;
    T* const each = reinterpret_cast<T*>(&bytes);
    for (int i = 0; i < 8; ++i) {
        from_float(values[i], each[i]);
    }
    *address = bytes;
}

// The sum over all threads of a block, in every thread. The number of threads is a multiple of 32.
__device__ float block_sum(float value) {
    __shared__ float of_warps[32];
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xffffffffU, value, step);
    }
    int const warps = static_cast<int>(blockDim.x) / 32;
    if (warps == 1) {
        return value;
    }
    __syncthreads();  // the last sum was read by all
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float total = 0.0F;
    for (int warp = 0; warp < warps; ++warp) {
        total += of_warps[warp];
    }
    return total;
}

// One block for each row; a thread holds `Pieces` times eight numbers of it.
template <typename T, int Pieces>
__device__ void normalise(NormCall const& call) {
    long long const begin = static_cast<long long>(blockIdx.x) * call.pieces;
    float values[Pieces][8];
    float total = 0.0F;
    for (int i = 0; i < Pieces; ++i) {
        int const piece = static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x);
        for (int j = 0; j < 8; ++j) {
            values[i][j] = 0.0F;
        }
        if (piece >= call.pieces) {
            continue;
        }
        load<T>(call.x + begin + piece, values[i]);
        if (call.residual != nullptr) {
            float more[8];
            load<T>(call.residual + begin + piece, more);
            for (int j = 0; j < 8; ++j) {
                values[i][j] += more[j];
            }
        }
        if (call.sum != nullptr) {
            store<T>(call.sum + begin + piece, values[i]);
        }
        for (int j = 0; j < 8; ++j) {
            total += values[i][j];
        }
    }
    // On their way while the sums are computed; for more pieces there are too few registers.
    uint4 first_scale{};
    if (Pieces == 1 && static_cast<int>(threadIdx.x) < call.pieces) {
        first_scale = call.scale[threadIdx.x];
    }
    float const width = static_cast<float>(call.pieces) * 8.0F;
    float const mean = call.is_rms != 0 ? 0.0F : block_sum(total) / width;
    float squares = 0.0F;
    for (int i = 0; i < Pieces; ++i) {
        if (static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x) < call.pieces) {
            for (int j = 0; j < 8; ++j) {
                float const apart = values[i][j] - mean;
                squares += apart * apart;
            }
        }
    }
    float const factor = 1.0F / sqrtf(block_sum(squares) / width + call.epsilon);
    for (int i = 0; i < Pieces; ++i) {
        int const piece = static_cast<int>(threadIdx.x) + i * static_cast<int>(blockDim.x);
        if (piece >= call.pieces) {
            continue;
        }
        float scale[8];
        float bias[8] = {};
        load<T>(Pieces == 1 ? &first_scale : call.scale + piece, scale);
        if (call.bias != nullptr) {
            load<T>(call.bias + piece, bias);
        }
        for (int j = 0; j < 8; ++j) {
            values[i][j] = (values[i][j] - mean) * factor * scale[j] + bias[j];
        }
        if (call.y != nullptr) {
            store<T>(call.y + begin + piece, values[i]);
        }
        if (call.fp8 != nullptr) {
            call.fp8[begin + piece] = to_fp8(values[i], call.fp8_factor);
        }
    }
}

template <typename T>
__device__ void activate(ActivationCall const& call) {
    long long const piece = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (piece >= call.pieces) {
        return;
    }
    float x[8];
    float gate[8] = {1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F};
    long long const before = call.row_pieces == 0 ? 0 : piece / call.row_pieces * call.row_pieces;
    load<T>(call.x + before + piece, x);
    if (call.row_pieces != 0) {
        load<T>(call.x + before + piece + call.row_pieces, gate);
    } else if (call.gate != nullptr) {
        load<T>(call.gate + piece, gate);
    }
    for (int i = 0; i < 8; ++i) {
        float y = x[i];
        if (call.kind == 2) {
            y = 0.5F * x[i] * (1.0F + erff(x[i] * 0.70710678118654752F));
        } else if (call.kind == 3) {
            float const inner = 0.79788456080286536F * (x[i] + 0.044715F * x[i] * x[i] * x[i]);
            y = 0.5F * x[i] * (1.0F + tanhf(inner));
        } else if (call.kind == 4) {
            y = x[i] * __frcp_rn(1.0F + __expf(-x[i]));
        }
        x[i] = y * gate[i];
    }
    if (call.y != nullptr) {
        store<T>(call.y + piece, x);
    }
    if (call.fp8 != nullptr) {
        call.fp8[piece] = to_fp8(x, call.fp8_factor);
    }
}

}  // namespace

#define MHA_DEPLOY_NORM(type, name, pieces) \
    extern "C" __global__ void mha_deploy_norm_activation_norm##pieces##_##name(NormCall call) { \
        normalise<type, pieces>(call); \
    }
MHA_DEPLOY_NORM(__half, fp16, 1)
MHA_DEPLOY_NORM(__half, fp16, 2)
MHA_DEPLOY_NORM(__half, fp16, 4)
MHA_DEPLOY_NORM(__nv_bfloat16, bf16, 1)
MHA_DEPLOY_NORM(__nv_bfloat16, bf16, 2)
MHA_DEPLOY_NORM(__nv_bfloat16, bf16, 4)

extern "C" __global__ void mha_deploy_norm_activation_act_fp16(ActivationCall call) {
    activate<__half>(call);
}

extern "C" __global__ void mha_deploy_norm_activation_act_bf16(ActivationCall call) {
    activate<__nv_bfloat16>(call);
}
