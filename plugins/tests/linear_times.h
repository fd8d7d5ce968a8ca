// Times of projections of known models, beside what the device's arithmetic and memory allow.
#pragma once

#include "../src/linear.h"
#include "check.h"

#include <chrono>

namespace mha_deploy::check {

struct TimedLinear {
    char const* name;
    LinearShape shape;
};

inline constexpr double kFlopsPerSecond = 780e12;  // both measured on an H200
inline constexpr double kBytesPerSecond = 4.3e12;

inline double bound_microseconds(LinearShape const& shape) {
    auto const rows = static_cast<double>(shape.rows);
    auto const inputs = static_cast<double>(shape.inputs);
    auto const outputs = static_cast<double>(shape.outputs);
    double const bytes = 2.0 * (rows * inputs + inputs * outputs + rows * outputs);
    return 1e6 * std::max(2.0 * rows * inputs * outputs / kFlopsPerSecond, bytes / kBytesPerSecond);
}

// Random numbers all over, without making each of them on the host.
inline void fill_with(Buffer const& buffer, std::vector<uint16_t> const& numbers) {
    std::size_t const step = numbers.size() * sizeof(uint16_t);
    for (std::size_t at = 0; at < buffer.bytes(); at += step) {
        auto const to = reinterpret_cast<CUdeviceptr>(buffer.get()) + at;
        must(gpu().copy_from_host(to, numbers.data(), std::min(step, buffer.bytes() - at)), "upload");
    }
    must(gpu().synchronize(nullptr), "wait for device memory");
}

// The tensors of one shape, with as many weights as keep each of them out of the L2 cache until its turn.
class TimedData {
public:
    explicit TimedData(LinearShape const& shape)
        : shape_(shape),
          x_(bytes(shape.rows, shape.inputs)),
          bias_(bytes(1, shape.outputs)),
          scale_(2 * bytes(1, shape.outputs)),
          y_(bytes(shape.rows, shape.outputs)) {
        std::vector<uint16_t> const numbers = random_bits(Type::kHalf, std::size_t{1} << 20, 5, 0.05);
        fill_with(x_, numbers);
        fill_with(bias_, numbers);
        fill_with(scale_, numbers);
        std::size_t const one = bytes(shape.inputs, shape.outputs);
        std::size_t const count = std::min<std::size_t>(16, (kRotated + one - 1) / one);
        for (std::size_t i = 0; i < count; ++i) {
            weights_.emplace_back(one);
            fill_with(weights_.back(), numbers);
        }
    }

    // Every weight once.
    Status run_all(LinearWork& work, CUstream stream) const {
        for (Buffer const& weight : weights_) {
            LinearPointers const pointers{x_.get(), weight.get(), bias_.get(), y_.get(), scale_.get()};
            Status status = work.run(shape_, Type::kHalf, pointers, nullptr, 0, stream);
            if (!status.ok()) {
                return status;
            }
        }
        return Status();
    }
    std::size_t launches() const { return weights_.size(); }

private:
    static constexpr std::size_t kRotated = std::size_t{180} << 20;
    static std::size_t bytes(int64_t rows, int64_t columns) {
        return static_cast<std::size_t>(2 * rows * columns);
    }

