// Attention calls on a GPU: their memory, their comparison, and what must hold beside the numbers.
#pragma once

#include "../src/attention.h"
#include "attention_cases.h"

#include <memory>
#include <thread>

namespace mha_deploy::check {

// The buffers of one call.
class DeviceCall {
public:
    DeviceCall(HostCall const& call, bool in_place) : call_(call) {
        for (auto const& operand : call.operands) {
            add_input(operand);
        }
        if (call.parameters.has_bias) {
            add_input(call.bias);
        }
        if (call.parameters.has_key_lengths) {
            add_input(call.key_lengths);
        }
        if (call.parameters.has_key_mask) {
            add_input(call.key_mask);
        }
        AttentionParameters const& p = call.parameters;
        add_output(static_cast<std::size_t>(
                       call.shapes.batch() * call.shapes.queries(p) * p.query_heads * p.value_size)
                   * (p.fp8 ? 1 : 2));
        if (call.parameters.has_cache) {
            for (auto const* past : {&call.past_key, &call.past_value}) {
                add_input(*past);
                if (in_place) {
                    pointers.outputs.push_back(buffers_.back()->get());
                    caches_.push_back(buffers_.back().get());
                } else {
                    add_output(past->size() * 2);
                    caches_.push_back(buffers_.back().get());
                }
            }
            add_input(call.starts);
        }
        if (p.fp8_copy) {
            add_output(output_->bytes() / 2);
            copy_ = buffers_.back().get();
        }
    }

    Status run(
        AttentionWork& work, Stream const& stream, void* workspace = nullptr, std::size_t bytes = 0) const {
        return work.run(call_.shapes, call_.type, pointers, workspace, bytes, stream.get());
    }
    std::vector<uint16_t> output() const { return output_->download<uint16_t>(); }
    std::vector<uint16_t> copy() const { return copy_->download<uint16_t>(); }
    std::vector<uint16_t> cache(std::size_t which) const { return caches_[which]->download<uint16_t>(); }
    void poison_output() const { output_->fill(0xff); }  // NaN: every row must be written
    bool intact() const {
        bool whole = true;
        for (auto const& buffer : buffers_) {
            whole = whole && buffer->intact();
        }
        return whole;
    }

    AttentionPointers pointers;

private:
    template <typename Value>
    void add_input(std::vector<Value> const& values) {
        buffers_.push_back(std::make_unique<Buffer>(values));
        pointers.inputs.push_back(buffers_.back()->get());
    }
    void add_output(std::size_t bytes) {
        buffers_.push_back(std::make_unique<Buffer>(bytes));
        pointers.outputs.push_back(buffers_.back()->get());
        output_ = output_ == nullptr ? buffers_.back().get() : output_;
    }

