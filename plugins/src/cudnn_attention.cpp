#include "cudnn_attention.h"

#include "driver.h"

// cuDNN and CUDA are opened when they are first needed, not when this library is loaded.
#ifndef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#endif
#include <cudnn_frontend.h>

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // cudnn-frontend finds cuDNN's functions through this
}

namespace mha_deploy {
namespace {

namespace fe = cudnn_frontend;

// The numbers by which a launch names its tensors.
enum Name : int64_t {
    kQuery = 1,
    kKey,
    kValue,
    kBias,
    kQueryCounts,
    kKeyCounts,
    kOutput,
    kScales,  // as many as kFp8Numbers
    kFirst = kQuery,
    kLast = kScales + static_cast<int64_t>(kFp8Numbers) - 1
};

// cuDNN, found once. Not closed: plans and handles of other objects may outlive whoever loaded it.
Status load_cudnn() {
    static std::mutex& mutex = *new std::mutex;
    std::lock_guard<std::mutex> const lock(mutex);
    if (fe::cudnn_dlhandle != nullptr) {
        return Status();
    }
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (fe::cudnn_dlhandle != nullptr) {
        return Status();
    }
    char const* const error = dlerror();
    return Status::failed(std::string("cuDNN 9 is not found: ") + (error != nullptr ? error : "libcudnn.so.9")
                          + "; install it and put its folder into LD_LIBRARY_PATH");
}

Status status_of_cudnn(cudnnStatus_t status, char const* tried) {
    if (status == CUDNN_STATUS_SUCCESS) {
        return Status();
    }
    return Status::failed(
        std::string("could not ") + tried + ": cuDNN says " + fe::detail::get_error_string(status));
}

Status status_of_frontend(fe::error_t error, char const* tried) {
    if (error.is_good()) {
        return Status();
    }
    std::string const version = std::to_string(fe::detail::get_backend_version());
    return Status::failed(
        std::string("could not ") + tried + ": cuDNN " + version + " says " + error.get_message());
}

// Launches by addresses in the order of their names. cudnn-frontend takes an array of them since it keeps a
// template of each graph's tensors; before that it takes a map, which is made anew for every launch.
template <typename Graph, typename = void>
struct Launcher {
    fe::error_t prepare(Graph&) { return {fe::error_code_t::OK, ""}; }
    fe::error_t launch(
        Graph const& graph, cudnnHandle_t handle, void* const* named, void* workspace, int64_t plan) const {
        std::unordered_map<int64_t, void*> tensors;
        for (int64_t name = kFirst; name <= kLast; ++name) {
            tensors.emplace(name, named[name]);
        }
        return graph.execute_plan_at_index(handle, tensors, workspace, plan);
    }
};

template <typename Graph>
struct Launcher<Graph, std::void_t<decltype(std::declval<Graph&>().prepare_variant_pack_template()),
                           decltype(std::declval<Graph const&>().get_variant_pack_uids_sorted())>> {
    std::vector<int64_t> names;  // those that the graph has

    fe::error_t prepare(Graph& graph) {
        fe::error_t error = graph.prepare_variant_pack_template();
        names = graph.get_variant_pack_uids_sorted();
        bool const ours = names.size() <= kLast && std::all_of(names.begin(), names.end(), [](int64_t name) {
            return name >= kFirst && name <= kLast;
        });
        return ours || error.is_bad()
                   ? error
                   : fe::error_t{fe::error_code_t::INVALID_VARIANT_PACK, "the graph has tensors of others"};
    }
    fe::error_t launch(
        Graph const& graph, cudnnHandle_t handle, void* const* named, void* workspace, int64_t plan) const {
        void* sorted[kLast] = {};
        std::transform(names.begin(), names.end(), sorted, [named](int64_t name) { return named[name]; });
        return graph.execute_plan_at_index(handle, sorted, static_cast<int>(names.size()), workspace, plan);
    }
};

// A handle for building plans in the current context, which is given: kept forever, so that no plan outlives
// the one that built it.
Status builder_handle(Context const& context, cudnnHandle_t& handle) {
    static std::mutex& mutex = *new std::mutex;
    static std::map<uint64_t, cudnnHandle_t>& handles = *new std::map<uint64_t, cudnnHandle_t>;
    std::lock_guard<std::mutex> const lock(mutex);
    if (auto const known = handles.find(context.number); known != handles.end()) {
        handle = known->second;
        return Status();
    }
    Status status = status_of_cudnn(fe::detail::create_handle(&handle), "make a cuDNN handle");
    if (status.ok()) {
        handles[context.number] = handle;
    }
    return status;
}

fe::graph::Tensor_attributes describe(View const& view, Name name, fe::DataType_t type) {
    return fe::graph::Tensor_attributes()
        .set_uid(name)
        .set_dim(std::vector<int64_t>(view.sizes.begin(), view.sizes.end()))
        .set_stride(std::vector<int64_t>(view.strides.begin(), view.strides.end()))
        .set_data_type(type);
}

void add_mask(fe::graph::SDPA_attributes& attributes, Mask const& mask) {
    attributes.set_diagonal_alignment(
        mask.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT);
    if (mask.left.has_value()) {
        attributes.set_diagonal_band_left_bound(static_cast<int>(*mask.left));
    }
    if (mask.right.has_value()) {
        attributes.set_diagonal_band_right_bound(static_cast<int>(*mask.right));
    }
}

void describe_attention(fe::graph::Graph& graph, CudnnProblem const& problem) {
    auto const data = problem.fp8                   ? fe::DataType_t::FP8_E4M3
                      : problem.type == Type::kHalf ? fe::DataType_t::HALF
                                                    : fe::DataType_t::BFLOAT16;
    graph.set_io_data_type(data)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    fe::graph::SDPA_attributes attributes;
    attributes.set_name("attention").set_generate_stats(false).set_attn_scale(problem.scale);
    add_mask(attributes, problem.mask);
    if (!problem.bias.empty()) {
        Dims const& bias = problem.bias;
        View const view = dense_view(bias[0], bias[1], bias[2], bias[3]);
        attributes.set_bias(graph.tensor(describe(view, kBias, data)));
    }
    if (problem.mask.counts_keys) {
        View const counts = dense_view(problem.query.sizes[0], 1, 1, 1);
        attributes.set_padding_mask(true)
            .set_seq_len_q(graph.tensor(describe(counts, kQueryCounts, fe::DataType_t::INT32)))
            .set_seq_len_kv(graph.tensor(describe(counts, kKeyCounts, fe::DataType_t::INT32)));
    }
    auto const query = graph.tensor(describe(problem.query, kQuery, data));
    auto const key = graph.tensor(describe(problem.key, kKey, data));
    auto const value = graph.tensor(describe(problem.value, kValue, data));
    auto const give = [](auto const& tensor, View const& view, int64_t name, fe::DataType_t type) {
        tensor->set_output(true)
            .set_uid(name)
            .set_dim(std::vector<int64_t>(view.sizes.begin(), view.sizes.end()))
            .set_stride(std::vector<int64_t>(view.strides.begin(), view.strides.end()))
            .set_data_type(type);
    };
    if (!problem.fp8) {
        give(graph.sdpa(query, key, value, attributes)[0], problem.output, kOutput, data);
        return;
    }
    View const one = dense_view(1, 1, 1, 1);
    auto const scale = [&](int64_t place) {
        return graph.tensor(describe(one, static_cast<Name>(kScales + place), fe::DataType_t::FLOAT));
    };
    auto const outputs = graph.sdpa_fp8(
        query, key, value, scale(0), scale(1), scale(2), scale(3), scale(4), scale(5), attributes);
    give(outputs[0], problem.output, kOutput, data);
    give(outputs[2], one, kScales + 6, fe::DataType_t::FLOAT);
    give(outputs[3], one, kScales + 7, fe::DataType_t::FLOAT);
}

// Whether the rows of a head fit one tile, and there are few heads. cuDNN's first proposal for Hopper counts
// tiles in its workspace, with a memset before every call; its last one has no workspace. On an H200 the last
// one takes 3.9 to 5.7 us at these sizes and the first 6.4 to 8.6; with 384 rows the last one is slower.
bool fits_one_tile(CudnnProblem const& problem, Driver const& driver) {
    constexpr int64_t kRows = 128;
    constexpr int64_t kElements = int64_t{1} << 20;
    auto const [batch, heads, queries, size] = problem.query.sizes;
    CUdevice device = 0;
    int major = 0;
    return queries > 1 && queries <= kRows && problem.key.sizes[2] <= kRows && problem.bias.empty()
           && !problem.fp8
           && batch * heads * queries * size <= kElements
           && driver.current_device(&device) == CUDA_SUCCESS
           && driver.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
                  == CUDA_SUCCESS
           && major == 9;
}

// A graph that a caller records points into its plan, which stays as long as the execution context that it was
// recorded from. Else cudnn-frontend would ask CUDA at every launch whether one is being recorded, by a function
// that it looks up by name, under a lock; versions that do not ask have no such setting.
template <typename Graph>
auto keep_plans_ourselves(Graph& graph, int) -> decltype(graph.set_cuda_graph_retention({}), void()) {
    using Retention = decltype(graph.get_cuda_graph_retention());
    graph.set_cuda_graph_retention(Retention::NONE);
}
template <typename Graph>
void keep_plans_ourselves(Graph&, long) {}

// Builds the plan that `plan` then names; `bytes` is the workspace that it wants.
fe::error_t build_plan(
    fe::graph::Graph& graph, cudnnHandle_t handle, bool one_tile, int64_t& plan, int64_t& bytes) {
    keep_plans_ourselves(graph, 0);
    fe::error_t error = graph.validate();
    if (error.is_good()) {
        error = graph.build_operation_graph(handle);
    }
    if (error.is_good()) {
        error = graph.create_execution_plans({fe::HeurMode_t::A});
    }
    if (error.is_good()) {
        error = graph.check_support();
    }
    if (error.is_bad()) {
        return error;
    }
    int64_t const last = graph.get_execution_plan_count() - 1;
    if (one_tile && graph.build_plan_at_index(handle, last).is_good()
        && graph.get_workspace_size_plan_at_index(last, bytes).is_good() && bytes == 0) {
        plan = last;
        return error;
    }
    for (plan = 0; plan <= last; ++plan) {  // in the order of cuDNN's heuristics
        error = graph.build_plan_at_index(handle, plan);
        if (error.is_good()) {
            return graph.get_workspace_size_plan_at_index(plan, bytes);
        }
    }
    return error;
}

}  // namespace

Status create_cudnn_handle(void*& handle) {
    RETURN_IF_FAILED(load_cudnn());
    cudnnHandle_t made = nullptr;
    Status status = status_of_cudnn(fe::detail::create_handle(&made), "make a cuDNN handle");
    handle = status.ok() ? made : nullptr;
    return status;
}

void destroy_cudnn_handle(void* handle) noexcept {
    Status const status = guarded("let a cuDNN handle go", [&] {
        fe::detail::destroy_handle(static_cast<cudnnHandle_t>(handle));
        return Status();
    });
    (void)status.ok();
}

struct CudnnAttention::Graph {
    Driver const* driver = nullptr;
    Context context;  // the one that its kernels were loaded into
    fe::graph::Graph graph;
    Launcher<fe::graph::Graph> launcher;
    int64_t plan = 0;  // of the proposals of cuDNN
    bool fp8 = false;
    std::size_t workspace_bytes = 0;
};

CudnnAttention::CudnnAttention(std::unique_ptr<Graph> graph) : graph_(std::move(graph)) {}
CudnnAttention::~CudnnAttention() {
    release_in_context(graph_);
}

Status CudnnAttention::build(CudnnProblem const& problem, std::shared_ptr<CudnnAttention>& plan) {
    ++counters.plans;
    return guarded("plan this attention", [&] {
        RETURN_IF_FAILED(load_cudnn());
        auto graph = std::make_unique<Graph>();
        RETURN_IF_FAILED(load_driver(graph->driver));
        RETURN_IF_FAILED(current_context(*graph->driver, graph->context));
        cudnnHandle_t handle = nullptr;
        RETURN_IF_FAILED(builder_handle(graph->context, handle));
        // One at a time: they share the handle, and building is no matter of microseconds.
        static std::mutex& building = *new std::mutex;
        std::lock_guard<std::mutex> const lock(building);
        describe_attention(graph->graph, problem);
        graph->fp8 = problem.fp8;
        int64_t bytes = 0;
        bool const one_tile = fits_one_tile(problem, *graph->driver);
        RETURN_IF_FAILED(status_of_frontend(
            build_plan(graph->graph, handle, one_tile, graph->plan, bytes), "plan this attention"));
        RETURN_IF_FAILED(
            status_of_frontend(graph->launcher.prepare(graph->graph), "name the tensors of this attention"));
        graph->workspace_bytes = bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
        plan.reset(new CudnnAttention(std::move(graph)));
        return Status();
    });
}

std::size_t CudnnAttention::workspace_bytes() const noexcept {
    return graph_->workspace_bytes;
}

bool CudnnAttention::in_fp8() const noexcept {
    return graph_->fp8;
}

Status CudnnAttention::launch(
    void* handle, CudnnAddresses const& addresses, void* workspace, CUstream stream) const {
    return guarded("launch this attention", [&] {
        auto* const cudnn = static_cast<cudnnHandle_t>(handle);
        Status status = status_of_cudnn(fe::detail::set_stream(cudnn, stream), "use the stream");
        if (!status.ok()) {
            return status;
        }
        std::array<void*, kLast + 1> named{};
        named[kQuery] = addresses.query;
        named[kKey] = addresses.key;
        named[kValue] = addresses.value;
        named[kBias] = addresses.bias;
        named[kQueryCounts] = addresses.query_counts;
        named[kKeyCounts] = addresses.key_counts;
        named[kOutput] = addresses.output;
        for (std::size_t i = 0; graph_->fp8 && i < kFp8Numbers; ++i) {
            named[kScales + i] = static_cast<char*>(addresses.scales) + i * kFp8NumberBytes;
        }
        auto const error = graph_->launcher.launch(graph_->graph, cudnn, named.data(), workspace, graph_->plan);
        return status_of_frontend(error, "launch this attention");
    });
}

}  // namespace mha_deploy
