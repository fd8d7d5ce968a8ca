// How far cuDNN looks in every batch row, and zeros for the rows that have no key.
#include "../src/row_kernels.h"

// A grid of (blocks, batch). A batch row without keys has no queries for cuDNN, which then leaves its output
// alone; it is cleared here. With lengths beyond the keys, cuDNN would read memory that is not ours.
extern "C" __global__ void mha_deploy_key_counts(mha_deploy::KeyCounts call) {
    int const batch = blockIdx.y;
    int const given = batch >= call.batch ? 0 : call.lengths != nullptr ? call.lengths[batch] : call.keys;
    int const keys = given < 0 ? 0 : given > call.keys ? call.keys : given;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        call.key_counts[batch] = keys;
        call.query_counts[batch] = keys == 0 ? 0 : call.queries;
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
