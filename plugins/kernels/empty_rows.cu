// A query that sees no key gives zeros, whatever the attention before made of it.
#include "../src/row_kernels.h"

// A grid of (blocks, batch): the blocks share the rows, and write only those without keys.
extern "C" __global__ void mha_deploy_empty_rows(mha_deploy::EmptyRows call) {
    int const batch = blockIdx.y;
    int keys = call.key_counts != nullptr ? call.key_counts[batch] : call.keys;
    keys = keys < 0 ? 0 : keys > call.keys ? call.keys : keys;
    long long const shift = call.bottom_right != 0 ? static_cast<long long>(keys) - call.queries : 0;
    // Queries from `first` to `last` see at least one key.
    int const first_key = call.first_keys != nullptr ? call.first_keys[batch] : 0;
    long long const first = first_key - (shift + call.right);
    long long const last = keys == 0 ? -1 : keys - 2 - shift + call.left;
    for (int row = blockIdx.x; row < call.queries; row += gridDim.x) {
        if (row >= first && row <= last) {
            continue;
        }
        long long const place = static_cast<long long>(batch) * call.queries + row;
        uint4* const output = call.output + place * call.pieces;
        for (int piece = threadIdx.x; piece < call.pieces; piece += blockDim.x) {
            output[piece] = make_uint4(0, 0, 0, 0);
        }
    }
}
