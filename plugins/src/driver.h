// CUDA's driver, found when it is first needed: the library loads on a machine without one, to be listed and
// checked.
#pragma once

#include "status.h"

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace mha_deploy {

// The functions of libcuda.so.1 that are used, and no others.
struct Driver {
    decltype(&cuInit) init = nullptr;
    decltype(&cuCtxGetDevice) current_device = nullptr;
    decltype(&cuCtxGetCurrent) current_context = nullptr;
    decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
    decltype(&cuModuleLoadData) load_module = nullptr;
    decltype(&cuModuleGetFunction) get_function = nullptr;
    decltype(&cuFuncSetAttribute) set_function_attribute = nullptr;
    decltype(&cuLaunchKernel) launch = nullptr;
    decltype(&cuMemAlloc) allocate = nullptr;
    decltype(&cuMemFree) free = nullptr;
    decltype(&cuMemcpyDtoDAsync) copy_async = nullptr;
    decltype(&cuMemsetD8Async) set_async = nullptr;
    decltype(&cuMemsetD32Async) set_words_async = nullptr;
    decltype(&cuStreamCreate) create_stream = nullptr;
    decltype(&cuStreamDestroy) destroy_stream = nullptr;
    decltype(&cuStreamSynchronize) synchronize = nullptr;
    decltype(&cuStreamIsCapturing) is_capturing = nullptr;
    decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode = nullptr;
    decltype(&cuGetErrorString) error_string = nullptr;
    decltype(&cuCtxGetId) context_id = nullptr;  // null before CUDA 12
};

// The driver, or why there is none.
Status load_driver(Driver const*& driver);

// A status of the driver as one of ours: what was tried, and what CUDA says.
Status status_of(CUresult result, char const* tried);

// What tells a context from every other of the process. An address does not: a new context may get that of
// one that was destroyed, and with it kernels and plans that are gone.
uint64_t number_of(Driver const& driver, CUcontext context);

// A kernel that the library carries (kernels/*.cu), loaded once for each context.
Status load_kernel(char const* name, CUfunction& function);

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
