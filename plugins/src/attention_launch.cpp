#include "attention_launch.h"

#include "attention_pointers.h"
#include "row_kernels.h"

#include <algorithm>
#include <limits>

namespace mha_deploy {
namespace {

constexpr int64_t kElementsOfLoad = 8;
constexpr unsigned kThreads = 128;
constexpr long long kUnbounded = std::numeric_limits<int64_t>::max() / 4;

struct Call {
    Driver const& driver;
    AttentionParameters const& parameters;
    AttentionShapes const& shapes;
    Prepared const& prepared;
    AttentionPointers const& pointers;
    CUstream stream;
};

char* moved(void const* address, int64_t elements) {
    return static_cast<char*>(const_cast<void*>(address)) + elements * 2;
}

// Where Q, K or V begins: for a cache, the new rows of K and V.
char* begin_of(Call const& call, Part part) {
    auto const index = static_cast<std::size_t>(part);
    auto const source = static_cast<std::size_t>(call.parameters.sources[index]);
    return moved(call.pointers.inputs[source], call.parameters.offsets[index]);
}

// The memory of a view, in pieces of 16 bytes.
Entries entries_of(Call const& call, Part part, View const& target, void* address) {
    View const view = view_of(call.parameters, call.shapes, part);
    bool const rotates = call.parameters.rotates() && part != Part::kValue;
    Entries entries{};
    entries.source = reinterpret_cast<uint4 const*>(begin_of(call, part));
    entries.target = static_cast<uint4*>(address);
    entries.batch_stride = view.strides[0] / kElementsOfLoad;
    entries.head_stride = view.strides[1] / kElementsOfLoad;
    entries.row_stride = view.strides[2] / kElementsOfLoad;
    entries.target_batch_stride = target.strides[0] / kElementsOfLoad;
    entries.target_head_stride = target.strides[1] / kElementsOfLoad;
    entries.target_row_stride = target.strides[2] / kElementsOfLoad;
    entries.heads = static_cast<int>(view.sizes[1]);
    entries.units = static_cast<int>(view.sizes[3] / kElementsOfLoad);
    entries.rotates = rotates ? 1 : 0;
    if (rotates && call.parameters.rotary == RotaryPairs::kHalves) {  // a thread moves both halves of pairs
        entries.units -= static_cast<int>(call.parameters.rotary_size / kElementsOfLoad / 2);
    }
    return entries;
}

// Past and present are normally the same memory. Where they are not, the past is brought along.
Status copy_past(Call const& call, std::size_t past) {
    int64_t const rows = call.shapes.batch() * call.parameters.key_heads * call.shapes.cache_rows;
    int64_t const sizes[] = {call.parameters.head_size, call.parameters.value_size};
    for (std::size_t i = 0; i < 2; ++i) {
        auto const source = reinterpret_cast<CUdeviceptr>(call.pointers.inputs[past + i]);
        auto const target = reinterpret_cast<CUdeviceptr>(call.pointers.outputs[1 + i]);
        auto const bytes = static_cast<std::size_t>(rows * sizes[i]) * 2;
        if (source != target && bytes > 0) {
            CUresult const result = call.driver.copy_async(target, source, bytes, call.stream);
            if (result != CUDA_SUCCESS) {
                return status_of(result, "copy a cache");
            }
        }
    }
    return Status();
}

// Key and query counts of every batch row, where cuDNN expects them.
struct Counts {
    int32_t* keys = nullptr;
    int32_t* queries = nullptr;
};

// The place of the counts in the scratch memory, behind cuDNN's part.
Counts counts_in(Call const& call, void* workspace) {
    Counts counts;
    if (call.prepared.plan == nullptr || !(call.parameters.has_cache || call.parameters.has_key_lengths)) {
        return counts;
    }
    std::size_t const own = rounded_scratch(call.prepared.plan->workspace_bytes());
    char* const behind = static_cast<char*>(workspace) + own;
    auto const bytes = static_cast<std::size_t>(call.shapes.batch()) * sizeof(int32_t);
    counts.keys = reinterpret_cast<int32_t*>(behind);
    counts.queries = reinterpret_cast<int32_t*>(behind + rounded_scratch(bytes));
    return counts;
}

// Where rotated queries and keys lie in the scratch memory, behind the counts.
struct Rotated {
    char* query = nullptr;
    char* key = nullptr;
};

Rotated rotated_in(Call const& call, void* workspace) {
    Rotated rotated;
    if (call.prepared.plan == nullptr || !call.parameters.rotates()) {
        return rotated;
    }
    std::size_t const counts = call.parameters.has_key_lengths ? 2 : call.parameters.has_cache ? 1 : 0;
    auto const bytes = static_cast<std::size_t>(call.shapes.batch()) * sizeof(int32_t);
    rotated.query = static_cast<char*>(workspace) + rounded_scratch(call.prepared.plan->workspace_bytes())
                    + counts * rounded_scratch(bytes);
    rotated.key = rotated.query + rotated_bytes(call.parameters, call.shapes, Part::kQuery);
    return rotated;
}

Status move_entries(Call const& call, Counts const& counts, Rotated const& rotated) {
    InputPlaces const places(call.parameters);
    bool const cache = call.parameters.has_cache;
    if (cache) {
        if (Status status = copy_past(call, places.past); !status.ok()) {
            return status;
        }
    }
    if (call.prepared.entries == nullptr) {  // there are no new tokens
        return Status();
    }
    auto const to = [&](Part part, void* address) {
        return entries_of(call, part, attended_view(call.parameters, call.shapes, part), address);
    };
    EntriesCall entries{};
    entries.rows = static_cast<int>(call.shapes.queries(call.parameters));
    if (call.parameters.rotates()) {
        entries.query = to(Part::kQuery, rotated.query);
        entries.key = to(Part::kKey, rotated.key);
        entries.rotary.cos = call.pointers.inputs[places.tables];
        entries.rotary.sin = call.pointers.inputs[places.tables + 1];
        entries.rotary.positions = static_cast<int>(call.parameters.rotary_positions);
        if (call.parameters.rotary_positions == RotaryPositions::kGiven) {
            entries.rotary.given = static_cast<int const*>(call.pointers.inputs[places.tables + 2]);
        }
        entries.rotary.table_rows = call.shapes.table_rows;
        entries.rotary.pieces = static_cast<int>(call.parameters.rotary_size / kElementsOfLoad);
        entries.rotary.interleaved = call.parameters.rotary == RotaryPairs::kNeighbours ? 1 : 0;
    }
    if (cache) {
        entries.key = to(Part::kKey, call.pointers.outputs[1]);
        entries.value = to(Part::kValue, call.pointers.outputs[2]);
        entries.starts = static_cast<int const*>(call.pointers.inputs[places.past + 2]);
        entries.key_counts = counts.keys;
        entries.cache_rows = static_cast<int>(call.shapes.cache_rows);
    }
    unsigned units = 0;
    for (Entries const& part : {entries.query, entries.key, entries.value}) {
        units += static_cast<unsigned>(part.heads * part.units);
    }
    void* arguments[] = {&entries};
    CUresult const result = call.driver.launch(call.prepared.entries, static_cast<unsigned>(entries.rows),
        (units + kThreads - 1) / kThreads, static_cast<unsigned>(call.shapes.batch()), kThreads, 1, 1, 0,
        call.stream, arguments, nullptr);
    return status_of(result, "rotate and write the new keys and values");
}

// Pieces of 16 bytes in a row of the output.
int pieces_of_row(AttentionParameters const& parameters) {
    return static_cast<int>(int64_t{parameters.query_heads} * parameters.value_size / kElementsOfLoad);
}

unsigned blocks_for_rows(int rows) {
    return std::clamp(static_cast<unsigned>(rows) / 32U, 1U, 64U);
}

Status count_keys(Call const& call, Counts const& counts) {
    KeyCounts rows{};
    rows.lengths = static_cast<int const*>(call.pointers.inputs[InputPlaces(call.parameters).key_lengths]);
    rows.key_counts = counts.keys;
    rows.query_counts = counts.queries;
    rows.output = static_cast<uint4*>(call.pointers.outputs[0]);
    rows.queries = static_cast<int>(call.shapes.queries(call.parameters));
    rows.keys = static_cast<int>(call.shapes.keys(call.parameters));
    rows.pieces = pieces_of_row(call.parameters);
    void* arguments[] = {&rows};
    CUresult const result = call.driver.launch(call.prepared.key_counts_kernel, blocks_for_rows(rows.queries),
        static_cast<unsigned>(call.shapes.batch()), 1, kThreads, 1, 1, 0, call.stream, arguments, nullptr);
    return status_of(result, "count the keys");
}

Status clear_empty_rows(Call const& call) {
    Mask const stated = stated_mask(call.parameters);
    EmptyRows rows{};
    rows.output = static_cast<uint4*>(call.pointers.outputs[0]);
    if (call.parameters.has_key_lengths) {
        rows.key_counts = static_cast<int const*>(call.pointers.inputs[InputPlaces(call.parameters).key_lengths]);
    }
    rows.queries = static_cast<int>(call.shapes.queries(call.parameters));
    rows.keys = static_cast<int>(call.shapes.keys(call.parameters));
    rows.pieces = pieces_of_row(call.parameters);
    rows.left = stated.left.value_or(kUnbounded);
    rows.right = stated.right.value_or(kUnbounded);
    rows.bottom_right = stated.bottom_right ? 1 : 0;
    void* arguments[] = {&rows};
    CUresult const result = call.driver.launch(call.prepared.empty_rows, blocks_for_rows(rows.queries),
        static_cast<unsigned>(call.shapes.batch()), 1, kThreads, 1, 1, 0, call.stream, arguments, nullptr);
    return status_of(result, "clear rows without keys");
}

// No batch, no query, or no key at all.
Status clear_output(Call const& call) {
    View const view = output_view(call.parameters, call.shapes);
    auto const elements = static_cast<std::size_t>(view.sizes[0] * view.strides[0]);
    if (elements == 0) {
        return Status();
    }
    auto const output = reinterpret_cast<CUdeviceptr>(call.pointers.outputs[0]);
    return status_of(call.driver.set_async(output, 0, elements * 2, call.stream), "clear the output");
}

CudnnAddresses addresses_of(Call const& call, Counts const& counts, Rotated const& rotated) {
    InputPlaces const places(call.parameters);
    bool const cache = call.parameters.has_cache;
    CudnnAddresses addresses;
    bool const rotates = call.parameters.rotates();
    addresses.query = rotates ? rotated.query : begin_of(call, Part::kQuery);
    addresses.key = cache ? call.pointers.outputs[1] : rotates ? rotated.key : begin_of(call, Part::kKey);
    addresses.value = cache ? call.pointers.outputs[2] : begin_of(call, Part::kValue);
    addresses.output = call.pointers.outputs[0];
    if (call.parameters.has_bias) {
        addresses.bias = moved(call.pointers.inputs[places.bias], 0);
    }
    bool const lengths = call.parameters.has_key_lengths;
    addresses.query_counts =
        lengths ? counts.queries : reinterpret_cast<void*>(call.prepared.query_counts.address());
    addresses.key_counts =
        counts.keys != nullptr ? counts.keys : reinterpret_cast<void*>(call.prepared.key_counts.address());
    return addresses;
}

}  // namespace

std::size_t rotated_bytes(AttentionParameters const& parameters, AttentionShapes const& shapes, Part part) {
    if (!parameters.rotates() || (part == Part::kKey && parameters.has_cache)) {
        return 0;
    }
    auto const& sizes = attended_view(parameters, shapes, part).sizes;
    return rounded_scratch(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]) * 2);
}

Status launch_attention(Driver const& driver, CudnnHandle const& handle,
    AttentionParameters const& parameters, AttentionShapes const& shapes, Prepared const& prepared,
    AttentionPointers const& pointers, void* workspace, CUstream stream) {
    Call const call{driver, parameters, shapes, prepared, pointers, stream};
    Counts const counts = counts_in(call, workspace);
    Rotated const rotated = rotated_in(call, workspace);
    Status status =
        parameters.has_cache || parameters.rotates() ? move_entries(call, counts, rotated) : Status();
    if (status.ok() && prepared.key_counts_kernel != nullptr) {
        status = count_keys(call, counts);
    }
    if (!status.ok()) {
        return status;
    }
    if (prepared.plan == nullptr) {
        return clear_output(call);
    }
    status = prepared.plan->launch(handle, addresses_of(call, counts, rotated), workspace, stream);
    return status.ok() && prepared.empty_rows != nullptr ? clear_empty_rows(call) : status;
}

}  // namespace mha_deploy
