#include "attention_layout.h"

#include "sparse_heads.h"

#include <limits>
#include <string>

namespace mha_deploy {
namespace {

constexpr int64_t kElementsOfLoad = 8;
constexpr int64_t kLargestDimension = std::numeric_limits<int32_t>::max();
char const* const kNames[] = {"Q", "K", "V"};

std::string text(Dims const& dims) {
    std::string text = "[";
    for (std::size_t i = 0; i < dims.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    }
    return text + "]";
}

Status refused(std::string const& what, std::string const& got, std::string const& reason) {
    return Status::failed("attention: " + what + ", got " + got + ": " + reason);
}

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
                text(dims) + " and offset " + std::to_string(offset), "heads are not packed in this form");
        }
        return Status();
    }
    if (offset + heads * size > dims[2]) {
        return refused("the rows of the input of " + name + " must hold offset + heads * size = "
                           + std::to_string(offset + heads * size) + " elements",
            text(dims), "check head counts, sizes and offsets");
    }
    if (!parameters.has_gates && dims[2] % kElementsOfLoad != 0) {
        return refused("the row width of the input of " + name + " must be a multiple of 8", text(dims),
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
            return refused("inputs must be [B, L, W] or [B, H, L, D]", text(dims), "reshape them");
        }
        for (int64_t const dim : dims) {
            if (dim < 0 || dim > kLargestDimension) {
                return refused(
                    "dimensions must be known and fit 31 bits", text(dims), "set the input shapes first");
            }
        }
        if (dims[0] != shapes.operands[0][0]) {
            return refused("all inputs must have the same batch size", text(dims) + " and "
                               + text(shapes.operands[0]), "broadcasting of the batch is not supported");
        }
    }
    for (Part const part : {Part::kQuery, Part::kKey, Part::kValue}) {
        if (Status status = check_part(parameters, dims_of(parameters, shapes, part), part); !status.ok()) {
            return status;
        }
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
        return bias.empty() ? Status() : refused("there must be no bias", text(bias), "has_bias is not set");
    }
    int64_t const queries = shapes.queries(parameters);
    int64_t const keys = shapes.keys(parameters);
    std::string const sizes = "S " + std::to_string(queries) + " and T " + std::to_string(keys);
    bool const fits = bias.size() == 4 && (bias[0] == 1 || bias[0] == shapes.batch())
                      && (bias[1] == 1 || bias[1] == parameters.query_heads) && bias[2] == queries
                      && bias[3] == keys;
    if (!fits) {
        return refused("the bias must be [B or 1, Hq or 1, S, T] with " + sizes, text(bias),
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

Status AttentionWork::check(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    for (auto const check_some : {check_operands, check_lengths, check_bias, check_tables}) {
        if (Status status = check_some(parameters, shapes); !status.ok()) {
            return status;
        }
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

View attended_view(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part) {
    if (parameters.has_cache && part != Part::kQuery) {
        return dense_view(shapes.batch(), parameters.key_heads, shapes.cache_rows, size_of(parameters, part));
    }
    View view = view_of(parameters, shapes, part);
    if (parameters.rotates() && part != Part::kValue) {
        auto const [batch, heads, rows, size] = view.sizes;
        view.strides = {rows * heads * size, size, heads * size, 1};
        view.offset = 0;
    }
    return view;
}

View dense_view(int64_t batch, int64_t heads, int64_t rows, int64_t size) {
    View view;
    view.sizes = {batch, heads, rows, size};
    view.strides = {heads * rows * size, rows * size, size, 1};
    return view;
}

View output_view(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    int64_t const rows = shapes.queries(parameters);
    int64_t const heads = parameters.query_heads;
    int64_t const size = parameters.value_size;
    View view;
    view.sizes = {shapes.batch(), heads, rows, size};
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

Mask mask_of(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    int64_t const queries = shapes.queries(parameters);
    int64_t const keys = shapes.keys(parameters);
    Mask mask = stated_mask(parameters);
    // With a cache each new query stands at a key of its own. Batch rows without any key are cleared before.
    bool const any_count = parameters.has_key_lengths && (mask.bottom_right || mask.left.has_value());
    mask.may_be_empty = any_count
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

}  // namespace mha_deploy
