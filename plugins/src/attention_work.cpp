// One call of the attention on a stream: queries and keys rotated or staged, new keys and values written into
// the caches, keys counted, cuDNN, zeros where there was no key. Plans by shape are found once and kept.
#include "attention.h"
#include "cudnn_attention.h"
#include "driver.h"
#include "handles.h"
#include "plan_cache.h"
#include "row_kernels.h"
#include "sparse_heads.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

namespace mha_deploy {
namespace {

constexpr std::uintptr_t kScratchAlignment = 16;
constexpr int64_t kMostBatches = 65535;  // of a launch grid
constexpr unsigned kThreads = 128;
constexpr long long kUnbounded = std::numeric_limits<int64_t>::max() / 4;
constexpr int64_t kTileRows = 256;  // no kernel of cuDNN reads further behind the last key
// Where cuDNN's kernel in FP8 is the faster one, rounding to FP8 included. An H200 takes, in microseconds and
// in place of FP16: 32 heads of 128, causal, at 1024 keys 27 and 31, at 2048 64 and 85, at 8192 663 and 1048;
// 16 heads of 64 at 1024 keys and a batch of 8, 108 and 82.
constexpr int64_t kLeastKeysInFp8 = 1024;
constexpr int32_t kLeastSizeInFp8 = 128;
constexpr std::size_t kMostStagedBytes = std::size_t{512} << 20;
constexpr std::size_t kNowhere = std::numeric_limits<std::size_t>::max();
constexpr std::array<Part, 3> kParts{Part::kQuery, Part::kKey, Part::kValue};

// All that calls of some sizes need beside their inputs.
struct Prepared {
    std::shared_ptr<CudnnAttention> plan;  // null where there is nothing to attend to, or for sparse heads
    Mask mask;
    bool rounded = false;  // the plan is for sizes rounded up: tensors are staged, and rows counted
    bool narrow = false;   // the plan reads and writes FP8
    int64_t batch = 0;     // of the plan
    std::array<View, 3> attended{};  // Q, K and V as cuDNN reads them
    View output;
    DeviceMemory query_counts;  // S for every batch element
    DeviceMemory key_counts;    // T for every batch element, where cuDNN counts keys that nobody counted
    DeviceMemory scales;        // kFp8Numbers of a plan in FP8
    CUfunction rotary_append = nullptr;  // rotates, stages, and writes into the caches
    CUfunction narrow_rows = nullptr;    // the output of a plan that writes no FP8
    CUfunction key_counts_kernel = nullptr;
    CUfunction empty_rows = nullptr;
    SparseHeadsKernels sparse_heads;  // with gates
    // Where things lie in the scratch memory, behind cuDNN's part.
    std::size_t key_counts_at = kNowhere;
    std::size_t query_counts_at = kNowhere;
    std::array<std::size_t, 3> staged_at{kNowhere, kNowhere, kNowhere};
    std::size_t output_at = kNowhere;
    std::size_t first_keys_at = kNowhere;
    std::size_t scratch_bytes = 0;
    DeviceMemory scratch;   // where the caller gives too little
    bool launched = false;  // so that the device may still be at it

