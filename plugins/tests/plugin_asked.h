// The two plugin interfaces asked in the same words, so that one test serves both.
#pragma once

#include "plugin_host.h"

namespace host {

using Bytes = std::vector<char>;

#if NV_TENSORRT_MAJOR >= 10
using Plugin = mha_deploy::trt::PluginV3;
using Creator = mha_deploy::trt::CreatorV3;

struct Release {
    void operator()(Plugin* plugin) const { delete plugin; }
};
using PluginPointer = std::unique_ptr<Plugin, Release>;

inline std::vector<Creator*> creators() {
    int32_t count = 0;
    nvinfer1::IPluginCreatorInterface* const* const all = getCreators(count);
    std::vector<Creator*> own;
    for (int32_t i = 0; i < count; ++i) {
        own.push_back(static_cast<Creator*>(all[i]));
    }
    return own;
}

inline PluginPointer create(Creator& creator, FieldList& fields) {
    return PluginPointer(creator.createPlugin("node", fields.collection(), nvinfer1::TensorRTPhase::kBUILD));
}

inline PluginPointer load(Creator& creator, Bytes const& bytes) {
    FieldList fields;
    fields.put("parameters", bytes.data(), bytes.size(), PluginFieldType::kUNKNOWN, bytes.size());
    return PluginPointer(
        creator.createPlugin("node", fields.collection(), nvinfer1::TensorRTPhase::kRUNTIME));
}

inline Bytes save(Plugin& plugin) {
    nvinfer1::PluginFieldCollection const* const fields = plugin.getFieldsToSerialize();
    char const* const begin = static_cast<char const*>(fields->fields[0].data);
    return Bytes(begin, begin + fields->fields[0].length);
}

inline bool output_dims(Plugin& plugin, std::vector<nvinfer1::DimsExprs> const& inputs, Expressions& builder,
    std::vector<nvinfer1::DimsExprs>& outputs) {
    outputs.resize(static_cast<std::size_t>(plugin.getNbOutputs()));
    return plugin.getOutputShapes(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, 0,
               outputs.data(), plugin.getNbOutputs(), builder)
        == 0;
}

inline bool supports(Plugin& plugin, int32_t position,
    std::vector<nvinfer1::DynamicPluginTensorDesc> const& all, int32_t outputs) {
    return plugin.supportsFormatCombination(
        position, all.data(), static_cast<int32_t>(all.size()) - outputs, outputs);
}

inline std::size_t workspace(Plugin& plugin, std::vector<nvinfer1::DynamicPluginTensorDesc> const& inputs) {
    return plugin.getWorkspaceSize(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, 0);
}

// Whether these sizes were taken, as far as the interface says so.
inline bool configure(Plugin& plugin, std::vector<nvinfer1::DynamicPluginTensorDesc> const& inputs) {
    std::vector<nvinfer1::PluginTensorDesc> const known = plain(inputs);
    auto const count = static_cast<int32_t>(inputs.size());
    return plugin.configurePlugin(inputs.data(), count, nullptr, 0) == 0
        && plugin.onShapeChange(known.data(), count, nullptr, 0) == 0;
}

inline PluginPointer attach(Plugin& plugin) {
    return PluginPointer(static_cast<Plugin*>(plugin.attachToContext(nullptr)));
}

inline std::string name_of(Plugin& plugin) {
    return plugin.getPluginName();
}

#else
using Plugin = mha_deploy::trt::PluginV2;
using Creator = mha_deploy::trt::CreatorV2;

struct Release {
    void operator()(Plugin* plugin) const { plugin->destroy(); }
};
using PluginPointer = std::unique_ptr<Plugin, Release>;

inline std::vector<Creator*> creators() {
    int32_t count = 0;
    nvinfer1::IPluginCreator* const* const all = getPluginCreators(count);
    std::vector<Creator*> own;
    for (int32_t i = 0; i < count; ++i) {
        own.push_back(static_cast<Creator*>(all[i]));
    }
    return own;
}

inline PluginPointer create(Creator& creator, FieldList& fields) {
    return PluginPointer(creator.createPlugin("node", fields.collection()));
}

inline PluginPointer load(Creator& creator, Bytes const& bytes) {
    return PluginPointer(creator.deserializePlugin("node", bytes.data(), bytes.size()));
}

inline Bytes save(Plugin& plugin) {
    Bytes bytes(plugin.getSerializationSize());
    plugin.serialize(bytes.data());
    return bytes;
}

inline bool output_dims(Plugin& plugin, std::vector<nvinfer1::DimsExprs> const& inputs, Expressions& builder,
    std::vector<nvinfer1::DimsExprs>& outputs) {
    outputs.clear();
    for (int32_t i = 0; i < plugin.getNbOutputs(); ++i) {
        outputs.push_back(
            plugin.getOutputDimensions(i, inputs.data(), static_cast<int32_t>(inputs.size()), builder));
    }
    return outputs[0].nbDims >= 0;
}

inline bool supports(Plugin& plugin, int32_t position,
    std::vector<nvinfer1::DynamicPluginTensorDesc> const& all, int32_t outputs) {
    return plugin.supportsFormatCombination(
        position, plain(all).data(), static_cast<int32_t>(all.size()) - outputs, outputs);
}

inline std::size_t workspace(Plugin& plugin, std::vector<nvinfer1::DynamicPluginTensorDesc> const& inputs) {
    return plugin.getWorkspaceSize(plain(inputs).data(), static_cast<int32_t>(inputs.size()), nullptr, 0);
}

// This interface cannot refuse sizes here: the test looks at the log.
inline bool configure(Plugin& plugin, std::vector<nvinfer1::DynamicPluginTensorDesc> const& inputs) {
    plugin.configurePlugin(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, 0);
    return true;
}

inline PluginPointer attach(Plugin& plugin) {
    return PluginPointer(plugin.clone());
}

inline std::string name_of(Plugin& plugin) {
    return plugin.getPluginType();
}
#endif

}  // namespace host
