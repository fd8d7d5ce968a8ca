// What a launch of sparse_heads.cu is given: one record, read by the host and by the device.
#pragma once

#include <cstdint>

namespace mha_deploy {

// The sizes that a launch is made of. The kernels are compiled for them.
inline constexpr int kSparseHeadsThreads = 128;      // of a block that attends
inline constexpr int kSparseHeadsListThreads = 256;  // of a block that lists
inline constexpr int kSparseHeadsKeyTile = 64;
inline constexpr int kSparseHeadsSmallTile = 64;   // queries of a block, for few tokens
inline constexpr int kSparseHeadsLargeTile = 128;  // and for many

// Gates that a thread reads at once. Up to this many for each thread of a block, the attention finds its
// tokens itself, which saves a launch; beyond, they are listed first.
inline constexpr int kSparseHeadsGatesPerThread = 4;
inline constexpr int kSparseHeadsUnlistedTokens = kSparseHeadsThreads * kSparseHeadsGatesPerThread;

// Shared memory of a block: the queries, and two tiles each of keys and values.
inline constexpr int sparse_heads_shared_bytes(int query_tile, int head_size) {
    return (query_tile + 4 * kSparseHeadsKeyTile) * head_size * static_cast<int>(sizeof(uint16_t));
}

// Where the rows of one operand are, in elements.
struct SparseHeadsOperand {
    void const* memory;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;
};

struct SparseHeadsArguments {
    SparseHeadsOperand query;
    SparseHeadsOperand key;
    SparseHeadsOperand value;
    uint16_t const* gates;       // [B, S, Hq]
    int32_t const* key_lengths;  // [B], or null: every key exists
    uint16_t* output;            // [B, S, Hq * D]
    int32_t* tokens;             // [B, Hq, S]: the tokens that chose a head, ascending; null: not listed
    int32_t* counts;             // [B, Hq]: how many they are
    int32_t queries;             // S
    int32_t keys;                // T
    int32_t query_heads;
    int32_t heads_per_key_head;
    int32_t causal;    // 0 none, 1 top left, 2 bottom right
    float scale_log2;  // of the scores, times log2(e): exp2 is what the hardware has
};

}  // namespace mha_deploy
