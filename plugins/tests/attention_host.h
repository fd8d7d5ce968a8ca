// What can be checked of the attention without a GPU: fields, bytes, masks, sizes, the store of plans, the
// comparator.
#pragma once

#include "../src/plan_cache.h"
#include "../src/serializer.h"
#include "attention_cases.h"

namespace mha_deploy::check {

inline AttentionParameters sound_parameters() {
    AttentionParameters p;
    p.query_heads = 32;
    p.key_heads = 8;
    p.head_size = 128;
    p.value_size = 64;
    p.scale = 0.088F;
    p.causal = Causal::kBottomRight;
    p.left_window = 4095;
    p.sources = {0, 1, 1};
    p.offsets = {0, 0, 1024};
    p.has_bias = true;
    return p;
}

inline void check_fields(Tally& tally) {
    struct Wrong {
        char const* name;
        void (*change)(AttentionParameters&);
    };
    Wrong const wrongs[] = {
        {"no heads", [](AttentionParameters& p) { p.query_heads = 0; }},
        {"negative key heads", [](AttentionParameters& p) { p.key_heads = -8; }},
        {"heads without groups", [](AttentionParameters& p) { p.key_heads = 5; }},
        {"no head size", [](AttentionParameters& p) { p.head_size = 0; }},
        {"head size 60", [](AttentionParameters& p) { p.head_size = 60; }},
        {"head size 264", [](AttentionParameters& p) { p.head_size = 264; }},
        {"value size 4", [](AttentionParameters& p) { p.value_size = 4; }},
        {"scale not a number", [](AttentionParameters& p) { p.scale = std::nanf(""); }},
        {"causal 3", [](AttentionParameters& p) { p.causal = static_cast<Causal>(3); }},
        {"window -2", [](AttentionParameters& p) { p.left_window = -2; }},
        {"source 3", [](AttentionParameters& p) { p.sources = {0, 1, 3}; }},
        {"source with a gap", [](AttentionParameters& p) { p.sources = {0, 2, 2}; }},
        {"negative offset", [](AttentionParameters& p) { p.offsets = {0, 0, -8}; }},
        {"offset 4", [](AttentionParameters& p) { p.offsets = {0, 0, 4}; }},
        {"cache with lengths", [](AttentionParameters& p) { p.has_cache = p.has_key_lengths = true; }},
        {"fp8 with a bias", [](AttentionParameters& p) { p.fp8 = true; }},
        {"fp8, head size 24", [](AttentionParameters& p) {
             p.fp8 = true;
             p.has_bias = false;
             p.head_size = 24;
         }},
        {"fp8, no scale", [](AttentionParameters& p) {
             p.fp8 = true;
             p.has_bias = false;
             p.value_scale = 0.0F;
         }},
        {"cache, top left", [](AttentionParameters& p) {
             p.has_cache = true;
             p.causal = Causal::kTopLeft;
         }},
    };
    tally.note(sound_parameters().check().ok(), "fields: sound", sound_parameters().check().reason());
    for (Wrong const& wrong : wrongs) {
        AttentionParameters p = sound_parameters();
        wrong.change(p);
        tally.note(!p.check().ok(), std::string("fields: ") + wrong.name, p.check().reason());
    }
    AttentionParameters p = sound_parameters();
    p.has_key_lengths = true;
    bool const counted = p.operands() == 2 && p.inputs() == 4 && p.outputs() == 1;
    tally.note(counted, "fields: inputs with bias and lengths");
    p.has_key_lengths = false;
    p.has_cache = true;
    tally.note(p.inputs() == 6 && p.outputs() == 3, "fields: inputs and outputs with a cache");
}

inline void check_bytes(Tally& tally) {
    AttentionParameters const p = sound_parameters();
    std::vector<std::byte> const bytes = serialize(p);
    AttentionParameters q;
    Status const status = deserialize(bytes.data(), bytes.size(), q);
    tally.note(status.ok() && serialize(q) == bytes && q.causal == p.causal && q.offsets == p.offsets
                   && q.scale == p.scale && q.has_bias && !q.has_cache,
        "bytes: round trip", status.reason());
    auto const refuses = [&tally](std::string const& name, std::vector<std::byte> const& blob) {
        AttentionParameters untouched;
        Status const refused = deserialize(blob.data(), blob.size(), untouched);
        tally.note(!refused.ok() && untouched.query_heads == 0, "bytes: " + name, refused.reason());
    };
    auto const changed = [&bytes](std::size_t at) {
        std::vector<std::byte> blob = bytes;
        blob[at] ^= std::byte{1};
        return blob;
    };
    refuses("nothing", {});
    refuses("foreign", std::vector<std::byte>(bytes.size(), std::byte{0x2a}));
    refuses("other magic number", changed(0));
    refuses("other version", changed(4));
    refuses("other length", changed(8));
    refuses("damaged field", changed(12));
    refuses("damaged checksum", changed(bytes.size() - 1));
    refuses("one byte more", [&] {
        std::vector<std::byte> blob = bytes;
        blob.push_back(std::byte{0});
        return blob;
    }());
    bool all = true;
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        all = all && !deserialize(bytes.data(), size, q).ok();
    }
    tally.note(all && !deserialize(nullptr, 64, q).ok(), "bytes: cut at any place, or null");
    refuses("another plugin's", BlobWriter(0x4c41484dU, 1).finish());
}