    void reserve(std::size_t bytes, std::size_t& at) noexcept {
        at = scratch_bytes;
        scratch_bytes += (bytes + 255) / 256 * 256;
    }
};

int64_t elements_of(View const& view) {
    auto const [batch, heads, rows, size] = view.sizes;
    return batch * heads * rows * size;
}

// cuDNN's plans for the whole process: contexts of one engine share them. Kept until the process is gone.
struct SharedPlans {
    std::mutex mutex;
    PlanCache<CudnnAttention> plans{AttentionWork::kMostPlans};
};
SharedPlans& shared_plans() {
    static SharedPlans& shared = *new SharedPlans;
    return shared;
}

std::shared_ptr<CudnnAttention> find_shared(PlanKey const& key) {
    std::lock_guard<std::mutex> const lock(shared_plans().mutex);
    return shared_plans().plans.find(key);
}

std::shared_ptr<CudnnAttention> share(PlanKey const& key, std::shared_ptr<CudnnAttention> plan) {
    // Whoever still works with an evicted plan holds it, so these can go at once, behind the lock.
    std::vector<std::shared_ptr<CudnnAttention>> evicted;
    std::lock_guard<std::mutex> const lock(shared_plans().mutex);
    return shared_plans().plans.insert(key, std::move(plan), evicted);
}

// Into `key`, whose memory is used again: a call that meets sizes once more takes none.
void set_key(PlanKey& key, AttentionParameters const& p, AttentionShapes const& shapes, Type type,
    Context const& context, bool rounded) {
    uint32_t scale = 0;
    std::memcpy(&scale, &p.scale, sizeof(scale));
    // Where the rotary tables are looked up is the same plan.
    key = {p.query_heads, p.key_heads, p.head_size, p.value_size, scale,
        static_cast<int64_t>(p.causal), p.left_window, p.right_window, p.has_bias, p.has_key_lengths,
        p.has_key_mask, p.has_gates, p.has_cache, p.fp8, static_cast<int64_t>(type),
        static_cast<int64_t>(context.number), shapes.cache_rows, p.rotates(), rounded};
    key.insert(key.end(), p.sources.begin(), p.sources.end());
    key.insert(key.end(), p.offsets.begin(), p.offsets.end());
    auto const add = [&key](Dims const& dims) {
        key.push_back(static_cast<int64_t>(dims.size()));
        key.insert(key.end(), dims.begin(), dims.end());
    };
    add(shapes.bias);
    std::for_each(shapes.operands.begin(), shapes.operands.end(), add);
}

int64_t rounded_up(int64_t size, int64_t least) {
    int64_t rounded = least;
    while (rounded < size) {
        rounded *= 2;
    }
    return rounded;
}

bool is_nothing(AttentionParameters const& parameters, AttentionShapes const& shapes) {
    return shapes.batch() == 0 || shapes.queries(parameters) == 0 || shapes.keys(parameters) == 0;
}

// Powers of two of batch, queries and keys, or nothing where plans cannot be shared. Caches stay as they are:
// their keys are counted anyway.
std::optional<AttentionShapes> rounded_shapes(
    AttentionParameters const& parameters, AttentionShapes const& shapes) {
    if (parameters.has_gates || parameters.has_bias || parameters.has_key_mask || parameters.fp8
        || is_nothing(parameters, shapes)) {
        return std::nullopt;
    }
    int64_t const queries = shapes.queries(parameters);
    int64_t rows = queries == 1 ? 1 : rounded_up(queries, 16);
    rows = parameters.has_cache ? std::min(rows, shapes.cache_rows) : rows;
    int64_t const batch = parameters.has_cache ? shapes.batch() : rounded_up(shapes.batch(), 1);
    AttentionShapes rounded = shapes;
    for (std::size_t i = 0; i < rounded.operands.size(); ++i) {
        Dims& dims = rounded.operands[i];
        int64_t& length = dims[dims.size() == 4 ? 2 : 1];
        // The new tokens of a cache are as many as queries; other keys are rounded on their own.
        bool const as_queries = parameters.has_cache || static_cast<int32_t>(i) == parameters.sources[0];
        length = as_queries ? rows : rounded_up(length, 64);
        dims[0] = batch;
    }
    std::size_t bytes = 0;
    for (Part const part : kParts) {
        bytes += static_cast<std::size_t>(elements_of(view_of(parameters, rounded, part))) * 2;
    }
    return bytes <= kMostStagedBytes && batch <= kMostBatches ? std::optional(std::move(rounded))
                                                              : std::nullopt;
}

Status constant_counts(Driver const& driver, int64_t batch, int64_t count, DeviceMemory& memory) {
    Status status = memory.allocate(driver, static_cast<std::size_t>(batch) * sizeof(int32_t));
    return status.ok() ? memory.fill(static_cast<uint32_t>(count)) : status;
}

Status constant_scales(Driver const& driver, AttentionParameters const& p, DeviceMemory& memory) {
    std::array<float, kFp8Numbers * kFp8NumberBytes / sizeof(float)> numbers{};
    std::size_t at = 0;
    for (float const number : {p.query_scale, p.key_scale, p.value_scale, p.weights_scale,
             1.0F / p.weights_scale, 1.0F / p.output_scale}) {
        numbers[at] = number;
        at += kFp8NumberBytes / sizeof(float);
    }
    RETURN_IF_FAILED(memory.allocate(driver, sizeof(numbers)));
    return status_of(driver.copy_from_host(memory.address(), numbers.data(), sizeof(numbers)), "copy scales");
}

// ---- one call

struct Call {
    Driver const& driver;
    AttentionParameters const& parameters;
    AttentionShapes const& shapes;
    Prepared const& prepared;
    AttentionPointers const& pointers;
    char* workspace;
    CUstream stream;
    InputPlaces places;

