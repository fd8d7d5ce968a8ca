// One call of the attention on a stream: rows into the caches or keys counted, cuDNN, zeros where there was no
// key.
#pragma once

#include "attention_layout.h"
#include "attention_work.h"
#include "cudnn_attention.h"
#include "driver.h"

#include <cstddef>
#include <memory>

namespace mha_deploy {

// All that a call of some sizes needs beside its inputs.
struct Prepared {
    std::shared_ptr<CudnnAttention> plan;  // null where there is nothing to attend to, or for sparse heads
    Mask mask;
    DeviceMemory query_counts;  // S for every batch row
    DeviceMemory key_counts;    // T for every batch row, where cuDNN counts keys that nobody counted
    CUfunction entries = nullptr;  // rotates, and writes into the caches
    CUfunction key_counts_kernel = nullptr;
    CUfunction empty_rows = nullptr;
    std::size_t scratch_bytes = 0;
    DeviceMemory scratch;  // where the caller gives too little
    bool launched = false;  // so that the device may still be at it
};

// Pieces of scratch memory begin at multiples of this many bytes: cuDNN's part, then the key counts of a
// cache, or key and query counts made from given lengths, then rotated queries and keys.
inline std::size_t rounded_scratch(std::size_t bytes) noexcept {
    return (bytes + 255) / 256 * 256;
}

// Bytes of the rotated queries, and of the rotated keys where they do not go into a cache.
std::size_t rotated_bytes(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part);

// The pointers must have been checked, and `workspace` must hold `prepared.scratch_bytes`.
Status launch_attention(Driver const& driver, CudnnHandle const& handle,
    AttentionParameters const& parameters, AttentionShapes const& shapes, Prepared const& prepared,
    AttentionPointers const& pointers, void* workspace, CUstream stream);

}  // namespace mha_deploy
