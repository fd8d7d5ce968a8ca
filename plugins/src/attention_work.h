// Attention on a GPU, behind every plugin interface: plans by shape, found once and kept.
#pragma once

#include "attention_parameters.h"
#include "status.h"

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mha_deploy {

using Dims = std::vector<int64_t>;

// The sizes of one call. Operands have rank 3, [B, L, W] with the heads side by side in a row, or rank 4, [B,
// H, L, D].
struct AttentionShapes {
    std::vector<Dims> operands;  // one for each distinct input of Q, K and V
    Dims bias;                   // empty where there is none
    int64_t cache_rows = 0;      // T of the caches
    int64_t table_rows = 0;      // of the rotary tables; B * S where they are per token

    int64_t batch() const noexcept;
    int64_t queries(AttentionParameters const& parameters) const noexcept;
    int64_t keys(AttentionParameters const& parameters) const noexcept;  // T of the caches where there is one
    bool operator==(AttentionShapes const& other) const noexcept;
};

// Device memory of one call, in the order of the inputs and outputs. What stands behind the valid keys and
// values of a row must be finite numbers (stale rows, zeros), as PyTorch's fused attention asks, too: they
// are read in whole tiles and weighted with zero, and zero times NaN is NaN.
struct AttentionPointers {
    std::vector<void const*> inputs;
    std::vector<void*> outputs;
};

// Of one execution context. Calls of one object come one after the other, on the device, too: where the
// stream changes, the new one waits for the old one. Several objects may work at the same time.
class AttentionWork {
public:
    static constexpr std::size_t kMostPlans = 128;

    // Keeps what it prepared for at most so many shapes; the longest unused leaves, unless a graph captured
    // it.
    explicit AttentionWork(AttentionParameters const& parameters, std::size_t most_plans = kMostPlans);
    ~AttentionWork();
    AttentionWork(AttentionWork const&) = delete;
    AttentionWork& operator=(AttentionWork const&) = delete;

    // Whether these sizes fit the parameters: rank, widths, batch, bias. Needs no GPU.
    static Status check(AttentionParameters const& parameters, AttentionShapes const& shapes);

    // Find the plan of these sizes, so that `run` only launches. Fails where the library has no kernel for
    // them.
    Status prepare(AttentionShapes const& shapes, Type type);

    // Scratch memory that `run` wants for these sizes; zero where that cannot be known without a GPU.
    std::size_t workspace_bytes(AttentionShapes const& shapes, Type type);

    // Launch. Memory beyond the given workspace is taken once for a shape and kept.
    Status run(AttentionShapes const& shapes, Type type, AttentionPointers const& pointers, void* workspace,
        std::size_t workspace_bytes, CUstream stream);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace mha_deploy
