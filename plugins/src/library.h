// What the shared library shows: the functions that TensorRT's plugin registry looks for, and one that
// describes it.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#if NV_TENSORRT_MAJOR < 8
#error "These are headers of TensorRT before 8; give those of TensorRT 8.6 or later (TENSORRT_INCLUDE)."
#endif

#define MHA_DEPLOY_EXPORT __attribute__((visibility("default")))

extern "C" {

MHA_DEPLOY_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder);

#if NV_TENSORRT_MAJOR >= 10
MHA_DEPLOY_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);
#else
MHA_DEPLOY_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count);
#endif

// Add the plugins to the registry of the TensorRT in this process. Null where they are there, else why not.
MHA_DEPLOY_EXPORT char const* mha_deploy_register_plugins();

// JSON: name, version, plugin interface, versions it was built with, plugins, GPU architectures of its
// kernels.
MHA_DEPLOY_EXPORT char const* mha_deploy_plugins_info();

// How many attentions in FP8 this process has prepared with a kernel in FP8, or, for 0, with another one.
MHA_DEPLOY_EXPORT int32_t mha_deploy_fp8_attentions(int32_t with_fp8_kernel);
}
