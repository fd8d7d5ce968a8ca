// y = x W + b with sums in FP32, through cuBLASLt: what a projection is beside attention.
#pragma once

#include "attention_parameters.h"
#include "status.h"

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mha_deploy {

struct LinearParameters {
    bool has_bias = false;

    int32_t inputs() const noexcept { return has_bias ? 3 : 2; }  // x, W, b
};

std::vector<std::byte> serialize(LinearParameters const& parameters);
Status deserialize(void const* bytes, std::size_t size, LinearParameters& parameters);

struct LinearShape {
    int64_t rows = 0;     // all dimensions of x but the last, multiplied
    int64_t inputs = 0;   // K: x is [rows, K], W is [K, N], as ONNX's MatMul has them
    int64_t outputs = 0;  // N

    bool operator==(LinearShape const& other) const noexcept;
};

struct LinearPointers {
    void const* x = nullptr;
    void const* weight = nullptr;
    void const* bias = nullptr;
    void* y = nullptr;
};

// Of one execution context; see AttentionWork.
class LinearWork {
public:
    explicit LinearWork(LinearParameters const& parameters);
    ~LinearWork();
    LinearWork(LinearWork const&) = delete;
    LinearWork& operator=(LinearWork const&) = delete;

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
