// CUDA's driver, found when it is first needed: the library loads on a machine without one, to be listed and
// checked.
#pragma once

#include "status.h"

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace mha_deploy {

// The functions of libcuda.so.1 that are used, and no others: what they are called here, and there.
#define MHA_DEPLOY_DRIVER_FUNCTIONS(X) \
    X(init, cuInit) \
    X(current_device, cuCtxGetDevice) \
    X(current_context, cuCtxGetCurrent) \
    X(push_context, cuCtxPushCurrent) \
    X(pop_context, cuCtxPopCurrent) \
    X(device_attribute, cuDeviceGetAttribute) \
    X(load_module, cuModuleLoadData) \
    X(get_function, cuModuleGetFunction) \
    X(set_function_attribute, cuFuncSetAttribute) \
    X(launch, cuLaunchKernel) \
    X(allocate, cuMemAlloc) \
    X(free, cuMemFree) \
    X(copy_async, cuMemcpyDtoDAsync) \
    X(copy_rows_async, cuMemcpy2DAsync) \
    X(copy_from_host, cuMemcpyHtoD) \
    X(set_async, cuMemsetD8Async) \
    X(set_words_async, cuMemsetD32Async) \
    X(create_stream, cuStreamCreate) \
    X(destroy_stream, cuStreamDestroy) \
    X(synchronize, cuStreamSynchronize) \
    X(is_capturing, cuStreamIsCapturing) \
    X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode) \
    X(begin_capture, cuStreamBeginCapture) \
    X(end_capture, cuStreamEndCapture) \
    X(instantiate, cuGraphInstantiateWithFlags) \
    X(launch_graph, cuGraphLaunch) \
    X(destroy_executable, cuGraphExecDestroy) \
    X(destroy_graph, cuGraphDestroy) \
    X(create_event, cuEventCreate) \
    X(record_event, cuEventRecord) \
    X(destroy_event, cuEventDestroy) \
    X(error_string, cuGetErrorString)

struct Driver {
#define MHA_DEPLOY_MEMBER(member, function) decltype(&function) member = nullptr;
    MHA_DEPLOY_DRIVER_FUNCTIONS(MHA_DEPLOY_MEMBER)
#undef MHA_DEPLOY_MEMBER
    CUresult (*elapsed)(float*, CUevent, CUevent) = nullptr;  // the form that every driver has
    decltype(&cuCtxGetId) context_id = nullptr;               // null before CUDA 12
};

// What a call should not do once its sizes are warm, counted for the tests.
struct Counters {
    std::atomic<int> plans{0};
    std::atomic<int> allocations{0};
    std::atomic<int> synchronisations{0};
    std::atomic<int> handles{0};
    // Attentions in FP8 that were prepared with a kernel in FP8, and with another one: what a builder asks for.
    std::atomic<int> fp8{0};
    std::atomic<int> not_fp8{0};

    int all() const noexcept { return plans + allocations + synchronisations + handles; }
};
inline Counters counters;

// The driver, or why there is none.
Status load_driver(Driver const*& driver);

// A status of the driver as one of ours: what was tried, and what CUDA says.
Status status_of(CUresult result, char const* tried);

// A context and what tells it from every other of the process. Its address does not: a new context may get
// that of one that was destroyed, and with it kernels and plans that are gone.
struct Context {
    CUcontext handle = nullptr;
    uint64_t number = 0;

    bool operator==(Context const& other) const noexcept { return number == other.number; }
};

// That of this thread, or that it has none.
Status current_context(Driver const& driver, Context& context);

// A kernel that the library carries (kernels/*.cu), loaded once for each context.
Status load_kernel(char const* name, CUfunction& function);

// A kernel that one object launches again and again: looked up once, and again for another name or context.
// Not for several threads at a time.
class KernelSlot {
public:
    // The name must stay where it is.
    Status find(Driver const& driver, char const* name, CUfunction& function);

private:
    char const* name_ = nullptr;
    Context context_;
    CUfunction function_ = nullptr;
};

// Whether the stream is recording a graph. Where that cannot be known it is taken to be.
bool is_capturing(Driver const& driver, CUstream stream);

// Lets this thread plan and take memory while another thread records a graph, which CUDA forbids by default.
class OutsideCapture {
public:
    explicit OutsideCapture(Driver const& driver);
    OutsideCapture(OutsideCapture const&) = delete;
    OutsideCapture& operator=(OutsideCapture const&) = delete;
    ~OutsideCapture();

private:
    Driver const& driver_;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Makes a context current as long as it lives: what is freed on a thread without one would stay taken.
class InContext {
public:
    InContext(Driver const& driver, Context const& context);
    InContext(InContext const&) = delete;
    InContext& operator=(InContext const&) = delete;
    ~InContext();

    // False where the context was destroyed meanwhile, and with it all that it held; a driver before CUDA 12
    // cannot tell.
    bool alive() const noexcept { return alive_; }

private:
    Driver const& driver_;
    bool alive_ = false;
    bool pushed_ = false;
};

// Lets the state of a piece of work go, in its context whatever thread this is, and while others record. What
// belonged to a context that is gone is left alone: it went with it, and freeing it again may do harm.
template <typename State>
void release_in_context(std::unique_ptr<State>& state) {
    if (state == nullptr || state->context.handle == nullptr) {
        return;  // nothing was taken
    }
    OutsideCapture const outside(*state->driver);
    InContext const in_context(*state->driver, state->context);
    if (in_context.alive()) {
        state.reset();
    } else {
        static_cast<void>(state.release());
    }
}

// Device memory that frees itself.
class DeviceMemory {
public:
    DeviceMemory() = default;
    DeviceMemory(DeviceMemory const&) = delete;
    DeviceMemory& operator=(DeviceMemory const&) = delete;
    ~DeviceMemory();

    Status allocate(Driver const& driver, std::size_t bytes);
    // Every 32-bit word, finished when this returns.
    Status fill(uint32_t word);

    CUdeviceptr address() const noexcept { return address_; }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    Driver const* driver_ = nullptr;
    CUdeviceptr address_ = 0;
    std::size_t bytes_ = 0;
};

}  // namespace mha_deploy
