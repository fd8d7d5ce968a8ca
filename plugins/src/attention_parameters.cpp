#include "attention_parameters.h"

#include "serializer.h"
#include "sparse_heads.h"

#include <algorithm>
#include <cmath>

namespace mha_deploy {
namespace {

constexpr uint32_t kMagic = 0x4141484dU;  // "MHAA"
constexpr uint32_t kVersion = 2;

// 16 bytes: what one load of the attention kernels takes.
constexpr int32_t kElementsOfLoad = 8;
constexpr int32_t kLargestHead = 256;
constexpr int32_t kMostHeads = 65535;

Status refused(std::string const& what, std::string const& got, std::string const& reason) {
    return Status::failed("attention: " + what + ", got " + got + ": " + reason);
}

Status check_heads(AttentionParameters const& parameters) {
    int32_t const queries = parameters.query_heads;
    int32_t const keys = parameters.key_heads;
    if (queries < 1 || keys < 1 || queries > kMostHeads) {
        return refused("query_heads and key_heads must be at least 1",
            std::to_string(queries) + " and " + std::to_string(keys), "state both");
    }
    if (queries % keys != 0) {
        return refused("query_heads must be a multiple of key_heads",
            std::to_string(queries) + " and " + std::to_string(keys),
            "every key head serves the same number of query heads");
    }
    if (parameters.head_size < 1 || parameters.value_size < 1) {
        return refused("head_size and value_size must be at least 1",
            std::to_string(parameters.head_size) + " and " + std::to_string(parameters.value_size),
            "state both");
    }
    return Status();
}

Status check_masks(AttentionParameters const& parameters) {
    auto const causal = static_cast<int32_t>(parameters.causal);
    if (causal < 0 || causal > static_cast<int32_t>(Causal::kBottomRight)) {
        return refused("causal must be 0, 1 or 2", std::to_string(causal), "none, top left or bottom right");
    }
    if (parameters.left_window < kNoWindow || parameters.right_window < kNoWindow) {
        return refused("left_window and right_window must be -1 or more",
            std::to_string(parameters.left_window) + " and " + std::to_string(parameters.right_window),
            "-1 means no window");
    }
    if (!std::isfinite(parameters.scale)) {
        return refused("scale must be a finite number", std::to_string(parameters.scale),
            "it multiplies the scores; 1/sqrt(head_size) is the usual one");
    }
    return Status();
}

Status check_places(AttentionParameters const& parameters) {
    static char const* const names[] = {"Q", "K", "V"};
    auto const& sources = parameters.sources;
    for (std::size_t i = 0; i < sources.size(); ++i) {
        if (sources[i] < 0 || sources[i] > 2) {
            return refused(std::string("sources of ") + names[i] + " must be 0, 1 or 2",
                std::to_string(sources[i]), "it counts the inputs that hold Q, K and V");
        }
        if (parameters.offsets[i] < 0) {
            return refused(std::string("offsets of ") + names[i] + " must not be negative",
                std::to_string(parameters.offsets[i]), "it counts elements from the beginning of a row");
        }
    }
    for (int32_t operand = 0; operand < parameters.operands(); ++operand) {
        if (std::find(sources.begin(), sources.end(), operand) == sources.end()) {
            return refused("every input must hold Q, K or V", "no use of input " + std::to_string(operand),
                "number the inputs in sources without a gap");
        }
    }
    return Status();
}

Status check_extras(AttentionParameters const& parameters) {
    if (!parameters.has_cache) {
        return Status();
    }
    if (parameters.has_key_lengths) {
        return refused("a cache must come without key_lengths", "both", "the key counts follow from starts");
    }
    if (parameters.causal == Causal::kTopLeft) {
        return refused("causal must be 0 or 2 with a cache", "1",
            "new rows stand at the end of the keys, so the diagonal ends in the lower right corner");
    }
    return Status();
}

Status check_rotary(AttentionParameters const& parameters) {
    auto const pairs = static_cast<int32_t>(parameters.rotary);
    auto const positions = static_cast<int32_t>(parameters.rotary_positions);
    if (pairs < 0 || pairs > 2 || positions < 0 || positions > 3) {
        return refused("rotary must be 0 to 2 and rotary_positions 0 to 3",
            std::to_string(pairs) + " and " + std::to_string(positions), "see the list of attributes");
    }
    if (!parameters.rotates()) {
        return Status();
    }
    bool const halves = parameters.rotary == RotaryPairs::kHalves;
    int32_t const divisor = halves ? 2 * kElementsOfLoad : kElementsOfLoad;
    int32_t const size = parameters.rotary_size;
    if (size < divisor || size % divisor != 0 || size > parameters.head_size) {
        return refused("rotary_size must be a multiple of " + std::to_string(divisor) + " up to head_size",
            std::to_string(size), "the kernel loads 16 bytes at once; rotate before this node");
    }
    if (parameters.has_gates) {
        return refused("a rotary embedding must come without gates", "both", "rotate before this node");
    }
    if (parameters.rotary_positions == RotaryPositions::kFromStarts && !parameters.has_cache) {
        return refused("positions that begin at starts need a cache", "has_cache 0", "give positions");
    }
    return Status();
}

// What cuDNN's fused attention takes in no version.
Status check_cudnn(AttentionParameters const& parameters) {
    for (int32_t const size : {parameters.head_size, parameters.value_size}) {
        if (size % kElementsOfLoad != 0 || size > kLargestHead) {
            return refused("head_size and value_size must be multiples of 8 up to 256", std::to_string(size),
                "cuDNN's fused attention has no kernel for others; use another attention for this node");
        }
    }
    for (int32_t const offset : parameters.offsets) {
        if (offset % kElementsOfLoad != 0) {
            return refused("offsets must be multiples of 8", std::to_string(offset),
                "the kernels load 16 bytes at once; pad the projection, or use an input for each of Q, K, V");
        }
    }
    return Status();
}

}  // namespace

int32_t AttentionParameters::operands() const noexcept {
    return 1 + *std::max_element(sources.begin(), sources.end());
}

int32_t AttentionParameters::inputs() const noexcept {
    return operands() + static_cast<int32_t>(has_bias) + static_cast<int32_t>(has_key_lengths)
           + static_cast<int32_t>(has_gates) + (has_cache ? 3 : 0)
           + (rotates() ? (rotary_positions == RotaryPositions::kGiven ? 3 : 2) : 0);
}

int32_t AttentionParameters::outputs() const noexcept {
    return has_cache ? 3 : 1;
}

Status AttentionParameters::check() const {
    for (auto const check_some : {check_heads, check_masks, check_places, check_extras, check_rotary}) {
        if (Status status = check_some(*this); !status.ok()) {
            return status;
        }
    }
    return has_gates ? check_sparse_heads(*this) : check_cudnn(*this);
}

std::vector<std::byte> serialize(AttentionParameters const& parameters) {
    BlobWriter writer(kMagic, kVersion);
    writer.add(parameters.query_heads);
    writer.add(parameters.key_heads);
    writer.add(parameters.head_size);
    writer.add(parameters.value_size);
    writer.add(parameters.scale);
    writer.add(static_cast<int32_t>(parameters.causal));
    writer.add(parameters.left_window);
    writer.add(parameters.right_window);
    for (int32_t const source : parameters.sources) {
        writer.add(source);
    }
    for (int32_t const offset : parameters.offsets) {
        writer.add(offset);
    }
    writer.add(parameters.has_bias);
    writer.add(parameters.has_key_lengths);
    writer.add(parameters.has_gates);
    writer.add(parameters.has_cache);
    writer.add(static_cast<int32_t>(parameters.rotary));
    writer.add(parameters.rotary_size);
    writer.add(static_cast<int32_t>(parameters.rotary_positions));
    return writer.finish();
}

Status deserialize(void const* bytes, std::size_t size, AttentionParameters& parameters) {
    BlobReader reader;
    if (Status status = reader.open(bytes, size, kMagic, kVersion, "attention"); !status.ok()) {
        return status;
    }
    AttentionParameters read;
    int32_t causal = 0;
    int32_t rotary = 0;
    int32_t rotary_positions = 0;
    reader.take(read.query_heads);
    reader.take(read.key_heads);
    reader.take(read.head_size);
    reader.take(read.value_size);
    reader.take(read.scale);
    reader.take(causal);
    reader.take(read.left_window);
    reader.take(read.right_window);
    for (int32_t& source : read.sources) {
        reader.take(source);
    }
    for (int32_t& offset : read.offsets) {
        reader.take(offset);
    }
    reader.take(read.has_bias);
    reader.take(read.has_key_lengths);
    reader.take(read.has_gates);
    reader.take(read.has_cache);
    reader.take(rotary);
    reader.take(read.rotary_size);
    reader.take(rotary_positions);
    read.causal = static_cast<Causal>(causal);
    read.rotary = static_cast<RotaryPairs>(rotary);
    read.rotary_positions = static_cast<RotaryPositions>(rotary_positions);
    if (Status status = reader.finish(); !status.ok()) {
        return status;
    }
    if (Status status = read.check(); !status.ok()) {
        return status;
    }
    parameters = read;
    return Status();
}

}  // namespace mha_deploy
