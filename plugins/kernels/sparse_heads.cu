// Attention of the heads that a token chose, and of no others: y = gate * softmax(scale Q K^T) V.
//
// A block takes one head of one batch row, and a tile of the tokens that chose it, wherever they stand in the
// sequence. So the number of tiles with work falls with the share of chosen heads, and so does the time.
#include "sparse_heads_tokens.cuh"
#include "sparse_heads_warp.cuh"

namespace mha_deploy {
namespace {

// The rows of a block: the tokens and their gates. Rows behind the last have token -1.
template <int kRows>
struct Rows {
    int tokens[kRows];
    float gates[kRows];
};

// Fill in the tokens first to first + kRows - 1 of those that chose the head, from the list or from the
// gates. Returns how many there are.
template <int kRows>
__device__ __forceinline__ int find_rows(
    SparseHeadsArguments const& arguments, Gates const& gates, int64_t place, int first, Rows<kRows>& rows) {
    int const thread = static_cast<int>(threadIdx.x);
    int count = 0;
    if (arguments.tokens != nullptr) {
        count = arguments.counts[place];
        if (thread < kRows) {
            int32_t const* const listed = arguments.tokens + place * arguments.queries;
            rows.tokens[thread] = first + thread < count ? listed[first + thread] : -1;
        }
    } else {
        if (thread < kRows) {
            rows.tokens[thread] = -1;
        }
        count = number_tokens<kSparseHeadsThreads>(gates, 0, 0, [&](int number, int token) {
            if (number >= first && number < first + kRows) {
                rows.tokens[number - first] = token;
            }
        });
    }
    __syncthreads();
    return max(0, min(kRows, count - first));
}

// The gates of the rows. They are needed last, so nothing waits for them; the next barrier shows them to all.
template <typename Type, int kRows>
__device__ __forceinline__ void read_gates(Gates const& gates, Rows<kRows>& rows) {
    int const thread = static_cast<int>(threadIdx.x);
    if (thread < kRows) {
        int const token = rows.tokens[thread];
        rows.gates[thread] = token < 0 ? 0.0F : to_float<Type>(gates.bits(token));
    }
}

// How many keys a token sees: a query at place i of S, where `keys` keys exist.
__device__ __forceinline__ int visible_keys(SparseHeadsArguments const& arguments, int token, int keys) {
    if (arguments.causal == 0) {
        return keys;
    }
    int const diagonal = arguments.causal == 1 ? token : token + keys - arguments.queries;
    return max(0, min(keys, diagonal + 1));
}

// Copy the warp's rows from shared memory to the places of their tokens.
template <int kHeadSize, int kRows>
__device__ __forceinline__ void write_rows(
    unsigned char const* results, int const* tokens, uint16_t* output, int64_t row_stride) {
    constexpr int kPieces = kHeadSize / 8;
#pragma unroll 4
    for (int index = static_cast<int>(threadIdx.x) % 32; index < kRows * kPieces; index += 32) {
        int const row = index / kPieces;
        int const piece = index % kPieces;
        int const token = tokens[row];
        if (token >= 0) {
            *reinterpret_cast<uint4*>(output + token * row_stride + piece * 8) =
                *reinterpret_cast<uint4 const*>(results + place_in_tile<kHeadSize>(row, piece));
        }
    }
}

// The tiles of keys and values of one head, two of each in shared memory: one is read while the next comes.
template <int kHeadSize>
struct KeyTiles {
    static constexpr int kKeys = kSparseHeadsKeyTile;
    static constexpr uint32_t kTileBytes = kKeys * kHeadSize * 2;

    uint16_t const* key_memory;
    uint16_t const* value_memory;
    int64_t key_stride;
    int64_t value_stride;
    uint32_t shared;
    int keys;

    __device__ __forceinline__ KeyTiles(
        SparseHeadsArguments const& arguments, int batch, int head, uint32_t shared_tiles, int existing)
        : key_stride(arguments.key.row_stride),
          value_stride(arguments.value.row_stride),
          shared(shared_tiles),
          keys(existing) {
        key_memory = rows_of(arguments.key, batch, head);
        value_memory = rows_of(arguments.value, batch, head);
    }

    __device__ __forceinline__ uint32_t key_tile(int tile) const {
        return shared + static_cast<uint32_t>(tile % 2 * 2) * kTileBytes;
    }
    __device__ __forceinline__ uint32_t value_tile(int tile) const { return key_tile(tile) + kTileBytes; }

