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

NewRows new_rows(Call const& call, Part part, void* cache) {
    View const view = view_of(call.parameters, call.shapes, part);
    NewRows rows{};
    rows.source = reinterpret_cast<uint4 const*>(begin_of(call, part));
    rows.cache = static_cast<uint4*>(cache);
    rows.batch_stride = view.strides[0] / kElementsOfLoad;
    rows.head_stride = view.strides[1] / kElementsOfLoad;
    rows.row_stride = view.strides[2] / kElementsOfLoad;
    rows.heads = static_cast<int>(view.sizes[1]);
    rows.cache_rows = static_cast<int>(call.shapes.cache_rows);
    rows.pieces = static_cast<int>(view.sizes[3] / kElementsOfLoad);
    return rows;
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

Status write_cache(Call const& call, int32_t* key_counts) {
    std::size_t const past = InputPlaces(call.parameters).past;
    Status copied = copy_past(call, past);
    if (!copied.ok() || call.prepared.cache_rows == nullptr) {  // null: there are no new rows
        return copied;
    }
    CacheRows rows{};
    rows.key = new_rows(call, Part::kKey, call.pointers.outputs[1]);
    rows.value = new_rows(call, Part::kValue, call.pointers.outputs[2]);
    rows.starts = static_cast<int const*>(call.pointers.inputs[past + 2]);
    rows.key_counts = key_counts;
    rows.rows = static_cast<int>(call.shapes.queries(call.parameters));
    auto const pieces = static_cast<unsigned>(rows.key.heads * (rows.key.pieces + rows.value.pieces));
    void* arguments[] = {&rows};
    auto const batch = static_cast<unsigned>(call.shapes.batch());
    CUresult const result = call.driver.launch(call.prepared.cache_rows, static_cast<unsigned>(rows.rows),
        (pieces + kThreads - 1) / kThreads, batch, kThreads, 1, 1, 0, call.stream, arguments, nullptr);
    return status_of(result, "write the new rows of the caches");
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

CudnnAddresses addresses_of(Call const& call, Counts const& counts) {
    InputPlaces const places(call.parameters);
    bool const cache = call.parameters.has_cache;
    CudnnAddresses addresses;
    addresses.query = begin_of(call, Part::kQuery);
    addresses.key = cache ? call.pointers.outputs[1] : begin_of(call, Part::kKey);
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

Status launch_attention(Driver const& driver, CudnnHandle const& handle,
    AttentionParameters const& parameters, AttentionShapes const& shapes, Prepared const& prepared,
    AttentionPointers const& pointers, void* workspace, CUstream stream) {
    Call const call{driver, parameters, shapes, prepared, pointers, stream};
    Counts const counts = counts_in(call, workspace);
    Status status = parameters.has_cache ? write_cache(call, counts.keys) : Status();
    if (status.ok() && prepared.key_counts_kernel != nullptr) {
        status = count_keys(call, counts);
    }
    if (!status.ok()) {
        return status;
    }
    if (prepared.plan == nullptr) {
        return clear_output(call);
    }
    status = prepared.plan->launch(handle, addresses_of(call, counts), workspace, stream);
    return status.ok() && prepared.empty_rows != nullptr ? clear_empty_rows(call) : status;
}

}  // namespace mha_deploy
