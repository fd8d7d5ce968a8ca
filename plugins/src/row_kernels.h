// What the kernels of kernels/{rotary_append,empty_rows,key_counts}.cu are given: read by both compilers.
#pragma once

#include <vector_types.h>

namespace mha_deploy {

// Q, K or V of the new tokens, and where they go. Strides are counted in pieces of 16 bytes.
struct HeadCopy {
    uint4 const* source;
    uint4* target;
    long long batch_stride;
    long long head_stride;
    long long row_stride;
    long long target_batch_stride;
    long long target_head_stride;
    long long target_row_stride;
    int heads;  // 0: nothing moves
    int pieces;  // of a head
    int units;  // threads for one head of one token
    int added;  // of them, those that write the pieces behind the head which a key mask needs
    int is_key;
    int rotates;
    float fp8_scale;  // 0: numbers stay as they are
    int narrow;       // whether they are written in FP8, or rounded to its grid
};

struct Rotary {
    enum Positions { kFromZero = 0, kFromStarts = 1, kPerToken = 2, kGiven = 3 };
    void const* cos;  // [table_rows, R/2]
    void const* sin;
    int const* given;  // [B, S], for kGiven
    long long table_rows;
    int positions;
    int pieces;  // R/8
    int interleaved;
};

// A key mask is part of the scores: queries and keys get elements that are multiplied with each other, kFar in
// queries, -kFar in masked keys, whose other elements are zero, and zero in all others.
struct KeyMask {
    int const* kept;  // [B, keys]; null: there is none
    int* first_keys;  // of those that are attended to; `keys` where there is none
    int keys;
};
constexpr float kFar = 32768.0F;

struct RotaryAppendCall {
    HeadCopy query;
    HeadCopy key;
    HeadCopy value;
    Rotary rotary;
    KeyMask mask;
    int const* starts;
    int* key_counts;  // null: there is no cache
    int rows;         // new tokens
    int filled_rows;  // of keys and values: those behind the last token become zero
    int cache_rows;   // T
};

// Key and query counts, as cuDNN gets them; the output of batch elements without keys becomes zero.
struct KeyCounts {
    int const* lengths;  // null: `keys` for every batch element
    int* key_counts;
    int* query_counts;
    uint4* output;  // [B, S, pieces]
    int queries;
    int keys;   // the most
    int batch;  // those behind it, of a plan for a larger one, have no keys
    int pieces;
};

// Queries without keys: their rows of the output become zero. With `fp8`, all rows are also written there.
struct EmptyRows {
    uint4* output;          // [B, S, pieces]
    int const* key_counts;  // null: `keys` for every batch row
    int const* first_keys;  // of a key mask; null: 0
    uint2* fp8;             // may be null
    float fp8_factor;       // one by the scale
    int queries;
    int keys;
    int pieces;
    long long left;   // as in Mask
    long long right;
    int bottom_right;
};

}  // namespace mha_deploy
