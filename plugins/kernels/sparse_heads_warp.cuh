// What one warp does: some rows of queries against tiles of keys and values, with a softmax that runs along.
#pragma once

#include "sparse_heads_tiles.cuh"

namespace mha_deploy {

// The state of a warp that attends for 16 * kRowTiles queries. The matrices are spread over the lanes as
// multiply_add has them: a lane holds the rows lane/4 (half 0) and lane/4 + 8 (half 1) of every row tile.
template <typename Type, int kHeadSize, int kRowTiles>
class WarpAttention {
public:
    static constexpr int kKeys = kSparseHeadsKeyTile;
    static constexpr int kRows = 16 * kRowTiles;

    // `queries` is the warp's part of the tile, and stays its own: the results go through the same memory.
    __device__ __forceinline__ WarpAttention(uint32_t queries, float scale_log2)
        : lane_(static_cast<int>(threadIdx.x) % 32), scale_(scale_log2) {
        queries_ = queries + place_in_tile<kHeadSize>(lane_ % 16, lane_ / 16);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int column = 0; column < kHeadSize / 8; ++column) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    results_[tile][column][i] = 0.0F;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                maximum_[tile][half] = -INFINITY;
                total_[tile][half] = 0.0F;
            }
        }
    }

    // The row of a lane within the warp's rows.
    __device__ __forceinline__ int row(int tile, int half) const { return tile * 16 + half * 8 + lane_ / 4; }

    // How many keys each row sees: visible(row, exists). Rows that do not exist give what they like: they are
    // never written.
    template <typename Visible>
    __device__ __forceinline__ void set_visible(Visible visible) {
        int least = INT_MAX;
        int most = 0;
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bool exists = false;
                int const keys = visible(row(tile, half), exists);
                visible_[tile][half] = keys;
                least = min(least, keys);
                most = exists ? max(most, keys) : most;
            }
        }
        least_visible_ = __reduce_min_sync(0xFFFFFFFFU, least);
        most_visible_ = __reduce_max_sync(0xFFFFFFFFU, most);
    }

    // The queries have come: keep them where there are registers enough.
    __device__ __forceinline__ void keep_queries() {
        if constexpr (kQueriesKept) {
#pragma unroll
            for (int depth = 0; depth < kDepths; ++depth) {
                load_queries(kept_[depth], depth);
            }
        }
    }

    // One tile of keys and values, whose first key is `first`.
    __device__ __forceinline__ void attend(uint32_t keys, uint32_t values, int first) {
        if (first >= most_visible_) {
            return;
        }
        float scores[kRowTiles][kKeys / 8][4];
        score(scores, keys);
        if (first + kKeys > least_visible_) {
            mask(scores, first);
        }
        weigh(scores);
        add_values(scores, values);
    }

    // The rows are done: weighted mean times gate(row), in the type of the output, where the queries were.
    template <typename Gate>
    __device__ __forceinline__ void finish(unsigned char* results, Gate gate) {
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float const total = sum_of_four(total_[tile][half]);
                // A query that sees no key has no weights, and gives zeros.
                float const factor = total == 0.0F ? 0.0F : gate(row(tile, half)) / total;
#pragma unroll
                for (int column = 0; column < kHeadSize / 8; ++column) {
                    uint32_t const place = place_in_tile<kHeadSize>(row(tile, half), column) + lane_ % 4 * 4;
                    float const(&sums)[4] = results_[tile][column];
                    *reinterpret_cast<uint32_t*>(results + place) =
                        pack<Type>(sums[2 * half] * factor, sums[2 * half + 1] * factor);
                }
            }
        }
        __syncwarp();
    }

