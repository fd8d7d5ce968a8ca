#include "linear_work.h"

#include "driver.h"
#include "linear_matmul.h"
#include "serializer.h"

#include <limits>
#include <list>
#include <new>

namespace mha_deploy {

namespace {

constexpr uint32_t kMagic = 0x4c41484d;  // "MHAL"
constexpr uint32_t kVersion = 1;

// Shapes that one object keeps ready. Those whose memory a graph uses come on top: they stay with the object.
constexpr std::size_t kPlans = 32;

struct Plan {
    LinearMatmul matmul;
    DeviceMemory memory;  // where no workspace was given
    bool pinned = false;  // a graph was recorded that uses the memory
};

Status check(LinearShape const& shape, Type type) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    auto const between = [](int64_t size, int64_t least) { return size >= least && size <= kMost; };
    if (!between(shape.rows, 0) || !between(shape.inputs, 1) || !between(shape.outputs, 1)) {
        return Status::failed("a projection has 0 to 2147483647 rows, 1 to as many inputs and outputs; got "
                              + std::to_string(shape.rows) + " rows, " + std::to_string(shape.inputs)
                              + " inputs, " + std::to_string(shape.outputs)
                              + " outputs; try other sizes of x and of the weight");
    }
    if (type != Type::kHalf && type != Type::kBFloat16) {
        return Status::failed("a projection is in FP16 or BF16; got type "
                              + std::to_string(static_cast<int32_t>(type))
                              + "; try casting x, the weight and the bias");
    }
    return Status();
}

Status check(LinearPointers const& pointers, bool has_bias) {
    auto const missing = [](char const* name) {
        return Status::failed(std::string("a projection got no address of ") + name
                              + "; try setting the addresses of all inputs and outputs");
    };
    if (pointers.x == nullptr) {
        return missing("x");
    }
    if (pointers.weight == nullptr) {
        return missing("the weight");
    }
    if (pointers.y == nullptr) {
        return missing("y");
    }
    return has_bias && pointers.bias == nullptr ? missing("the bias") : Status();
}

// In three steps, so that oddly placed tensors do not have a plan for every address.
Status alignment_of(LinearPointers const& pointers, bool has_bias, uint32_t& alignment) {
    auto const bits = reinterpret_cast<uintptr_t>(pointers.x) | reinterpret_cast<uintptr_t>(pointers.weight)
                      | reinterpret_cast<uintptr_t>(pointers.y)
                      | (has_bias ? reinterpret_cast<uintptr_t>(pointers.bias) : uintptr_t{0});
    for (uint32_t const step : {kFullAlignment, 16U, 2U}) {
        if (bits % step == 0) {
            alignment = step;
            return Status();
        }
    }
    return Status::failed("a projection got an odd address; try tensors aligned to 256 bytes");
}

}  // namespace

std::vector<std::byte> serialize(LinearParameters const& parameters) {
    BlobWriter writer(kMagic, kVersion);
    writer.add(parameters.has_bias);
    return writer.finish();
}

Status deserialize(void const* bytes, std::size_t size, LinearParameters& parameters) {
    BlobReader reader;
    if (Status status = reader.open(bytes, size, kMagic, kVersion, "linear"); !status.ok()) {
        return status;
    }
    LinearParameters read;
    reader.take(read.has_bias);
    if (Status status = reader.finish(); !status.ok()) {
        return status;
    }
    parameters = read;
    return Status();
}

struct LinearWork::State {
    LinearParameters parameters;
    Driver const* driver = nullptr;
    Context context;  // the one that the handle and the memory belong to
    CublasLt const* library = nullptr;
    LtHandle handle{nullptr, nullptr};
    std::list<Plan> plans;  // the last used first

    Status open();
    Status plan(LinearProblem const& problem, bool capturing, Plan*& plan);
    Status workspace(Plan& plan, bool capturing, void*& workspace, std::size_t given) const;
    void make_room();
};

// Once; later only a look at whether the context is still the same.
Status LinearWork::State::open() {
    Context current;
    if (Status status = current_context(*driver, current); !status.ok()) {
        return status;
    }
    if (handle != nullptr) {
        if (current == context) {
            return Status();
        }
        return Status::failed("a projection was prepared in one CUDA context; got another one; "
                              "try an execution context for each");
    }
    OutsideCapture const outside(*driver);
    context = current;
    return make_handle(library, handle);
}

