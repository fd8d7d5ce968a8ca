// Attention calls with their inputs on the host, and what they must give, in double.
#pragma once

#include "../src/attention.h"
#include "check.h"

#include <cmath>
#include <string>
#include <vector>

namespace mha_deploy::check {

enum class Layout { kPacked, kPackedKeyValue, kSeparate, kHeadsFirst };
enum class Bias { kNone, kOne, kBatch, kHeads, kFull };  // which of batch and heads are not broadcast

// The keys of a batch element that a key mask leaves: from `first` to before `end`, but every `gap`-th (0: all).
struct Kept {
    int32_t first = 0;
    int32_t end = 0;
    int32_t gap = 0;
};

struct Case {
    std::string name;
    Type type = Type::kHalf;
    Layout layout = Layout::kSeparate;
    int64_t batch = 2;
    int32_t heads = 4;
    int32_t key_heads = 4;
    int64_t queries = 64;
    int64_t keys = 64;
    int32_t size = 64;
    int32_t value_size = 0;  // 0: as size
    Causal causal = Causal::kNone;
    int32_t left = kNoWindow;
    int32_t right = kNoWindow;
    Bias bias = Bias::kNone;
    std::vector<int32_t> lengths{};  // of the keys
    std::vector<Kept> kept{};        // of a key mask
    std::vector<int32_t> starts{};   // of a cache with `keys` rows
    bool in_place = true;            // present and past are the same memory
    bool fp8 = false;
    bool fp8_copy = false;
};

// Inputs and parameters of one call. The 16-bit tensors are kept as bits.
struct HostCall {
    AttentionParameters parameters;
    AttentionShapes shapes;
    Type type = Type::kHalf;
    std::vector<std::vector<uint16_t>> operands;
    std::vector<uint16_t> bias;
    std::vector<int32_t> key_lengths;
    std::vector<int32_t> key_mask;  // [B, T]
    std::vector<uint16_t> gates;  // [B, S, Hq]
    std::vector<uint16_t> past_key;
    std::vector<uint16_t> past_value;
    std::vector<int32_t> starts;
};

inline std::size_t elements(Dims const& dims) {
    std::size_t count = 1;
    for (int64_t const dim : dims) {
        count *= static_cast<std::size_t>(dim);
    }
    return count;
}

inline std::size_t place(View const& view, int64_t b, int64_t h, int64_t row, int64_t d) {
    auto const& strides = view.strides;
    return static_cast<std::size_t>(
        view.offset + b * strides[0] + h * strides[1] + row * strides[2] + d * strides[3]);
}

inline std::vector<uint16_t>& operand_of(HostCall& call, Part part) {
    return call.operands[static_cast<std::size_t>(call.parameters.sources[static_cast<std::size_t>(part)])];
}

// What stands behind the valid keys: so large that whoever counts it in cannot hide it, but finite, as the
// caller must keep it. Of either sign: all alike could vanish in a maximum.
inline uint16_t stale_bits(Type type, std::size_t at) {
    bool const negative = (at * 2654435761U >> 16U & 1U) != 0U;
    return bits_of_number(type, negative ? -3e4 : 3e4);
}

// Whether the lengths and the key mask leave a key.
inline bool is_kept(HostCall const& call, int64_t b, int64_t key) {
    AttentionParameters const& p = call.parameters;
    if (p.has_key_mask) {
        return call.key_mask[static_cast<std::size_t>(b * call.shapes.keys(p) + key)] != 0;
    }
    return !p.has_key_lengths || key < call.key_lengths[static_cast<std::size_t>(b)];
}

inline void poison_rows(HostCall& call, Part part) {
    View const view = view_of(call.parameters, call.shapes, part);
    for (int64_t b = 0; b < view.sizes[0]; ++b) {
        for (int64_t row = 0; row < view.sizes[2]; ++row) {
            if (is_kept(call, b, row)) {
                continue;
            }
            for (int64_t h = 0; h < view.sizes[1]; ++h) {
                for (int64_t d = 0; d < view.sizes[3]; ++d) {
                    std::size_t const at = place(view, b, h, row, d);
                    operand_of(call, part)[at] = stale_bits(call.type, at);
                }
            }
        }
    }
}

inline void set_layout(HostCall& call, Case const& given) {
    AttentionParameters& p = call.parameters;
    int64_t const rows = given.starts.empty() ? given.keys : given.queries;
    int64_t const query_width = int64_t{p.query_heads} * p.head_size;
    int64_t const key_width = int64_t{p.key_heads} * p.head_size;
    int64_t const value_width = int64_t{p.key_heads} * p.value_size;
    switch (given.layout) {
    case Layout::kPacked:
        p.sources = {0, 0, 0};
        p.offsets = {0, static_cast<int32_t>(query_width), static_cast<int32_t>(query_width + key_width)};
        call.shapes.operands = {{given.batch, rows, query_width + key_width + value_width}};
        break;
    case Layout::kPackedKeyValue:  // V before K, and a gap, which no kernel may mind
        p.sources = {0, 1, 1};
        p.offsets = {0, static_cast<int32_t>(value_width + 8), 0};
        call.shapes.operands = {
            {given.batch, given.queries, query_width}, {given.batch, rows, value_width + 8 + key_width}};
        break;
    case Layout::kSeparate:
        call.shapes.operands = {{given.batch, given.queries, query_width}, {given.batch, rows, key_width},
            {given.batch, rows, value_width}};
        break;
    case Layout::kHeadsFirst:
        call.shapes.operands = {{given.batch, p.query_heads, given.queries, p.head_size},
            {given.batch, p.key_heads, rows, p.head_size}, {given.batch, p.key_heads, rows, p.value_size}};
        break;
    }
}

inline std::vector<uint16_t> past_of(Case const& given, int64_t size, uint32_t seed) {
    View const view = dense_view(given.batch, given.key_heads, given.keys, size);
    auto cache = random_bits(given.type, static_cast<std::size_t>(view.sizes[0] * view.strides[0]), seed);
    for (int64_t b = 0; b < given.batch; ++b) {
        for (int64_t h = 0; h < given.key_heads; ++h) {
            for (int64_t row = given.starts[static_cast<std::size_t>(b)]; row < given.keys; ++row) {
                for (int64_t d = 0; d < size; ++d) {
                    std::size_t const at = place(view, b, h, row, d);
                    cache[at] = stale_bits(given.type, at);
                }
            }
        }
    }
    return cache;
}

inline HostCall make_call(Case const& given, uint32_t seed) {
    HostCall call;
    AttentionParameters& p = call.parameters;
    p.query_heads = given.heads;
    p.key_heads = given.key_heads;
    p.head_size = given.size;
    p.value_size = given.value_size == 0 ? given.size : given.value_size;
    p.scale = static_cast<float>(1.3 / std::sqrt(static_cast<double>(given.size)));
    p.causal = given.causal;
    p.left_window = given.left;
    p.right_window = given.right;
    p.has_bias = given.bias != Bias::kNone;
    p.has_key_lengths = !given.lengths.empty();
    p.has_key_mask = !given.kept.empty();
    p.has_cache = !given.starts.empty();
    p.fp8 = given.fp8;
    p.fp8_copy = given.fp8_copy;
    p.query_scale = 0.01F;
    p.key_scale = 0.0125F;
    p.value_scale = 0.009F;
    p.weights_scale = 1.0F / 448.0F;
    p.output_scale = 0.008F;
    call.type = given.type;
    call.key_lengths = given.lengths;
    for (Kept const& kept : given.kept) {
        for (int32_t key = 0; key < given.keys; ++key) {
            bool const left = key >= kept.first && key < kept.end && (kept.gap == 0 || key % kept.gap != 0);
            call.key_mask.push_back(left ? 1 : 0);
        }
    }
    call.starts = given.starts;
    set_layout(call, given);
    for (Dims const& dims : call.shapes.operands) {
        call.operands.push_back(random_bits(given.type, elements(dims), ++seed));
    }
    if (p.has_bias) {
        bool const batches = given.bias == Bias::kBatch || given.bias == Bias::kFull;
        bool const heads = given.bias == Bias::kHeads || given.bias == Bias::kFull;
        call.shapes.bias = {batches ? given.batch : 1, heads ? given.heads : 1, given.queries, given.keys};
        call.bias = random_bits(given.type, elements(call.shapes.bias), ++seed);
    }
    if (p.has_key_lengths || p.has_key_mask) {
        poison_rows(call, Part::kKey);
        poison_rows(call, Part::kValue);
    }
    if (p.has_cache) {
        call.shapes.cache_rows = given.keys;
        call.past_key = past_of(given, p.head_size, ++seed);
        call.past_value = past_of(given, p.value_size, ++seed);
    }
    return call;
}

// The cache after the call: the past with the new rows in it.
inline std::vector<uint16_t> present_of(HostCall const& call, Part part) {
    View const rows = view_of(call.parameters, call.shapes, part);
    View const cache = dense_view(rows.sizes[0], rows.sizes[1], call.shapes.cache_rows, rows.sizes[3]);
    std::vector<uint16_t> present = part == Part::kKey ? call.past_key : call.past_value;
    std::vector<uint16_t> const& source = operand_of(const_cast<HostCall&>(call), part);
    for (int64_t b = 0; b < rows.sizes[0]; ++b) {
        for (int64_t row = 0; row < rows.sizes[2]; ++row) {
            int64_t const target = call.starts[static_cast<std::size_t>(b)] + row;
            for (int64_t h = 0; target >= 0 && target < call.shapes.cache_rows && h < rows.sizes[1]; ++h) {
                for (int64_t d = 0; d < rows.sizes[3]; ++d) {
                    present[place(cache, b, h, target, d)] = source[place(rows, b, h, row, d)];
                }
            }
        }
    }
    return present;
}

// Keys or values of a call, wherever they come from.
struct Rows {
    View view;
    std::vector<double> numbers;

