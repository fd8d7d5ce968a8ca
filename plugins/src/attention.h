// One attention: what the graph states, the sizes of a call, where its tensors lie in memory, and the work on
// a GPU behind every plugin interface.
#pragma once

#include "status.h"

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace mha_deploy {

enum class Type : int32_t { kHalf = 0, kBFloat16 = 1 };

// Numbers of these types in the 16 bytes that a thread loads at once.
inline constexpr int32_t kElementsOfLoad = 8;

// Where the diagonal of a causal attention ends: in the upper left or in the lower right corner of the
// scores.
enum class Causal : int32_t { kNone = 0, kTopLeft = 1, kBottomRight = 2, kLast = kBottomRight };

// How the elements of a head are paired for the rotary embedding: x_j with x_{j+R/2}, or neighbours.
enum class RotaryPairs : int32_t { kNone = 0, kHalves = 1, kNeighbours = 2, kLast = kNeighbours };

// The row of the tables for query s of batch element b: s, starts[b] + s, b * S + s, or positions[b, s].
enum class RotaryPositions : int32_t {
    kFromZero = 0,
    kFromStarts = 1,
    kPerToken = 2,
    kGiven = 3,
    kLast = kGiven
};

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
    bool has_key_mask = false;     // int32 [B, T]: not 0 for keys that are attended to
    // [B, S, Hq]: factor of each head of each token; heads with zero are not computed
    bool has_gates = false;
    // K and V are new rows of caches [B, Hkv, T, D], written at `starts`, int32 [B]
    bool has_cache = false;
    // Queries and new keys are rotated first: cos and sin [rows, R/2], with kGiven int32 positions [B, S]
    RotaryPairs rotary = RotaryPairs::kNone;
    int32_t rotary_size = 0;  // R: the first elements of a head
    RotaryPositions rotary_positions = RotaryPositions::kFromZero;
    // Q, K, V and the weights after the softmax in FP8 (E4M3), and y, too, four numbers in a word of 32 bits
    bool fp8 = false;
    bool fp8_copy = false;  // y in FP8 is a last output, besides
    float query_scale = 1.0F;
    float key_scale = 1.0F;
    float value_scale = 1.0F;
    float weights_scale = 1.0F;
    float output_scale = 1.0F;

    bool rotates() const noexcept { return rotary != RotaryPairs::kNone; }
    int32_t operands() const noexcept;  // how many inputs hold Q, K and V: 1 to 3
    // operands, bias, key_lengths, key_mask, gates, past_key, past_value, starts, cos, sin, positions: those
    // there are
    int32_t inputs() const noexcept;
    // y; with a cache also present_key and present_value; y in FP8 where it is a copy
    int32_t outputs() const noexcept;

    // Whether the fields make sense together, and whether there is a kernel for them at any size.
    Status check() const;

    // Every field with its name: as a plugin's fields have it, and in the order of the bytes that an engine
    // keeps.
    template <typename Self, typename Visit>
    static void visit_fields(Self& p, Visit const& visit) {
        visit("query_heads", p.query_heads);
        visit("key_heads", p.key_heads);
        visit("head_size", p.head_size);
        visit("value_size", p.value_size);
        visit("scale", p.scale);
        visit("causal", p.causal);
        visit("left_window", p.left_window);
        visit("right_window", p.right_window);
        visit("sources", p.sources);
        visit("offsets", p.offsets);
        visit("has_bias", p.has_bias);
        visit("has_key_lengths", p.has_key_lengths);
        visit("has_key_mask", p.has_key_mask);
        visit("has_gates", p.has_gates);
        visit("has_cache", p.has_cache);
        visit("rotary", p.rotary);
        visit("rotary_size", p.rotary_size);
        visit("rotary_positions", p.rotary_positions);
        visit("fp8", p.fp8);
        visit("fp8_copy", p.fp8_copy);
        visit("query_scale", p.query_scale);
        visit("key_scale", p.key_scale);
        visit("value_scale", p.value_scale);
        visit("weights_scale", p.weights_scale);
        visit("output_scale", p.output_scale);
    }
};

// The head size of queries and keys with a key mask: the next multiple of 16.
int32_t widened(int32_t head_size) noexcept;

std::vector<std::byte> serialize(AttentionParameters const& parameters);
Status deserialize(void const* bytes, std::size_t size, AttentionParameters& parameters);

using Dims = std::vector<int64_t>;

// The sizes of one call. Operands have rank 3, [B, L, W] with the heads side by side in a row, or rank 4, [B,
// H, L, D].
struct AttentionShapes {
    std::vector<Dims> operands;  // one for each distinct input of Q, K and V
    Dims bias;                   // empty where there is none
    int64_t cache_rows = 0;      // T of the caches
    int64_t table_rows = 0;      // of the rotary tables; B * S where they are per token

    int64_t batch() const noexcept;
    int64_t queries(AttentionParameters const& parameters) const noexcept;
    int64_t keys(AttentionParameters const& parameters) const noexcept;  // T of the caches where there is one
    bool operator==(AttentionShapes const& other) const noexcept;
};

// "[2, 128, 768]", for messages.
std::string text_of(Dims const& dims);

// Whether these sizes fit the parameters: rank, widths, batch, bias. Needs no GPU.
Status check_shapes(AttentionParameters const& parameters, AttentionShapes const& shapes);

