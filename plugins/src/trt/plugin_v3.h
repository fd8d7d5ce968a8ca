// The plugins for TensorRT 10 and later: IPluginV3 with its core, build and runtime capabilities in one
// object.
#pragma once

#include "body.h"

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

namespace mha_deploy::trt {

class PluginV3 final : public nvinfer1::IPluginV3,
                       public nvinfer1::IPluginV3OneCore,
                       public nvinfer1::IPluginV3OneBuild,
                       public nvinfer1::IPluginV3OneRuntime {
public:
    explicit PluginV3(std::unique_ptr<PluginBody> body);

    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override;
    PluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;

    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t outputs,
        nvinfer1::DataType const* input_types, int32_t inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t input_count,
        nvinfer1::DimsExprs const* shape_inputs, int32_t shape_input_count, nvinfer1::DimsExprs* outputs,
        int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
        int32_t inputs, int32_t outputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) const noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::PluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs,
        nvinfer1::PluginTensorDesc const* output_descs, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    std::unique_ptr<PluginBody> body_;
    // What getFieldsToSerialize points to has to outlive the call.
    std::vector<std::byte> bytes_;
    nvinfer1::PluginField field_;
    nvinfer1::PluginFieldCollection serialized_{};
};

class CreatorV3 final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit CreatorV3(LayerKind const& kind);

    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    PluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;

private:
    LayerKind const& kind_;
    nvinfer1::PluginFieldCollection fields_{};
};

}  // namespace mha_deploy::trt