    Rows(HostCall const& call, Part part) : view(view_of(call.parameters, call.shapes, part)) {
        if (call.parameters.has_cache && part != Part::kQuery) {
            view = dense_view(view.sizes[0], view.sizes[1], call.shapes.cache_rows, view.sizes[3]);
            numbers = numbers_of(call.type, present_of(call, part));
        } else {
            numbers = numbers_of(call.type, operand_of(const_cast<HostCall&>(call), part));
        }
        AttentionParameters const& p = call.parameters;
        float const scales[] = {p.query_scale, p.key_scale, p.value_scale};
        auto const scale = static_cast<double>(scales[static_cast<std::size_t>(part)]);
        for (double& number : numbers) {
            number = p.fp8 ? rounded_to_fp8(number / scale) * scale : number;
        }
    }
    double const* row(int64_t b, int64_t h, int64_t at) const {
        return numbers.data() + place(view, b, h, at, 0);
    }
};

inline int64_t keys_of_row(HostCall const& call, int64_t b) {
    int64_t const keys = call.shapes.keys(call.parameters);
    if (call.parameters.has_cache) {
        return call.starts[static_cast<std::size_t>(b)] + call.shapes.queries(call.parameters);
    }
    if (!call.parameters.has_key_lengths) {
        return keys;
    }
    // A length beyond the keys there are means all of them, a negative one none.
    return std::clamp<int64_t>(call.key_lengths[static_cast<std::size_t>(b)], 0, keys);
}

inline bool sees(HostCall const& call, int64_t b, int64_t query, int64_t key) {
    AttentionParameters const& p = call.parameters;
    int64_t const keys = keys_of_row(call, b);
    int64_t const own = query + (p.causal == Causal::kBottomRight ? keys - call.shapes.queries(p) : 0);
    return key < keys && is_kept(call, b, key) && (p.causal == Causal::kNone || key <= own)
           && (p.left_window == kNoWindow || key >= own - p.left_window)
           && (p.right_window == kNoWindow || key <= own + p.right_window);
}

inline double bias_of(HostCall const& call, int64_t b, int64_t h, int64_t query, int64_t key) {
    Dims const& dims = call.shapes.bias;
    if (!call.parameters.has_bias) {
        return 0.0;
    }
    int64_t const matrix = (dims[0] == 1 ? 0 : b) * dims[1] + (dims[1] == 1 ? 0 : h);
    int64_t const at = (matrix * dims[2] + query) * dims[3] + key;
    return number_of_bits(call.type, call.bias[static_cast<std::size_t>(at)]);
}

inline double gate_of(HostCall const& call, int64_t at) {
    if (!call.parameters.has_gates) {
        return 1.0;
    }
    return number_of_bits(call.type, call.gates[static_cast<std::size_t>(at)]);
}

// y [B, S, Hq*Dv] by the book: scores, softmax, weighted sum; zeros where no key is seen.
inline std::vector<double> reference(HostCall const& call) {
    AttentionParameters const& p = call.parameters;
    Rows const query(call, Part::kQuery);
    Rows const key(call, Part::kKey);
    Rows const value(call, Part::kValue);
    int64_t const queries = call.shapes.queries(p);
    int64_t const keys = call.shapes.keys(p);
    View const output =
        rows_view(call.shapes.batch(), p.query_heads, call.shapes.queries(p), p.value_size);
    std::vector<double> y(static_cast<std::size_t>(output.sizes[0] * output.strides[0]), 0.0);
    std::vector<double> weights(static_cast<std::size_t>(keys));
    for (int64_t b = 0; b < call.shapes.batch(); ++b) {
        for (int64_t h = 0; h < p.query_heads; ++h) {
            int64_t const group = h / (p.query_heads / p.key_heads);
            for (int64_t i = 0; i < queries; ++i) {
                double largest = -std::numeric_limits<double>::infinity();
                for (int64_t t = 0; t < keys; ++t) {
                    double score = -std::numeric_limits<double>::infinity();
                    if (sees(call, b, i, t)) {
                        score = 0.0;
                        for (int64_t d = 0; d < p.head_size; ++d) {
                            score += query.row(b, h, i)[d] * key.row(b, group, t)[d];
                        }
                        score = score * static_cast<double>(p.scale) + bias_of(call, b, h, i, t);
                        largest = std::max(largest, score);
                    }
                    weights[static_cast<std::size_t>(t)] = score;
                }
                double sum = 0.0;
                for (double& weight : weights) {
                    weight = std::isinf(weight) ? 0.0 : std::exp(weight - largest);
                    sum += weight;
                }
                double const gate = gate_of(call, (b * queries + i) * p.query_heads + h);
                double* const out = y.data() + place(output, b, h, i, 0);
                for (int64_t t = 0; t < keys && sum != 0.0; ++t) {
                    double const weight = weights[static_cast<std::size_t>(t)] / sum * gate;
                    for (int64_t d = 0; weight != 0.0 && d < p.value_size; ++d) {
                        out[d] += weight * value.row(b, group, t)[d];
                    }
                }
            }
        }
    }
    return y;
}

}  // namespace mha_deploy::check
