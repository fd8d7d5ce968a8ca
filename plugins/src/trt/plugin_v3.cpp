#include "plugin_v3.h"

#include "log.h"

#include <algorithm>
#include <utility>

namespace mha_deploy::trt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr char const* kSerializedField = "parameters";

Status body_from_serialized(LayerKind const& kind, nvinfer1::PluginFieldCollection const* collection,
    std::unique_ptr<PluginBody>& body) {
    PluginField const* const field = Fields(collection).find(kSerializedField);
    if (field == nullptr || (field->type != PluginFieldType::kINT8 && field->type != PluginFieldType::kCHAR)
        || field->length < 0) {
        return Status::failed(
            "the engine holds no bytes named 'parameters' for this plugin; "
            "build the engine again with this library");
    }
    return PluginBody::deserialize(kind, field->data, static_cast<std::size_t>(field->length), body);
}

}  // namespace

PluginV3::PluginV3(std::unique_ptr<PluginBody> body) : body_(std::move(body)) {}

nvinfer1::IPluginCapability* PluginV3::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

PluginV3* PluginV3::clone() noexcept {
    return guarded<PluginV3*>(getPluginName(), nullptr, [&] { return new PluginV3(body_->clone()); });
}

char const* PluginV3::getPluginName() const noexcept {
    return body_->layer().name();
}

char const* PluginV3::getPluginVersion() const noexcept {
    return kPluginVersion;
}

char const* PluginV3::getPluginNamespace() const noexcept {
    return kPluginNamespace;
}

int32_t PluginV3::getNbOutputs() const noexcept {
    return body_->layer().outputs();
}

int32_t PluginV3::getOutputDataTypes(
    DataType* output_types, int32_t outputs, DataType const* input_types, int32_t) const noexcept {
    std::fill_n(output_types, outputs, input_types[0]);
    return 0;
}

int32_t PluginV3::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
    DimsExprs* outputs, int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept {
    return guarded<int32_t>(getPluginName(), 1, [&] {
        for (int32_t i = 0; i < output_count; ++i) {
            Status const status = body_->output_dims(i, inputs, input_count, builder, outputs[i]);
            if (!logged_ok(getPluginName(), status)) {
                return 1;
            }
        }
        return 0;
    });
}

bool PluginV3::supportsFormatCombination(
    int32_t position, DynamicPluginTensorDesc const* tensors, int32_t, int32_t) noexcept {
    return body_->supports(position, tensors[position].desc, tensors[0].desc);
}

int32_t PluginV3::configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t input_count,
    DynamicPluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(getPluginName(), 1,
        [&] { return logged_ok(getPluginName(), body_->check_largest(inputs, input_count)) ? 0 : 1; });
}

size_t PluginV3::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t input_count,
    DynamicPluginTensorDesc const*, int32_t) const noexcept {
    return guarded<size_t>(getPluginName(), 0,
        [&] { return body_->workspace_bytes(largest_sizes_of(inputs, input_count), inputs[0].desc.type); });
}

int32_t PluginV3::onShapeChange(
    PluginTensorDesc const* inputs, int32_t input_count, PluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(getPluginName(), 1,
        [&] { return logged_ok(getPluginName(), body_->prepare(inputs, input_count)) ? 0 : 1; });
}

int32_t PluginV3::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*,
    void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded<int32_t>(getPluginName(), 1, [&] {
        CallMemory const memory{inputs, outputs, workspace, 0, stream};
        return logged_ok(getPluginName(), body_->run(input_descs, memory)) ? 0 : 1;
    });
}

nvinfer1::IPluginV3* PluginV3::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    return clone();
}

nvinfer1::PluginFieldCollection const* PluginV3::getFieldsToSerialize() noexcept {
    return guarded<nvinfer1::PluginFieldCollection const*>(getPluginName(), nullptr, [&] {
        bytes_ = body_->serialize();
        field_ = PluginField(
            kSerializedField, bytes_.data(), PluginFieldType::kINT8, static_cast<int32_t>(bytes_.size()));
        serialized_.nbFields = 1;
        serialized_.fields = &field_;
        return &serialized_;
    });
}

CreatorV3::CreatorV3(LayerKind const& kind) : kind_(kind) {
    fields_.nbFields = static_cast<int32_t>(kind.fields.size());
    fields_.fields = kind.fields.data();
}

char const* CreatorV3::getPluginName() const noexcept {
    return kind_.name;
}

char const* CreatorV3::getPluginVersion() const noexcept {
    return kPluginVersion;
}

char const* CreatorV3::getPluginNamespace() const noexcept {
    return kPluginNamespace;
}

nvinfer1::PluginFieldCollection const* CreatorV3::getFieldNames() noexcept {
    return &fields_;
}

PluginV3* CreatorV3::createPlugin(
    char const*, nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase) noexcept {
    return guarded<PluginV3*>(kind_.name, nullptr, [&] {
        std::unique_ptr<PluginBody> body;
        Status const status = phase == nvinfer1::TensorRTPhase::kRUNTIME
                                ? body_from_serialized(kind_, fields, body)
                                : body_from_fields(kind_, fields, body);
        return logged_ok(kind_.name, status) ? new PluginV3(std::move(body)) : nullptr;
    });
}

}  // namespace mha_deploy::trt
