#include "handles.h"

#include "cudnn_attention.h"

#include <map>

namespace mha_deploy {

Status Handles::open(Driver const& driver, Context const& context, std::shared_ptr<Handles>& handles) {
    // Never destroyed: layers may go after other static objects.
    static std::mutex& mutex = *new std::mutex;
    static auto& all = *new std::map<uint64_t, std::weak_ptr<Handles>>;
    return guarded("share library handles", [&] {
        std::lock_guard<std::mutex> const lock(mutex);
        std::weak_ptr<Handles>& known = all[context.number];
        handles = known.lock();
        if (handles == nullptr) {
            known = handles = std::make_shared<Handles>(driver, context);
        }
        return Status();
    });
}

Handles::~Handles() {
    OutsideCapture const outside(driver_);
    InContext const in_context(driver_, context_);
    if (!in_context.alive()) {  // they went with the context
        static_cast<void>(cublas_lt_.release());
        return;
    }
    for (void* const handle : cudnn_) {
        destroy_cudnn_handle(handle);
    }
}

Status Handles::cublas_lt(CublasLt const*& library, cublasLtHandle_t& handle) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (cublas_lt_ == nullptr) {
        OutsideCapture const outside(driver_);
        RETURN_IF_FAILED(make_handle(library_, cublas_lt_));
        ++counters.handles;
    }
    library = library_;
    handle = cublas_lt_.get();
    return Status();
}

Status Handles::take_cudnn(void*& handle) {
    for (std::atomic<void*>& idle : idle_cudnn_) {
        handle = idle.load(std::memory_order_relaxed) == nullptr ? nullptr : idle.exchange(nullptr);
        if (handle != nullptr) {
            return Status();
        }
    }
    return guarded("take a cuDNN handle", [&] {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (!more_idle_cudnn_.empty()) {
            handle = more_idle_cudnn_.back();
            more_idle_cudnn_.pop_back();
            return Status();
        }
        OutsideCapture const outside(driver_);
        more_idle_cudnn_.reserve(cudnn_.size() + 1);  // so that giving back cannot fail
        cudnn_.reserve(cudnn_.size() + 1);
        RETURN_IF_FAILED(create_cudnn_handle(handle));
        ++counters.handles;
        cudnn_.push_back(handle);
        return Status();
    });
}

void Handles::give_cudnn_back(void* handle) noexcept {
    if (handle == nullptr) {
        return;
    }
    for (std::atomic<void*>& idle : idle_cudnn_) {
        void* none = nullptr;
        if (idle.compare_exchange_strong(none, handle)) {
            return;
        }
    }
    std::lock_guard<std::mutex> const lock(mutex_);
    more_idle_cudnn_.push_back(handle);
}

}  // namespace mha_deploy