    __device__ __forceinline__ void copy(int tile) const {
        copy_rows<kHeadSize, kKeys>(key_tile(tile), key_memory, key_stride, tile * kKeys, keys);
        copy_rows<kHeadSize, kKeys>(value_tile(tile), value_memory, value_stride, tile * kKeys, keys);
    }
};

// All tiles of keys for the warps of a block, the first two of which are already coming. Every thread copies;
// a warp attends where its rows see a key.
template <typename Warp, int kHeadSize>
__device__ __forceinline__ void attend_all(Warp& warp, KeyTiles<kHeadSize> const& tiles, int visible) {
    wait_for_copies();
    __syncthreads();
    warp.keep_queries();
    int const count = (visible + Warp::kKeys - 1) / Warp::kKeys;
    for (int tile = 0; tile < count; ++tile) {
        // Everybody has left the other tile: the barrier below says so.
        if (tile > 0 && tile + 1 < count) {
            tiles.copy(tile + 1);
        }
        warp.attend(tiles.key_tile(tile), tiles.value_tile(tile), tile * Warp::kKeys);
        wait_for_copies();
        __syncthreads();
    }
}

template <typename Type, int kHeadSize, int kRows>
__device__ __forceinline__ void attend_block(SparseHeadsArguments const& arguments) {
    using Warp = WarpAttention<Type, kHeadSize, kRows / (16 * (kSparseHeadsThreads / 32))>;
    extern __shared__ __align__(kTileAlignment) unsigned char shared_memory[];
    __shared__ Rows<kRows> rows;

    // Causal: the last tiles see most keys, and are begun first.
    int const tile = static_cast<int>(arguments.causal == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    int const head = static_cast<int>(blockIdx.y);
    int const batch = static_cast<int>(blockIdx.z);
    int const first = tile * kRows;
    int64_t const place = static_cast<int64_t>(batch) * arguments.query_heads + head;
    Gates const gates(arguments, batch, head);

    int const length = arguments.key_lengths == nullptr ? arguments.keys : arguments.key_lengths[batch];
    int const keys = max(0, min(arguments.keys, length));
    int const most = arguments.tokens == nullptr ? arguments.queries : arguments.counts[place];
    uint32_t const queries = shared_address(shared_memory);
    KeyTiles<kHeadSize> const tiles(
        arguments, batch, head / arguments.heads_per_key_head, queries + kRows * kHeadSize * 2, keys);
    // The first keys come while the tokens are still looked for.
    if (first < most && keys > 0) {
        tiles.copy(0);
    }
    int const count = first < most ? find_rows(arguments, gates, place, first, rows) : 0;
    int visible = 0;
    if (count > 0) {
        gather_rows<kHeadSize>(
            queries, rows_of(arguments.query, batch, head), arguments.query.row_stride, rows.tokens);
        // The tokens ascend: the last one sees most.
        visible = visible_keys(arguments, rows.tokens[count - 1], keys);
        if (visible > Warp::kKeys) {
            tiles.copy(1);
        }
        read_gates<Type>(gates, rows);
    }
    // Short sequences are all waiting for memory: the zeros are written while the queries come.
    write_zeros<kHeadSize, kRows>(arguments, gates, batch, head, first);
    if (count == 0) {
        wait_for_copies();
        return;
    }

    int const own = static_cast<int>(threadIdx.x) / 32 * Warp::kRows;
    Warp warp(queries + own * kHeadSize * 2, arguments.scale_log2);
    warp.set_visible([&](int row, bool& exists) {
        int const token = rows.tokens[own + row];
        exists = token >= 0;
        return exists ? visible_keys(arguments, token, keys) : keys;
    });
    attend_all(warp, tiles, visible);

    warp.finish(shared_memory + own * kHeadSize * 2, [&](int row) { return rows.gates[own + row]; });
    int64_t const row_stride = static_cast<int64_t>(arguments.query_heads) * kHeadSize;
    int64_t const begin = static_cast<int64_t>(batch) * arguments.queries * row_stride + head * kHeadSize;
    write_rows<kHeadSize, Warp::kRows>(
        shared_memory + own * kHeadSize * 2, rows.tokens + own, arguments.output + begin, row_stride);
}

}  // namespace
}  // namespace mha_deploy

extern "C" __global__ void __launch_bounds__(mha_deploy::kSparseHeadsListThreads)
    mha_deploy_sparse_heads_list(mha_deploy::SparseHeadsArguments const arguments) {
    mha_deploy::list_tokens(arguments, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x));
}

// mha_deploy_sparse_heads_<type>_d<head size>_<tile>: one kernel for each, found by name.
#define MHA_DEPLOY_SPARSE_HEADS(name, type, head_size, tile)                                          \
    extern "C" __global__ void __launch_bounds__(mha_deploy::kSparseHeadsThreads)                     \
        mha_deploy_sparse_heads_##name##_d##head_size##_##tile(                                       \
            mha_deploy::SparseHeadsArguments const arguments) {                                       \
        mha_deploy::attend_block<mha_deploy::type, head_size, mha_deploy::kSparseHeads##tile>(        \
            arguments);                                                                               \
    }
#define MHA_DEPLOY_SPARSE_HEADS_OF_TYPE(name, type)       \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 32, SmallTile)    \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 32, LargeTile)    \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 64, SmallTile)    \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 64, LargeTile)    \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 96, SmallTile)    \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 96, LargeTile)    \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 128, SmallTile)   \
    MHA_DEPLOY_SPARSE_HEADS(name, type, 128, LargeTile)

MHA_DEPLOY_SPARSE_HEADS_OF_TYPE(fp16, Half)
MHA_DEPLOY_SPARSE_HEADS_OF_TYPE(bf16, BFloat16)
