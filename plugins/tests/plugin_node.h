// A plugin on its way through TensorRT: made from fields, configured, saved, loaded, attached, enqueued.
#pragma once

#include "counted.h"
#include "plugin_asked.h"

namespace host {

using Sizes = std::vector<std::vector<int64_t>>;

inline std::size_t elements(std::vector<int64_t> const& sizes) {
    std::size_t count = 1;
    for (int64_t const size : sizes) {
        count *= static_cast<std::size_t>(size);
    }
    return count;
}

inline std::vector<nvinfer1::DynamicPluginTensorDesc> typed(
    Sizes const& sizes, std::vector<DataType> const& types) {
    auto tensors_of = tensors(sizes);
    for (std::size_t i = 0; i < types.size(); ++i) {
        tensors_of[i].desc.type = types[i];
    }
    return tensors_of;
}

struct Node {
    PluginPointer loaded;  // of the engine; null where fields or sizes were refused
    PluginPointer plugin;  // of an execution context
    std::size_t workspace_bytes = 0;

    // For calls up to the largest sizes.
    Node(Creator& creator, FieldList fields, Sizes const& largest, std::vector<DataType> const& types) {
        PluginPointer const built = create(creator, fields);
        if (built == nullptr) {
            return;
        }
        auto const inputs = typed(largest, types);
        auto dynamic = inputs;
        for (auto& tensor : dynamic) {
            tensor.min.d[0] = 1;
            tensor.desc.dims.d[0] = -1;
        }
#if NV_TENSORRT_MAJOR >= 10
        bool const fits =
            built->configurePlugin(dynamic.data(), static_cast<int32_t>(dynamic.size()), nullptr, 0) == 0;
#else
        built->configurePlugin(dynamic.data(), static_cast<int32_t>(dynamic.size()), nullptr, 0);
        bool const fits = true;
        dynamic = inputs;  // this interface is asked for workspace with the largest sizes
#endif
        workspace_bytes = workspace(*built, dynamic);
        loaded = fits ? load(creator, save(*built)) : nullptr;
        plugin = loaded == nullptr ? nullptr : attach(*loaded);
    }

    // Another execution context of the same engine.
    Node(Node const& other) : plugin(attach(*other.loaded)), workspace_bytes(other.workspace_bytes) {}

    // As TensorRT does before the first call with some sizes.
    bool announce(Sizes const& sizes, std::vector<DataType> const& types) {
        if (plugin == nullptr) {
            return false;
        }
        auto const inputs = typed(sizes, types);
        auto const count = static_cast<int32_t>(inputs.size());
#if NV_TENSORRT_MAJOR >= 10
        return plugin->onShapeChange(host::plain(inputs).data(), count, nullptr, 0) == 0;
#else
        plugin->configurePlugin(inputs.data(), count, nullptr, 0);
        return true;
#endif
    }

    bool enqueue(Sizes const& sizes, std::vector<DataType> const& types,
        std::vector<void const*> const& inputs, std::vector<void*> const& outputs, void* memory,
        CUstream stream) {
        bool ok = true;
        taken_by_enqueue(sizes, types, inputs, outputs, memory, stream, ok);
        return ok;
    }

    // Becomes false where the call fails, or there is nothing to call.
    mha_deploy::check::Taken taken_by_enqueue(Sizes const& sizes, std::vector<DataType> const& types,
        std::vector<void const*> const& inputs, std::vector<void*> const& outputs, void* memory,
        CUstream stream, bool& ok) {
        ok = ok && plugin != nullptr;
        auto const described = host::plain(typed(sizes, types));
        return mha_deploy::check::taken_by([&] {
            ok = ok
                 && plugin->enqueue(described.data(), nullptr, inputs.data(), outputs.data(), memory, stream)
                        == 0;
        });
    }
};

}  // namespace host