inline void check_sizes(Tally& tally) {
    Case sound{"sound"};
    sound.bias = Bias::kHeads;
    HostCall const call = make_call(sound, 1);
    tally.note(check_shapes(call.parameters, call.shapes).ok(), "sizes: sound",
        check_shapes(call.parameters, call.shapes).reason());
    auto const refuses = [&](std::string const& name, auto const& change) {
        AttentionShapes shapes = call.shapes;
        change(shapes);
        Status const status = check_shapes(call.parameters, shapes);
        tally.note(!status.ok(), "sizes: " + name, status.reason());
    };
    refuses("an operand too few", [](AttentionShapes& s) { s.operands.pop_back(); });
    refuses("rank 2", [](AttentionShapes& s) { s.operands[0] = {2, 64}; });
    refuses("no operands", [](AttentionShapes& s) { s.operands.clear(); });
    refuses("unknown dimension", [](AttentionShapes& s) { s.operands[0][1] = -1; });
    refuses("other batch", [](AttentionShapes& s) { s.operands[1][0] = 3; });
    refuses("too narrow", [](AttentionShapes& s) { s.operands[1][2] = 248; });
    refuses("odd width", [](AttentionShapes& s) { s.operands[1][2] = 257; });
    refuses("fewer values", [](AttentionShapes& s) { s.operands[2][1] = 63; });
    refuses("rank 4, other heads", [](AttentionShapes& s) { s.operands[0] = {2, 8, 64, 64}; });
    refuses("bias missing", [](AttentionShapes& s) { s.bias.clear(); });
    refuses("bias rank 3", [](AttentionShapes& s) { s.bias = {4, 64, 64}; });
    refuses("bias of other heads", [](AttentionShapes& s) { s.bias[1] = 2; });
    Case cached{"cached"};
    cached.starts = {3, 60};
    HostCall const with_cache = make_call(cached, 1);
    AttentionShapes small = with_cache.shapes;
    small.cache_rows = 63;
    tally.note(!check_shapes(with_cache.parameters, small).ok(), "sizes: cache without room");
}

// The mask given to cuDNN must hide what the definition hides: compared for all queries and keys.
inline void check_masks(Tally& tally) {
    int checked = 0;
    int wrong = 0;
    for (int64_t const queries : {1, 2, 5, 7}) {
        for (int64_t const keys : {1, 2, 5, 9}) {
            for (int form = 0; form < 3 * 4 * 4 * 2; ++form) {
                Case given{"mask"};
                given.batch = 1;
                given.queries = queries;
                given.keys = keys;
                given.causal = static_cast<Causal>(form % 3);
                given.left = form / 3 % 4 * 2 - (form / 3 % 4 == 0 ? 1 : 2);
                given.right = form / 12 % 4 * 2 - (form / 12 % 4 == 0 ? 1 : 2);
                given.bias = form / 48 == 0 ? Bias::kNone : Bias::kOne;
                HostCall const call = make_call(given, 1);
                Mask const mask = mask_of(call.parameters, call.shapes);
                bool empty = false;
                for (int64_t i = 0; i < queries; ++i) {
                    bool alone = true;
                    for (int64_t t = 0; t < keys; ++t) {
                        int64_t const own = i + (mask.bottom_right ? keys - queries : 0);
                        bool const seen = (!mask.left.has_value() || t > own - *mask.left)
                                          && (!mask.right.has_value() || t <= own + *mask.right);
                        wrong += seen != sees(call, 0, i, t) ? 1 : 0;
                        alone = alone && !seen;
                        ++checked;
                    }
                    empty = empty || alone;
                }
                wrong += empty && !mask.may_be_empty ? 1 : 0;
            }
        }
    }
    tally.note(wrong == 0, "masks", std::to_string(checked) + " pairs, " + std::to_string(wrong) + " wrong");
    Case decode{"decode"};
    decode.queries = 1;
    decode.causal = Causal::kBottomRight;
    decode.starts = {0, 63};
    HostCall const call = make_call(decode, 1);
    Mask const mask = mask_of(call.parameters, call.shapes);
    tally.note(!mask.right && !mask.left && !mask.bottom_right && mask.counts_keys && !mask.may_be_empty,
        "masks: one new query hides nothing");
}

