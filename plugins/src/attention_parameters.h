// One attention as the graph states it, without its sizes: what a plugin's fields hold, and what an engine
// keeps.
#pragma once

#include "status.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mha_deploy {

enum class Type : int32_t { kHalf = 0, kBFloat16 = 1 };

// Where the diagonal of a causal attention ends: in the upper left or in the lower right corner of the
// scores.
enum class Causal : int32_t { kNone = 0, kTopLeft = 1, kBottomRight = 2 };

// How the elements of a head are paired for the rotary embedding: x_j with x_{j+R/2}, or neighbours.
enum class RotaryPairs : int32_t { kNone = 0, kHalves = 1, kNeighbours = 2 };

// The row of the tables for query s of batch element b: s, starts[b] + s, b * S + s, or positions[b, s].
enum class RotaryPositions : int32_t { kFromZero = 0, kFromStarts = 1, kPerToken = 2, kGiven = 3 };

inline constexpr int32_t kNoWindow = -1;

struct AttentionParameters {
    int32_t query_heads = 0;
    int32_t key_heads = 0;
    int32_t head_size = 0;   // of queries and keys
    int32_t value_size = 0;  // of values
    float scale = 1.0F;
    Causal causal = Causal::kNone;
    int32_t left_window = kNoWindow;   // keys before the query's own place that it sees
    int32_t right_window = kNoWindow;  // and behind it
    // Which input holds Q, K and V, and where in a row of it they begin: packed projections are read in
    // place.
    std::array<int32_t, 3> sources{0, 1, 2};
    std::array<int32_t, 3> offsets{0, 0, 0};
    bool has_bias = false;         // added to the scores: [B or 1, Hq or 1, S, T]
    bool has_key_lengths = false;  // int32 [B]: valid keys of each batch row
    // [B, S, Hq]: factor of each head of each token; heads with zero are not computed
    bool has_gates = false;
    // K and V are new rows of caches [B, Hkv, T, D], written at `starts`, int32 [B]
    bool has_cache = false;
    // Queries and new keys are rotated first: cos and sin [rows, R/2], with kGiven int32 positions [B, S]
    RotaryPairs rotary = RotaryPairs::kNone;
    int32_t rotary_size = 0;  // R: the first elements of a head
    RotaryPositions rotary_positions = RotaryPositions::kFromZero;

    bool rotates() const noexcept { return rotary != RotaryPairs::kNone; }
    int32_t operands() const noexcept;  // how many inputs hold Q, K and V: 1 to 3
    // operands, bias, key_lengths, gates, past_key, past_value, starts, cos, sin, positions: those there are
    int32_t inputs() const noexcept;
    int32_t outputs() const noexcept;   // y; with a cache also present_key and present_value

    // Whether the fields make sense together, and whether there is a kernel for them at any size.
    Status check() const;
};

// As bytes: a magic number, a version, the fields, a checksum. Whatever is not such a blob is refused.
std::vector<std::byte> serialize(AttentionParameters const& parameters);
Status deserialize(void const* bytes, std::size_t size, AttentionParameters& parameters);

}  // namespace mha_deploy
