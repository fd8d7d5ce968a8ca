// Tiles of rows in shared memory: how they lie there, and how they come there.
#pragma once

#include "sparse_heads_arguments.cuh"
#include "sparse_heads_instructions.cuh"

namespace mha_deploy {

// Where 16 bytes of a row lie. Eight rows at the same place would share their banks, and the matrices are
// read eight rows at once: so the places within a row are exchanged, each row in another way.
template <int kHeadSize>
__device__ __forceinline__ uint32_t place_in_tile(int row, int piece) {
    constexpr int kPieces = kHeadSize / 8;
    int const exchange = kPieces % 8 == 0 ? row & 7 : (row >> 1) & 3;
    return static_cast<uint32_t>((row * kPieces + (piece ^ exchange)) * 16);
}

// The address `pieces` further in the same row, for an even number of pieces from one of the first two on.
// Tiles begin at multiples of kTileAlignment, so the exchange is one of bits of the address itself.
inline constexpr int kTileAlignment = 128;

template <int kHeadSize>
__device__ __forceinline__ uint32_t further_in_row(uint32_t address, int pieces) {
    constexpr int kExchanged = kHeadSize / 8 % 8 == 0 ? 8 : 4;
    return (address ^ static_cast<uint32_t>(pieces % kExchanged * 16)) +
        static_cast<uint32_t>(pieces / kExchanged * kExchanged * 16);
}

// The rows of one head of one batch row.
__device__ __forceinline__ uint16_t const* rows_of(SparseHeadsOperand const& operand, int batch, int head) {
    auto const* const memory = static_cast<uint16_t const*>(operand.memory);
    return memory + batch * operand.batch_stride + head * operand.head_stride;
}

// Which pieces of a tile a thread copies: the same place in every kRowStep-th row, and with 12 pieces in a
// row also those 4 and 8 places further. All lie at fixed distances from the first, in spite of the exchange.
template <int kHeadSize>
struct CopyPlan {
    static constexpr int kPieces = kHeadSize / 8;
    static constexpr int kAcross = kPieces % 8 == 0 ? kPieces : 4;
    static constexpr int kGroups = kPieces / kAcross;
    static constexpr int kRowStep = kSparseHeadsThreads / kAcross;
    static_assert(kRowStep % 8 == 0, "the exchange repeats every 8 rows");
    static_assert(kSparseHeadsKeyTile % kRowStep == 0, "every thread copies the same number of pieces");

    static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kAcross; }
    static __device__ __forceinline__ int piece() { return static_cast<int>(threadIdx.x) % kAcross; }
    static __device__ __forceinline__ uint32_t place() { return place_in_tile<kHeadSize>(row(), piece()); }
};

// Start copying the rows first to first + kRows - 1 of an operand. Rows from `end` on are not read: they
// become zeros, so that no NaN that happens to lie there meets a weight of zero.
template <int kHeadSize, int kRows>
__device__ __forceinline__ void copy_rows(
    uint32_t tile, uint16_t const* memory, int64_t row_stride, int first, int end) {
    using Plan = CopyPlan<kHeadSize>;
    int const row = first + Plan::row();
    uint16_t const* from = memory + row * row_stride + Plan::piece() * 8;
    uint32_t const to = tile + Plan::place();
#pragma unroll
    for (int step = 0; step < kRows; step += Plan::kRowStep) {
#pragma unroll
        for (int group = 0; group < Plan::kGroups; ++group) {
            copy_async(to + step * kHeadSize * 2 + group * 64, from + group * 32, row + step < end);
        }
        from += Plan::kRowStep * row_stride;
    }
}

// Start copying the rows of the given tokens; tokens below zero are rows that do not exist.
template <int kHeadSize, int kRows>
__device__ __forceinline__ void gather_rows(
    uint32_t tile, uint16_t const* memory, int64_t row_stride, int const (&tokens)[kRows]) {
    using Plan = CopyPlan<kHeadSize>;
    uint32_t const to = tile + Plan::place();
#pragma unroll
    for (int step = 0; step < kRows; step += Plan::kRowStep) {
        int const token = tokens[Plan::row() + step];
        uint16_t const* const from = memory + max(token, 0) * row_stride + Plan::piece() * 8;
#pragma unroll
        for (int group = 0; group < Plan::kGroups; ++group) {
            copy_async(to + step * kHeadSize * 2 + group * 64, from + group * 32, token >= 0);
        }
    }
}

}  // namespace mha_deploy