inline void check_plan_cache(Tally& tally) {
    PlanCache<int> cache(2);
    std::vector<std::shared_ptr<int>> evicted;
    auto const insert = [&](int number) {
        evicted.clear();
        return *cache.insert({number % 10}, std::make_shared<int>(number), evicted);
    };
    insert(0);
    insert(1);
    bool const found = *cache.find({0}) == 0;  // now 1 is the longest unused
    insert(2);
    tally.note(found && evicted.size() == 1 && *evicted[0] == 1 && cache.find({1}) == nullptr,
        "plans: the longest unused leaves and is handed out");
    tally.note(insert(12) == 2 && evicted.empty(), "plans: the first of two stays");
    cache.pin({0});
    cache.pin({0});
    insert(3);
    tally.note(evicted.empty() && cache.size() == 3, "plans: a pinned one takes no place");
    insert(4);
    insert(5);
    tally.note(evicted.size() == 1 && cache.size() == 3 && cache.find({0}) != nullptr
                   && cache.find({4}) != nullptr && cache.find({5}) != nullptr,
        "plans: a pinned one stays");
    PlanCache<int> none(0);
    none.insert({1}, std::make_shared<int>(1), evicted);
    tally.note(none.find({1}) != nullptr, "plans: the newest stays without any place");
    tally.note(!Status::failed("").ok(), "a failure without a reason is one");
}

// Wrong answers of the kinds that happen must not pass as right ones.
inline void check_comparator(Tally& tally) {
    for (Type const type : {Type::kHalf, Type::kBFloat16}) {
        Case given{"comparator"};
        given.type = type;
        given.key_heads = 2;
        given.queries = 24;
        given.keys = 40;
        given.causal = Causal::kBottomRight;
        given.left = 12;
        given.bias = Bias::kHeads;
        given.lengths = {40, 33};
        HostCall const call = make_call(given, 7);
        std::vector<double> const want = reference(call);
        std::vector<double> rounded = want;
        for (double& number : rounded) {
            number = number_of_bits(type, bits_of_number(type, number));
        }
        std::string const suffix = type == Type::kHalf ? " fp16" : " bf16";
        double const right = relative_error(rounded, want);
        tally.note(right < tolerance(type), "comparator: rounding passes" + suffix, format("%.1e", right));
        auto const notices = [&](std::string const& name, auto const& change) {
            HostCall wrong = call;
            change(wrong);
            double const error = relative_error(reference(wrong), want);
            tally.note(error > tolerance(type), "comparator: " + name + suffix, format("%.1e", error));
        };
        notices("scale", [](HostCall& c) { c.parameters.scale *= 1.03F; });
        notices("other corner", [](HostCall& c) { c.parameters.causal = Causal::kTopLeft; });
        notices("no causal mask", [](HostCall& c) { c.parameters.causal = Causal::kNone; });
        notices("window by one", [](HostCall& c) { c.parameters.left_window += 1; });
        notices("no bias", [](HostCall& c) { c.parameters.has_bias = false; });
        notices("length by one", [](HostCall& c) { c.key_lengths[1] -= 1; });
        notices("stale row read", [](HostCall& c) { c.key_lengths[1] += 1; });
        notices("key heads", [](HostCall& c) { c.parameters.offsets[1] = 0, c.parameters.key_heads = 1; });
    }
}

}  // namespace mha_deploy::check
