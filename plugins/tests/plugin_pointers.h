// Which addresses a call of the attention may have. Nothing is read there.
#pragma once

#include "../src/attention.h"
#include "plugin_expect.h"

namespace host {

inline mha_deploy::AttentionParameters pointers_case(bool lengths, bool cache) {
    mha_deploy::AttentionParameters p;
    p.query_heads = 4;
    p.key_heads = 2;
    p.head_size = p.value_size = 8;
    p.has_key_lengths = lengths;
    p.has_cache = cache;
    return p;
}

inline mha_deploy::AttentionShapes pointers_sizes(
    int64_t batch, int64_t queries, int64_t keys, int64_t rows) {
    mha_deploy::AttentionShapes shapes;
    shapes.operands = {{batch, queries, 32}, {batch, keys, 16}, {batch, keys, 16}};
    shapes.cache_rows = rows;
    return shapes;
}

// One address for everything but the one at `index`, counted over inputs and then outputs.
inline mha_deploy::AttentionPointers pointers_but(
    mha_deploy::AttentionParameters const& p, std::size_t index, void* other) {
    alignas(16) static char memory[64];
    mha_deploy::AttentionPointers pointers;
    pointers.inputs.assign(static_cast<std::size_t>(p.inputs()), memory);
    pointers.outputs.assign(static_cast<std::size_t>(p.outputs()), memory);
    std::size_t const inputs = pointers.inputs.size();
    if (index < inputs) {
        pointers.inputs[index] = other;
    } else if (index < inputs + pointers.outputs.size()) {
        pointers.outputs[index - inputs] = other;
    }
    return pointers;
}

inline void expect_pointers() {
    constexpr std::size_t kNone = 99;
    alignas(16) static char memory[64];
    auto const right = [](mha_deploy::AttentionParameters const& p, mha_deploy::AttentionShapes const& shapes,
                           std::size_t index, void* other) {
        return mha_deploy::check_pointers(p, shapes, pointers_but(p, index, other)).ok();
    };
    auto const lengths = pointers_case(true, false);
    auto const cache = pointers_case(false, true);
    auto const some = pointers_sizes(2, 3, 5, 0);
    auto const cached = pointers_sizes(2, 3, 3, 9);
    expect(right(lengths, some, kNone, nullptr) && right(cache, cached, kNone, nullptr), "addresses: right");
    for (std::size_t i = 0; i < 5; ++i) {
        expect(!right(lengths, some, i, nullptr), "addresses: null " + std::to_string(i));
        bool const counts = i == 3;
        expect(right(lengths, some, i, memory + 4) == counts, "addresses: 4 behind 16, " + std::to_string(i));
        expect(!right(lengths, some, i, memory + 2), "addresses: 2 behind 16, " + std::to_string(i));
    }
    expect(right(cache, cached, 5, memory + 4) && !right(cache, cached, 4, memory + 4), "addresses: starts");
    for (std::size_t i = 3; i < 9; ++i) {
        expect(!right(cache, cached, i, nullptr), "addresses: null beside a cache " + std::to_string(i));
    }
    for (std::size_t i = 0; i < 5; ++i) {
        expect(right(lengths, pointers_sizes(0, 3, 5, 0), i, nullptr), "addresses: no batch");
    }
    auto const no_queries = pointers_sizes(2, 0, 5, 0);
    expect(right(lengths, no_queries, 0, nullptr) && right(lengths, no_queries, 4, nullptr)
               && !right(lengths, no_queries, 1, nullptr),
        "addresses: no queries");
    auto const no_keys = pointers_sizes(2, 3, 0, 0);
    expect(right(lengths, no_keys, 1, nullptr) && !right(lengths, no_keys, 4, nullptr), "addresses: no keys");
    auto const only_caches = pointers_sizes(2, 0, 0, 9);
    expect(right(cache, only_caches, 6, nullptr) && !right(cache, only_caches, 7, nullptr),
        "addresses: no new rows for the caches");
    mha_deploy::AttentionPointers few = pointers_but(lengths, kNone, nullptr);
    few.inputs.pop_back();
    expect(!mha_deploy::check_pointers(lengths, some, few).ok(), "addresses: one too few");
}

}  // namespace host
