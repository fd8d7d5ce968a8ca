// One projection as cuBLASLt states it, and the algorithm it has for it.
#pragma once

#include "cublas_lt.h"
#include "linear_work.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace mha_deploy {

inline constexpr uint32_t kFullAlignment = 256;  // bytes: what CUDA's and TensorRT's memory has

// What cuBLAS takes for itself on Hopper, too.
inline constexpr uint64_t kWorkspaceLimit = uint64_t{32} << 20;

// All that decides which algorithms can be used.
struct LinearProblem {
    LinearShape shape;
    Type type = Type::kHalf;
    bool has_bias = false;
    uint32_t alignment = kFullAlignment;  // of the least aligned pointer, in bytes

    bool operator==(LinearProblem const& other) const noexcept;
    std::string text() const;  // as in "[8, 768] x [768, 2304] in FP16 with bias"
};

// Of one thread at a time: a launch writes the address of the bias into it.
class LinearMatmul {
public:
    // Takes the algorithm that the library proposes first: the same one each time, and measuring the others
    // gains nothing. Needs a GPU, launches nothing.
    Status make(CublasLt const& library, cublasLtHandle_t handle, LinearProblem const& problem);

    Status launch(cublasLtHandle_t handle, LinearPointers const& pointers, void* workspace, CUstream stream);

    LinearProblem const& problem() const { return problem_; }
    std::size_t workspace_bytes() const { return workspace_bytes_; }

private:
    Status make_operation();
    Status make_layout(LtLayout& layout, int64_t rows, int64_t columns, char const* of) const;
    Status make_preference(LtPreference& preference) const;
    Status find_algorithm(cublasLtHandle_t handle);
    Status set_bias(void const* bias);

    CublasLt const* library_ = nullptr;
    LinearProblem problem_;
    LtOperation operation_{nullptr, nullptr};
    LtLayout weight_{nullptr, nullptr};
    LtLayout x_{nullptr, nullptr};
    LtLayout y_{nullptr, nullptr};
    void const* bias_ = nullptr;  // the one that is written into the operation
    cublasLtMatmulAlgo_t algorithm_{};
    std::size_t workspace_bytes_ = 0;
};

}  // namespace mha_deploy
