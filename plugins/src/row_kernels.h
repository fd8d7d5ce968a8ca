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
    int units;  // threads for one head of one token
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

struct RotaryAppendCall {
    HeadCopy query;
    HeadCopy key;
    HeadCopy value;
    Rotary rotary;
    int const* starts;
    int* key_counts;  // null: there is no cache
    int rows;         // new tokens
    int filled_rows;  // of keys and values: those behind the last token become zero
    int cache_rows;   // T
};

// Key and query counts, as cuDNN gets them; the output of batch elements without keys becomes zero. With a
// mask, batch elements that attend to other keys than the first ones have no queries there, but in `masked`.
struct KeyCounts {
    int const* lengths;  // null: `keys` for every batch element, or those of the mask
    int const* mask;     // [B, keys]; may be null
    int* key_counts;
    int* query_counts;
    uint4* output;  // [B, S, pieces]
    int queries;
    int keys;   // the most
    int batch;  // those behind it, of a plan for a larger one, have no keys
    int pieces;
    struct Masked {
        int* key_counts;
        int* query_counts;
        int* first_keys;        // of those that are attended to; 0 where all of the first ones are
        unsigned short* bias;   // [B, S, keys]: 0, or minus infinity for masked keys
        unsigned short hidden;  // minus infinity in the type of the bias
    } masked;
};

// Queries without keys: their rows of the output become zero.
struct EmptyRows {
    uint4* output;          // [B, S, pieces]
    int const* key_counts;  // null: `keys` for every batch row
    int const* first_keys;  // null: 0; else keys before it are masked
    int queries;
    int keys;
    int pieces;
    long long left;   // as in Mask
    long long right;
    int bottom_right;
};

}  // namespace mha_deploy
