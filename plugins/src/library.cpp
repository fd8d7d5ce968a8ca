#include "library.h"

#include "driver.h"
#include "trt/layer.h"
#include "trt/log.h"
#include "trt/process.h"

#if NV_TENSORRT_MAJOR >= 10
#include "trt/plugin_v3.h"
using Creator = mha_deploy::trt::CreatorV3;
using CreatorInterface = nvinfer1::IPluginCreatorInterface;
#define MHA_DEPLOY_INTERFACE "IPluginV3"
#else
#include "trt/plugin_v2.h"
using Creator = mha_deploy::trt::CreatorV2;
using CreatorInterface = nvinfer1::IPluginCreator;
#define MHA_DEPLOY_INTERFACE "IPluginV2DynamicExt"
#endif

#include <cudnn_frontend_version.h>

#include <array>
#include <mutex>
#include <string>

#define MHA_DEPLOY_TEXT_OF(value) #value
#define MHA_DEPLOY_TEXT(value) MHA_DEPLOY_TEXT_OF(value)
#define MHA_DEPLOY_DOTTED(major, minor, patch) \
    MHA_DEPLOY_TEXT(major) "." MHA_DEPLOY_TEXT(minor) "." MHA_DEPLOY_TEXT(patch)
#define MHA_DEPLOY_TENSORRT MHA_DEPLOY_DOTTED(NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR, NV_TENSORRT_PATCH)
#define MHA_DEPLOY_CUDNN_FRONTEND \
    MHA_DEPLOY_DOTTED( \
        CUDNN_FRONTEND_MAJOR_VERSION, CUDNN_FRONTEND_MINOR_VERSION, CUDNN_FRONTEND_PATCH_VERSION)

namespace {

std::array<Creator*, 3> const& creators() {
    static Creator attention(mha_deploy::trt::attention_kind());
    static Creator linear(mha_deploy::trt::linear_kind());
    static Creator norm_activation(mha_deploy::trt::norm_activation_kind());
    static std::array<Creator*, 3> const all{&attention, &linear, &norm_activation};
    return all;
}

CreatorInterface* const* interfaces(int32_t& count) {
    static std::array<CreatorInterface*, 3> const all{creators()[0], creators()[1], creators()[2]};
    count = static_cast<int32_t>(all.size());
    return all.data();
}

// MHA_DEPLOY_VERSION and MHA_DEPLOY_ARCHITECTURES come from the build, the other versions from the headers.
std::string description() {
    std::string plugins;
    for (Creator* const creator : creators()) {
        plugins += plugins.empty() ? "" : ", ";
        plugins += std::string("{\"name\": \"") + creator->getPluginName() + "\", \"version\": \""
                   + mha_deploy::trt::kPluginVersion + "\", \"namespace\": \""
                   + mha_deploy::trt::kPluginNamespace + "\"}";
    }
    return "{\"library\": \"mha_deploy_plugins\", \"version\": \"" MHA_DEPLOY_VERSION "\""
           ", \"interface\": \"" MHA_DEPLOY_INTERFACE "\""
           ", \"tensorrt\": \"" MHA_DEPLOY_TENSORRT "\""
           ", \"cudnn_frontend\": \"" MHA_DEPLOY_CUDNN_FRONTEND "\""
           ", \"plugins\": [" + plugins + "], \"architectures\": [" MHA_DEPLOY_ARCHITECTURES "]}";
}

// The logger that TensorRT itself uses.
class TensorRTLogger final : public nvinfer1::ILoggerFinder {
public:
    nvinfer1::ILogger* findLogger() override {
        auto* const get = mha_deploy::trt::function_named<nvinfer1::ILogger*()>("getLogger");
        return get == nullptr ? nullptr : get();
    }
};

bool is_registered(nvinfer1::IPluginRegistry& registry, char const* name) {
#if NV_TENSORRT_MAJOR >= 10
    return registry.getCreator(name, mha_deploy::trt::kPluginVersion, mha_deploy::trt::kPluginNamespace)
           != nullptr;
#else
    return registry.getPluginCreator(name, mha_deploy::trt::kPluginVersion, mha_deploy::trt::kPluginNamespace)
           != nullptr;
#endif
}

// Registering with a TensorRT that is in the process already, without its registry's loadLibrary: that
// function has another place in the registry of 8.6.0 than in that of 8.6.1, so a caller made for one calls
// something else in the other. What is there already stays.
std::string register_creators() {
    nvinfer1::IPluginRegistry* const registry = mha_deploy::trt::plugin_registry();
    if (registry == nullptr) {
        return std::string("there is no ") + mha_deploy::trt::kTensorRT
               + " in this process; load TensorRT before its plugins";
    }
    static TensorRTLogger logger;
    static std::mutex mutex;
    std::lock_guard<std::mutex> const lock(mutex);
    mha_deploy::trt::set_logger_finder(&logger);
    for (Creator* const creator : creators()) {
        char const* const name = creator->getPluginName();
        bool const known = is_registered(*registry, name);
        if (!known && !registry->registerCreator(*creator, mha_deploy::trt::kPluginNamespace)) {
            return std::string("TensorRT's registry refuses the plugin ") + name;
        }
    }
    return "";
}

}  // namespace

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    mha_deploy::trt::set_logger_finder(finder);
}

#if NV_TENSORRT_MAJOR >= 10
extern "C" CreatorInterface* const* getCreators(int32_t& count) {
    return interfaces(count);
}
#else
extern "C" CreatorInterface* const* getPluginCreators(int32_t& count) {
    return interfaces(count);
}
#endif

extern "C" char const* mha_deploy_register_plugins() {
    static thread_local std::string reason;
    try {
        reason = register_creators();
        return reason.empty() ? nullptr : reason.c_str();
    } catch (...) {
        return "there is too little memory to register plugins";
    }
}

extern "C" int32_t mha_deploy_fp8_attentions(int32_t with_fp8_kernel) {
    return with_fp8_kernel != 0 ? mha_deploy::counters.fp8 : mha_deploy::counters.not_fp8;
}

extern "C" char const* mha_deploy_plugins_info() {
    static std::string const info = description();
    return info.c_str();
}
