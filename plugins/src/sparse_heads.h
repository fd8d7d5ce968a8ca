// Attention of the heads that a token chose, and of no others (kernels/sparse_heads.cu).
#pragma once

#include "attention.h"

namespace mha_deploy {

// Whether the kernel has these parameters: head sizes, masks.
Status check_sparse_heads(AttentionParameters const& parameters);

// And whether it has these sizes: rows in steps of 16 bytes, and not more heads than a launch takes.
Status check_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes);

// Scratch memory: the tokens of every head, listed. None for short sequences: they are found on the way.
std::size_t sparse_heads_workspace(AttentionParameters const& parameters, AttentionShapes const& shapes);

// The kernels for some sizes, and what they are launched with.
struct SparseHeadsKernels {
    CUfunction list = nullptr;  // null where the tokens are found on the way
    CUfunction attend = nullptr;
    int tile = 0;
    int shared_bytes = 0;
};

// Load the kernels, so that `run_sparse_heads` only launches, and can be captured.
Status prepare_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes, Type type,
    SparseHeadsKernels& kernels);

// With the kernels of these sizes, in the context that they were loaded in.
Status run_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes,
    SparseHeadsKernels const& kernels, AttentionPointers const& pointers, void* workspace, CUstream stream);

}  // namespace mha_deploy
