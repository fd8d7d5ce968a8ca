#include "plugin_v2.h"

#include "log.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace mha_deploy::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

namespace {

char const* given(char const* text) {
    return text == nullptr ? "" : text;
}

}  // namespace

PluginV2::PluginV2(std::unique_ptr<PluginBody> body, std::string plugin_namespace)
    : body_(std::move(body)), namespace_(std::move(plugin_namespace)) {}

char const* PluginV2::getPluginType() const noexcept {
    return body_->layer().name();
}

char const* PluginV2::getPluginVersion() const noexcept {
    return kPluginVersion;
}

void PluginV2::setPluginNamespace(char const* plugin_namespace) noexcept {
    guarded(getPluginType(), 0, [&] { return namespace_ = given(plugin_namespace), 0; });
}

char const* PluginV2::getPluginNamespace() const noexcept {
    return namespace_.c_str();
}

int32_t PluginV2::getNbOutputs() const noexcept {
    return body_->layer().outputs();
}

PluginV2* PluginV2::clone() const noexcept {
    return guarded<PluginV2*>(
        getPluginType(), nullptr, [&] { return new PluginV2(body_->clone(), namespace_); });
}

DataType PluginV2::getOutputDataType(int32_t, DataType const* input_types, int32_t) const noexcept {
    return input_types[0];
}

DimsExprs PluginV2::getOutputDimensions(
    int32_t output, DimsExprs const* inputs, int32_t count, nvinfer1::IExprBuilder& builder) noexcept {
    DimsExprs const refused{-1, {}};  // this interface has no other way to say no
    return guarded(getPluginType(), refused, [&] {
        DimsExprs dims{};
        bool const ok = logged_ok(getPluginType(), body_->output_dims(output, inputs, count, builder, dims));
        return ok ? dims : refused;
    });
}

bool PluginV2::supportsFormatCombination(
    int32_t position, PluginTensorDesc const* tensors, int32_t, int32_t) noexcept {
    return body_->supports(position, tensors[position], tensors[0]);
}

// Called at build time, where sizes may still be unknown (-1), and when an execution context is given sizes.
// There is no way to refuse from here: the reason is logged, and `enqueue` then fails for the same one.
void PluginV2::configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t input_count,
    DynamicPluginTensorDesc const*, int32_t) noexcept {
    guarded(getPluginType(), false, [&] {
        bool const concrete = std::all_of(inputs, inputs + input_count,
            [](DynamicPluginTensorDesc const& input) { return is_concrete(input.desc.dims); });
        if (!concrete) {
            return logged_ok(getPluginType(), body_->check_largest(inputs, input_count));
        }
        std::vector<PluginTensorDesc> tensors;
        for (int32_t i = 0; i < input_count; ++i) {
            tensors.push_back(inputs[i].desc);
        }
        return logged_ok(getPluginType(), body_->prepare(tensors.data(), input_count));
    });
}

size_t PluginV2::getWorkspaceSize(
    PluginTensorDesc const* inputs, int32_t input_count, PluginTensorDesc const*, int32_t) const noexcept {
    return guarded<size_t>(getPluginType(), 0,
        [&] { return body_->workspace_bytes(sizes_of(inputs, input_count), inputs[0].type); });
}

int32_t PluginV2::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*,
    void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded<int32_t>(getPluginType(), 1, [&] {
        CallMemory const memory{inputs, outputs, workspace, 0, stream};
        return logged_ok(getPluginType(), body_->run(input_descs, memory)) ? 0 : 1;
    });
}

size_t PluginV2::getSerializationSize() const noexcept {
    return guarded<size_t>(getPluginType(), 0, [&] { return body_->serialize().size(); });
}

void PluginV2::serialize(void* buffer) const noexcept {
    guarded(getPluginType(), 0, [&] {
        std::vector<std::byte> const bytes = body_->serialize();
        std::memcpy(buffer, bytes.data(), bytes.size());
        return 0;
    });
}

CreatorV2::CreatorV2(LayerKind const& kind) : kind_(kind) {
    fields_.nbFields = static_cast<int32_t>(kind.fields.size());
    fields_.fields = kind.fields.data();
}

char const* CreatorV2::getPluginName() const noexcept {
    return kind_.name;
}

char const* CreatorV2::getPluginVersion() const noexcept {
    return kPluginVersion;
}

nvinfer1::PluginFieldCollection const* CreatorV2::getFieldNames() noexcept {
    return &fields_;
}

PluginV2* CreatorV2::createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields) noexcept {
    return guarded<PluginV2*>(kind_.name, nullptr, [&] {
        std::unique_ptr<PluginBody> body;
        bool const ok = logged_ok(kind_.name, body_from_fields(kind_, fields, body));
        return ok ? new PluginV2(std::move(body), namespace_) : nullptr;
    });
}

PluginV2* CreatorV2::deserializePlugin(char const*, void const* bytes, size_t size) noexcept {
    return guarded<PluginV2*>(kind_.name, nullptr, [&] {
        std::unique_ptr<PluginBody> body;
        bool const ok = logged_ok(kind_.name, PluginBody::deserialize(kind_, bytes, size, body));
        return ok ? new PluginV2(std::move(body), namespace_) : nullptr;
    });
}

void CreatorV2::setPluginNamespace(char const* plugin_namespace) noexcept {
    guarded(kind_.name, 0, [&] { return namespace_ = given(plugin_namespace), 0; });
}

char const* CreatorV2::getPluginNamespace() const noexcept {
    return namespace_.c_str();
}

}  // namespace mha_deploy::trt
