// Registering with a TensorRT that is in the process already, without its registry's loadLibrary: that
// function has another place in the registry of 8.6.0 than in that of 8.6.1, so a caller made for one calls
// something else in the other.
#pragma once

#include "../status.h"

#include <NvInferRuntime.h>

#include <cstdint>

namespace mha_deploy::trt {

#if NV_TENSORRT_MAJOR >= 10
using CreatorInterface = nvinfer1::IPluginCreatorInterface;
#else
using CreatorInterface = nvinfer1::IPluginCreator;
#endif

// A creator, and the name by which TensorRT looks for it.
struct NamedCreator {
    char const* name;
    CreatorInterface* creator;
};

// Add the creators to TensorRT's registry, and find its logger. What is there already stays.
Status register_creators(NamedCreator const* creators, int32_t count);

}  // namespace mha_deploy::trt
