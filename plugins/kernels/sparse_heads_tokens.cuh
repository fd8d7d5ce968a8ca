// Which tokens chose a head: found by counting bits, so that the order is always the order of the tokens.
#pragma once

#include "sparse_heads_arguments.cuh"

namespace mha_deploy {

// The gates of one head of one batch row.
struct Gates {
    uint16_t const* memory;
    int stride;
    int tokens;

    __device__ Gates(SparseHeadsArguments const& arguments, int batch, int head)
        : stride(arguments.query_heads), tokens(arguments.queries) {
        memory = arguments.gates + static_cast<int64_t>(batch) * tokens * stride + head;
    }

    // The gate of a token as it is stored; zero behind the last one.
    __device__ __forceinline__ uint16_t bits(int token) const {
        return token < tokens ? memory[static_cast<int64_t>(token) * stride] : uint16_t{0};
    }
};

// Both FP16 and BF16 have the sign in the highest bit; a zero may have either sign.
__device__ __forceinline__ bool is_chosen(uint16_t gate) {
    return (gate & 0x7FFF) != 0;
}

// Number the chosen tokens from `first` on, as many as the block reads at once, and call
// take(number, token) for each. Returns how many there are up to here: `before` plus those found. All
// threads of the block take part.
template <int kThreads, typename Take>
__device__ __forceinline__ int number_tokens(Gates const& gates, int first, int before, Take take) {
    constexpr int kWarps = kThreads / 32;
    constexpr int kRounds = kSparseHeadsGatesPerThread;
    __shared__ int found[kRounds * kWarps];
    int const thread = static_cast<int>(threadIdx.x);
    int const warp = thread / 32;
    int const lane = thread % 32;

    uint16_t gate[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        gate[round] = gates.bits(first + round * kThreads + thread);
    }
    uint32_t chosen[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        chosen[round] = __ballot_sync(0xFFFFFFFFU, is_chosen(gate[round]));
        if (lane == 0) {
            found[round * kWarps + warp] = __popc(chosen[round]);
        }
    }
    __syncthreads();
    int number = before;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            if (other == warp && is_chosen(gate[round])) {
                int const in_warp = __popc(chosen[round] & ((1U << lane) - 1U));
                take(number + in_warp, first + round * kThreads + thread);
            }
            number += found[round * kWarps + other];
        }
    }
    return number;
}

// List the tokens of one head of one batch row.
__device__ __forceinline__ void list_tokens(SparseHeadsArguments const& arguments, int batch, int head) {
    constexpr int kStep = kSparseHeadsListThreads * kSparseHeadsGatesPerThread;
    Gates const gates(arguments, batch, head);
    int64_t const place = static_cast<int64_t>(batch) * arguments.query_heads + head;
    int32_t* const tokens = arguments.tokens + place * arguments.queries;
    int count = 0;
    for (int first = 0; first < arguments.queries; first += kStep) {
        count = number_tokens<kSparseHeadsListThreads>(
            gates, first, count, [&](int number, int token) { tokens[number] = token; });
        __syncthreads();  // before the next step counts anew
    }
    if (threadIdx.x == 0) {
        arguments.counts[place] = count;
    }
}

// Zeros for the tokens first to first + kTokens - 1 that did not choose the head.
template <int kHeadSize, int kTokens>
__device__ __forceinline__ void write_zeros(
    SparseHeadsArguments const& arguments, Gates const& gates, int batch, int head, int first) {
    constexpr int kPieces = kHeadSize / 8;  // 16 bytes each
    int64_t const row_stride = static_cast<int64_t>(arguments.query_heads) * kHeadSize;
    uint16_t* const output = arguments.output +
        (static_cast<int64_t>(batch) * arguments.queries + first) * row_stride + head * kHeadSize;
#pragma unroll 4
    for (int piece = static_cast<int>(threadIdx.x); piece < kTokens * kPieces; piece += kSparseHeadsThreads) {
        int const token = piece / kPieces;
        if (first + token < arguments.queries && !is_chosen(gates.bits(first + token))) {
            *reinterpret_cast<uint4*>(output + token * row_stride + piece % kPieces * 8) = uint4{0, 0, 0, 0};
        }
    }
}

}  // namespace mha_deploy
