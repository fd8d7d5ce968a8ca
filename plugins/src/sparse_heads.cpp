#include "sparse_heads.h"

#include "../kernels/sparse_heads_arguments.cuh"
#include "driver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace mha_deploy {
namespace {

constexpr int64_t kMostBlocks = 65535;  // in the second and third direction of a launch
// Blocks for each multiprocessor from which on larger tiles pay. Where there are fewer, smaller tiles give
// work to more multiprocessors at the same time.
constexpr int64_t kBlocksForLargeTiles = 4;
constexpr float kLog2OfE = 1.44269504F;

Status refused(std::string const& what, std::string const& got, char const* advice) {
    return Status::failed("sparse heads: " + what + ", got " + got + "; " + advice);
}

// A row of heads that begins where the view begins; the kernel adds head, batch row and token.
SparseHeadsOperand operand_of(AttentionParameters const& parameters, AttentionShapes const& shapes,
    AttentionPointers const& pointers, Part part) {
    auto const place = static_cast<std::size_t>(part);
    auto const source = static_cast<std::size_t>(parameters.sources[place]);
    View const view = view_of(parameters, shapes, part);
    auto const* const memory = static_cast<uint16_t const*>(pointers.inputs[source]) + view.offset;
    return {memory, view.strides[0], view.strides[1], view.strides[2]};
}

bool lists_tokens(int64_t queries) {
    return queries > kSparseHeadsUnlistedTokens;
}

int64_t tiles_of(int64_t queries, int tile) {
    return (queries + tile - 1) / tile;
}

Status choose_tile(Driver const& driver, int64_t heads, int64_t queries, int& tile) {
    CUdevice device = 0;
    int processors = 0;
    RETURN_IF_FAILED(status_of(driver.current_device(&device), "find the current GPU"));
    CUresult const result =
        driver.device_attribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    RETURN_IF_FAILED(status_of(result, "count the multiprocessors"));
    bool const large = heads * tiles_of(queries, kSparseHeadsLargeTile) >= kBlocksForLargeTiles * processors;
    tile = large ? kSparseHeadsLargeTile : kSparseHeadsSmallTile;
    return {};
}

Status find_kernels(Driver const& driver, AttentionParameters const& parameters,
    AttentionShapes const& shapes, Type type, SparseHeadsKernels& launch) {
    int64_t const queries = shapes.queries(parameters);
    int64_t const heads = shapes.batch() * parameters.query_heads;
    RETURN_IF_FAILED(choose_tile(driver, heads, queries, launch.tile));
    std::string name = "mha_deploy_sparse_heads_";
    name += type == Type::kHalf ? "fp16" : "bf16";
    name += "_d" + std::to_string(parameters.head_size);
    name += launch.tile == kSparseHeadsLargeTile ? "_LargeTile" : "_SmallTile";
    RETURN_IF_FAILED(load_kernel(name.c_str(), launch.attend));
    launch.shared_bytes = sparse_heads_shared_bytes(launch.tile, parameters.head_size);
    // Always asked for: without, CUDA gives 48 KiB, and counts what the kernel declares itself among them.
    CUresult const result = driver.set_function_attribute(
        launch.attend, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes);
    RETURN_IF_FAILED(status_of(result, "ask for shared memory for sparse heads"));
    return lists_tokens(queries) ? load_kernel("mha_deploy_sparse_heads_list", launch.list) : Status();
}

SparseHeadsArguments arguments_of(AttentionParameters const& parameters, AttentionShapes const& shapes,
    AttentionPointers const& pointers, void* workspace) {
    InputPlaces const places(parameters);
    SparseHeadsArguments arguments{};
    arguments.query = operand_of(parameters, shapes, pointers, Part::kQuery);
    arguments.key = operand_of(parameters, shapes, pointers, Part::kKey);
    arguments.value = operand_of(parameters, shapes, pointers, Part::kValue);
    if (parameters.has_key_lengths) {
        arguments.key_lengths =
            static_cast<int32_t const*>(pointers.inputs[static_cast<std::size_t>(places.key_lengths)]);
    }
    arguments.gates = static_cast<uint16_t const*>(pointers.inputs[static_cast<std::size_t>(places.gates)]);
    arguments.output = static_cast<uint16_t*>(pointers.outputs[0]);
    if (lists_tokens(shapes.queries(parameters))) {
        arguments.counts = static_cast<int32_t*>(workspace);
        arguments.tokens = arguments.counts + shapes.batch() * parameters.query_heads;
    }
    arguments.queries = static_cast<int32_t>(shapes.queries(parameters));
    arguments.keys = static_cast<int32_t>(shapes.keys(parameters));
    arguments.query_heads = parameters.query_heads;
    arguments.heads_per_key_head = parameters.query_heads / parameters.key_heads;
    arguments.causal = static_cast<int32_t>(parameters.causal);
    arguments.scale_log2 = parameters.scale * kLog2OfE;
    return arguments;
}

Status check_memory(SparseHeadsArguments const& arguments) {
    void const* const output = arguments.output;
    for (void const* const memory :
        {arguments.query.memory, arguments.key.memory, arguments.value.memory, output}) {
        auto const address = reinterpret_cast<std::uintptr_t>(memory);
        if (address % (kElementsOfLoad * sizeof(uint16_t)) != 0) {
            return refused("Q, K, V and y must begin at multiples of 16 bytes",
                "address " + std::to_string(address), "bind memory as CUDA allocates it");
        }
    }
    return {};
}

}  // namespace

