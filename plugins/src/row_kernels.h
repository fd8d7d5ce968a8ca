// What the kernels of kernels/{cache_rows,empty_rows,key_counts}.cu are given: read by both compilers.
#pragma once

#include <vector_types.h>

namespace mha_deploy {

// New rows of K or of V. Everything is counted in pieces of 16 bytes.
struct NewRows {
    uint4 const* source;
    uint4* cache;  // [B, H, T, pieces]
    long long batch_stride;
    long long head_stride;
    long long row_stride;
    int heads;
    int cache_rows;  // T
    int pieces;      // of one row of one head
};

struct CacheRows {
    NewRows key;
    NewRows value;
    int const* starts;
    int* key_counts;
    int rows;  // new ones
};

// Given lengths, as cuDNN gets them; the output of batch rows without keys becomes zero.
struct KeyCounts {
    int const* lengths;
    int* key_counts;
    int* query_counts;
    uint4* output;  // [B, S, pieces]
    int queries;
    int keys;  // the most
    int pieces;
};

// Queries without keys: their rows of the output become zero.
struct EmptyRows {
    uint4* output;          // [B, S, pieces]
    int const* key_counts;  // null: `keys` for every batch row
    int queries;
    int keys;
    int pieces;
    long long left;   // as in Mask
    long long right;
    int bottom_right;
};

}  // namespace mha_deploy
