// The plugins for TensorRT 10 and later: IPluginV3 with its core, build and runtime capabilities in one
// object.
#pragma once

#include "body.h"
#include "log.h"
#include "resource.h"

#include <NvInferRuntime.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace mha_deploy::trt {

// From 10.3 on a plugin can say that an output is the memory of an input.
#if NV_TENSORRT_MAJOR > 10 || NV_TENSORRT_MINOR >= 3
using BuildCapability = nvinfer1::IPluginV3OneBuildV2;
#define MHA_DEPLOY_ALIASES 1
#else
using BuildCapability = nvinfer1::IPluginV3OneBuild;
#define MHA_DEPLOY_ALIASES 0
#endif

class PluginV3 final : public nvinfer1::IPluginV3,
                       public nvinfer1::IPluginV3OneCore,
                       public BuildCapability,
                       public nvinfer1::IPluginV3OneRuntime {
    using DataType = nvinfer1::DataType;
    using DimsExprs = nvinfer1::DimsExprs;
    using DynamicPluginTensorDesc = nvinfer1::DynamicPluginTensorDesc;
    using PluginTensorDesc = nvinfer1::PluginTensorDesc;

public:
    static constexpr char const* kSerializedField = "parameters";

    explicit PluginV3(std::unique_ptr<PluginBody> body) : body_(std::move(body)) {}

    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
            case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<BuildCapability*>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME:
                return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    PluginV3* clone() noexcept override {
        return guarded<PluginV3*>(getPluginName(), nullptr, [&] { return new PluginV3(body_->clone()); });
    }
    // The memory of a call is TensorRT's workspace, so of the context's resources none is needed; the handles
    // of cuDNN and cuBLASLt are shared through the registry.
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
        return guarded<PluginV3*>(getPluginName(), nullptr, [&] {
            auto attached = std::make_unique<PluginV3>(body_->clone());
            attached->handles_.acquire();
            return attached.release();
        });
    }

    char const* getPluginName() const noexcept override { return body_->layer().name(); }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
    char const* getMetadataString() noexcept override { return "mha_deploy, interface version 1"; }

    int32_t getNbOutputs() const noexcept override { return body_->layer().outputs(); }
    int32_t getOutputDataTypes(DataType* output_types, int32_t outputs, DataType const* input_types,
        int32_t) const noexcept override {
        for (int32_t i = 0; i < outputs; ++i) {
            output_types[i] = body_->output_type(i, input_types[0]);
        }
        return 0;
    }
    int32_t getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
        DimsExprs* outputs, int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept override {
        return answered([&] {
            Status status;
            for (int32_t i = 0; status.ok() && i < output_count; ++i) {
                status = body_->output_dims(i, inputs, input_count, builder, outputs[i]);
            }
            return status;
        });
    }
    bool supportsFormatCombination(
        int32_t position, DynamicPluginTensorDesc const* tensors, int32_t, int32_t) noexcept override {
        return body_->supports(position, tensors[position].desc, tensors[0].desc);
    }
    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t count,
        DynamicPluginTensorDesc const*, int32_t) noexcept override {
        return answered([&] {
            tactics_ = 0;
            RETURN_IF_FAILED(body_->configure(inputs, count));
            std::vector<Dims> const usual = sizes_of(inputs, count, &DynamicPluginTensorDesc::opt);
            bool const known = std::all_of(inputs, inputs + count,
                [](DynamicPluginTensorDesc const& input) { return is_concrete(input.opt); });
            tactics_ = known ? body_->propose_tactics(usual, inputs[0].desc.type) : 0;
            return Status();
        });
    }

    // TensorRT times these at the usual sizes, and keeps the times in its timing cache; other sizes of a dynamic
    // layer are measured in getWorkspaceSize, since it does not ask for them.
    int32_t getNbTactics() noexcept override { return tactics_; }
    int32_t getValidTactics(int32_t* tactics, int32_t count) noexcept override {
        return answered([&] {
            std::iota(tactics, tactics + count, 1);  // 0 is TensorRT's own
            body_->offer_tactics();
            return Status();
        });
    }
    char const* getTimingCacheID() noexcept override {
        return guarded<char const*>(getPluginName(), nullptr, [&]() -> char const* {
            timing_key_ = body_->layer().timing_key();
            return timing_key_.empty() ? nullptr : timing_key_.c_str();
        });
    }
    int32_t setTactic(int32_t tactic) noexcept override {
        body_->set_tactic(tactic);
        return 0;
    }
    size_t getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t count,
        DynamicPluginTensorDesc const*, int32_t) const noexcept override {
        return guarded<size_t>(getPluginName(), 0, [&] {
            DataType const type = inputs[0].desc.type;
            body_->tune(sizes_of(inputs, count, &DynamicPluginTensorDesc::opt), type);
            return body_->workspace_bytes(sizes_of(inputs, count, &DynamicPluginTensorDesc::max), type);
        });
    }
