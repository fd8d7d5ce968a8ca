// How far cuDNN looks in every batch row, and zeros for the rows that have no key.
#include "../src/row_kernels.h"

namespace {

constexpr unsigned kAll = 0xffffffffU;

// Which keys of a batch element are attended to.
struct Kept {
    int count;
    int first;
    int last;
    __device__ bool are_the_first() const { return last == count - 1; }
};

// Of the whole block; its threads are at most 32 warps.
__device__ Kept kept_of(int const* mask, int keys) {
    Kept kept{0, keys, -1};
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        if (mask[key] != 0) {
            ++kept.count;
            kept.first = min(kept.first, key);
            kept.last = key;
        }
    }
    __shared__ Kept of_warps[32];
    kept = {__reduce_add_sync(kAll, kept.count), __reduce_min_sync(kAll, kept.first),
        __reduce_max_sync(kAll, kept.last)};
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = kept;
    }
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
        Kept const& other = of_warps[warp];
        bool const own = warp == threadIdx.x / 32;
        kept = {kept.count + (own ? 0 : other.count), min(kept.first, other.first),
            max(kept.last, other.last)};
    }
    return kept;
}

}  // namespace

// A grid of (blocks, batch). A batch row without keys has no queries for cuDNN, which then leaves its output
// alone; it is cleared here. With lengths beyond the keys, cuDNN would read memory that is not ours.
extern "C" __global__ void mha_deploy_key_counts(mha_deploy::KeyCounts call) {
    int const batch = blockIdx.y;
    int given = batch >= call.batch ? 0 : call.lengths != nullptr ? call.lengths[batch] : call.keys;
    bool masked = false;  // batch elements of a plan with a bias
    if (call.mask != nullptr) {
        int const* const mask = call.mask + static_cast<long long>(batch) * call.keys;
        Kept const kept = kept_of(mask, call.keys);
        masked = !kept.are_the_first();
        given = kept.count;
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            call.masked.key_counts[batch] = masked ? kept.last + 1 : 0;
            call.masked.query_counts[batch] = masked ? call.queries : 0;
            call.masked.first_keys[batch] = masked ? kept.first : 0;
        }
        long long const place = static_cast<long long>(batch) * call.queries;
        for (int row = blockIdx.x; masked && row < call.queries; row += gridDim.x) {
            unsigned short* const bias = call.masked.bias + (place + row) * call.keys;
            for (int key = threadIdx.x; key < call.keys; key += blockDim.x) {
                bias[key] = mask[key] != 0 ? 0 : call.masked.hidden;
            }
        }
    }
    int const keys = given < 0 ? 0 : given > call.keys ? call.keys : given;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        call.key_counts[batch] = keys;
        call.query_counts[batch] = keys == 0 || masked ? 0 : call.queries;
    }
    if (keys > 0 || batch >= call.batch) {
        return;
    }
    for (int row = blockIdx.x; row < call.queries; row += gridDim.x) {
        long long const place = static_cast<long long>(batch) * call.queries + row;
        uint4* const output = call.output + place * call.pieces;
        for (int piece = threadIdx.x; piece < call.pieces; piece += blockDim.x) {
            output[piece] = make_uint4(0, 0, 0, 0);
        }
    }
}
