// The handles of cuBLASLt and cuDNN in one CUDA context, shared by all layers and execution contexts there.
#pragma once

#include "cublas_lt.h"
#include "driver.h"
#include "status.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace mha_deploy {

// Handles are made when they are first needed, and go with the last owner of this object.
class Handles {
public:
    // Those of a context: one object for all that hold it.
    static Status open(Driver const& driver, Context const& context, std::shared_ptr<Handles>& handles);

    Handles(Driver const& driver, Context const& context) : driver_(driver), context_(context) {}
    ~Handles();
    Handles(Handles const&) = delete;
    Handles& operator=(Handles const&) = delete;

    // cuBLASLt's: it holds no stream, so any number of threads may use it at the same time.
    Status cublas_lt(CublasLt const*& library, cublasLtHandle_t& handle);

private:
    friend class CudnnHandle;
    Status take_cudnn(void*& handle);
    void give_cudnn_back(void* handle) noexcept;

    Driver const& driver_;
    Context context_;
    std::mutex mutex_;
    CublasLt const* library_ = nullptr;
    LtHandle cublas_lt_{nullptr, nullptr};
    std::vector<void*> cudnn_;  // all of them
    // Those that no launch uses now. Taken and given back without a lock; where more than so many threads
    // launch at once, the others' handles wait in the list behind.
    std::array<std::atomic<void*>, 32> idle_cudnn_{};
    std::vector<void*> more_idle_cudnn_;
};

// A cuDNN handle for one launch. It has a stream, so a thread that launches meanwhile gets another one; there
// are as many as threads ever launched at once.
class CudnnHandle {
public:
    explicit CudnnHandle(Handles& handles) : handles_(handles), status_(handles.take_cudnn(handle_)) {}
    CudnnHandle(CudnnHandle const&) = delete;
    CudnnHandle& operator=(CudnnHandle const&) = delete;
    ~CudnnHandle() { handles_.give_cudnn_back(handle_); }

    Status const& status() const noexcept { return status_; }
    void* get() const noexcept { return handle_; }

private:
    Handles& handles_;
    void* handle_ = nullptr;
    Status status_;
};

}  // namespace mha_deploy