    LinearShape shape_;
    Buffer x_, bias_, scale_, y_;
    std::vector<Buffer> weights_;
};

// As cuBLASLt proposes it, or the fastest of its proposals.
inline void time_linear(
    TimedLinear const& timed, bool transposed, bool tuned, Quantized quantized = Quantized::kNone) {
    TimedData const data(timed.shape);
    Stream const stream;
    LinearParameters const parameters{true, transposed, quantized};
    auto const tuning = std::make_shared<LinearTuning>();
    auto const begin = std::chrono::steady_clock::now();
    if (tuned) {
        tuning->measure(parameters, timed.shape, Type::kHalf);
    }
    std::chrono::duration<double> const measuring = std::chrono::steady_clock::now() - begin;
    LinearWork work(parameters, tuning);
    Status const prepared = work.prepare(timed.shape, Type::kHalf);
    Graph const graph(stream, [&] { return data.run_all(work, stream.get()); });
    std::string const reason = prepared.reason() + graph.status.reason();
    double time = 0.0;
    if (reason.empty()) {
        int const launches = std::clamp(static_cast<int>(2e4 / graph.microseconds(1, 1)), 2, 50);
        time = graph.microseconds(7, launches) / static_cast<double>(data.launches());
    }
    double const bound = bound_microseconds(timed.shape);
    std::string const sizes = std::to_string(timed.shape.rows) + "x" + std::to_string(timed.shape.inputs)
                              + "x" + std::to_string(timed.shape.outputs);
    char const* const format = quantized == Quantized::kNone        ? "fp16"
                               : quantized == Quantized::kPerTensor ? "fp8"
                                                                    : "fp8 of each output";
    std::printf("time %-25s %-16s %s %s %s %8.1f us  bound %8.1f us  %.2fx  measured in %.2f s %s\n", timed.name,
        sizes.c_str(), transposed ? "[N, K]" : "[K, N]", format, tuned ? "tuned" : "first", time, bound, time / bound,
        measuring.count(), reason.c_str());
    std::fflush(stdout);
}

// What an engine with many projections waits for at its start, and one call of the host later.
inline void time_host() {
    using Clock = std::chrono::steady_clock;
    auto const since = [](Clock::time_point begin) {
        return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    };
    LinearShape const shape{77, 768, 768};
    std::vector<std::unique_ptr<LinearWork>> works;
    double first = 0.0;
    Clock::time_point begin = Clock::now();
    for (int i = 0; i < 65; ++i) {
        works.push_back(std::make_unique<LinearWork>(LinearParameters{}));
        if (!works.back()->prepare(shape, Type::kHalf).ok()) {
            return;
        }
        if (i == 0) {
            first = since(begin);
            begin = Clock::now();
        }
    }
    double const others = since(begin) / 64.0;
    Buffer const memory(std::size_t{4} << 20);
    Stream const stream;
    LinearPointers const pointers{memory.get(), memory.get(), nullptr, memory.get(), nullptr};
    begin = Clock::now();
    for (int i = 0; i < 200; ++i) {
        (void)works.front()->run(shape, Type::kHalf, pointers, nullptr, 0, stream.get());
    }
    double const call = since(begin) / 200.0;
    stream.wait();
    std::printf("time host: first object %.0f us, each other %.0f us, one call %.2f us\n", first,
        others, call);
}

inline void time_all() {
    static constexpr TimedLinear kTimed[] = {
        {"bert-base 8x128 qkv", {1024, 768, 2304}}, {"bert-base 8x128 out", {1024, 768, 768}},
        {"bert-large 8x384 qkv", {3072, 1024, 3072}}, {"bert-large 8x384 out", {3072, 1024, 1024}},
        {"llama-3-8b 1x2048 qkv", {2048, 4096, 6144}}, {"llama-3-8b 1x2048 out", {2048, 4096, 4096}},
        {"llama-3-8b 1x8192 qkv", {8192, 4096, 6144}}, {"gpt3-175b 1x512 qkv", {512, 12288, 36864}},
        {"gpt3-175b 1x512 out", {512, 12288, 12288}}, {"llama-3-8b decode 1 qkv", {1, 4096, 6144}},
        {"llama-3-8b decode 32 qkv", {32, 4096, 6144}}};
    for (TimedLinear const& timed : kTimed) {
        for (bool const transposed : {false, true}) {
            for (bool const tuned : {false, true}) {
                time_linear(timed, transposed, tuned);
            }
        }
        time_linear(timed, true, true, Quantized::kPerTensor);
        time_linear(timed, true, true, Quantized::kPerOutput);
    }
    time_host();
}

}  // namespace mha_deploy::check
