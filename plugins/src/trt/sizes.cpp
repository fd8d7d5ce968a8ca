// Sizes as TensorRT has them, as ours.
#include "body.h"

#include <algorithm>
#include <iterator>

namespace mha_deploy::trt {

Dims dims_of(nvinfer1::Dims const& dims) {
    return Dims(dims.d, dims.d + std::max<int32_t>(dims.nbDims, 0));
}

bool is_concrete(nvinfer1::Dims const& dims) noexcept {
    return dims.nbDims >= 0
        && std::all_of(dims.d, dims.d + dims.nbDims, [](int64_t size) { return size >= 0; });
}

std::optional<Dims> dims_of(nvinfer1::DimsExprs const& dims) {
    Dims sizes;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        if (!dims.d[i]->isConstant()) {
            return std::nullopt;
        }
        sizes.push_back(dims.d[i]->getConstantValue());
    }
    return sizes;
}

std::vector<Dims> sizes_of(nvinfer1::PluginTensorDesc const* tensors, int32_t count) {
    std::vector<Dims> sizes;
    std::transform(tensors, tensors + count, std::back_inserter(sizes),
        [](nvinfer1::PluginTensorDesc const& tensor) { return dims_of(tensor.dims); });
    return sizes;
}

std::vector<Dims> largest_sizes_of(nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t count) {
    std::vector<Dims> sizes;
    std::transform(tensors, tensors + count, std::back_inserter(sizes),
        [](nvinfer1::DynamicPluginTensorDesc const& tensor) { return dims_of(tensor.max); });
    return sizes;
}

std::string text_of(Dims const& dims) {
    std::string text = "[";
    for (std::size_t i = 0; i < dims.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    }
    return text + "]";
}

}  // namespace mha_deploy::trt
