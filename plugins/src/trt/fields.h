// The fields of a plugin: attributes of the ONNX node, as TensorRT's parser hands them over.
#pragma once

#include "../status.h"

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>

namespace mha_deploy::trt {

// Usage: `take` every field, then ask `status`, which holds the first thing that was wrong.
// Every field has to be there: a default would hide a misspelt attribute, which the parser drops silently.
class Fields {
public:
    explicit Fields(nvinfer1::PluginFieldCollection const* collection);

    void take(char const* name, int32_t& value);
    void take(char const* name, float& value);
    void take(char const* name, bool& value);
    void take(char const* name, std::array<int32_t, 3>& values);
    void take_between(char const* name, int32_t least, int32_t most, int32_t& value);

    nvinfer1::PluginField const* find(char const* name) const;
    Status const& status() const noexcept { return status_; }

private:
    nvinfer1::PluginField const* expect(char const* name, int32_t length);
    void take_integers(char const* name, int32_t* values, int32_t count);
    void fail(std::string reason);

    nvinfer1::PluginFieldCollection const* collection_;
    Status status_;
};

}  // namespace mha_deploy::trt
