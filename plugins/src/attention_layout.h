// Where Q, K and V lie in the inputs of one call, and which keys a query sees, in cuDNN's way of counting.
#pragma once

#include "attention_parameters.h"
#include "attention_work.h"

#include <array>
#include <cstdint>
#include <optional>

namespace mha_deploy {

enum class Part : std::size_t { kQuery = 0, kKey = 1, kValue = 2 };

// A tensor [B, H, L, D] inside an input: sizes, strides in elements, and where it begins.
struct View {
    std::array<int64_t, 4> sizes{};
    std::array<int64_t, 4> strides{};
    int64_t offset = 0;
};

// As the operands hold it: with a cache these are the new rows of K and V.
View view_of(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part);

// As cuDNN reads it: rotated queries and keys lie in scratch memory, [B, L, H, D] without gaps.
View attended_view(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part);

// A whole tensor [B, H, L, D] without gaps, such as a cache.
View dense_view(int64_t batch, int64_t heads, int64_t rows, int64_t size);

// y [B, S, Hq*Dv] as [B, Hq, S, Dv].
View output_view(AttentionParameters const& parameters, AttentionShapes const& shapes);

// The mask of one call. A key is seen where i - left < t <= i + right, i being the place of the query; with
// bottom_right the place is shifted by the number of keys minus the number of queries.
struct Mask {
    bool bottom_right = false;
    std::optional<int64_t> left;
    std::optional<int64_t> right;
    bool counts_keys = false;    // the number of keys of each batch row is given as an array
    bool may_be_empty = false;   // there may be queries that see no key
};

// Without parts that hide nothing, and in the corner for which there are most kernels.
Mask mask_of(AttentionParameters const& parameters, AttentionShapes const& shapes);

// The window as it was asked for; the same for every size.
Mask stated_mask(AttentionParameters const& parameters);

}  // namespace mha_deploy
