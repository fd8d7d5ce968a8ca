#include "cublas_lt.h"

#include <dlfcn.h>

#include <mutex>

namespace mha_deploy {

namespace {

// Newest first: each has the kernels of more GPUs. One that is too new for the driver gives no handle.
constexpr char const* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"};

// The name of the first function that the library lacks, or nothing.
std::string find_functions(void* library, CublasLt& functions) {
#define MHA_DEPLOY_LOAD(member, function) \
    functions.member = reinterpret_cast<decltype(functions.member)>(dlsym(library, #function)); \
    if (functions.member == nullptr) { \
        return #function; \
    }
    MHA_DEPLOY_CUBLASLT_FUNCTIONS(MHA_DEPLOY_LOAD)
#undef MHA_DEPLOY_LOAD
    return "";
}

Status handle_of(CublasLt const& library, LtHandle& handle) {
    cublasLtHandle_t made = nullptr;
    cublasStatus_t const status = library.create(&made);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status_of(status, "make a handle");
    }
    handle = LtHandle(made, library.destroy);
    return Status();
}

// Why this library is not the one, or nothing, with the functions and the handle set.
std::string try_library(char const* name, CublasLt& functions, LtHandle& handle) {
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        return "not found";
    }
    std::string reason = find_functions(library, functions);
    if (!reason.empty()) {
        reason += " is missing";
    } else if (Status const status = handle_of(functions, handle); !status.ok()) {
        reason = status.reason();
    }
    // One that was refused stays loaded: CUDA's driver may know its kernels already.
    return reason;
}

struct Found {
    std::mutex mutex;
    bool there = false;
    CublasLt functions;
};

// Never destroyed: plans may be freed by other static objects after this one's turn.
Found& found() {
    static auto* const shared = new Found;
    return *shared;
}

}  // namespace

Status make_handle(CublasLt const*& library, LtHandle& handle) {
    Found& shared = found();
    std::lock_guard<std::mutex> const lock(shared.mutex);
    if (shared.there) {
        library = &shared.functions;
        return handle_of(shared.functions, handle);
    }
    std::string reasons;
    for (char const* const name : kNames) {
        CublasLt functions;
        std::string const reason = try_library(name, functions, handle);
        if (reason.empty()) {
            shared.functions = functions;
            shared.there = true;
            library = &shared.functions;
            return Status();
        }
        reasons += std::string(reasons.empty() ? "" : "; ") + name + ": " + reason;
    }
    return Status::failed("no cuBLASLt for the projections; got " + reasons
                          + "; try putting the folder of CUDA's libcublasLt on LD_LIBRARY_PATH");
}

std::string name_of(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "not initialized";
        case CUBLAS_STATUS_ALLOC_FAILED: return "out of memory";
        case CUBLAS_STATUS_INVALID_VALUE: return "invalid value";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "not for this GPU";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "execution failed";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "not supported";
        default: return "status " + std::to_string(static_cast<int>(status));
    }
}

Status status_of(cublasStatus_t status, std::string const& tried) {
    if (status == CUBLAS_STATUS_SUCCESS) {
        return Status();
    }
    return Status::failed("cuBLASLt could not " + tried + "; got \"" + name_of(status) + "\"");
}

}  // namespace mha_deploy