#if MHA_DEPLOY_ALIASES
    int32_t getAliasedInput(int32_t output) noexcept override { return body_->layer().aliased_input(output); }
#endif

    int32_t onShapeChange(
        PluginTensorDesc const* inputs, int32_t count, PluginTensorDesc const*, int32_t) noexcept override {
        return answered([&] { return body_->prepare(inputs, count); });
    }
    int32_t enqueue(PluginTensorDesc const* descs, PluginTensorDesc const*, void const* const* inputs,
        void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        return answered([&] { return body_->run(descs, CallMemory{inputs, outputs, workspace, 0, stream}); });
    }
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        return guarded<nvinfer1::PluginFieldCollection const*>(getPluginName(), nullptr, [&] {
            bytes_ = body_->serialize();
            field_ = nvinfer1::PluginField(kSerializedField, bytes_.data(),
                nvinfer1::PluginFieldType::kUNKNOWN, static_cast<int32_t>(bytes_.size()));
            serialized_.nbFields = 1;
            serialized_.fields = &field_;
            return &serialized_;
        });
    }

private:
    // TensorRT's answer: 0 where all is well.
    template <typename Work>
    int32_t answered(Work const& work) noexcept {
        return guarded<int32_t>(
            getPluginName(), 1, [&] { return logged_ok(getPluginName(), work()) ? 0 : 1; });
    }

    AttachedHandles handles_;
    std::unique_ptr<PluginBody> body_;
    int32_t tactics_ = 0;
    std::string timing_key_;
    // What getFieldsToSerialize points to has to outlive the call.
    std::vector<std::byte> bytes_;
    nvinfer1::PluginField field_;
    nvinfer1::PluginFieldCollection serialized_{};
};

class CreatorV3 final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit CreatorV3(LayerKind const& kind) : kind_(kind) {
        fields_.nbFields = static_cast<int32_t>(kind.fields.size());
        fields_.fields = kind.fields.data();
    }

    char const* getPluginName() const noexcept override { return kind_.name; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &fields_; }
    PluginV3* createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override {
        return guarded<PluginV3*>(kind_.name, nullptr, [&] {
            std::unique_ptr<PluginBody> body;
            Status const status = phase == nvinfer1::TensorRTPhase::kRUNTIME
                                      ? from_serialized(fields, body)
                                      : body_from_fields(kind_, fields, body);
            return logged_ok(kind_.name, status) ? new PluginV3(std::move(body)) : nullptr;
        });
    }

private:
    Status from_serialized(
        nvinfer1::PluginFieldCollection const* collection, std::unique_ptr<PluginBody>& body) const {
        nvinfer1::PluginField const* const field = Fields(collection).find(PluginV3::kSerializedField);
        if (field == nullptr || field->length < 0) {
            return Status::failed("the engine holds no bytes named 'parameters' for this plugin; "
                                  "build the engine again with this library");
        }
        return PluginBody::deserialize(kind_, field->data, static_cast<std::size_t>(field->length), body);
    }

    LayerKind const& kind_;
    nvinfer1::PluginFieldCollection fields_{};
};

}  // namespace mha_deploy::trt