// Device memory of one call, in the order of the inputs and outputs. What stands behind the valid keys and
// values of a row must be finite numbers (stale rows, zeros), as PyTorch's fused attention asks, too: they
// are read in whole tiles and weighted with zero, and zero times NaN is NaN.
struct AttentionPointers {
    std::vector<void const*> inputs;
    std::vector<void*> outputs;
};

// Where the inputs behind the operands stand; -1 for those that there are not.
struct InputPlaces {
    int32_t bias, key_lengths, key_mask, gates, past_key, past_value, starts, cos, sin, positions;

    explicit InputPlaces(AttentionParameters const& p) noexcept {
        int32_t next = p.operands();
        auto const place = [&next](bool there) { return there ? next++ : -1; };
        bias = place(p.has_bias);
        key_lengths = place(p.has_key_lengths);
        key_mask = place(p.has_key_mask);
        gates = place(p.has_gates);
        past_key = place(p.has_cache);
        past_value = place(p.has_cache);
        starts = place(p.has_cache);
        cos = place(p.rotates());
        sin = place(p.rotates());
        positions = place(p.rotates() && p.rotary_positions == RotaryPositions::kGiven);
        count = next;
    }
    int32_t count;  // of all inputs

    bool is_integer(int32_t input) const noexcept {
        return input >= 0
               && (input == key_lengths || input == key_mask || input == starts || input == positions);
    }
};

// As many as there must be, none null where there is something to read or write, each at a place that the
// kernels can load from. The sizes must have been checked.
Status check_pointers(AttentionParameters const& parameters, AttentionShapes const& shapes,
    AttentionPointers const& pointers);

// ---- views and masks, in cuDNN's way of counting

enum class Part : std::size_t { kQuery = 0, kKey = 1, kValue = 2 };

// A tensor [B, H, L, D] inside an input: sizes, strides in elements, and where it begins.
struct View {
    std::array<int64_t, 4> sizes{};
    std::array<int64_t, 4> strides{};
    int64_t offset = 0;
};

// As the operands hold it: with a cache these are the new rows of K and V.
View view_of(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part);

// A whole tensor [B, H, L, D] without gaps, such as a cache.
View dense_view(int64_t batch, int64_t heads, int64_t rows, int64_t size);

// [B, L, H, D] without gaps as [B, H, L, D]: the output, and what is staged in scratch memory.
View rows_view(int64_t batch, int64_t heads, int64_t rows, int64_t size);

// The mask of one call. A key is seen where i - left < t <= i + right, i being the place of the query; with
// bottom_right the place is shifted by the number of keys minus the number of queries.
struct Mask {
    bool bottom_right = false;
    std::optional<int64_t> left;
    std::optional<int64_t> right;
    bool counts_keys = false;    // the number of keys of each batch row is given as an array
    bool may_be_empty = false;   // there may be queries that see no key
};

// Without parts that hide nothing, and in the corner for which there are most kernels. With `counts_keys` it
// holds for all smaller sizes as well: the diagonal is where queries and keys are counted.
Mask mask_of(AttentionParameters const& parameters, AttentionShapes const& shapes, bool counts_keys = false);

// The window as it was asked for; the same for every size.
Mask stated_mask(AttentionParameters const& parameters);

// ---- the work

// Of one execution context. Calls of one object come one after the other, on the device, too, as TensorRT
// demands of an execution context: a caller that changes the stream makes the new one wait for the old one.
// Several objects may work at the same time.
//
// The first few sizes get plans of their own. Others share plans for sizes rounded up, through copies of
// queries, keys and values in scratch memory with counts of both: a plan takes tens of milliseconds, a copy
// some microseconds, and a cache that grows has new sizes at every step. With a bias, a key mask, gates or FP8
// there is a plan for every size.
//
// A key mask is part of the scores: queries and keys are staged with more elements, whose product is 0, or far
// below all scores for masked keys. On an H200, causal, 32 heads of 64 and 1024 keys take 27 us in place of 22,
// with the numbers as a bias 38; heads of 128 and 2048 keys 105 in place of 86, with a bias 151.
//
// In FP8, Q, K and V are rounded to its grid as they are staged. cuDNN's kernel in FP8 then reads them where
// there is one and it is the faster one; else the one in FP16 or BF16, with the weights as they are.
class AttentionWork {
public:
    static constexpr std::size_t kMostPlans = 128;
    static constexpr std::size_t kExactPlans = 4;

    // Keeps what it prepared for at most so many shapes; the longest unused leaves, unless a graph captured
    // it.
    explicit AttentionWork(AttentionParameters const& parameters, std::size_t most_plans = kMostPlans,
        std::size_t exact_plans = kExactPlans);
    ~AttentionWork();
    AttentionWork(AttentionWork const&) = delete;
    AttentionWork& operator=(AttentionWork const&) = delete;

    // Find the plan of these sizes, so that `run` only launches. Fails where the library has no kernel for
    // them.
    Status prepare(AttentionShapes const& shapes, Type type);

    // Scratch memory that `run` wants for these sizes, `dynamic`: and for any smaller ones; zero where that
    // cannot be known without a GPU.
    std::size_t workspace_bytes(AttentionShapes const& shapes, Type type, bool dynamic = false);

    // Launch. Memory beyond the given workspace is taken once for a shape and kept.
    Status run(AttentionShapes const& shapes, Type type, AttentionPointers const& pointers, void* workspace,
        std::size_t workspace_bytes, CUstream stream);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace mha_deploy