private:
    static constexpr int kDepths = kHeadSize / 16;
    static constexpr bool kQueriesKept = kRowTiles * kHeadSize <= 128;

    // A 16x16 matrix lies in shared memory as four of 8x8: upper left, lower left, upper right, lower right.
    __device__ __forceinline__ void load_queries(uint32_t (&queries)[kRowTiles][4], int depth) const {
        uint32_t const address = further_in_row<kHeadSize>(queries_, depth * 2);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
            load_matrices(queries[tile], address + tile * 16 * kHeadSize * 2);
        }
    }

    // scores = Q K^T. A column of K^T is a row of K, so the rows are read as they lie. 16 keys at a time:
    // keys 0-7, the same with their next 8 dimensions, then keys 8-15 in the same way.
    __device__ __forceinline__ void score(float (&scores)[kRowTiles][kKeys / 8][4], uint32_t keys) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[tile][column][i] = 0.0F;
                }
            }
        }
        keys += place_in_tile<kHeadSize>(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
#pragma unroll
        for (int depth = 0; depth < kDepths; ++depth) {
            uint32_t read[kRowTiles][4];
            if constexpr (!kQueriesKept) {
                load_queries(read, depth);
            }
            auto const& query = kQueriesKept ? kept_[kQueriesKept ? depth : 0] : read;
            uint32_t const address = further_in_row<kHeadSize>(keys, depth * 2);
#pragma unroll
            for (int pair = 0; pair < kKeys / 16; ++pair) {
                uint32_t matrices[4];
                load_matrices(matrices, address + pair * 16 * kHeadSize * 2);
#pragma unroll
                for (int tile = 0; tile < kRowTiles; ++tile) {
                    multiply_add<Type>(scores[tile][2 * pair], query[tile], matrices[0], matrices[1]);
                    multiply_add<Type>(scores[tile][2 * pair + 1], query[tile], matrices[2], matrices[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void mask(float (&scores)[kRowTiles][kKeys / 8][4], int first) const {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int column = 0; column < kKeys / 8; ++column) {
                int const key = first + column * 8 + lane_ % 4 * 2;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (key + i % 2 >= visible_[tile][i / 2]) {
                        scores[tile][column][i] = -INFINITY;
                    }
                }
            }
        }
    }

    // From scores to weights, relative to the greatest score so far; what was summed before follows.
    __device__ __forceinline__ void weigh(float (&scores)[kRowTiles][kKeys / 8][4]) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float greatest = maximum_[tile][half];
#pragma unroll
                for (int column = 0; column < kKeys / 8; ++column) {
                    greatest = fmaxf(greatest,
                        fmaxf(scores[tile][column][2 * half], scores[tile][column][2 * half + 1]));
                }
                greatest = fmaxf(greatest, __shfl_xor_sync(0xFFFFFFFFU, greatest, 1));
                greatest = fmaxf(greatest, __shfl_xor_sync(0xFFFFFFFFU, greatest, 2));
                // Where no key was visible yet, infinity minus infinity would be no number.
                float const shift = greatest == -INFINITY ? 0.0F : greatest * scale_;
                float const before = power_of_two(maximum_[tile][half] * scale_ - shift);
                maximum_[tile][half] = greatest;
                float total = total_[tile][half] * before;
#pragma unroll
                for (int column = 0; column < kKeys / 8; ++column) {
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i) {
                        scores[tile][column][i] = power_of_two(scores[tile][column][i] * scale_ - shift);
                        total += scores[tile][column][i];
                    }
                }
                total_[tile][half] = total;
#pragma unroll
                for (int column = 0; column < kHeadSize / 8; ++column) {
                    results_[tile][column][2 * half] *= before;
                    results_[tile][column][2 * half + 1] *= before;
                }
            }
        }
    }

    // results += weights * V. The weights already lie as the left side of a matmul wants them. A column of V
    // is needed over the keys, so its matrices are transposed on the way: 16 keys of 8 columns, then of the
    // next 8.
    __device__ __forceinline__ void add_values(
        float const (&weights)[kRowTiles][kKeys / 8][4], uint32_t values) {
        values += place_in_tile<kHeadSize>(lane_ % 16, lane_ / 16);
#pragma unroll
        for (int depth = 0; depth < kKeys / 16; ++depth) {
            uint32_t left[kRowTiles][4];
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float const(&pair)[4] = weights[tile][2 * depth + i / 2];
                    left[tile][i] = pack<Type>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
                }
            }
#pragma unroll
            for (int pair = 0; pair < kHeadSize / 16; ++pair) {
                uint32_t matrices[4];
                load_matrices_transposed(
                    matrices, further_in_row<kHeadSize>(values, pair * 2) + depth * 16 * kHeadSize * 2);
#pragma unroll
                for (int tile = 0; tile < kRowTiles; ++tile) {
                    multiply_add<Type>(results_[tile][2 * pair], left[tile], matrices[0], matrices[1]);
                    multiply_add<Type>(results_[tile][2 * pair + 1], left[tile], matrices[2], matrices[3]);
                }
            }
        }
    }

    // Four neighbouring lanes hold a row.
    static __device__ __forceinline__ float sum_of_four(float part) {
        part += __shfl_xor_sync(0xFFFFFFFFU, part, 1);
        return part + __shfl_xor_sync(0xFFFFFFFFU, part, 2);
    }

    int lane_;
    float scale_;
    uint32_t queries_;  // where this lane reads
    int least_visible_;
    int most_visible_;
    int visible_[kRowTiles][2];
    float maximum_[kRowTiles][2];
    float total_[kRowTiles][2];
    float results_[kRowTiles][kHeadSize / 8][4];
    uint32_t kept_[kQueriesKept ? kDepths : 1][kRowTiles][4];
};

}  // namespace mha_deploy
