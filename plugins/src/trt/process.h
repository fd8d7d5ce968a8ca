// Functions of the TensorRT in this process; it is not loaded for our sake.
#pragma once

#include <NvInferRuntime.h>

#include <dlfcn.h>

namespace mha_deploy::trt {

#define MHA_DEPLOY_LIBRARY_OF(major) "libnvinfer.so." #major
#define MHA_DEPLOY_LIBRARY(major) MHA_DEPLOY_LIBRARY_OF(major)
inline constexpr char const* kTensorRT = MHA_DEPLOY_LIBRARY(NV_TENSORRT_MAJOR);
#undef MHA_DEPLOY_LIBRARY
#undef MHA_DEPLOY_LIBRARY_OF

template <typename Function>
Function* function_named(char const* name) {
    void* const library = dlopen(kTensorRT, RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function*>(dlsym(library == nullptr ? RTLD_DEFAULT : library, name));
}

// Null where there is no TensorRT.
inline nvinfer1::IPluginRegistry* plugin_registry() {
    auto* const get = function_named<nvinfer1::IPluginRegistry*()>("getPluginRegistry");
    return get == nullptr ? nullptr : get();
}

}  // namespace mha_deploy::trt
