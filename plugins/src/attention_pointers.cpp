#include "attention_pointers.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace mha_deploy {
namespace {

constexpr std::uintptr_t kLoadBytes = 16;  // what the kernels load and store at once
constexpr std::uintptr_t kCountBytes = sizeof(int32_t);

bool is_empty(Dims const& dims) {
    return std::find(dims.begin(), dims.end(), 0) != dims.end();
}

Status check_count(AttentionParameters const& parameters, AttentionPointers const& pointers) {
    auto const inputs = static_cast<std::size_t>(parameters.inputs());
    auto const outputs = static_cast<std::size_t>(parameters.outputs());
    if (pointers.inputs.size() == inputs && pointers.outputs.size() == outputs) {
        return Status();
    }
    return Status::failed("attention: there must be " + std::to_string(inputs) + " inputs and "
                          + std::to_string(outputs) + " outputs, got "
                          + std::to_string(pointers.inputs.size()) + " and "
                          + std::to_string(pointers.outputs.size()));
}

Status check_place(char const* kind, std::size_t index, void const* address, std::uintptr_t divisor) {
    if (address != nullptr && reinterpret_cast<std::uintptr_t>(address) % divisor == 0) {
        return Status();
    }
    return Status::failed(std::string("attention: ") + kind + " " + std::to_string(index)
                          + " must be at an address that " + std::to_string(divisor) + " divides, got "
                          + (address == nullptr ? "null" : "one between") + "; allocate it on its own");
}

bool is_empty_input(AttentionParameters const& parameters, AttentionShapes const& shapes,
    InputPlaces const& places, std::size_t index) {
    if (index < shapes.operands.size()) {
        return is_empty(shapes.operands[index]);
    }
    if (parameters.has_bias && index == places.bias) {
        return is_empty(shapes.bias);
    }
    if (parameters.has_gates && index == places.gates) {
        return shapes.batch() == 0 || shapes.queries(parameters) == 0;
    }
    if (parameters.rotates() && index >= places.tables) {
        return shapes.batch() == 0 || shapes.queries(parameters) == 0;
    }
    bool const is_cache = parameters.has_cache && (index == places.past || index == places.past + 1);
    return shapes.batch() == 0 || (is_cache && shapes.cache_rows == 0);
}

bool is_counts(AttentionParameters const& parameters, InputPlaces const& places, std::size_t index) {
    return (parameters.has_key_lengths && index == places.key_lengths)
           || (parameters.has_cache && index == places.past + 2)
           || (parameters.rotates() && index == places.tables + 2);
}

}  // namespace

Status check_pointers(AttentionParameters const& parameters, AttentionShapes const& shapes,
    AttentionPointers const& pointers) {
    InputPlaces const places(parameters);
    Status status = check_count(parameters, pointers);
    for (std::size_t i = 0; status.ok() && i < pointers.inputs.size(); ++i) {
        if (!is_empty_input(parameters, shapes, places, i)) {
            auto const divisor = is_counts(parameters, places, i) ? kCountBytes : kLoadBytes;
            status = check_place("input", i, pointers.inputs[i], divisor);
        }
    }
    bool const no_rows = shapes.batch() == 0 || shapes.queries(parameters) == 0;
    bool const no_caches = shapes.batch() == 0 || shapes.cache_rows == 0;
    for (std::size_t i = 0; status.ok() && i < pointers.outputs.size(); ++i) {
        if (!(i == 0 ? no_rows : no_caches)) {
            status = check_place("output", i, pointers.outputs[i], kLoadBytes);
        }
    }
    return status;
}

}  // namespace mha_deploy