    template <typename Value = void>
    Value const* input(int32_t place) const {
        return place < 0 ? nullptr
                         : static_cast<Value const*>(pointers.inputs[static_cast<std::size_t>(place)]);
    }
    void* scratch(std::size_t at) const { return at == kNowhere ? nullptr : workspace + at; }
    int queries() const { return static_cast<int>(shapes.queries(parameters)); }
    int keys() const { return static_cast<int>(shapes.keys(parameters)); }
    int output_pieces() const {  // of 16 bytes, in a row of what the plan writes
        int64_t const width = int64_t{parameters.query_heads} * parameters.value_size;
        return static_cast<int>(width / kElementsOfLoad / (prepared.narrow ? 2 : 1));
    }
    // Where queries without keys become zero.
    uint4* cleared() const {
        bool const inner = parameters.fp8 && !prepared.narrow;
        return static_cast<uint4*>(inner ? scratch(prepared.output_at) : pointers.outputs[0]);
    }
    // Where Q, K or V begins: for a cache, the new tokens of K and V.
    char* begin_of(Part part) const {
        auto const index = static_cast<std::size_t>(part);
        auto const* const source = input<char>(parameters.sources[index]);
        return const_cast<char*>(source) + int64_t{parameters.offsets[index]} * 2;
    }
    template <typename Arguments>
    Status launch(
        CUfunction kernel, unsigned x, unsigned y, unsigned z, Arguments& call, char const* tried) const {
        void* arguments[] = {&call};
        return status_of(
            driver.launch(kernel, x, y, z, kThreads, 1, 1, 0, stream, arguments, nullptr), tried);
    }
};

// Past and present are normally the same memory. Where they are not, the past is brought along.
Status copy_past(Call const& call) {
    int64_t const rows = call.shapes.batch() * call.parameters.key_heads * call.shapes.cache_rows;
    int64_t const sizes[] = {call.parameters.head_size, call.parameters.value_size};
    int32_t const places[] = {call.places.past_key, call.places.past_value};
    for (std::size_t i = 0; i < 2; ++i) {
        auto const source = reinterpret_cast<CUdeviceptr>(call.input(places[i]));
        auto const target = reinterpret_cast<CUdeviceptr>(call.pointers.outputs[1 + i]);
        auto const bytes = static_cast<std::size_t>(rows * sizes[i]) * 2;
        if (source != target && bytes > 0) {
            if (CUresult const result = call.driver.copy_async(target, source, bytes, call.stream);
                result != CUDA_SUCCESS) {
                return status_of(result, "copy a cache");
            }
        }
    }
    return Status();
}

// The memory of a view, in pieces of 16 bytes; no heads where this part stays where it is.
HeadCopy head_copy_of(Call const& call, Part part) {
    auto const index = static_cast<std::size_t>(part);
    bool const cached = call.parameters.has_cache && part != Part::kQuery;
    void* const target = cached ? call.pointers.outputs[index] : call.scratch(call.prepared.staged_at[index]);
    HeadCopy copy{};
    if (target == nullptr) {
        return copy;
    }
    View const view = view_of(call.parameters, call.shapes, part);
    View const& to = call.prepared.attended[index];
    bool const rotates = call.parameters.rotates() && part != Part::kValue;
    copy.source = reinterpret_cast<uint4 const*>(call.begin_of(part));
    copy.target = static_cast<uint4*>(target);
    copy.batch_stride = view.strides[0] / kElementsOfLoad;
    copy.head_stride = view.strides[1] / kElementsOfLoad;
    copy.row_stride = view.strides[2] / kElementsOfLoad;
    copy.target_batch_stride = to.strides[0] / kElementsOfLoad;
    copy.target_head_stride = to.strides[1] / kElementsOfLoad;
    copy.target_row_stride = to.strides[2] / kElementsOfLoad;
    copy.heads = static_cast<int>(view.sizes[1]);
    copy.pieces = static_cast<int>(view.sizes[3] / kElementsOfLoad);
    copy.added = static_cast<int>(to.sizes[3] / kElementsOfLoad) - copy.pieces;
    copy.units = copy.pieces + copy.added;
    copy.is_key = part == Part::kKey ? 1 : 0;
    copy.rotates = rotates ? 1 : 0;
    if (call.parameters.fp8) {
        float const scales[] = {
            call.parameters.query_scale, call.parameters.key_scale, call.parameters.value_scale};
        copy.fp8_scale = scales[index];
        copy.narrow = call.prepared.narrow ? 1 : 0;
    }
    if (rotates && call.parameters.rotary == RotaryPairs::kHalves) {  // a thread moves both halves of pairs
        copy.units -= static_cast<int>(call.parameters.rotary_size / kElementsOfLoad / 2);
    }
    return copy;
}

Status launch_rotary_append(Call const& call, RotaryAppendCall append, int64_t rows) {
    bool const cache = call.parameters.has_cache;
    unsigned units = 0;
    for (HeadCopy const& part : {append.query, append.key, append.value}) {
        units += static_cast<unsigned>(part.heads * part.units);
    }
    if (units == 0) {
        return Status();
    }
    append.rows = static_cast<int>(rows);
    append.filled_rows = append.rows;
    if (call.prepared.rounded && !cache && append.value.heads > 0) {
        int64_t const whole_tiles = (rows + kTileRows - 1) / kTileRows * kTileRows;
        append.filled_rows = static_cast<int>(std::min(whole_tiles, call.prepared.attended[1].sizes[2]));
    }
    return call.launch(call.prepared.rotary_append, static_cast<unsigned>(append.filled_rows),
        (units + kThreads - 1) / kThreads, static_cast<unsigned>(call.shapes.batch()), append,
        "rotate and write the new keys and values");
}

Status rotate_and_append(Call const& call) {
    AttentionParameters const& p = call.parameters;
    RotaryAppendCall append{};
    append.query = head_copy_of(call, Part::kQuery);
    append.key = head_copy_of(call, Part::kKey);
    append.value = head_copy_of(call, Part::kValue);
    if (p.rotates()) {
        append.rotary.cos = call.input(call.places.cos);
        append.rotary.sin = call.input(call.places.sin);
        append.rotary.given = call.input<int>(call.places.positions);
        append.rotary.positions = static_cast<int>(p.rotary_positions);
        append.rotary.table_rows = call.shapes.table_rows;
        append.rotary.pieces = static_cast<int>(p.rotary_size / kElementsOfLoad);
        append.rotary.interleaved = p.rotary == RotaryPairs::kNeighbours ? 1 : 0;
    }
    if (p.has_cache) {
        append.starts = call.input<int>(call.places.starts);
        append.key_counts = static_cast<int*>(call.scratch(call.prepared.key_counts_at));
        append.cache_rows = static_cast<int>(call.shapes.cache_rows);
    }
    if (p.has_key_mask) {
        append.mask.kept = call.input<int>(call.places.key_mask);
        append.mask.first_keys = static_cast<int*>(call.scratch(call.prepared.first_keys_at));
        append.mask.keys = call.keys();
    }
    int64_t const queries = call.queries();
    int64_t const keys = view_of(p, call.shapes, Part::kKey).sizes[2];
    if (keys == queries) {
        return launch_rotary_append(call, append, queries);
    }
    RotaryAppendCall others = append;
    others.query = HeadCopy{};
    append.key = append.value = HeadCopy{};
    Status status = launch_rotary_append(call, append, queries);
    return status.ok() ? launch_rotary_append(call, others, keys) : status;
}

unsigned blocks_for_rows(int rows) {
    return std::clamp(static_cast<unsigned>(rows) / 32U, 1U, 64U);
}

Status count_rows(Call const& call) {
    auto* const query_counts = static_cast<int*>(call.scratch(call.prepared.query_counts_at));
    if (call.prepared.key_counts_kernel == nullptr) {  // a cache: its keys were counted as they were written
        auto const count = static_cast<unsigned>(call.queries());
        return query_counts == nullptr
                   ? Status()
                   : status_of(call.driver.set_words_async(reinterpret_cast<CUdeviceptr>(query_counts), count,
                                   static_cast<std::size_t>(call.prepared.batch), call.stream),
                         "count the queries");
    }
    KeyCounts rows{};
    rows.lengths = call.input<int>(call.places.key_lengths);
    rows.key_counts = static_cast<int*>(call.scratch(call.prepared.key_counts_at));
    rows.query_counts = query_counts;
    rows.output = call.cleared();
    rows.queries = call.queries();
    rows.keys = call.keys();
    rows.batch = static_cast<int>(call.shapes.batch());
    rows.pieces = call.output_pieces();
    return call.launch(call.prepared.key_counts_kernel, blocks_for_rows(rows.queries),
        static_cast<unsigned>(call.prepared.batch), 1, rows, "count the keys");
}

// Zeros for queries without keys; and what a plan in FP16 or BF16 gave, in FP8.
Status finish_rows(Call const& call) {
    Mask const stated = stated_mask(call.parameters);
    EmptyRows rows{};
    rows.output = call.cleared();
    rows.key_counts = call.input<int>(call.places.key_lengths);
    rows.first_keys = static_cast<int const*>(call.scratch(call.prepared.first_keys_at));
    rows.queries = call.queries();
    rows.keys = call.keys();
    rows.pieces = call.output_pieces();
    rows.left = stated.left.value_or(kUnbounded);
    rows.right = stated.right.value_or(kUnbounded);
    rows.bottom_right = stated.bottom_right ? 1 : 0;
    auto const batch = static_cast<unsigned>(call.shapes.batch());
    if (call.prepared.narrow_rows != nullptr) {
        rows.fp8 = static_cast<uint2*>(call.parameters.fp8_copy ? call.pointers.outputs.back()
                                                                : call.pointers.outputs.front());
        rows.fp8_factor = 1.0F / call.parameters.output_scale;
        return call.launch(call.prepared.narrow_rows, static_cast<unsigned>(rows.queries), batch, 1, rows,
            "write the output in FP8");
    }
    return call.launch(call.prepared.empty_rows, blocks_for_rows(rows.queries), batch, 1, rows,
        "clear queries without keys");
}

// No batch, no query, or no key at all.
Status clear_output(Call const& call) {
    auto const bytes =
        static_cast<std::size_t>(call.shapes.batch() * call.queries() * call.output_pieces()) * 16;
    auto const clear = [&call](void* output, std::size_t count) {
        auto const address = reinterpret_cast<CUdeviceptr>(output);
        return count == 0
                   ? Status()
                   : status_of(call.driver.set_async(address, 0, count, call.stream), "clear the output");
    };
    RETURN_IF_FAILED(clear(call.pointers.outputs.front(), bytes));
    return call.parameters.fp8_copy ? clear(call.pointers.outputs.back(), bytes / 2) : Status();
}

// From the output of a plan with more rows.
Status copy_output(Call const& call) {
    auto const row = static_cast<std::size_t>(call.output_pieces()) * 16;
    CUDA_MEMCPY2D copy{};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = reinterpret_cast<CUdeviceptr>(call.scratch(call.prepared.output_at));
    copy.srcPitch = static_cast<std::size_t>(call.prepared.output.sizes[2]) * row;
    copy.dstDevice = reinterpret_cast<CUdeviceptr>(call.pointers.outputs[0]);
    copy.dstPitch = copy.WidthInBytes = static_cast<std::size_t>(call.queries()) * row;
    copy.Height = static_cast<std::size_t>(call.shapes.batch());
    return status_of(call.driver.copy_rows_async(&copy, call.stream), "copy the output");
}

// The pointers must have been checked, and the workspace must hold `prepared.scratch_bytes`.
Status launch_attention(Call const& call, Handles* handles) {
    AttentionParameters const& p = call.parameters;
    Prepared const& prepared = call.prepared;
    Status status = p.has_cache ? copy_past(call) : Status();
    if (!status.ok() || prepared.plan == nullptr) {
        return status.ok() ? clear_output(call) : status;
    }
    if (prepared.rotary_append != nullptr) {
        status = rotate_and_append(call);
    }
    if (status.ok()) {
        status = count_rows(call);
    }
    if (!status.ok()) {
        return status;
    }
    auto const attended = [&](Part part) -> void* {
        auto const index = static_cast<std::size_t>(part);
        if (p.has_cache && part != Part::kQuery) {
            return call.pointers.outputs[index];
        }
        void* const staged = call.scratch(prepared.staged_at[index]);
        return staged != nullptr ? staged : call.begin_of(part);
    };
    auto const counts = [&](std::size_t at, DeviceMemory const& constant) {
        void* const counted = call.scratch(at);
        return counted != nullptr ? counted : reinterpret_cast<void*>(constant.address());
    };
    CudnnAddresses addresses;
    addresses.query = attended(Part::kQuery);
    addresses.key = attended(Part::kKey);
    addresses.value = attended(Part::kValue);
    void* const inner = call.scratch(prepared.output_at);
    addresses.output = inner != nullptr ? inner : call.pointers.outputs[0];
    addresses.scales = reinterpret_cast<void*>(prepared.scales.address());
    addresses.bias = const_cast<void*>(call.input(call.places.bias));
    addresses.query_counts = counts(prepared.query_counts_at, prepared.query_counts);
    addresses.key_counts = counts(prepared.key_counts_at, prepared.key_counts);
    CudnnHandle const handle(*handles);
    RETURN_IF_FAILED(handle.status());
    status = prepared.plan->launch(handle.get(), addresses, call.workspace, call.stream);
    if (status.ok() && prepared.rounded) {
        status = copy_output(call);
    }
    bool const may_be_empty = prepared.rounded ? p.has_key_lengths || mask_of(p, call.shapes).may_be_empty
                                               : prepared.mask.may_be_empty;
    return status.ok() && (may_be_empty || prepared.narrow_rows != nullptr) ? finish_rows(call) : status;
}

}  // namespace

// ---- plans by shape

struct AttentionWork::State {
    State(AttentionParameters const& given, std::size_t most_plans, std::size_t exact_plans)
        : parameters(given), valid(given.check()), exact_left(exact_plans), prepared(most_plans) {}

