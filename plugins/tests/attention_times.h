// Microseconds of attention calls in a CUDA graph.
#pragma once

#include "attention_device.h"

#include <chrono>

namespace mha_deploy::check {

// Memory is taken in turns until the second level cache cannot help.
constexpr std::size_t kBeyondCache = std::size_t{300} << 20U;
constexpr int kLaunches = 10;

inline std::size_t bytes_of(HostCall const& call) {
    std::size_t count = call.past_key.size() + call.past_value.size();
    for (auto const& operand : call.operands) {
        count += operand.size();
    }
    return count * 2;
}

// Short bursts with rests between them: under a load of a second the GPU lowers its clock to keep its power.
inline double rested_microseconds(Graph const& graph) {
    std::vector<double> times;
    for (int burst = 0; burst < 7; ++burst) {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        times.push_back(graph.microseconds(1, 1));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

inline void time_case(Tally& tally, Case const& given, bool rotate) {
    HostCall const call = make_call(given, 3);
    AttentionWork work(call.parameters);
    if (Status const status = work.prepare(call.shapes, call.type); !status.ok()) {
        tally.refused(given.name, status.reason());
        return;
    }
    std::size_t const sets = rotate ? std::min<std::size_t>(kBeyondCache / bytes_of(call) + 1, 32) : 1;
    std::vector<std::unique_ptr<DeviceCall>> memory;
    for (std::size_t i = 0; i < sets; ++i) {
        memory.push_back(std::make_unique<DeviceCall>(call, true));
    }
    Stream const stream;
    Buffer const workspace(work.workspace_bytes(call.shapes, call.type) + 16);
    auto const run = [&](std::size_t set) {
        return memory[set]->run(work, stream, workspace.get(), workspace.bytes());
    };
    Status const warm = run(0);
    stream.wait();
    std::size_t const launches = std::max<std::size_t>(sets, kLaunches);
    Graph const graph(stream, [&] {
        Status status = warm;
        for (std::size_t i = 0; i < launches && status.ok(); ++i) {
            status = run(i % sets);
        }
        return status;
    });
    if (!graph.status.ok()) {
        tally.note(false, given.name, graph.status.reason());
        return;
    }
    auto const count = static_cast<double>(launches);
    double const rested = rested_microseconds(graph) / count;
    double const sustained = graph.microseconds(7, 20) / count;
    tally.note(true, given.name, format("%.2f us", sustained) + format(", rested %.2f us", rested)
                                     + ", scratch " + std::to_string(workspace.bytes() - 16));
}

inline Case timed(std::string const& name, int64_t batch, int32_t heads, int32_t key_heads, int64_t queries,
    int64_t keys, int32_t size, Causal causal, Layout layout) {
    Case given{name};
    given.batch = batch;
    given.heads = heads;
    given.key_heads = key_heads;
    given.queries = queries;
    given.keys = keys;
    given.size = size;
    given.causal = causal;
    given.layout = layout;
    return given;
}

inline void time_attention(Tally& tally, std::string const& only) {
    Causal const none = Causal::kNone;
    Causal const causal = Causal::kBottomRight;
    Layout const packed = Layout::kPacked;
    Layout const separate = Layout::kSeparate;
    Layout const heads_first = Layout::kHeadsFirst;
    std::vector<Case> cases = {
        timed("8x12x128x64", 8, 12, 12, 128, 128, 64, none, packed),
        timed("8x12x128x64 separate", 8, 12, 12, 128, 128, 64, none, separate),
        timed("8x12x128x64 lengths", 8, 12, 12, 128, 128, 64, none, packed),
        timed("8x16x384x64", 8, 16, 16, 384, 384, 64, none, packed),
        timed("1x32/8x2048x128 causal", 1, 32, 8, 2048, 2048, 128, causal, packed),
        timed("1x32/8x8192x128 causal", 1, 32, 8, 8192, 8192, 128, causal, packed),
        timed("4x32x4096x128", 4, 32, 32, 4096, 4096, 128, none, packed),
        timed("1x96x512x128 causal", 1, 96, 96, 512, 512, 128, causal, packed),
        timed("decode 1x32/8 T 4096", 1, 32, 8, 1, 4096, 128, causal, heads_first),
        timed("decode 32x32/8 T 4096", 32, 32, 8, 1, 4096, 128, causal, heads_first),
        timed("decode 1x32/8 T 4096 cache", 1, 32, 8, 1, 4096, 128, causal, packed),
        timed("decode 32x32/8 T 4096 cache", 32, 32, 8, 1, 4096, 128, causal, packed),
    };
    int32_t const whole = 1024;
    for (std::string const name : {"bias", "key mask", "key mask, padding first"}) {
        Case decoder = timed(
            "1x32/4x1024x64 top left " + name, 1, 32, 4, whole, whole, 64, Causal::kTopLeft, packed);
        Case encoder = timed("8x12x128x64 " + name, 8, 12, 12, 128, 128, 64, none, packed);
        Case longer = timed("8x16x384x64 " + name, 8, 16, 16, 384, 384, 64, none, packed);
        for (Case* const each : {&decoder, &encoder, &longer}) {
            auto const keys = static_cast<int32_t>(each->keys);
            each->bias = name == "bias" ? Bias::kBatch : Bias::kNone;
            Kept const kept{name == "key mask" ? 0 : 1, keys};
            each->kept.assign(name == "bias" ? 0 : static_cast<std::size_t>(each->batch), kept);
            cases.push_back(*each);
        }
    }
    std::vector<Case> narrow;
    for (int64_t const rows : {1024, 2048, 4096, 8192}) {
        narrow.push_back(timed("fp8 1x32/8x" + std::to_string(rows) + "x128 causal", 1, 32, 8, rows, rows, 128,
            Causal::kTopLeft, packed));
        narrow.push_back(timed("1x32/8x" + std::to_string(rows) + "x128 top left", 1, 32, 8, rows, rows, 128,
            Causal::kTopLeft, packed));
    }
    narrow.push_back(timed("fp8 8x16x1024x64", 8, 16, 16, 1024, 1024, 64, none, packed));
    narrow.push_back(timed("8x16x1024x64", 8, 16, 16, 1024, 1024, 64, none, packed));
    narrow.push_back(timed("fp8 8x16x384x64", 8, 16, 16, 384, 384, 64, none, packed));
    for (Case& given : narrow) {
        given.fp8 = given.name.find("fp8") == 0;
    }
    cases.insert(cases.end(), narrow.begin(), narrow.end());
    cases[2].lengths.assign(8, 128);
    cases[10].starts.assign(1, 4095);
    cases[11].starts.assign(32, 4095);
    for (Case const& given : cases) {
        if (given.name.find(only) != std::string::npos) {
            time_case(tally, given, given.queries == 1);
        }
    }
}

}  // namespace mha_deploy::check
