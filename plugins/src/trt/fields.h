// The fields of a plugin: attributes of the ONNX node, as TensorRT's parser hands them over.
#pragma once

#include "../status.h"

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

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
    // An enumeration from 0 to its kLast.
    template <typename Choice, std::enable_if_t<std::is_enum_v<Choice>, int> = 0>
    void take(char const* name, Choice& value) {
        value = static_cast<Choice>(take_up_to(name, static_cast<int32_t>(Choice::kLast)));
    }

    nvinfer1::PluginField const* find(char const* name) const;
    Status const& status() const noexcept { return status_; }

private:
    nvinfer1::PluginField const* expect(char const* name, int32_t length);
    void take_integers(char const* name, int32_t* values, int32_t count);
    int32_t take_up_to(char const* name, int32_t most);
    void fail(std::string reason);

    nvinfer1::PluginFieldCollection const* collection_;
    Status status_;
};

inline nvinfer1::PluginField field_of(char const* name, float) {
    return {name, nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1};
}
inline nvinfer1::PluginField field_of(char const* name, std::array<int32_t, 3> const&) {
    return {name, nullptr, nvinfer1::PluginFieldType::kINT32, 3};
}
template <typename Integer>  // or an enumeration, or bool
nvinfer1::PluginField field_of(char const* name, Integer) {
    return {name, nullptr, nvinfer1::PluginFieldType::kINT32, 1};
}

// What parameters name in their `visit_fields`, as TensorRT lists them and hands them over.
template <typename Parameters>
std::vector<nvinfer1::PluginField> field_names() {
    std::vector<nvinfer1::PluginField> all;
    Parameters const none;
    Parameters::visit_fields(
        none, [&](char const* name, auto const& value) { all.push_back(field_of(name, value)); });
    return all;
}

template <typename Parameters>
Status take_fields(Fields& fields, Parameters& parameters) {
    Parameters::visit_fields(parameters, [&](char const* name, auto& value) { fields.take(name, value); });
    return fields.status().ok() ? parameters.check() : fields.status();
}

}  // namespace mha_deploy::trt
