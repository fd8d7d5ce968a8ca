// A query that sees no key gives zeros, whatever the attention before made of it. The output in FP8, where a
// GEMM reads it.
#include "../src/row_kernels.h"
#include "numbers.cuh"

namespace {

using mha_deploy::EmptyRows;

// Queries from `first` to `last` see at least one key.
struct Seeing {
    long long first;
    long long last;
};

__device__ Seeing seeing_of(EmptyRows const& call, int batch) {
    int keys = call.key_counts != nullptr ? call.key_counts[batch] : call.keys;
    keys = keys < 0 ? 0 : keys > call.keys ? call.keys : keys;
    int const first_key = call.first_keys != nullptr ? call.first_keys[batch] : 0;
    long long const shift = call.bottom_right != 0 ? static_cast<long long>(keys) - call.queries : 0;
    return {first_key - (shift + call.right), first_key >= keys ? -1 : keys - 2 - shift + call.left};
}

// A grid of (blocks, batch): the blocks share the rows.
template <typename T, bool Narrows>
__device__ void clear(EmptyRows const& call) {
    int const batch = blockIdx.y;
    Seeing const seeing = seeing_of(call, batch);
    for (int row = blockIdx.x; row < call.queries; row += gridDim.x) {
        bool const sees = row >= seeing.first && row <= seeing.last;
        if (sees && !Narrows) {
            continue;
        }
        long long const begin = (static_cast<long long>(batch) * call.queries + row) * call.pieces;
        for (int piece = threadIdx.x; piece < call.pieces; piece += blockDim.x) {
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (sees) {
                eight = call.output[begin + piece];
            } else {
                call.output[begin + piece] = eight;
            }
            if constexpr (Narrows) {
                float values[8];
                for (int i = 0; i < 8; ++i) {
                    values[i] = mha_deploy::to_float(reinterpret_cast<T const*>(&eight)[i]);
                }
                call.fp8[begin + piece] = mha_deploy::to_fp8(values, call.fp8_factor);
            }
        }
    }
}

}  // namespace

extern "C" __global__ void mha_deploy_empty_rows(EmptyRows call) {
    clear<__half, false>(call);
}

extern "C" __global__ void mha_deploy_empty_rows_narrow_fp16(EmptyRows call) {
    clear<__half, true>(call);
}

extern "C" __global__ void mha_deploy_empty_rows_narrow_bf16(EmptyRows call) {
    clear<__nv_bfloat16, true>(call);
}