    Status find(AttentionShapes const& shapes, Type type, bool capturing, std::shared_ptr<Prepared>& found);
    Status entry_of(AttentionShapes const& shapes, Type type, bool rounded, bool capturing, PlanKey& key,
        std::shared_ptr<Prepared>& entry);
    Status make(AttentionShapes const& shapes, Type type, PlanKey const& key, Prepared& made);
    Status make_dense(AttentionShapes const& shapes, Type type, PlanKey const& key, Prepared& made);
    Status take_scratch(Prepared& prepared, bool capturing, void*& workspace, std::size_t bytes);
    Status let_go(CUstream stream);

    AttentionParameters parameters;
    Status valid;
    std::size_t exact_left;  // sizes that may still get plans of their own
    Driver const* driver = nullptr;
    Context context;  // the one that the handles, the plans and the memory belong to
    std::shared_ptr<Handles> handles;
    PlanCache<Prepared> prepared;
    std::vector<std::shared_ptr<Prepared>> leaving;  // evicted, but the device may still be at them
    // The latest call: most engines run one shape over and over.
    AttentionShapes last_shapes;
    Type last_type = Type::kHalf;
    PlanKey last_key;
    PlanKey next_key;  // of the sizes that are looked up
    std::shared_ptr<Prepared> last;
};

Status AttentionWork::State::find(AttentionShapes const& shapes, Type type, bool capturing,
    std::shared_ptr<Prepared>& found) {
    Context current;
    RETURN_IF_FAILED(current_context(*driver, current));
    if (context.handle != nullptr && !(current == context)) {
        return Status::failed(
            "attention: this work belongs to another CUDA context; make one for each device");
    }
    context = current;
    if (last == nullptr || type != last_type || !(shapes == last_shapes)) {
        set_key(next_key, parameters, shapes, type, context, false);
        std::shared_ptr<Prepared> entry = prepared.find(next_key);
        if (entry == nullptr) {
            RETURN_IF_FAILED(check_shapes(parameters, shapes));
            auto const rounded = exact_left == 0 ? rounded_shapes(parameters, shapes) : std::nullopt;
            Status status =
                entry_of(rounded.value_or(shapes), type, rounded.has_value(), capturing, next_key, entry);
            if (!status.ok()) {
                return status;
            }
            exact_left -= exact_left > 0 ? 1 : 0;
        }
        last_shapes = shapes;
        last_type = type;
        last_key.swap(next_key);
        last = std::move(entry);
    }
    found = last;
    return Status();
}

Status AttentionWork::State::entry_of(AttentionShapes const& shapes, Type type, bool rounded, bool capturing,
    PlanKey& key, std::shared_ptr<Prepared>& entry) {
    set_key(key, parameters, shapes, type, context, rounded);
    entry = prepared.find(key);
    if (entry != nullptr) {
        return Status();
    }
    if (capturing) {
        return Status::failed("attention: these sizes are new, and plans cannot be made while the "
                              "stream is being captured; run once with these sizes before capturing");
    }
    auto made = std::make_shared<Prepared>();
    made->rounded = rounded;
    OutsideCapture const outside(*driver);
    RETURN_IF_FAILED(make(shapes, type, key, *made));
    std::vector<std::shared_ptr<Prepared>> evicted;
    entry = prepared.insert(key, std::move(made), evicted);
    std::copy_if(evicted.begin(), evicted.end(), std::back_inserter(leaving),
        [](std::shared_ptr<Prepared> const& each) { return each->launched; });
    return Status();
}

// Earlier calls stand before this one, whatever stream they came on: waiting for this one is enough, and it
// surely still exists.
Status AttentionWork::State::let_go(CUstream stream) {
    OutsideCapture const outside(*driver);
    ++counters.synchronisations;
    Status status = status_of(driver->synchronize(stream), "wait for an attention of other sizes");
    if (status.ok()) {
        leaving.clear();
    }
    return status;
}

Status AttentionWork::State::make(AttentionShapes const& shapes, Type type, PlanKey const& key,
    Prepared& made) {
    if (parameters.has_gates) {
        made.scratch_bytes = sparse_heads_workspace(parameters, shapes);
        return prepare_sparse_heads(parameters, shapes, type, made.sparse_heads);
    }
    made.batch = shapes.batch();
    made.narrow = parameters.fp8;
    if (made.batch > kMostBatches) {
        return Status::failed(
            "attention: the batch must be at most 65535, got " + std::to_string(made.batch));
    }
    return is_nothing(parameters, shapes) ? Status() : make_dense(shapes, type, key, made);
}

Status AttentionWork::State::make_dense(AttentionShapes const& shapes, Type type, PlanKey const& key,
    Prepared& made) {
    AttentionParameters const& p = parameters;
    bool const cache = p.has_cache;
    RETURN_IF_FAILED(Handles::open(*driver, context, handles));
    RETURN_IF_FAILED(CudnnHandle(*handles).status());  // made now, and not while a graph is recorded
    made.mask = mask_of(p, shapes, made.rounded);
    made.output = rows_view(made.batch, p.query_heads, shapes.queries(p), p.value_size);
    std::array<bool, 3> staged{};
    for (Part const part : kParts) {
        auto const index = static_cast<std::size_t>(part);
        View view = view_of(p, shapes, part);
        auto const [batch, heads, rows, size] = view.sizes;
        bool const cached = cache && part != Part::kQuery;
        bool const scored = part != Part::kValue;
        staged[index] = !cached && (made.rounded || p.fp8 || (scored && (p.rotates() || p.has_key_mask)));
        made.attended[index] = cached          ? dense_view(batch, heads, shapes.cache_rows, size)
                               : staged[index] ? rows_view(batch, heads, rows,
                                     p.has_key_mask && scored ? widened(p.head_size) : size)
                                               : view;
    }
    made.plan = find_shared(key);
    if (made.plan == nullptr) {
        CudnnProblem problem{made.attended[0], made.attended[1], made.attended[2], made.output, made.mask,
            shapes.bias, p.scale, type};
        std::shared_ptr<CudnnAttention> plan;
        problem.fp8 = p.fp8 && shapes.keys(p) >= kLeastKeysInFp8 && p.head_size >= kLeastSizeInFp8;
        if (problem.fp8 && !CudnnAttention::build(problem, plan).ok()) {
            problem.fp8 = false;  // there is none of these sizes, or on this GPU
        }
        if (!problem.fp8) {
            RETURN_IF_FAILED(CudnnAttention::build(problem, plan));
        }
        made.plan = share(key, std::move(plan));
    }
    made.narrow = made.plan->in_fp8();
    if (p.fp8) {
        ++(made.narrow ? counters.fp8 : counters.not_fp8);
    }
    std::size_t own = 0;
    made.reserve(made.plan->workspace_bytes(), own);
    auto const counts_bytes = static_cast<std::size_t>(made.batch) * sizeof(int32_t);
    bool const counts = p.has_key_lengths || (made.rounded && !cache);  // by the kernel for it
    if (counts || cache) {
        made.reserve(counts_bytes, made.key_counts_at);
    }
    if (counts || made.rounded) {
        made.reserve(counts_bytes, made.query_counts_at);
    }
    for (std::size_t i = 0; i < staged.size(); ++i) {
        if (staged[i]) {
            std::size_t const bytes = made.narrow ? 1 : 2;
            made.reserve(static_cast<std::size_t>(elements_of(made.attended[i])) * bytes, made.staged_at[i]);
        }
    }
    if (p.has_key_mask) {
        made.reserve(counts_bytes, made.first_keys_at);
    }
    if (made.rounded || (p.fp8 && !made.narrow)) {
        made.reserve(static_cast<std::size_t>(elements_of(made.output)) * 2, made.output_at);
    }
    Status status = made.narrow ? constant_scales(*driver, p, made.scales) : Status();
    if (status.ok() && made.mask.counts_keys && made.query_counts_at == kNowhere) {
        status = constant_counts(*driver, made.batch, shapes.queries(p), made.query_counts);
    }
    if (status.ok() && made.mask.counts_keys && made.key_counts_at == kNowhere) {
        status = constant_counts(*driver, made.batch, shapes.keys(p), made.key_counts);
    }
    bool const half = type == Type::kHalf;
    if (status.ok() && (p.fp8_copy || (p.fp8 && !made.narrow))) {
        char const* const name =
            half ? "mha_deploy_empty_rows_narrow_fp16" : "mha_deploy_empty_rows_narrow_bf16";
        status = load_kernel(name, made.narrow_rows);
    }
    if (status.ok() && (cache || p.rotates() || p.has_key_mask || p.fp8 || made.rounded)) {
        status = load_kernel(
            half ? "mha_deploy_rotary_append_fp16" : "mha_deploy_rotary_append_bf16", made.rotary_append);
    }
    if (status.ok() && counts) {
        status = load_kernel("mha_deploy_key_counts", made.key_counts_kernel);
    }
    if (status.ok() && (made.mask.may_be_empty || made.rounded)) {
        status = load_kernel("mha_deploy_empty_rows", made.empty_rows);
    }
    return status;
}

Status AttentionWork::State::take_scratch(Prepared& entry, bool capturing, void*& workspace,
    std::size_t bytes) {
    bool const enough = workspace != nullptr && bytes >= entry.scratch_bytes
                        && reinterpret_cast<std::uintptr_t>(workspace) % kScratchAlignment == 0;
    if (entry.scratch_bytes == 0 || enough) {
        return Status();
    }
    if (entry.scratch.address() == 0) {
        if (capturing) {
            return Status::failed("attention: scratch memory is missing and cannot be taken while the stream "
                                  "is being captured; run once with these sizes before capturing");
        }
        OutsideCapture const outside(*driver);
        RETURN_IF_FAILED(entry.scratch.allocate(*driver, entry.scratch_bytes));
    }
    workspace = reinterpret_cast<void*>(entry.scratch.address());
    return Status();
}

AttentionWork::AttentionWork(
    AttentionParameters const& parameters, std::size_t most_plans, std::size_t exact_plans)
    : state_(std::make_unique<State>(parameters, most_plans, exact_plans)) {}

AttentionWork::~AttentionWork() {
    release_in_context(state_);
}

Status AttentionWork::prepare(AttentionShapes const& shapes, Type type) {
    return guarded("prepare this attention", [&] {
        if (!state_->valid.ok()) {
            return state_->valid;
        }
        RETURN_IF_FAILED(check_shapes(state_->parameters, shapes));
        RETURN_IF_FAILED(load_driver(state_->driver));
        std::shared_ptr<Prepared> found;
        return state_->find(shapes, type, false, found);
    });
}

std::size_t AttentionWork::workspace_bytes(AttentionShapes const& shapes, Type type, bool dynamic) {
    std::size_t bytes = 0;
    Status const status = guarded("size the scratch memory", [&] {
        Status prepared = prepare(shapes, type);
        bytes = prepared.ok() ? state_->last->scratch_bytes : 0;
        auto const rounded =
            dynamic && prepared.ok() ? rounded_shapes(state_->parameters, shapes) : std::nullopt;
        if (rounded.has_value()) {
            PlanKey key;
            std::shared_ptr<Prepared> entry;
            // Where there is no such plan, none will be asked for memory.
            if (state_->entry_of(*rounded, type, true, false, key, entry).ok()) {
                bytes = std::max(bytes, entry->scratch_bytes);
            }
        }
        return prepared;
    });
    return status.ok() ? bytes : 0;
}

Status AttentionWork::run(AttentionShapes const& shapes, Type type, AttentionPointers const& pointers,
    void* workspace, std::size_t workspace_bytes, CUstream stream) {
    return guarded("run this attention", [&] {
        State& state = *state_;
        if (!state.valid.ok()) {
            return state.valid;
        }
        RETURN_IF_FAILED(load_driver(state.driver));
        bool const capturing = is_capturing(*state.driver, stream);
        std::shared_ptr<Prepared> entry;
        RETURN_IF_FAILED(state.find(shapes, type, capturing, entry));
        RETURN_IF_FAILED(check_pointers(state.parameters, shapes, pointers));
        RETURN_IF_FAILED(state.take_scratch(*entry, capturing, workspace, workspace_bytes));
        if (capturing) {  // the graph holds addresses of the plan's kernels and of this memory
            state.prepared.pin(state.last_key);
        } else if (!state.leaving.empty()) {
            RETURN_IF_FAILED(state.let_go(stream));
        }
        entry->launched = true;
        if (state.parameters.has_gates) {
            return run_sparse_heads(
                state.parameters, shapes, entry->sparse_heads, pointers, workspace, stream);
        }
        Call const call{*state.driver, state.parameters, shapes, *entry, pointers,
            static_cast<char*>(workspace), stream, InputPlaces(state.parameters)};
        return launch_attention(call, state.handles.get());
    });
}

}  // namespace mha_deploy
