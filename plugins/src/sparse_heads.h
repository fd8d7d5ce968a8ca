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

// Load the kernels, so that `run_sparse_heads` only launches, and can be captured.
Status prepare_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes, Type type);

Status run_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes, Type type,
    AttentionPointers const& pointers, void* workspace, CUstream stream);

}  // namespace mha_deploy
