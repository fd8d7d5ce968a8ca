#include "driver.h"

#include <dlfcn.h>

#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>

// Device code that the build embeds: one image for each file of kernels/, closed by a row of nulls.
extern "C" {
struct MhaDeployFatbin {
    char const* file;
    unsigned char const* image;
};
extern MhaDeployFatbin const mha_deploy_fatbins[];
}

namespace mha_deploy {
namespace {

// cuda.h renames functions to their newest version by macros; these two steps find the name that is meant.
#define MHA_DEPLOY_NAME_OF(function) #function
#define MHA_DEPLOY_LOAD(member, function) \
    loaded.driver.member = reinterpret_cast<decltype(loaded.driver.member)>( \
        find(library, MHA_DEPLOY_NAME_OF(function), loaded.missing));

struct Loaded {
    Driver driver;
    std::string missing;  // why there is no driver; empty where there is one
};

void* find(void* library, char const* name, std::string& missing) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr && missing.empty()) {
        missing = std::string("libcuda.so.1 has no ") + name + "; install a newer NVIDIA driver";
    }
    return symbol;
}

Loaded load() {
    Loaded loaded;
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        char const* const reason = dlerror();
        loaded.missing =
            std::string("there is no NVIDIA driver: ") + (reason != nullptr ? reason : "libcuda.so.1");
        return loaded;
    }
    MHA_DEPLOY_DRIVER_FUNCTIONS(MHA_DEPLOY_LOAD)
    loaded.driver.elapsed = reinterpret_cast<decltype(loaded.driver.elapsed)>(
        find(library, "cuEventElapsedTime", loaded.missing));
    loaded.driver.context_id = reinterpret_cast<decltype(&cuCtxGetId)>(dlsym(library, "cuCtxGetId"));
    if (loaded.missing.empty()) {
        CUresult const result = loaded.driver.init(0);
        if (result != CUDA_SUCCESS) {
            char const* text = nullptr;
            loaded.driver.error_string(result, &text);
            loaded.missing = std::string("the NVIDIA driver does not start: ")
                             + (text != nullptr ? text : std::to_string(result));
        }
    }
    return loaded;
}

#undef MHA_DEPLOY_LOAD
#undef MHA_DEPLOY_NAME_OF

// Never destroyed: streams and plans of other objects may still be let go while the process ends.
Loaded const& shared_driver() {
    static Loaded const& loaded = *new Loaded(load());
    return loaded;
}

uint64_t number_of(Driver const& driver, CUcontext context) {
    unsigned long long id = 0;
    if (driver.context_id != nullptr && driver.context_id(context, &id) == CUDA_SUCCESS) {
        return id;
    }
    return reinterpret_cast<std::uintptr_t>(context);
}

struct Kernels {
    std::mutex mutex;
    std::map<std::pair<uint64_t, unsigned char const*>, CUmodule> modules;
    std::map<std::pair<uint64_t, std::string>, CUfunction> functions;
};

Kernels& shared_kernels() {
    static Kernels& kernels = *new Kernels;
    return kernels;
}

Status module_of(Driver const& driver, Kernels& kernels, uint64_t context, MhaDeployFatbin const& fatbin,
    CUmodule& module) {
    auto const place = std::make_pair(context, fatbin.image);
    if (auto const known = kernels.modules.find(place); known != kernels.modules.end()) {
        module = known->second;
        return Status();
    }
    CUresult const result = driver.load_module(&module, fatbin.image);
    if (result != CUDA_SUCCESS) {
        return status_of(result, (std::string("load the kernels of ") + fatbin.file).c_str());
    }
    kernels.modules[place] = module;
    return Status();
}

Status find_kernel(Driver const& driver, char const* name, CUfunction& function) {
    Context context;
    RETURN_IF_FAILED(current_context(driver, context));
    Kernels& kernels = shared_kernels();
    std::lock_guard<std::mutex> const lock(kernels.mutex);
    auto const place = std::make_pair(context.number, std::string(name));
    if (auto const known = kernels.functions.find(place); known != kernels.functions.end()) {
        function = known->second;
        return Status();
    }
    OutsideCapture const outside(driver);
    Status reason = Status::failed(std::string("this library carries no kernel named ") + name);
    for (MhaDeployFatbin const* fatbin = mha_deploy_fatbins; fatbin->image != nullptr; ++fatbin) {
        if (place.second.rfind(std::string("mha_deploy_") + fatbin->file, 0) != 0) {
            continue;  // kernels are named after their files
        }
        CUmodule module = nullptr;
        if (Status const loaded = module_of(driver, kernels, context.number, *fatbin, module); !loaded.ok()) {
            reason = loaded;
        } else if (driver.get_function(&function, module, name) == CUDA_SUCCESS) {
            kernels.functions[place] = function;
            return Status();
        }
    }
    function = nullptr;
    return reason;
}

}  // namespace

