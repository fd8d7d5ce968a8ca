// Which of a call's addresses is what, and whether the kernels can work with them.
#pragma once

#include "attention_work.h"
#include "status.h"

#include <cstddef>

namespace mha_deploy {

// Where the inputs behind the operands stand.
struct InputPlaces {
    explicit InputPlaces(AttentionParameters const& parameters) noexcept {
        bias = static_cast<std::size_t>(parameters.operands());
        key_lengths = bias + (parameters.has_bias ? 1 : 0);
        gates = key_lengths + (parameters.has_key_lengths ? 1 : 0);
        past = gates + (parameters.has_gates ? 1 : 0);
        tables = past + (parameters.has_cache ? 3 : 0);
    }
    std::size_t bias;
    std::size_t key_lengths;
    std::size_t gates;
    std::size_t past;    // past_key, past_value, starts
    std::size_t tables;  // cos, sin, positions
};

// As many as there must be, none null where there is something to read or write, each at a place that the
// kernels can load from. The sizes must have been checked.
Status check_pointers(AttentionParameters const& parameters, AttentionShapes const& shapes,
    AttentionPointers const& pointers);

}  // namespace mha_deploy
