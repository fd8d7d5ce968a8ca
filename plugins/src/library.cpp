#include "library.h"

#include "trt/layer.h"
#include "trt/log.h"
#include "trt/registration.h"

#if NV_TENSORRT_MAJOR >= 10
#include "trt/plugin_v3.h"
using Creator = mha_deploy::trt::CreatorV3;
#define MHA_DEPLOY_INTERFACE "IPluginV3"
#else
#include "trt/plugin_v2.h"
using Creator = mha_deploy::trt::CreatorV2;
#define MHA_DEPLOY_INTERFACE "IPluginV2DynamicExt"
#endif
using mha_deploy::trt::CreatorInterface;
using mha_deploy::trt::NamedCreator;

#include <cudnn_frontend_version.h>

#include <array>
#include <string>

#define MHA_DEPLOY_TEXT_OF(value) #value
#define MHA_DEPLOY_TEXT(value) MHA_DEPLOY_TEXT_OF(value)
#define MHA_DEPLOY_DOTTED(major, minor, patch) \
    MHA_DEPLOY_TEXT(major) "." MHA_DEPLOY_TEXT(minor) "." MHA_DEPLOY_TEXT(patch)
#define MHA_DEPLOY_TENSORRT MHA_DEPLOY_DOTTED(NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR, NV_TENSORRT_PATCH)
#define MHA_DEPLOY_CUDNN_FRONTEND \
    MHA_DEPLOY_DOTTED( \
        CUDNN_FRONTEND_MAJOR_VERSION, CUDNN_FRONTEND_MINOR_VERSION, CUDNN_FRONTEND_PATCH_VERSION)
#define MHA_DEPLOY_PLUGIN(name) "{\"name\": \"" name "\", \"version\": \"1\", \"namespace\": \"mha_deploy\"}"

namespace {

CreatorInterface* const* creators(int32_t& count) {
    static Creator attention(mha_deploy::trt::attention_kind());
    static Creator linear(mha_deploy::trt::linear_kind());
    static Creator rowwise(mha_deploy::trt::rowwise_kind());
    static std::array<CreatorInterface*, 3> const all{&attention, &linear, &rowwise};
    count = static_cast<int32_t>(all.size());
    return all.data();
}

}  // namespace

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    mha_deploy::trt::set_logger_finder(finder);
}

#if NV_TENSORRT_MAJOR >= 10
extern "C" CreatorInterface* const* getCreators(int32_t& count) {
    return creators(count);
}
#else
extern "C" CreatorInterface* const* getPluginCreators(int32_t& count) {
    return creators(count);
}
#endif

extern "C" char const* mha_deploy_register_plugins() {
    static thread_local std::string reason;
    try {
        int32_t count = 0;
        CreatorInterface* const* const all = creators(count);
        std::array<NamedCreator, 3> const named{{{mha_deploy::trt::attention_kind().name, all[0]},
            {mha_deploy::trt::linear_kind().name, all[1]}, {mha_deploy::trt::rowwise_kind().name, all[2]}}};
        reason = mha_deploy::trt::register_creators(named.data(), count).reason();
        return reason.empty() ? nullptr : reason.c_str();
    } catch (...) {
        return "there is too little memory to register plugins";
    }
}

// MHA_DEPLOY_VERSION and MHA_DEPLOY_ARCHITECTURES come from the build, the other versions from the headers.
extern "C" char const* mha_deploy_plugins_info() {
    return "{\"library\": \"mha_deploy_plugins\", \"version\": \"" MHA_DEPLOY_VERSION "\""
           ", \"interface\": \"" MHA_DEPLOY_INTERFACE "\""
           ", \"tensorrt\": \"" MHA_DEPLOY_TENSORRT "\""
           ", \"cudnn_frontend\": \"" MHA_DEPLOY_CUDNN_FRONTEND "\""
           ", \"plugins\": [" MHA_DEPLOY_PLUGIN("MhaDeployAttention") ", "
           MHA_DEPLOY_PLUGIN("MhaDeployLinear") ", " MHA_DEPLOY_PLUGIN("MhaDeployRowwise") "]"
           ", \"architectures\": [" MHA_DEPLOY_ARCHITECTURES "]}";
}