Status current_context(Driver const& driver, Context& context) {
    context = Context();
    if (driver.current_context(&context.handle) != CUDA_SUCCESS || context.handle == nullptr) {
        return Status::failed("no CUDA context is current; select a device first");
    }
    context.number = number_of(driver, context.handle);
    return Status();
}

Status load_driver(Driver const*& driver) {
    try {
        Loaded const& loaded = shared_driver();
        driver = loaded.missing.empty() ? &loaded.driver : nullptr;
        return loaded.missing.empty() ? Status() : Status::failed(loaded.missing);
    } catch (std::exception const& error) {
        driver = nullptr;
        return Status::failed(std::string("cannot load the NVIDIA driver: ") + error.what());
    }
}

Status status_of(CUresult result, char const* tried) {
    if (result == CUDA_SUCCESS) {
        return Status();
    }
    Driver const* driver = nullptr;
    char const* text = nullptr;
    if (load_driver(driver).ok()) {
        driver->error_string(result, &text);
    }
    return Status::failed(std::string("could not ") + tried + ": CUDA says "
                          + (text != nullptr ? text : "error " + std::to_string(static_cast<int>(result))));
}

Status load_kernel(char const* name, CUfunction& function) {
    function = nullptr;
    Driver const* driver = nullptr;
    RETURN_IF_FAILED(load_driver(driver));
    try {
        return find_kernel(*driver, name, function);
    } catch (std::exception const& error) {
        return Status::failed(std::string("cannot load the kernel ") + name + ": " + error.what());
    }
}

Status KernelSlot::find(Driver const& driver, char const* name, CUfunction& function) {
    Context context;
    RETURN_IF_FAILED(current_context(driver, context));
    if (function_ == nullptr || name != name_ || !(context == context_)) {
        function_ = nullptr;
        RETURN_IF_FAILED(load_kernel(name, function_));
        name_ = name;
        context_ = context;
    }
    function = function_;
    return Status();
}

bool is_capturing(Driver const& driver, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return driver.is_capturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

OutsideCapture::OutsideCapture(Driver const& driver) : driver_(driver) {
    driver_.exchange_capture_mode(&mode_);
}

OutsideCapture::~OutsideCapture() {
    driver_.exchange_capture_mode(&mode_);
}

InContext::InContext(Driver const& driver, Context const& context) : driver_(driver) {
    if (context.handle == nullptr || number_of(driver_, context.handle) != context.number) {
        return;
    }
    CUcontext current = nullptr;
    bool const there = driver_.current_context(&current) == CUDA_SUCCESS && current == context.handle;
    pushed_ = !there && driver_.push_context(context.handle) == CUDA_SUCCESS;
    alive_ = there || pushed_;
}

InContext::~InContext() {
    CUcontext left = nullptr;
    if (pushed_) {
        driver_.pop_context(&left);
    }
}

DeviceMemory::~DeviceMemory() {
    if (address_ != 0) {
        OutsideCapture const outside(*driver_);
        driver_->free(address_);
    }
}

Status DeviceMemory::allocate(Driver const& driver, std::size_t bytes) {
    driver_ = &driver;
    ++counters.allocations;
    CUresult const result = driver.allocate(&address_, bytes);
    if (result != CUDA_SUCCESS) {
        address_ = 0;
        return status_of(result, ("take " + std::to_string(bytes) + " bytes of device memory").c_str());
    }
    bytes_ = bytes;
    return Status();
}

Status DeviceMemory::fill(uint32_t word) {
    // A stream of its own: the default one would wait for, and disturb, everything else on the device.
    CUstream stream = nullptr;
    if (CUresult const made = driver_->create_stream(&stream, CU_STREAM_NON_BLOCKING); made != CUDA_SUCCESS) {
        return status_of(made, "make a stream");
    }
    CUresult result = driver_->set_words_async(address_, word, bytes_ / sizeof(word), stream);
    if (result == CUDA_SUCCESS) {
        result = driver_->synchronize(stream);
    }
    driver_->destroy_stream(stream);
    return status_of(result, "fill device memory");
}

}  // namespace mha_deploy