void LinearWork::State::make_room() {
    std::size_t kept = 0;
    for (auto plan = plans.begin(); plan != plans.end();) {
        bool const goes = !plan->pinned && ++kept >= kPlans;
        plan = goes ? plans.erase(plan) : std::next(plan);
    }
}

Status LinearWork::State::plan(LinearProblem const& problem, bool capturing, Plan*& plan) {
    if (Status status = open(); !status.ok()) {
        return status;
    }
    for (auto known = plans.begin(); known != plans.end(); ++known) {
        if (known->matmul.problem() == problem) {
            plans.splice(plans.begin(), plans, known);
            plan = &plans.front();
            return Status();
        }
    }
    if (!capturing) {  // freeing waits for the device, which is no business of a recording
        make_room();
    }
    OutsideCapture const outside(*driver);
    std::list<Plan> made(1);
    Plan& fresh = made.front();
    if (Status status = fresh.matmul.make(*library, handle.get(), problem); !status.ok()) {
        return status;
    }
    plans.splice(plans.begin(), made);
    plan = &plans.front();
    return Status();
}

// `workspace` is the caller's on the way in, and the one to use on the way out.
Status LinearWork::State::workspace(
    Plan& plan, bool capturing, void*& workspace, std::size_t given) const {
    std::size_t const wanted = plan.matmul.workspace_bytes();
    if (wanted == 0) {
        workspace = nullptr;
        return Status();
    }
    bool const aligned = reinterpret_cast<uintptr_t>(workspace) % kFullAlignment == 0;
    if (workspace != nullptr && given >= wanted && aligned) {
        return Status();
    }
    if (plan.memory.address() == 0) {
        OutsideCapture const outside(*driver);
        if (Status status = plan.memory.allocate(*driver, wanted); !status.ok()) {
            return status;
        }
    }
    plan.pinned = plan.pinned || capturing;
    workspace = reinterpret_cast<void*>(plan.memory.address());
    return Status();
}

LinearWork::LinearWork(LinearParameters const& parameters) : state_(new (std::nothrow) State) {
    if (state_ != nullptr) {
        state_->parameters = parameters;
    }
}

LinearWork::~LinearWork() {
    release_in_context(state_);
}

Status LinearWork::prepare(LinearShape const& shape, Type type) {
    return guarded("prepare a projection", [&]() -> Status {
        if (state_ == nullptr) {
            return Status::failed("out of memory");
        }
        if (Status status = check(shape, type); !status.ok() || shape.rows == 0) {
            return status;
        }
        if (Status status = load_driver(state_->driver); !status.ok()) {
            return status;
        }
        Plan* plan = nullptr;
        return state_->plan({shape, type, state_->parameters.has_bias, kFullAlignment}, false, plan);
    });
}

std::size_t LinearWork::workspace_bytes(LinearShape const& shape, Type type) {
    if (!prepare(shape, type).ok() || shape.rows == 0) {
        return 0;
    }
    return kWorkspaceLimit;
}

Status LinearWork::run(LinearShape const& shape, Type type, LinearPointers const& pointers, void* workspace,
    std::size_t workspace_bytes, CUstream stream) {
    return guarded("run a projection", [&]() -> Status {
        if (state_ == nullptr) {
            return Status::failed("out of memory");
        }
        if (Status status = check(shape, type); !status.ok() || shape.rows == 0) {
            return status;
        }
        bool const has_bias = state_->parameters.has_bias;
        if (Status status = check(pointers, has_bias); !status.ok()) {
            return status;
        }
        LinearProblem problem{shape, type, has_bias, kFullAlignment};
        if (Status status = alignment_of(pointers, has_bias, problem.alignment); !status.ok()) {
            return status;
        }
        if (Status status = load_driver(state_->driver); !status.ok()) {
            return status;
        }
        bool const capturing = is_capturing(*state_->driver, stream);
        Plan* plan = nullptr;
        if (Status status = state_->plan(problem, capturing, plan); !status.ok()) {
            return status;
        }
        if (Status status = state_->workspace(*plan, capturing, workspace, workspace_bytes); !status.ok()) {
            return status;
        }
        return plan->matmul.launch(state_->handle.get(), pointers, workspace, stream);
    });
}

}  // namespace mha_deploy
