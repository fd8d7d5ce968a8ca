#include "attention_work.h"

#include "attention_launch.h"
#include "attention_pointers.h"
#include "plan_cache.h"
#include "sparse_heads.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

namespace mha_deploy {
namespace {

constexpr std::uintptr_t kScratchAlignment = 16;
constexpr int64_t kMostBatches = 65535;  // of a launch grid

// cuDNN's plans for the whole process: contexts of one engine share them. Kept until the process is gone.
PlanCache<CudnnAttention>& shared_plans() {
    static PlanCache<CudnnAttention>& plans = *new PlanCache<CudnnAttention>(AttentionWork::kMostPlans);
    return plans;
}

PlanKey key_of(AttentionParameters const& p, AttentionShapes const& shapes, Type type, Context const& context) {
    uint32_t scale = 0;
    std::memcpy(&scale, &p.scale, sizeof(scale));
    // Where the rotary tables are looked up is the same plan.
    PlanKey key = {p.query_heads, p.key_heads, p.head_size, p.value_size, scale,
        static_cast<int64_t>(p.causal), p.left_window, p.right_window, p.has_bias, p.has_key_lengths,
        p.has_gates, p.has_cache,
        static_cast<int64_t>(type), static_cast<int64_t>(context.number), shapes.cache_rows, p.rotates()};
    key.insert(key.end(), p.sources.begin(), p.sources.end());
    key.insert(key.end(), p.offsets.begin(), p.offsets.end());
    auto const add = [&key](Dims const& dims) {
        key.push_back(static_cast<int64_t>(dims.size()));
        key.insert(key.end(), dims.begin(), dims.end());
    };
    add(shapes.bias);
    std::for_each(shapes.operands.begin(), shapes.operands.end(), add);
    return key;
}

Status constant_counts(Driver const& driver, int64_t batch, int64_t count, DeviceMemory& memory) {
    Status status = memory.allocate(driver, static_cast<std::size_t>(batch) * sizeof(int32_t));
    return status.ok() ? memory.fill(static_cast<uint32_t>(count)) : status;
}

}  // namespace

struct AttentionWork::State {
    State(AttentionParameters const& given, std::size_t most_plans)
        : parameters(given), valid(given.check()), prepared(most_plans) {}

    Status find(AttentionShapes const& shapes, Type type, bool capturing, std::shared_ptr<Prepared>& found);
    Status make(AttentionShapes const& shapes, Type type, PlanKey const& key, Prepared& made);
    Status make_dense(AttentionShapes const& shapes, Type type, PlanKey const& key, Prepared& made);
    Status take_scratch(Prepared& prepared, bool capturing, void*& workspace, std::size_t bytes);
    void keep(PlanKey const& key, std::shared_ptr<Prepared> made, std::shared_ptr<Prepared>& kept);
    Status let_go(CUstream stream);

