// The plugins for TensorRT 8: IPluginV2DynamicExt.
#pragma once

#include "body.h"
#include "log.h"

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mha_deploy::trt {

class PluginV2 final : public nvinfer1::IPluginV2DynamicExt {
    using DataType = nvinfer1::DataType;
    using DimsExprs = nvinfer1::DimsExprs;
    using DynamicPluginTensorDesc = nvinfer1::DynamicPluginTensorDesc;
    using PluginTensorDesc = nvinfer1::PluginTensorDesc;

public:
    PluginV2(std::unique_ptr<PluginBody> body, std::string plugin_namespace)
        : body_(std::move(body)), namespace_(std::move(plugin_namespace)) {}

    char const* getPluginType() const noexcept override { return body_->layer().name(); }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }
    void setPluginNamespace(char const* text) noexcept override {
        guarded(getPluginType(), 0, [&] { return namespace_ = text == nullptr ? "" : text, 0; });
    }
    int32_t getNbOutputs() const noexcept override { return body_->layer().outputs(); }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    void destroy() noexcept override { delete this; }
    PluginV2* clone() const noexcept override {
        return guarded<PluginV2*>(
            getPluginType(), nullptr, [&] { return new PluginV2(body_->clone(), namespace_); });
    }

    DataType getOutputDataType(int32_t output, DataType const* input_types, int32_t) const noexcept override {
        return body_->output_type(output, input_types[0]);
    }
    DimsExprs getOutputDimensions(int32_t output, DimsExprs const* inputs, int32_t count,
        nvinfer1::IExprBuilder& builder) noexcept override {
        DimsExprs const refused{-1, {}};  // this interface has no other way to say no
        return guarded(getPluginType(), refused, [&] {
            DimsExprs dims{};
            return is_ok(body_->output_dims(output, inputs, count, builder, dims)) ? dims : refused;
        });
    }
    bool supportsFormatCombination(
        int32_t position, PluginTensorDesc const* tensors, int32_t, int32_t) noexcept override {
        return body_->supports(position, tensors[position], tensors[0]);
    }

    // Called at build time, where sizes may still be unknown (-1), and when an execution context is given
    // sizes. There is no way to refuse from here: the reason is logged, and `enqueue` then fails for the
    // same.
    void configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t count, DynamicPluginTensorDesc const*,
        int32_t) noexcept override {
        guarded(getPluginType(), false, [&] {
            bool const concrete = std::all_of(inputs, inputs + count,
                [](DynamicPluginTensorDesc const& input) { return is_concrete(input.desc.dims); });
            if (!concrete) {
                return is_ok(body_->configure(inputs, count));
            }
            std::vector<PluginTensorDesc> tensors;
            std::transform(inputs, inputs + count, std::back_inserter(tensors),
                [](DynamicPluginTensorDesc const& input) { return input.desc; });
            return is_ok(body_->prepare(tensors.data(), count));
        });
    }
    size_t getWorkspaceSize(PluginTensorDesc const* inputs, int32_t count, PluginTensorDesc const*,
        int32_t) const noexcept override {
        return guarded<size_t>(getPluginType(), 0,
            [&] { return body_->workspace_bytes(sizes_of(inputs, count), inputs[0].type); });
    }
    int32_t enqueue(PluginTensorDesc const* descs, PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        return guarded<int32_t>(getPluginType(), 1, [&] {
            return is_ok(body_->run(descs, CallMemory{inputs, outputs, workspace, 0, stream})) ? 0 : 1;
        });
    }

    // TensorRT asks for the size, takes that much memory, and then for the bytes. Another clone may tune in
    // between, so both are of one serialisation.
    size_t getSerializationSize() const noexcept override {
        return guarded<size_t>(getPluginType(), 0, [&] {
            serialized_ = body_->serialize();
            return serialized_.size();
        });
    }
    void serialize(void* buffer) const noexcept override {
        std::memcpy(buffer, serialized_.data(), serialized_.size());
    }

private:
    bool is_ok(Status const& status) const noexcept { return logged_ok(getPluginType(), status); }

    std::unique_ptr<PluginBody> body_;
    std::string namespace_;
    mutable std::vector<std::byte> serialized_;  // as the size was asked for
};

class CreatorV2 final : public nvinfer1::IPluginCreator {
public:
    explicit CreatorV2(LayerKind const& kind) : kind_(kind) {
        fields_.nbFields = static_cast<int32_t>(kind.fields.size());
        fields_.fields = kind.fields.data();
    }

    char const* getPluginName() const noexcept override { return kind_.name; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }
    void setPluginNamespace(char const* text) noexcept override {
        guarded(kind_.name, 0, [&] { return namespace_ = text == nullptr ? "" : text, 0; });
    }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &fields_; }
    PluginV2* createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields) noexcept override {
        return made([&](std::unique_ptr<PluginBody>& body) { return body_from_fields(kind_, fields, body); });
    }
    PluginV2* deserializePlugin(char const*, void const* bytes, size_t size) noexcept override {
        return made([&](std::unique_ptr<PluginBody>& body) {
            return PluginBody::deserialize(kind_, bytes, size, body);
        });
    }

private:
    template <typename Make>
    PluginV2* made(Make const& make) const noexcept {
        return guarded<PluginV2*>(kind_.name, nullptr, [&] {
            std::unique_ptr<PluginBody> body;
            bool const ok = logged_ok(kind_.name, make(body));
            return ok ? new PluginV2(std::move(body), namespace_) : nullptr;
        });
    }

    LayerKind const& kind_;
    nvinfer1::PluginFieldCollection fields_{};
    std::string namespace_ = kPluginNamespace;
};

}  // namespace mha_deploy::trt
