// cuDNN's fused attention: a plan for one set of sizes, built through cudnn-frontend.
#pragma once

#include "attention.h"
#include "status.h"

#include <cuda.h>

#include <cstddef>
#include <memory>

namespace mha_deploy {

// A handle of the current context. Loads cuDNN where that has not happened yet.
Status create_cudnn_handle(void*& handle);
void destroy_cudnn_handle(void* handle) noexcept;

// Device memory of one launch. What the plan does not use may be null.
struct CudnnAddresses {
    void* query = nullptr;
    void* key = nullptr;
    void* value = nullptr;
    void* output = nullptr;
    void* bias = nullptr;
    void* query_counts = nullptr;  // int32 [B]: S, or 0 for a batch row without keys
    void* key_counts = nullptr;    // int32 [B]
    void* scales = nullptr;        // kFp8Numbers, of a plan in FP8
};

// FP32 numbers on the device, each at a multiple of 16 bytes, that a plan in FP8 reads: the scales of queries,
// keys, values and weights, and what weights and output are multiplied with before they are rounded. It writes
// two behind them: the largest weight and output.
inline constexpr std::size_t kFp8Numbers = 8;
inline constexpr std::size_t kFp8NumberBytes = 16;

// One attention as cuDNN sees it: tensors as they lie in memory, so that nothing is moved before.
struct CudnnProblem {
    View query, key, value, output;
    Mask mask;
    Dims bias;  // empty: none
    float scale = 1.0F;
    Type type = Type::kHalf;
    bool fp8 = false;  // all four tensors are E4M3
};

// Never changes after it was built; threads with handles of their own may launch it at the same time.
class CudnnAttention {
public:
    // The sizes must have passed check_shapes. Fails with cuDNN's reason where it has no kernel.
    static Status build(CudnnProblem const& problem, std::shared_ptr<CudnnAttention>& plan);

    ~CudnnAttention();
    CudnnAttention(CudnnAttention const&) = delete;
    CudnnAttention& operator=(CudnnAttention const&) = delete;

    std::size_t workspace_bytes() const noexcept;
    bool in_fp8() const noexcept;
    Status launch(void* handle, CudnnAddresses const& addresses, void* workspace, CUstream stream) const;

private:
    struct Graph;
    explicit CudnnAttention(std::unique_ptr<Graph> graph);
    std::unique_ptr<Graph> graph_;
};

}  // namespace mha_deploy
