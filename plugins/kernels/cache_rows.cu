// The new rows of K and V go into their caches, and the number of keys of each batch row is noted: one
// launch.
#include "../src/row_kernels.h"

namespace {

__device__ void write_piece(
    mha_deploy::NewRows const& rows, int batch, int row, int target, int piece_of_all) {
    int const head = piece_of_all / rows.pieces;
    int const piece = piece_of_all % rows.pieces;
    long long const from = batch * rows.batch_stride + head * rows.head_stride + row * rows.row_stride;
    long long const to = ((static_cast<long long>(batch) * rows.heads + head) * rows.cache_rows + target)
                         * rows.pieces;
    rows.cache[to + piece] = rows.source[from + piece];
}

}  // namespace

// One thread for each 16 bytes. A grid of (new rows, pieces of all heads, batch).
extern "C" __global__ void mha_deploy_cache_rows(mha_deploy::CacheRows call) {
    int const row = blockIdx.x;
    int const batch = blockIdx.z;
    int const start = call.starts[batch];
    if (row == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        long long const keys = static_cast<long long>(start) + call.rows;
        long long const most = call.key.cache_rows;
        call.key_counts[batch] = static_cast<int>(keys < 0 ? 0 : keys > most ? most : keys);
    }
    long long const target = static_cast<long long>(start) + row;
    if (start < 0 || target >= call.key.cache_rows) {
        return;  // it would lie outside of the cache
    }
    int const piece = blockIdx.y * blockDim.x + threadIdx.x;
    int const key_pieces = call.key.heads * call.key.pieces;
    int const value_pieces = call.value.heads * call.value.pieces;
    if (piece < key_pieces) {
        write_piece(call.key, batch, row, static_cast<int>(target), piece);
    } else if (piece < key_pieces + value_pieces) {
        write_piece(call.value, batch, row, static_cast<int>(target), piece - key_pieces);
    }
}
