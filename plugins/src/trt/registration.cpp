#include "registration.h"

#include "layer.h"
#include "log.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

namespace mha_deploy::trt {

namespace {

#define MHA_DEPLOY_LIBRARY_OF(major) "libnvinfer.so." #major
#define MHA_DEPLOY_LIBRARY(major) MHA_DEPLOY_LIBRARY_OF(major)

constexpr char const* kTensorRT = MHA_DEPLOY_LIBRARY(NV_TENSORRT_MAJOR);

// A function of the TensorRT in this process; it is not loaded for our sake.
template <typename Function>
Function* function_named(char const* name) {
    void* const library = dlopen(kTensorRT, RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function*>(dlsym(library == nullptr ? RTLD_DEFAULT : library, name));
}

// The logger that TensorRT itself uses.
class TensorRTLogger final : public nvinfer1::ILoggerFinder {
public:
    nvinfer1::ILogger* findLogger() override {
        auto* const get = function_named<nvinfer1::ILogger*()>("getLogger");
        return get == nullptr ? nullptr : get();
    }
};

bool is_registered(nvinfer1::IPluginRegistry& registry, char const* name) {
#if NV_TENSORRT_MAJOR >= 10
    return registry.getCreator(name, kPluginVersion, kPluginNamespace) != nullptr;
#else
    return registry.getPluginCreator(name, kPluginVersion, kPluginNamespace) != nullptr;
#endif
}

}  // namespace

Status register_creators(NamedCreator const* creators, int32_t count) {
    auto* const get = function_named<nvinfer1::IPluginRegistry*()>("getPluginRegistry");
    nvinfer1::IPluginRegistry* const registry = get == nullptr ? nullptr : get();
    if (registry == nullptr) {
        return Status::failed(std::string("there is no ") + kTensorRT
                              + " in this process; load TensorRT before its plugins");
    }
    static TensorRTLogger logger;
    static std::mutex mutex;
    std::lock_guard<std::mutex> const lock(mutex);
    set_logger_finder(&logger);
    for (int32_t index = 0; index < count; ++index) {
        NamedCreator const& each = creators[index];
        bool const known = is_registered(*registry, each.name);
        if (!known && !registry->registerCreator(*each.creator, kPluginNamespace)) {
            return Status::failed(std::string("TensorRT's registry refuses the plugin ") + each.name);
        }
    }
    return Status();
}

}  // namespace mha_deploy::trt