Status check_sparse_heads(AttentionParameters const& parameters) {
    if (!parameters.has_gates) {
        return refused("has_gates must be 1", "0", "use the dense attention where no token chooses heads");
    }
    if (parameters.has_bias) {
        return refused("there is no kernel with a bias", "has_bias 1",
            "state the mask by key_lengths or causal, or leave out the gates");
    }
    if (parameters.left_window != kNoWindow || parameters.right_window != kNoWindow) {
        return refused("there is no kernel with a window",
            std::to_string(parameters.left_window) + " and " + std::to_string(parameters.right_window),
            "leave out the window or the gates");
    }
    if (parameters.has_cache) {
        return refused("there is no kernel with a cache", "has_cache 1", "leave out the cache or the gates");
    }
    int32_t const size = parameters.head_size;
    if (size != parameters.value_size || (size != 32 && size != 64 && size != 96 && size != 128)) {
        return refused("head_size and value_size must be the same, and 32, 64, 96 or 128",
            std::to_string(size) + " and " + std::to_string(parameters.value_size),
            "use another attention for this node");
    }
    int32_t const heads = parameters.query_heads;
    if (heads <= 0 || parameters.key_heads <= 0 || heads % parameters.key_heads != 0) {
        return refused("query_heads must be a multiple of key_heads",
            std::to_string(heads) + " and " + std::to_string(parameters.key_heads),
            "check the heads of the node");
    }
    if (!std::isfinite(parameters.scale) || parameters.scale <= 0.0F) {
        return refused("scale must be above zero", std::to_string(parameters.scale),
            "move the sign into the weights of Q");
    }
    for (int32_t const offset : parameters.offsets) {
        if (offset < 0 || offset % kElementsOfLoad != 0) {
            return refused("offsets must be multiples of 8", std::to_string(offset),
                "pad the projection, or pass Q, K and V as inputs of their own");
        }
    }
    return {};
}

Status check_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    RETURN_IF_FAILED(check_sparse_heads(parameters));
    if (shapes.operands.size() != static_cast<std::size_t>(parameters.operands())) {
        return refused("there must be one shape for each input of Q, K and V",
            std::to_string(shapes.operands.size()) + " for " + std::to_string(parameters.operands()),
            "check the sources of the node");
    }
    for (Dims const& dims : shapes.operands) {
        if (dims.size() != 3 && dims.size() != 4) {
            return refused("Q, K and V must be [B, L, W] or [B, H, L, D]",
                "rank " + std::to_string(dims.size()), "reshape them");
        }
        if (dims.back() % kElementsOfLoad != 0) {
            return refused("rows must be multiples of 8 elements", std::to_string(dims.back()), "pad them");
        }
    }
    int64_t const batch = shapes.batch();
    int64_t const longest = std::max(shapes.queries(parameters), shapes.keys(parameters));
    int64_t const most_rows = std::numeric_limits<int32_t>::max() - kSparseHeadsLargeTile;
    if (batch > kMostBlocks || parameters.query_heads > kMostBlocks || longest > most_rows) {
        return refused("one launch takes 65535 batch rows and heads, and sequences below 2^31",
            std::to_string(batch) + " batch rows, " + std::to_string(parameters.query_heads) +
                " heads, length " + std::to_string(longest),
            "split the batch");
    }
    return {};
}

std::size_t sparse_heads_workspace(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    int64_t const queries = shapes.queries(parameters);
    if (!lists_tokens(queries)) {
        return 0;
    }
    // The tokens of every head, and how many they are.
    int64_t const heads = shapes.batch() * parameters.query_heads;
    return static_cast<std::size_t>(heads * (queries + 1)) * sizeof(int32_t);
}

Status prepare_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes, Type type,
    SparseHeadsKernels& kernels) {
    Driver const* driver = nullptr;
    RETURN_IF_FAILED(check_sparse_heads(parameters, shapes));
    RETURN_IF_FAILED(load_driver(driver));
    return find_kernels(*driver, parameters, shapes, type, kernels);
}

Status run_sparse_heads(AttentionParameters const& parameters, AttentionShapes const& shapes,
    SparseHeadsKernels const& kernels, AttentionPointers const& pointers, void* workspace, CUstream stream) {
    RETURN_IF_FAILED(check_sparse_heads(parameters, shapes));
    if (shapes.batch() == 0 || shapes.queries(parameters) == 0) {
        return {};
    }
    SparseHeadsArguments arguments = arguments_of(parameters, shapes, pointers, workspace);
    RETURN_IF_FAILED(check_memory(arguments));
    Driver const* driver = nullptr;
    RETURN_IF_FAILED(load_driver(driver));
    void* given[] = {&arguments};
    auto const batch = static_cast<unsigned>(shapes.batch());
    auto const heads = static_cast<unsigned>(parameters.query_heads);
    if (kernels.list != nullptr) {
        CUresult const result = driver->launch(
            kernels.list, heads, batch, 1, kSparseHeadsListThreads, 1, 1, 0, stream, given, nullptr);
        RETURN_IF_FAILED(status_of(result, "list the tokens of sparse heads"));
    }
    auto const tiles = static_cast<unsigned>(tiles_of(shapes.queries(parameters), kernels.tile));
    CUresult const result = driver->launch(kernels.attend, tiles, heads, batch, kSparseHeadsThreads, 1, 1,
        static_cast<unsigned>(kernels.shared_bytes), stream, given, nullptr);
    return status_of(result, "attend with sparse heads");
}

}  // namespace mha_deploy
