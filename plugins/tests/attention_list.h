// The attention calls that are compared on a GPU. Each costs cuDNN a plan, so each has a reason to be there.
#pragma once

#include "attention_cases.h"

#include <utility>
#include <vector>

namespace mha_deploy::check {

// Changes of the plain case, one after the other.
template <typename... Changes>
Case with(std::string name, Changes const&... changes) {
    Case made;
    made.name = std::move(name);
    (changes(made), ...);
    return made;
}

inline auto heads(int32_t queries, int32_t keys) {
    return [=](Case& c) { c.heads = queries, c.key_heads = keys; };
}
inline auto rows(int64_t queries, int64_t keys) {
    return [=](Case& c) { c.queries = queries, c.keys = keys; };
}
inline auto sizes(int32_t size, int32_t value_size = 0) {
    return [=](Case& c) { c.size = size, c.value_size = value_size; };
}
inline auto laid(Layout layout) {
    return [=](Case& c) { c.layout = layout; };
}
inline auto masked(Causal causal, int32_t left = kNoWindow, int32_t right = kNoWindow) {
    return [=](Case& c) { c.causal = causal, c.left = left, c.right = right; };
}
inline auto biased(Bias bias) {
    return [=](Case& c) { c.bias = bias; };
}
inline auto lengths(std::vector<int32_t> values) {
    return [=](Case& c) { c.lengths = values, c.batch = static_cast<int64_t>(values.size()); };
}
inline auto key_mask(std::vector<Kept> values) {
    return [=](Case& c) { c.kept = values, c.batch = static_cast<int64_t>(values.size()); };
}
inline auto cached(std::vector<int32_t> starts, bool in_place = true) {
    return [=](Case& c) {
        c.starts = starts;
        c.batch = static_cast<int64_t>(starts.size());
        c.in_place = in_place;
    };
}
inline void bf16(Case& c) {
    c.type = Type::kBFloat16;
}

inline std::vector<Case> layouts_and_sizes() {
    return {
        with("self, packed", laid(Layout::kPacked)),
        with("self, packed, bf16", laid(Layout::kPacked), bf16),
        with("gqa, packed, odd rows", laid(Layout::kPacked), heads(8, 2), rows(77, 77), sizes(128)),
        with("mqa, packed", laid(Layout::kPacked), heads(8, 1), rows(100, 100)),
        with("cross, packed kv", laid(Layout::kPackedKeyValue), rows(33, 150)),
        with("cross, more queries than keys", rows(150, 33)),
        with("gqa, separate, bf16", heads(6, 3), rows(50, 70), bf16),
        with("gqa, heads first", laid(Layout::kHeadsFirst), heads(8, 4), rows(65, 129), sizes(128)),
        with("one key", rows(5, 1)),
        with("head size 32", sizes(32)),
        with("head size 80", sizes(80), laid(Layout::kPacked)),
        with("head size 96", sizes(96), rows(70, 90)),
        with("head size 256", sizes(256), rows(70, 90)),
        with("head size 8", sizes(8)),
        with("value size 128 of 192", sizes(192, 128), rows(70, 70), laid(Layout::kPacked)),
        with("value size 64 of 128", sizes(128, 64), heads(4, 2), rows(40, 90)),
        with("value size 128 of 64, bf16", sizes(64, 128), bf16),
    };
}

inline std::vector<Case> masks() {
    Causal const none = Causal::kNone;
    Causal const top = Causal::kTopLeft;
    Causal const bottom = Causal::kBottomRight;
    return {
        with("top left, square", masked(top), laid(Layout::kPacked), sizes(128), heads(4, 2)),
        with("top left, S < T", masked(top), rows(40, 90)),
        with("top left, S > T", masked(top), rows(90, 40)),
        with("bottom right, square, odd", masked(bottom), rows(131, 131), laid(Layout::kPacked)),
        with("bottom right, S < T", masked(bottom), rows(40, 99), bf16),
        with("bottom right, S > T", masked(bottom), rows(99, 40)),
        with("window left, top left", masked(top, 16), rows(90, 90)),
        with("window left, bottom right", masked(bottom, 16), rows(40, 90)),
        with("window of itself", masked(top, 0), rows(70, 70)),
        with("window both, no causal", masked(none, 9, 5), rows(90, 90)),
        with("window right only", masked(none, kNoWindow, 7), rows(90, 90)),
        with("window left only", masked(none, 9), rows(90, 90)),
        with("window that leaves queries alone", masked(none, 3, 3), rows(90, 40)),
        with("bias one", biased(Bias::kOne)),
        with("bias batch, odd keys", biased(Bias::kBatch), rows(40, 75)),
        with("bias heads, bf16", biased(Bias::kHeads), bf16),
        with("bias full, gqa", biased(Bias::kFull), heads(8, 2), rows(64, 128), sizes(128)),
        with("bias, top left", biased(Bias::kHeads), masked(Causal::kTopLeft), rows(72, 72)),
        with("bias, bottom right, S < T", biased(Bias::kHeads), masked(bottom), rows(40, 96)),
        with("bias, bottom right window, S < T", biased(Bias::kOne), masked(bottom, 20), rows(40, 96)),
        with("bias, lengths", biased(Bias::kBatch), lengths({64, 0, 17})),
    };
}

inline std::vector<Case> lengths_and_caches() {
    Causal const top = Causal::kTopLeft;
    Causal const bottom = Causal::kBottomRight;
    return {
        with("lengths", lengths({100, 0, 1, 37}), rows(100, 100), laid(Layout::kPacked)),
        with("lengths out of range", lengths({101, -1, 1 << 30, 99}), rows(100, 100)),
        with("lengths, bf16, cross", lengths({1, 90, 0}), rows(30, 90), bf16),
        with("lengths, top left", lengths({100, 0, 1, 37}), rows(100, 100), masked(top), sizes(128)),
        with("lengths, bottom right", lengths({90, 40, 50, 0, 1}), rows(50, 90), masked(bottom)),
        with("lengths, bottom right window", lengths({90, 40, 3}), rows(50, 90), masked(bottom, 10)),
        with("lengths, window", lengths({90, 40, 3}), rows(90, 90), masked(Causal::kNone, 10, 4)),
        with("key mask", key_mask({{0, 100}, {}, {0, 37}, {30, 100}, {0, 100, 7}, {99, 100}}), rows(100, 100),
            laid(Layout::kPacked)),
        with("key mask, top left", key_mask({{0, 100}, {}, {0, 37}, {30, 100}, {2, 70, 7}, {99, 100}}),
            rows(100, 100), masked(top), laid(Layout::kPacked), heads(8, 2)),
        with("key mask, top left, bf16, heads of 128", key_mask({{5, 300}, {0, 300}}), rows(300, 300), masked(top),
            sizes(128), bf16),
        with("key mask, top left, S < T", key_mask({{0, 90}, {50, 90}}), rows(40, 90), masked(top)),
        with("key mask, cross, odd keys", key_mask({{0, 20}, {7, 75}}), rows(30, 75)),
        with("decode", rows(1, 300), heads(8, 2), sizes(128), masked(bottom)),
        with("decode, bf16, long", rows(1, 2100), heads(8, 8), sizes(64), bf16),
        with("decode, window", rows(1, 300), heads(8, 2), sizes(128), masked(bottom, 63)),
        with("decode, lengths", rows(1, 300), heads(8, 2), sizes(128), masked(bottom),
            lengths({300, 0, 1, 77})),
        with("decode, bias", rows(1, 300), heads(8, 2), sizes(128), biased(Bias::kHeads)),
        with("cache, decode", rows(1, 300), heads(8, 2), sizes(128), masked(bottom), cached({299, 0, 1, 77}),
            laid(Layout::kPacked)),
        with("cache, decode, bf16, copied", rows(1, 129), heads(4, 4), masked(bottom),
            cached({128, 5}, false), laid(Layout::kHeadsFirst), bf16),
        with("cache, decode, window", rows(1, 300), heads(8, 2), sizes(128), masked(bottom, 31),
            cached({290, 0, 40})),
        with("cache, 7 rows", rows(7, 130), heads(8, 2), sizes(128), masked(bottom), cached({123, 0, 64}),
            laid(Layout::kPackedKeyValue)),
        with("cache, 7 rows, no causal", rows(7, 130), heads(4, 2), cached({100, 0}, false)),
        with("cache, 7 rows, value size", rows(7, 64), heads(4, 2), sizes(128, 64), masked(bottom),
            cached({57, 2}), laid(Layout::kHeadsFirst)),
        with("cache, whole prompt", rows(70, 100), heads(8, 2), sizes(128), masked(bottom), cached({0, 30}),
            laid(Layout::kPacked)),
        with("cache, 7 rows, window", rows(7, 130), heads(8, 2), sizes(128), masked(bottom, 40),
            cached({123, 0, 64})),
    };
}

inline void fp8(Case& c) {
    c.fp8 = true;
}

// From 1024 keys on, with heads of 128, cuDNN's kernel in FP8 computes them.
inline std::vector<Case> in_fp8() {
    Causal const top = Causal::kTopLeft;
    Layout const packed = Layout::kPacked;
    return {
        with("fp8, few keys", fp8, laid(packed), rows(77, 77), masked(top)),
        with("fp8, few keys, lengths", fp8, laid(packed), rows(100, 100), lengths({100, 0, 1, 37})),
        with("fp8, decode", fp8, rows(1, 1100), heads(8, 2), sizes(128)),
        with("fp8, causal", fp8, laid(packed), rows(1024, 1024), heads(4, 1), sizes(128), masked(top)),
        with("fp8, causal, odd rows", fp8, laid(packed), rows(1031, 1031), heads(2, 1), sizes(128), masked(top)),
        with("fp8, heads of 64", fp8, rows(1024, 1024), heads(2, 2)),
        with("fp8, value size", fp8, rows(1024, 1024), heads(2, 2), sizes(128, 64)),
        with("fp8, bf16, cross", fp8, rows(40, 1100), heads(2, 1), sizes(128), bf16),
        with("fp8, lengths", fp8, laid(packed), rows(1100, 1100), heads(2, 1), sizes(128), masked(top),
            lengths({1100, 0, 700})),
        with("fp8, window", fp8, laid(packed), rows(1100, 1100), heads(2, 1), sizes(128), masked(top, 100)),
    };
}

inline void fp8_copy(Case& c) {
    c.fp8_copy = true;
}

inline std::vector<Case> with_copies() {
    Causal const top = Causal::kTopLeft;
    Layout const packed = Layout::kPacked;
    return {
        with("fp8 copy", fp8_copy, laid(packed), rows(77, 77), masked(top)),
        with("fp8 copy, bf16, lengths", fp8_copy, laid(packed), rows(100, 100), lengths({100, 0, 1, 37}), bf16),
        with("fp8 copy, key mask", fp8_copy, laid(packed), rows(100, 100), masked(top), sizes(128), heads(4, 2),
            key_mask({{0, 100}, {}, {0, 37}, {30, 100}, {2, 70, 7}})),
        with("fp8 copy, bias", fp8_copy, biased(Bias::kHeads), rows(40, 72)),
        with("fp8 copy, cache", fp8_copy, rows(7, 130), heads(8, 2), sizes(128), masked(Causal::kBottomRight),
            cached({123, 0, 64})),
    };
}

inline std::vector<Case> attention_list() {
    std::vector<Case> all = layouts_and_sizes();
    for (std::vector<Case> const& more : {masks(), lengths_and_caches(), in_fp8(), with_copies()}) {
        all.insert(all.end(), more.begin(), more.end());
    }
    return all;
}

}  // namespace mha_deploy::check