    AttentionParameters parameters;
    Status valid;
    Driver const* driver = nullptr;
    Context context;  // the one that the handle, the plans and the memory belong to
    CudnnHandle handle;
    PlanCache<Prepared> prepared;
    std::vector<std::shared_ptr<Prepared>> leaving;  // evicted, but the device may still be at them
    // The latest call: most engines run one shape over and over.
    AttentionShapes last_shapes;
    Type last_type = Type::kHalf;
    PlanKey last_key;
    std::shared_ptr<Prepared> last;
};

Status AttentionWork::State::find(AttentionShapes const& shapes, Type type, bool capturing,
    std::shared_ptr<Prepared>& found) {
    Context current;
    if (Status status = current_context(*driver, current); !status.ok()) {
        return status;
    }
    if (context.handle != nullptr && !(current == context)) {
        return Status::failed(
            "attention: this work belongs to another CUDA context; make one for each device");
    }
    context = current;
    if (last == nullptr || type != last_type || !(shapes == last_shapes)) {
        PlanKey key = key_of(parameters, shapes, type, context);
        std::shared_ptr<Prepared> entry = prepared.find(key);
        if (entry == nullptr) {
            if (Status status = check(parameters, shapes); !status.ok()) {
                return status;
            }
            if (capturing) {
                return Status::failed("attention: these sizes are new, and plans cannot be made while the "
                                      "stream is being captured; run once with these sizes before capturing");
            }
            auto made = std::make_shared<Prepared>();
            if (Status status = make(shapes, type, key, *made); !status.ok()) {
                return status;
            }
            keep(key, std::move(made), entry);
        }
        last = nullptr;
        last_shapes = shapes;
        last_type = type;
        last_key = std::move(key);
        last = std::move(entry);
    }
    found = last;
    return Status();
}

void AttentionWork::State::keep(PlanKey const& key, std::shared_ptr<Prepared> made,
    std::shared_ptr<Prepared>& kept) {
    OutsideCapture const outside(*driver);
    std::vector<std::shared_ptr<Prepared>> evicted;
    kept = prepared.insert(key, std::move(made), evicted);
    std::copy_if(evicted.begin(), evicted.end(), std::back_inserter(leaving),
        [](std::shared_ptr<Prepared> const& entry) { return entry->launched; });
}

// Earlier calls stand before this one, whatever stream they came on: waiting for this one is enough, and it
// surely still exists.
Status AttentionWork::State::let_go(CUstream stream) {
    OutsideCapture const outside(*driver);
    Status status = status_of(driver->synchronize(stream), "wait for an attention of other sizes");
    if (status.ok()) {
        leaving.clear();
    }
    return status;
}

Status AttentionWork::State::make(AttentionShapes const& shapes, Type type, PlanKey const& key,
    Prepared& made) {
    OutsideCapture const outside(*driver);
    if (parameters.has_gates) {
        made.scratch_bytes = sparse_heads_workspace(parameters, shapes);
        return prepare_sparse_heads(parameters, shapes, type);
    }
    int64_t const batch = shapes.batch();
    if (batch > kMostBatches) {
        return Status::failed("attention: the batch must be at most 65535, got " + std::to_string(batch));
    }
    bool const nothing = batch == 0 || shapes.queries(parameters) == 0 || shapes.keys(parameters) == 0;
    return nothing ? Status() : make_dense(shapes, type, key, made);
}

Status AttentionWork::State::make_dense(AttentionShapes const& shapes, Type type, PlanKey const& key,
    Prepared& made) {
    if (Status status = handle.create(); !status.ok()) {
        return status;
    }
    made.plan = shared_plans().find(key);
    if (made.plan == nullptr) {
        std::shared_ptr<CudnnAttention> plan;
        if (Status status = CudnnAttention::build(parameters, shapes, type, plan); !status.ok()) {
            return status;
        }
        // Whoever still works with an evicted plan holds it, so these can go at once.
        std::vector<std::shared_ptr<CudnnAttention>> evicted;
        made.plan = shared_plans().insert(key, std::move(plan), evicted);
    }
    made.mask = mask_of(parameters, shapes);
    made.scratch_bytes = rounded_scratch(made.plan->workspace_bytes());
    Status status;
    if (made.mask.counts_keys && !parameters.has_key_lengths) {
        status = constant_counts(*driver, shapes.batch(), shapes.queries(parameters), made.query_counts);
    }
    if (status.ok() && made.mask.counts_keys && !stated_mask(parameters).counts_keys) {
        status = constant_counts(*driver, shapes.batch(), shapes.keys(parameters), made.key_counts);
    }
    if (status.ok() && parameters.has_cache) {
        made.scratch_bytes += rounded_scratch(static_cast<std::size_t>(shapes.batch()) * sizeof(int32_t));
    }
    if (status.ok() && (parameters.has_cache || parameters.rotates())) {
        made.scratch_bytes += rotated_bytes(parameters, shapes, Part::kQuery)
                              + rotated_bytes(parameters, shapes, Part::kKey);
        bool const half = type == Type::kHalf;
        status = load_kernel(half ? "mha_deploy_entries_fp16" : "mha_deploy_entries_bf16", made.entries);
    }
    if (status.ok() && parameters.has_key_lengths) {
        made.scratch_bytes += 2 * rounded_scratch(static_cast<std::size_t>(shapes.batch()) * sizeof(int32_t));
        status = load_kernel("mha_deploy_key_counts", made.key_counts_kernel);
    }
    if (status.ok() && made.mask.may_be_empty) {
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
        if (Status status = entry.scratch.allocate(*driver, entry.scratch_bytes); !status.ok()) {
            return status;
        }
    }
    workspace = reinterpret_cast<void*>(entry.scratch.address());
    return Status();
}

AttentionWork::AttentionWork(AttentionParameters const& parameters, std::size_t most_plans)
    : state_(std::make_unique<State>(parameters, most_plans)) {}

AttentionWork::~AttentionWork() {
    release_in_context(state_);
}

Status AttentionWork::prepare(AttentionShapes const& shapes, Type type) {
    return guarded("prepare this attention", [&] {
        if (!state_->valid.ok()) {
            return state_->valid;
        }
        if (Status status = check(state_->parameters, shapes); !status.ok()) {
            return status;
        }
        if (Status status = load_driver(state_->driver); !status.ok()) {
            return status;
        }
        std::shared_ptr<Prepared> found;
        return state_->find(shapes, type, false, found);
    });
}

std::size_t AttentionWork::workspace_bytes(AttentionShapes const& shapes, Type type) {
    std::size_t bytes = 0;
    Status const status = guarded("size the scratch memory", [&] {
        Status prepared = prepare(shapes, type);
        bytes = prepared.ok() ? state_->last->scratch_bytes : 0;
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
        if (Status status = load_driver(state.driver); !status.ok()) {
            return status;
        }
        bool const capturing = is_capturing(*state.driver, stream);
        std::shared_ptr<Prepared> entry;
        if (Status status = state.find(shapes, type, capturing, entry); !status.ok()) {
            return status;
        }
        if (Status status = check_pointers(state.parameters, shapes, pointers); !status.ok()) {
            return status;
        }
        if (Status status = state.take_scratch(*entry, capturing, workspace, workspace_bytes); !status.ok()) {
            return status;
        }
        if (capturing) {  // the graph holds addresses of the plan's kernels and of this memory
            state.prepared.pin(state.last_key);
        } else if (!state.leaving.empty()) {
            if (Status status = state.let_go(stream); !status.ok()) {
                return status;
            }
        }
        entry->launched = true;
        if (state.parameters.has_gates) {
            return run_sparse_heads(state.parameters, shapes, type, pointers, workspace, stream);
        }
        return launch_attention(
            *state.driver, state.handle, state.parameters, shapes, *entry, pointers, workspace, stream);
    });
}

}  // namespace mha_deploy