    HostCall const& call_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Buffer*> caches_;
    Buffer* output_ = nullptr;
    Buffer* copy_ = nullptr;  // the output in FP8
};

// Rows that must be zero are so to the last bit; the rest within the tolerance.
inline bool compare_numbers(
    std::vector<double> const& got, std::vector<double> const& want, double most, std::string& figures) {
    double const error = relative_error(got, want);
    std::size_t not_zero = 0;
    for (std::size_t i = 0; i < want.size() && got.size() == want.size(); ++i) {
        not_zero += want[i] == 0.0 && got[i] != 0.0 ? 1 : 0;  // NaN is not zero, either
    }
    figures = format("error %.1e", error) + (not_zero > 0 ? ", not zero: " + std::to_string(not_zero) : "");
    return error < most && not_zero == 0;
}

inline bool compare(
    Type type, std::vector<uint16_t> const& bits, std::vector<double> const& want, std::string& figures) {
    return compare_numbers(numbers_of(type, bits), want, tolerance(type), figures);
}

// In FP8 the output is rounded, and the weights may be: each costs up to 2.7 %.
inline bool compare_fp8(HostCall const& call, std::vector<uint16_t> const& bits, std::string& figures) {
    auto const scale = static_cast<double>(call.parameters.output_scale);
    std::vector<double> got;
    for (uint16_t const two : bits) {
        for (unsigned const shift : {0U, 8U}) {
            got.push_back(number_of_fp8(static_cast<uint8_t>(two >> shift)) * scale);
        }
    }
    return compare_numbers(got, reference(call), 0.045, figures);
}

inline bool compare_output(HostCall const& call, std::vector<uint16_t> const& bits, std::string& figures) {
    return call.parameters.fp8 ? compare_fp8(call, bits, figures)
                               : compare(call.type, bits, reference(call), figures);
}

inline bool compare_caches(HostCall const& call, DeviceCall const& device, std::string& figures) {
    bool const same =
        device.cache(0) == present_of(call, Part::kKey) && device.cache(1) == present_of(call, Part::kValue);
    figures += same ? ", caches right" : ", caches WRONG";
    return same;
}

// With a plan for these sizes, or with one for sizes rounded up.
inline void check_case(Tally& tally, Case const& given, uint32_t seed, bool rounded) {
    HostCall const call = make_call(given, seed);
    AttentionWork work(call.parameters, AttentionWork::kMostPlans, rounded ? 0 : AttentionWork::kExactPlans);
    std::string const name = given.name + (rounded ? ", rounded up" : "");
    if (Status const status = work.prepare(call.shapes, call.type); !status.ok()) {
        tally.refused(name, status.reason());
        return;
    }
    DeviceCall const device(call, given.in_place);
    Stream const stream;
    device.poison_output();
    Buffer const workspace(work.workspace_bytes(call.shapes, call.type) + 16);
    Status status = device.run(work, stream, workspace.get(), workspace.bytes());
    stream.wait();
    std::vector<uint16_t> const first = device.output();
    device.poison_output();
    if (status.ok()) {
        status = device.run(work, stream);  // with memory of its own
    }
    stream.wait();
    std::string figures;
    bool passed = status.ok() && compare_output(call, first, figures);
    if (status.ok() && call.parameters.has_cache) {
        passed = compare_caches(call, device, figures) && passed;
    }
    if (status.ok() && call.parameters.fp8_copy) {
        std::string of_copy;
        passed = compare_fp8(call, device.copy(), of_copy) && passed;
        figures += ", in FP8 " + of_copy;
    }
    if (status.ok() && first != device.output()) {
        passed = false;
        figures += ", the second run differs";
    }
    if (!device.intact() || !workspace.intact()) {
        passed = false;
        figures += ", wrote outside";
    }
    tally.note(passed, name, status.ok() ? figures : status.reason());
}

// One work, many sizes: after each rounded size was met once, a call neither plans, nor takes memory, nor
// waits. Sizes that the first pass meets stand for those that round to them.
inline void check_cheap_sizes(Tally& tally, std::string const& name, std::vector<Case> const& warm,
    std::vector<Case> const& cases, std::size_t compared) {
    HostCall const largest = make_call(warm.back(), 1);
    AttentionWork work(largest.parameters, AttentionWork::kMostPlans, 1);
    Buffer const workspace(work.workspace_bytes(largest.shapes, largest.type, true) + 16);
    Stream const stream;
    auto const run = [&](Case const& given, bool compares) {
        HostCall const call = make_call(given, 40);
        DeviceCall const device(call, true);
        device.poison_output();
        Status const status = device.run(work, stream, workspace.get(), workspace.bytes());
        stream.wait();
        std::string figures;
        bool const right = !compares || compare(call.type, device.output(), reference(call), figures);
        return status.ok() && right && device.intact();
    };
    bool passed = true;
    for (Case const& given : warm) {
        passed = run(given, false) && passed;
    }
    int const before = counters.all();
    for (std::size_t i = 0; i < cases.size(); ++i) {
        passed = run(cases[i], i % compared == 0) && passed;
    }
    int const more = counters.all() - before;
    tally.note(passed && more == 0 && workspace.intact(), name,
        std::to_string(cases.size()) + " sizes, " + std::to_string(more) + " plans, allocations and waits, "
            + std::to_string(counters.plans) + " plans in this process");
}

inline void check_many_sizes(Tally& tally) {
    Case step{"step"};
    step.heads = 8;
    step.key_heads = 2;
    step.queries = 1;
    auto const with_keys = [&step](int64_t keys) {
        Case made = step;
        made.keys = keys;
        return made;
    };
    std::vector<Case> warm;
    std::vector<Case> growing;
    for (int64_t keys = 64; keys <= 512; keys *= 2) {
        warm.push_back(with_keys(keys - 1));
    }
    warm.push_back(with_keys(512));
    for (int64_t keys = 1; keys <= 500; ++keys) {
        growing.push_back(with_keys(keys));
    }
    check_cheap_sizes(tally, "a cache that grows over 500 steps", warm, growing, 50);
    auto const square = [](int64_t batch, int64_t rows, int32_t seed) {
        Case made{"random"};
        made.layout = Layout::kPacked;
        made.causal = Causal::kTopLeft;
        made.batch = batch;
        made.queries = made.keys = rows;
        for (int64_t b = 0; b < batch; ++b) {
            made.lengths.push_back(static_cast<int32_t>((seed + 7 * b) % (rows + 1)));
        }
        return made;
    };
    warm.clear();
    std::vector<Case> random;
    for (int64_t const batch : {1, 2, 4}) {
        for (int64_t const rows : {1, 16, 32, 64, 128, 256}) {
            warm.push_back(square(batch, rows, 3));
        }
    }
    warm.push_back(square(4, 256, 3));
    std::mt19937 engine(11);
    for (int i = 0; i < 200; ++i) {
        auto const one = [&engine](int64_t most) {
            return static_cast<int64_t>(engine() % static_cast<uint32_t>(most)) + 1;
        };
        random.push_back(square(one(4), one(256), static_cast<int32_t>(engine() % 1000)));
    }
    check_cheap_sizes(tally, "200 random sizes", warm, random, 10);
}

inline Case plain(std::string const& name, int64_t rows) {
    Case given{name};
    given.layout = Layout::kPacked;
    given.queries = given.keys = rows;
    return given;
}

// What every cuDNN takes must be taken: else a missing library would look like a list of refusals.
inline void check_installation() {
    gpu();
    HostCall const call = make_call(plain("installation", 64), 5);
    AttentionWork work(call.parameters);
    if (Status const status = work.prepare(call.shapes, call.type); !status.ok()) {
        stop(status.reason());
    }
}

// Bad calls end with a reason, not with the process.
inline void check_refusals(Tally& tally) {
    HostCall const call = make_call(plain("refusals", 64), 5);
    DeviceCall const device(call, true);
    Stream const stream;
    AttentionWork work(call.parameters);
    auto const refuses = [&tally](std::string const& name, Status const& status) {
        tally.note(!status.ok(), "refuses " + name, status.reason());
    };
    AttentionPointers none = device.pointers;
    none.outputs[0] = nullptr;
    refuses("null", work.run(call.shapes, call.type, none, nullptr, 0, stream.get()));
    AttentionPointers odd = device.pointers;
    odd.outputs[0] = static_cast<char*>(odd.outputs[0]) + 2;
    refuses("odd address", work.run(call.shapes, call.type, odd, nullptr, 0, stream.get()));
    refuses("no pointers", work.run(call.shapes, call.type, AttentionPointers{}, nullptr, 0, stream.get()));
    AttentionShapes wrong = call.shapes;
    wrong.operands[0][2] -= 64;
    refuses("wrong width", work.run(wrong, call.type, device.pointers, nullptr, 0, stream.get()));
    refuses("no shapes", work.run(AttentionShapes{}, call.type, device.pointers, nullptr, 0, stream.get()));
    AttentionParameters bad = call.parameters;
    bad.head_size = 60;
    AttentionWork unsound(bad);
    refuses("unsound fields", unsound.run(call.shapes, call.type, device.pointers, nullptr, 0, stream.get()));
    AttentionShapes empty = call.shapes;
    empty.operands[0][1] = 0;
    AttentionPointers nowhere;
    nowhere.inputs = {nullptr};
    nowhere.outputs = {nullptr};
    for (AttentionPointers const& pointers : {device.pointers, nowhere}) {
        Status const nothing = work.run(empty, call.type, pointers, nullptr, 0, stream.get());
        tally.note(nothing.ok(), "no rows: nothing to do", nothing.reason());
    }
    stream.wait();
}

inline void check_capture(Tally& tally) {
    HostCall const call = make_call(plain("capture", 72), 6);
    DeviceCall const device(call, true);
    Stream const stream;
    AttentionWork work(call.parameters);
    {
        Graph const too_early(stream, [&] { return device.run(work, stream); });
        Status const& status = too_early.status;
        tally.note(!status.ok(), "capture before the first run is refused", status.reason());
    }
    Status const first = device.run(work, stream);
    stream.wait();
    Graph const graph(stream, [&] { return device.run(work, stream); });
    device.poison_output();
    graph.launch();
    graph.launch();
    stream.wait();
    std::string figures;
    bool const right = compare(call.type, device.output(), reference(call), figures);
    bool const passed = first.ok() && graph.status.ok() && right;
    tally.note(passed, "capture and replay", figures + graph.status.reason());
}

// A work that keeps one plan: the captured one must survive the others.
inline void check_eviction(Tally& tally) {
    Case given = plain("eviction", 80);
    given.lengths = {80, 13};
    HostCall const call = make_call(given, 8);
    DeviceCall const device(call, true);
    Stream const stream;
    AttentionWork work(call.parameters, 1);
    Status const first = device.run(work, stream);
    Graph const graph(stream, [&] { return device.run(work, stream); });
    bool others = first.ok() && graph.status.ok();
    for (int64_t const rows : {81, 82}) {
        Case more = given;
        more.queries = more.keys = rows;
        HostCall const other = make_call(more, 9);
        DeviceCall const memory(other, true);
        others = memory.run(work, stream).ok() && others;
        stream.wait();
        std::string figures;
        others = compare(other.type, memory.output(), reference(other), figures) && others;
    }
    device.poison_output();
    graph.launch();
    stream.wait();
    std::string figures;
    bool const right = compare(call.type, device.output(), reference(call), figures);
    tally.note(others && right, "a captured plan survives eviction", figures);
}

inline void check_threads(Tally& tally) {
    std::vector<int> wrong(4, -1);
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < wrong.size(); ++index) {
        threads.emplace_back([&wrong, index] {
            int64_t const rows = index % 2 == 0 ? 64 : 72;  // two share a plan
            HostCall const call = make_call(plain("threads", rows), static_cast<uint32_t>(20 + index));
            std::vector<double> const want = reference(call);
            DeviceCall const device(call, true);
            Stream const stream;
            AttentionWork work(call.parameters);
            int failed = 0;
            for (int round = 0; round < 20; ++round) {
                device.poison_output();
                failed += device.run(work, stream).ok() ? 0 : 1;
                stream.wait();
                std::string figures;
                failed += compare(call.type, device.output(), want, figures) ? 0 : 1;
            }
            wrong[index] = failed;
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    tally.note(wrong == std::vector<int>(wrong.size(), 0), "four works on four threads and streams");
}

}  // namespace mha_deploy::check
