// The plugins for TensorRT 8: IPluginV2DynamicExt.
#pragma once

#include "body.h"

#include <NvInferRuntime.h>

#include <memory>
#include <string>

namespace mha_deploy::trt {

class PluginV2 final : public nvinfer1::IPluginV2DynamicExt {
public:
    PluginV2(std::unique_ptr<PluginBody> body, std::string plugin_namespace);

    char const* getPluginType() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    void setPluginNamespace(char const* plugin_namespace) noexcept override;
    char const* getPluginNamespace() const noexcept override;
    int32_t getNbOutputs() const noexcept override;
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    void destroy() noexcept override { delete this; }
    PluginV2* clone() const noexcept override;

    nvinfer1::DataType getOutputDataType(
        int32_t index, nvinfer1::DataType const* input_types, int32_t inputs) const noexcept override;
    nvinfer1::DimsExprs getOutputDimensions(int32_t output, nvinfer1::DimsExprs const* inputs, int32_t count,
        nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::PluginTensorDesc const* tensors,
        int32_t inputs, int32_t outputs) noexcept override;
    void configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    size_t getWorkspaceSize(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::PluginTensorDesc const* outputs, int32_t output_count) const noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs,
        nvinfer1::PluginTensorDesc const* output_descs, void const* const* inputs, void* const* outputs,
        void* workspace, cudaStream_t stream) noexcept override;

    size_t getSerializationSize() const noexcept override;
    void serialize(void* buffer) const noexcept override;

private:
    std::unique_ptr<PluginBody> body_;
    std::string namespace_;
};

class CreatorV2 final : public nvinfer1::IPluginCreator {
public:
    explicit CreatorV2(LayerKind const& kind);

    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    PluginV2* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields) noexcept override;
    PluginV2* deserializePlugin(char const* name, void const* bytes, size_t size) noexcept override;
    void setPluginNamespace(char const* plugin_namespace) noexcept override;
    char const* getPluginNamespace() const noexcept override;

private:
    LayerKind const& kind_;
    nvinfer1::PluginFieldCollection fields_{};
    std::string namespace_ = kPluginNamespace;
};

}  // namespace mha_deploy::trt
