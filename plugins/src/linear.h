// y = x W + b accumulated in FP32, through cuBLASLt: a projection beside attention, or any linear layer. In FP8
// the sums are multiplied by the scales of x and of the weight before the bias is added.
#pragma once

#include "attention.h"
#include "status.h"

#include <cublasLt.h>
#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mha_deploy {

// Whether x and the weight are FP8 (E4M3), four numbers in a word of 32 bits, and whether one scale is for all
// outputs or each has its own.
enum class Quantized : int32_t { kNone = 0, kPerTensor = 1, kPerOutput = 2, kLast = kPerOutput };

struct LinearParameters {
    bool has_bias = false;
    bool transposed = false;  // the weight is [N, K], as PyTorch keeps it, instead of ONNX's [K, N]
    Quantized quantized = Quantized::kNone;

    bool in_fp8() const noexcept { return quantized != Quantized::kNone; }
    // x, W, b, and what sums of FP8 are multiplied by: those there are
    int32_t inputs() const noexcept { return 2 + static_cast<int32_t>(has_bias) + static_cast<int32_t>(in_fp8()); }
    Status check() const;

    template <typename Self, typename Visit>
    static void visit_fields(Self& p, Visit const& visit) {
        visit("has_bias", p.has_bias);
        visit("transposed", p.transposed);
        visit("quantized", p.quantized);
    }
};

struct LinearShape {
    int64_t rows = 0;     // all dimensions of x but the last, multiplied
    int64_t inputs = 0;   // K: x is [rows, K]
    int64_t outputs = 0;  // N

    bool operator==(LinearShape const& other) const noexcept;
};

// All that decides which algorithms can be used.
struct LinearProblem {
    LinearShape shape;
    Type type = Type::kHalf;
    LinearParameters parameters;
    uint32_t alignment = 0;  // of the least aligned pointer, in bytes

    bool operator==(LinearProblem const& other) const noexcept;
    std::string text() const;  // as in "[8, 768] x [768, 2304] in FP16 with bias"
};

// Algorithms that were chosen while an engine was built, for the GPU and the cuBLASLt that they were measured
// with. All clones of a plugin share one; an engine keeps it. Elsewhere cuBLASLt's first proposal is taken, and
// nothing is ever measured at run time.
class LinearTuning {
public:
    struct Choice {
        LinearShape shape;
        Type type = Type::kHalf;
        cublasLtMatmulAlgo_t algorithm{};
    };
    // What TensorRT times itself: its tactics are the places of this list, from 1 on.
    struct Tactics {
        LinearShape shape;
        Type type = Type::kHalf;
        std::vector<cublasLtMatmulAlgo_t> algorithms;
        bool offered = false;  // TensorRT has been given their numbers
    };
    // What was chosen at one time, as an engine keeps it.
    struct Record {
        uint64_t machine = 0;  // GPU and library as one number: the choices of another machine are ignored
        std::vector<Choice> choices;
        std::vector<Tactics> tactics;  // those that were offered
    };

    LinearTuning() = default;
    explicit LinearTuning(Record record) : record_(std::move(record)) {}

    // Measure the proposals of cuBLASLt at all powers of two, and three quarters of them, up to the most
    // rows, and at these. Needs a GPU; what is small, fails or takes too long keeps the first proposal, and what
    // TensorRT was offered is left to it.
    void measure(LinearParameters const& parameters, LinearShape const& most, Type type);

    // How many tactics there are for these sizes: the proposals of cuBLASLt, or none where one is as good as
    // another.
    int32_t propose(LinearParameters const& parameters, LinearShape const& shape, Type type);
    // TensorRT times those tactics from now on.
    void offer(LinearShape const& shape, Type type);

    // The algorithm of this tactic, or with 0 the one that was fastest here; on another machine none. A copy:
    // another clone may be measuring.
    std::optional<cublasLtMatmulAlgo_t> find(
        uint64_t machine, LinearShape const& shape, Type type, int32_t tactic = 0) const;

    Record record() const;

private:
    void begin_on(uint64_t machine);

    mutable std::mutex mutex_;
    Record record_;
};

// What tells the times of one projection from those of another, beside its sizes: as a timing cache keeps them.
// Empty without a GPU.
std::string timing_key(LinearParameters const& parameters);

std::vector<std::byte> serialize(LinearParameters const& parameters, LinearTuning::Record const& tuning);
Status deserialize(
    void const* bytes, std::size_t size, LinearParameters& parameters, LinearTuning::Record& tuning);

struct LinearPointers {
    void const* x = nullptr;
    void const* weight = nullptr;
    void const* bias = nullptr;
    void* y = nullptr;
    void const* scale = nullptr;  // FP32, of FP8 alone: [1] or [N]
};

// Of one execution context; see AttentionWork.
class LinearWork {
public:
    explicit LinearWork(LinearParameters const& parameters,
        std::shared_ptr<LinearTuning const> tuning = std::make_shared<LinearTuning>());
    ~LinearWork();
    LinearWork(LinearWork const&) = delete;
    LinearWork& operator=(LinearWork const&) = delete;

    // Which of the tactics to use where the sizes are those that they were proposed for; 0: none.
    void set_tactic(int32_t tactic) noexcept;
    Status prepare(LinearShape const& shape, Type type);
    // The same for all sizes: few rows may want more than many, since they are split, and TensorRT asks for
    // the most rows only.
    std::size_t workspace_bytes(LinearShape const& shape, Type type);
    Status run(LinearShape const& shape, Type type, LinearPointers const& pointers, void* workspace,
        std::size_t workspace_bytes, CUstream stream);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace mha_deploy
