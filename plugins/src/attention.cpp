#include "attention.h"

#include "serializer.h"
#include "sparse_heads.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mha_deploy {

// ---- parameters

namespace {

constexpr uint32_t kMagic = 0x4141484dU;  // "MHAA"
constexpr uint32_t kVersion = 5;

// 16 bytes: what one load of the attention kernels takes.
constexpr int32_t kLargestHead = 256;
constexpr int32_t kMostHeads = 65535;
constexpr float kLeastMaskedScale = 1e-6F;

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

Status check_key_mask(AttentionParameters const& p) {
    if (!p.has_key_mask) {
        return Status();
    }
    if (p.has_bias || p.has_key_lengths || p.has_gates || p.has_cache || p.fp8) {
        return refused("a key mask must come without bias, key_lengths, gates, cache and FP8", "one of them",
            "put the mask into the bias");
    }
    if (p.scale < kLeastMaskedScale || widened(p.head_size) > kLargestHead) {
        return refused("a key mask must come with a scale from 1e-6 on and heads up to 240",
            std::to_string(p.scale) + " and " + std::to_string(p.head_size), "put the mask into the bias");
    }
    if (p.causal == Causal::kBottomRight || p.left_window != kNoWindow || p.right_window != kNoWindow) {
        return refused("a key mask must come with causal 0 or 1 and without windows", "another",
            "put the mask into the bias");
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

Status check_fp8(AttentionParameters const& p) {
    if (p.fp8_copy && (p.fp8 || p.has_gates)) {
        return refused("a copy in FP8 must come without gates, of an attention that is not in FP8", "another",
            "write FP8 behind this node");
    }
    if (p.fp8_copy && (!std::isfinite(p.output_scale) || p.output_scale <= 0.0F)) {
        return refused(
            "output_scale must be a number above 0", std::to_string(p.output_scale), "take that of the export");
    }
    if (!p.fp8) {
        return Status();
    }
    if (p.has_bias || p.has_gates || p.has_cache) {
        return refused("FP8 must come without bias, gates and cache", "one of them",
            "cuDNN has no such kernel; leave this attention in FP16");
    }
    for (int32_t const size : {p.head_size, p.value_size}) {
        if (size % (2 * kElementsOfLoad) != 0) {
            return refused("head_size and value_size must be multiples of 16 in FP8", std::to_string(size),
                "the kernels load 16 bytes at once; leave this attention in FP16");
        }
    }
    for (float const scale :
        {p.query_scale, p.key_scale, p.value_scale, p.weights_scale, p.output_scale}) {
        if (!std::isfinite(scale) || scale <= 0.0F) {
            return refused(
                "scales of FP8 must be numbers above 0", std::to_string(scale), "take those of the export");
        }
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

int32_t widened(int32_t head_size) noexcept {
    constexpr int32_t kStep = 2 * kElementsOfLoad;
    return (head_size / kStep + 1) * kStep;
}

int32_t AttentionParameters::operands() const noexcept {
    return 1 + *std::max_element(sources.begin(), sources.end());
}

int32_t AttentionParameters::inputs() const noexcept {
    return InputPlaces(*this).count;
}

int32_t AttentionParameters::outputs() const noexcept {
    return (has_cache ? 3 : 1) + static_cast<int32_t>(fp8_copy);
}

Status AttentionParameters::check() const {
    for (auto const check_some :
        {check_heads, check_masks, check_places, check_extras, check_key_mask, check_rotary, check_fp8}) {
        RETURN_IF_FAILED(check_some(*this));
    }
    return has_gates ? check_sparse_heads(*this) : check_cudnn(*this);
}

std::vector<std::byte> serialize(AttentionParameters const& parameters) {
    return fields_to_bytes(parameters, kMagic, kVersion);
}

Status deserialize(void const* bytes, std::size_t size, AttentionParameters& parameters) {
    return fields_from_bytes(bytes, size, kMagic, kVersion, "attention", parameters);
}

// ---- sizes, views and masks

namespace {

constexpr int64_t kLargestDimension = std::numeric_limits<int32_t>::max();
char const* const kNames[] = {"Q", "K", "V"};

Dims const& dims_of(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part) {
    static Dims const& none = *new Dims;
    auto const index = static_cast<std::size_t>(parameters.sources[static_cast<std::size_t>(part)]);
    return index < shapes.operands.size() ? shapes.operands[index] : none;
}

int64_t rows_of(Dims const& dims) {
    return dims.size() == 4 ? dims[2] : dims.size() == 3 ? dims[1] : 0;
}

int64_t heads_of(AttentionParameters const& parameters, Part part) {
    return part == Part::kQuery ? parameters.query_heads : parameters.key_heads;
}

int64_t size_of(AttentionParameters const& parameters, Part part) {
    return part == Part::kValue ? parameters.value_size : parameters.head_size;
}

Status check_part(AttentionParameters const& parameters, Dims const& dims, Part part) {
    auto const index = static_cast<std::size_t>(part);
    std::string const name = kNames[index];
    int64_t const heads = heads_of(parameters, part);
    int64_t const size = size_of(parameters, part);
    int64_t const offset = parameters.offsets[index];
    if (dims.size() == 4) {
        if (offset != 0 || dims[1] != heads || dims[3] != size) {
            return refused("the rank 4 input of " + name + " must be [B, " + std::to_string(heads) + ", L, "
                               + std::to_string(size) + "] with offset 0",
                text_of(dims) + " and offset " + std::to_string(offset), "heads are not packed in this form");
        }
        return Status();
    }
    if (offset + heads * size > dims[2]) {
        return refused("the rows of the input of " + name + " must hold offset + heads * size = "
                           + std::to_string(offset + heads * size) + " elements",
            text_of(dims), "check head counts, sizes and offsets");
    }
    if (!parameters.has_gates && dims[2] % kElementsOfLoad != 0) {
        return refused("the row width of the input of " + name + " must be a multiple of 8", text_of(dims),
            "the kernels load 16 bytes at once; pad the projection");
    }
    return Status();
}

Status check_operands(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    if (shapes.operands.size() != static_cast<std::size_t>(parameters.operands())) {
        std::string const count = std::to_string(parameters.operands());
        return refused("there must be " + count + " inputs that hold Q, K and V",
            std::to_string(shapes.operands.size()), "sources says which input holds what");
    }
    for (Dims const& dims : shapes.operands) {
        if (dims.size() != 3 && dims.size() != 4) {
            return refused("inputs must be [B, L, W] or [B, H, L, D]", text_of(dims), "reshape them");
        }
        for (int64_t const dim : dims) {
            if (dim < 0 || dim > kLargestDimension) {
                return refused(
                    "dimensions must be known and fit 31 bits", text_of(dims), "set the input shapes first");
            }
        }
        if (dims[0] != shapes.operands[0][0]) {
            return refused("all inputs must have the same batch size", text_of(dims) + " and "
                               + text_of(shapes.operands[0]), "broadcasting of the batch is not supported");
        }
    }
    for (Part const part : {Part::kQuery, Part::kKey, Part::kValue}) {
        RETURN_IF_FAILED(check_part(parameters, dims_of(parameters, shapes, part), part));
    }
    return Status();
}

Status check_lengths(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    int64_t const queries = shapes.queries(parameters);
    int64_t const keys = rows_of(dims_of(parameters, shapes, Part::kKey));
    int64_t const values = rows_of(dims_of(parameters, shapes, Part::kValue));
    if (keys != values) {
        return refused("K and V must have the same number of rows",
            std::to_string(keys) + " and " + std::to_string(values), "each key has one value");
    }
    if (!parameters.has_cache) {
        return Status();
    }
    if (keys != queries) {
        return refused("with a cache K and V must have as many new rows as Q",
            std::to_string(keys) + " and " + std::to_string(queries), "pass only the rows of this call");
    }
    if (shapes.cache_rows < queries || shapes.cache_rows > kLargestDimension) {
        return refused("the caches must have room for the new rows", std::to_string(shapes.cache_rows)
                           + " rows for " + std::to_string(queries) + " new ones", "make the caches larger");
    }
    return Status();
}

Status check_bias(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    Dims const& bias = shapes.bias;
    if (!parameters.has_bias) {
        return bias.empty() ? Status()
                            : refused("there must be no bias", text_of(bias), "has_bias is not set");
    }
    int64_t const queries = shapes.queries(parameters);
    int64_t const keys = shapes.keys(parameters);
    std::string const sizes = "S " + std::to_string(queries) + " and T " + std::to_string(keys);
    bool const fits = bias.size() == 4 && (bias[0] == 1 || bias[0] == shapes.batch())
                      && (bias[1] == 1 || bias[1] == parameters.query_heads) && bias[2] == queries
                      && bias[3] == keys;
    if (!fits) {
        return refused("the bias must be [B or 1, Hq or 1, S, T] with " + sizes, text_of(bias),
            "expand it over queries and keys");
    }
    Mask const mask = mask_of(parameters, shapes);
    if (!parameters.has_gates && mask.bottom_right && mask.right.has_value()) {
        return refused("a causal diagonal that ends in the lower right corner must come without bias here",
            sizes + (mask.counts_keys ? " with key counts" : ""),
            "cuDNN has no such kernel; put the causal mask into the bias");
    }
    return Status();
}

Status check_tables(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    if (!parameters.rotates()) {
        return Status();
    }
    int64_t const queries = shapes.queries(parameters);
    int64_t const keys = rows_of(dims_of(parameters, shapes, Part::kKey));
    if (keys != queries) {
        return refused("rotated keys must be as many as queries",
            std::to_string(keys) + " and " + std::to_string(queries), "rotate before this node");
    }
    if (shapes.table_rows < 1 && queries > 0 && shapes.batch() > 0) {
        return refused("the rotary tables must have rows", "none", "give a row for each position");
    }
    return Status();
}

void drop_what_hides_nothing(Mask& mask, int64_t queries, int64_t keys) {
    if (mask.right.has_value()) {
        bool const all = mask.bottom_right ? queries == 1 : *mask.right >= keys - 1;
        mask.right = all ? std::nullopt : mask.right;
    }
    if (mask.left.has_value()) {
        bool const all = *mask.left >= (mask.bottom_right ? keys : queries);
        mask.left = all ? std::nullopt : mask.left;
    }
    mask.bottom_right = mask.bottom_right && (mask.left.has_value() || mask.right.has_value());
}

// Only the first and the last query can be the one that the band leaves without keys.
bool may_leave_a_query_alone(Mask const& stated, int64_t queries, int64_t keys) {
    int64_t const shift = stated.bottom_right ? keys - queries : 0;
    bool const first = stated.right.has_value() && shift + *stated.right < 0;
    bool const last = stated.left.has_value() && queries - 1 + shift - *stated.left >= keys - 1;
    return first || last;
}

}  // namespace

std::string text_of(Dims const& dims) {
    std::string text = "[";
    for (std::size_t i = 0; i < dims.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    }
    return text + "]";
}

int64_t AttentionShapes::batch() const noexcept {
    return operands.empty() || operands[0].empty() ? 0 : operands[0][0];
}

int64_t AttentionShapes::queries(AttentionParameters const& parameters) const noexcept {
    return rows_of(dims_of(parameters, *this, Part::kQuery));
}

int64_t AttentionShapes::keys(AttentionParameters const& parameters) const noexcept {
    return parameters.has_cache ? cache_rows : rows_of(dims_of(parameters, *this, Part::kKey));
}

bool AttentionShapes::operator==(AttentionShapes const& other) const noexcept {
    return operands == other.operands && bias == other.bias && cache_rows == other.cache_rows
           && table_rows == other.table_rows;
}

Status check_shapes(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    for (auto const check_some : {check_operands, check_lengths, check_bias, check_tables}) {
        RETURN_IF_FAILED(check_some(parameters, shapes));
    }
    return parameters.has_gates ? check_sparse_heads(parameters, shapes) : Status();
}

View view_of(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part) {
    Dims const& dims = dims_of(parameters, shapes, part);
    int64_t const heads = heads_of(parameters, part);
    int64_t const size = size_of(parameters, part);
    if (dims.size() == 4) {
        return dense_view(dims[0], heads, dims[2], size);
    }
    View view;
    view.sizes = {dims[0], heads, dims[1], size};
    view.strides = {dims[1] * dims[2], size, dims[2], 1};
    view.offset = parameters.offsets[static_cast<std::size_t>(part)];
    return view;
}

View dense_view(int64_t batch, int64_t heads, int64_t rows, int64_t size) {
    View view;
    view.sizes = {batch, heads, rows, size};
    view.strides = {heads * rows * size, rows * size, size, 1};
    return view;
}

View rows_view(int64_t batch, int64_t heads, int64_t rows, int64_t size) {
    View view;
    view.sizes = {batch, heads, rows, size};
    view.strides = {rows * heads * size, size, heads * size, 1};
    return view;
}

Mask stated_mask(AttentionParameters const& parameters) {
    Mask mask;
    mask.bottom_right = parameters.causal == Causal::kBottomRight;
    mask.counts_keys = parameters.has_key_lengths || parameters.has_cache;
    if (parameters.causal != Causal::kNone) {
        mask.right = 0;
    } else if (parameters.right_window != kNoWindow) {
        mask.right = parameters.right_window;
    }
    if (parameters.left_window != kNoWindow) {
        mask.left = int64_t{parameters.left_window} + 1;  // cuDNN counts the query's own place, too
    }
    return mask;
}

Mask mask_of(AttentionParameters const& parameters, AttentionShapes const& shapes, bool counts_keys) {
    int64_t const queries = shapes.queries(parameters);
    int64_t const keys = shapes.keys(parameters);
    Mask mask = stated_mask(parameters);
    mask.counts_keys = mask.counts_keys || counts_keys;
    // With a cache each new query stands at a key of its own. Batch rows without any key are cleared before.
    bool const any_count = parameters.has_key_lengths && (mask.bottom_right || mask.left.has_value());
    mask.may_be_empty = any_count || parameters.has_key_mask
                        || (!parameters.has_cache && may_leave_a_query_alone(mask, queries, keys));
    drop_what_hides_nothing(mask, queries, keys);
    bool const movable = queries == keys || (parameters.has_bias && queries < keys);
    if (mask.bottom_right && !mask.counts_keys && movable) {
        // The diagonal is the same for all batch rows: it can be counted from the upper left corner.
        int64_t const shift = keys - queries;
        mask.bottom_right = false;
        mask.right = mask.right.has_value() ? std::optional<int64_t>(*mask.right + shift) : std::nullopt;
        mask.left = mask.left.has_value() ? std::optional<int64_t>(*mask.left - shift) : std::nullopt;
    }
    // cuDNN takes more queries than keys under a band only where it counts the keys.
    if (queries > keys && (mask.left.has_value() || mask.bottom_right)) {
        mask.counts_keys = true;
    }
    return mask;
}

// ---- addresses

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

bool is_empty_input(
    AttentionShapes const& shapes, InputPlaces const& places, bool no_rows, bool no_keys, int32_t index) {
    if (static_cast<std::size_t>(index) < shapes.operands.size()) {
        return is_empty(shapes.operands[static_cast<std::size_t>(index)]);
    }
    if (index == places.bias) {
        return is_empty(shapes.bias);
    }
    if (index == places.past_key || index == places.past_value) {
        return shapes.batch() == 0 || shapes.cache_rows == 0;
    }
    if (index == places.key_mask) {
        return shapes.batch() == 0 || no_keys;
    }
    return index == places.key_lengths || index == places.starts ? shapes.batch() == 0 : no_rows;
}

}  // namespace

Status check_pointers(AttentionParameters const& parameters, AttentionShapes const& shapes,
    AttentionPointers const& pointers) {
    InputPlaces const places(parameters);
    bool const no_rows = shapes.batch() == 0 || shapes.queries(parameters) == 0;
    bool const no_keys = shapes.keys(parameters) == 0;
    bool const no_caches = shapes.batch() == 0 || shapes.cache_rows == 0;
    Status status = check_count(parameters, pointers);
    for (std::size_t i = 0; status.ok() && i < pointers.inputs.size(); ++i) {
        auto const index = static_cast<int32_t>(i);
        if (!is_empty_input(shapes, places, no_rows, no_keys, index)) {
            auto const divisor = places.is_integer(index) ? kCountBytes : kLoadBytes;
            status = check_place("input", i, pointers.inputs[i], divisor);
        }
    }
    for (std::size_t i = 0; status.ok() && i < pointers.outputs.size(); ++i) {
        bool const of_rows = i == 0 || (parameters.fp8_copy && i + 1 == pointers.outputs.size());
        if (!(of_rows ? no_rows : no_caches)) {
            status = check_place("output", i, pointers.outputs[i], kLoadBytes);
        }
    }
    return status;
}

}  // namespace mha_deploy
