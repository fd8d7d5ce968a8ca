#include "body.h"

#include "log.h"

#include "../driver.h"
#include "../serializer.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace mha_deploy::trt {

using nvinfer1::DataType;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr uint32_t kMagic = 0x4544484dU;  // "MHDE": what an engine keeps of one plugin
constexpr uint32_t kBlobVersion = 1;
constexpr std::size_t kWorkspaceAlignment = 256;

bool is_floating(DataType type) noexcept {
#if NV_TENSORRT_MAJOR >= 10
    return type == DataType::kHALF || type == DataType::kBF16;
#else
    return type == DataType::kHALF;
#endif
}

Status type_of(DataType from, Type& type) {
    if (!is_floating(from)) {
        return Status::failed("TensorRT gave data type " + std::to_string(static_cast<int32_t>(from))
                              + "; this plugin takes FP16, and BF16 from TensorRT 10 on");
    }
    type = from == DataType::kHALF ? Type::kHalf : Type::kBFloat16;
    return Status();
}

bool is_same(nvinfer1::Dims const& left, Dims const& right) noexcept {
    return left.nbDims == static_cast<int32_t>(right.size())
        && std::equal(right.begin(), right.end(), left.d);
}

bool has_gpu() {
    Driver const* driver = nullptr;
    CUdevice device = 0;
    return load_driver(driver).ok() && driver->current_device(&device) == CUDA_SUCCESS;
}

}  // namespace

// ---- sizes as TensorRT has them, as ours

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

std::vector<Dims> sizes_of(nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t count,
    nvinfer1::Dims nvinfer1::DynamicPluginTensorDesc::*which) {
    std::vector<Dims> sizes;
    std::transform(tensors, tensors + count, std::back_inserter(sizes),
        [which](nvinfer1::DynamicPluginTensorDesc const& tensor) { return dims_of(tensor.*which); });
    return sizes;
}

Status rows_of(Dims const& x, int64_t& rows) {
    rows = 1;
    for (auto size = x.begin(); size != x.end() - 1; ++size) {
        if (*size < 0 || (*size != 0 && rows > std::numeric_limits<int32_t>::max() / *size)) {
            return Status::failed("x is " + text_of(x) + "; it may have up to 2147483647 rows");
        }
        rows *= *size;
    }
    return Status();
}

// ---- one plugin object

PluginBody::PluginBody(std::unique_ptr<Layer> layer, std::shared_ptr<EngineRecord> record)
    : layer_(std::move(layer)), record_(std::move(record)) {}

std::unique_ptr<PluginBody> PluginBody::clone() const {
    return std::make_unique<PluginBody>(layer_->clone(), record_);
}

bool PluginBody::supports(
    int32_t position, PluginTensorDesc const& tensor, PluginTensorDesc const& first) const noexcept {
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) {
        return false;
    }
    Holds const holds = layer_->holds(position);
    return tensor.type == type_for(holds, first.type) && (holds != Holds::kNumbers || is_floating(tensor.type));
}

DataType PluginBody::type_for(Holds holds, DataType first) const noexcept {
    switch (holds) {
        case Holds::kWords: return DataType::kINT32;
        case Holds::kScales: return DataType::kFLOAT;
        case Holds::kNumbers: break;
    }
    return layer_->typed_by_input() ? first : DataType::kHALF;
}

DataType PluginBody::output_type(int32_t output, DataType first) const noexcept {
    return type_for(layer_->holds(layer_->inputs() + output), first);
}

Status PluginBody::check_count(std::size_t inputs) const {
    if (static_cast<int32_t>(inputs) == layer_->inputs()) {
        return Status();
    }
    return Status::failed("the node has " + std::to_string(inputs) + " inputs; its attributes say "
                          + std::to_string(layer_->inputs()));
}

Status PluginBody::output_dims(int32_t output, nvinfer1::DimsExprs const* inputs, int32_t count,
    nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs& dims) {
    RETURN_IF_FAILED(check_count(static_cast<std::size_t>(count)));
    std::vector<Dims> sizes;
    for (int32_t i = 0; i < count; ++i) {
        if (std::optional<Dims> known = dims_of(inputs[i])) {
            sizes.push_back(*std::move(known));
        }
    }
    Status const fits = static_cast<int32_t>(sizes.size()) == count ? resize(std::move(sizes)) : Status();
    return fits.ok() ? layer_->output_dims(output, inputs, builder, dims) : fits;
}

Status PluginBody::resize(std::vector<Dims> sizes) {
    sizes_.clear();
    Status status = check_count(sizes.size());
    if (status.ok()) {
        status = layer_->resize(sizes);
    }
    if (status.ok()) {
        sizes_ = std::move(sizes);
    }
    return status;
}

Status PluginBody::configure(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t count) {
    using Tensor = nvinfer1::DynamicPluginTensorDesc;
    std::vector<Dims> const smallest = sizes_of(inputs, count, &Tensor::min);
    std::vector<Dims> const largest = sizes_of(inputs, count, &Tensor::max);
    if (smallest != largest) {
        record_->dynamic = true;
    }
    Status status = resize(largest);
    return status.ok() || resize(smallest).ok() ? Status() : status;
}

Status PluginBody::prepare(PluginTensorDesc const* inputs, int32_t count) {
    Type type = Type::kHalf;
    RETURN_IF_FAILED(resize(sizes_of(inputs, count)));
    RETURN_IF_FAILED(type_of(type_for(Holds::kNumbers, inputs[0].type), type));
    return has_gpu() ? layer_->prepare(type) : Status();
}

void PluginBody::tune(std::vector<Dims> const& inputs, DataType from) {
    Type type = Type::kHalf;
    if (record_->building && has_gpu() && resize(inputs).ok() && type_of(type_for(Holds::kNumbers, from), type).ok()) {
        layer_->tune(type);
    }
}

int32_t PluginBody::propose_tactics(std::vector<Dims> const& inputs, DataType from) {
    proposed_.clear();
    bool const can = record_->building && has_gpu()
                     && type_of(type_for(Holds::kNumbers, from), proposed_type_).ok() && resize(inputs).ok();
    int32_t const count = can ? layer_->tactics(proposed_type_) : 0;
    if (count > 0) {
        proposed_ = inputs;
    }
    return count;
}

void PluginBody::offer_tactics() {
    if (!proposed_.empty() && resize(proposed_).ok()) {
        layer_->offer_tactics(proposed_type_);
    }
}

std::size_t PluginBody::workspace_bytes(std::vector<Dims> const& inputs, DataType from) {
    Type type = Type::kHalf;
    std::size_t bytes = 0;
    tune(inputs, from);
    if (resize(inputs).ok() && type_of(type_for(Holds::kNumbers, from), type).ok()) {
        if (has_gpu()) {
            // Logged here: a kernel that is missing would only show at the first call.
            logged_ok(layer_->name(), layer_->prepare(type));
        }
        std::size_t const wanted = layer_->workspace_bytes(type, record_->dynamic);
        bytes = (wanted + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    }
    record_->lower_workspace(bytes);
    return bytes;
}

Status PluginBody::run(PluginTensorDesc const* inputs, CallMemory memory) {
    bool known = !sizes_.empty();
    for (std::size_t i = 0; known && i < sizes_.size(); ++i) {
        known = is_same(inputs[i].dims, sizes_[i]);
    }
    if (!known) {
        RETURN_IF_FAILED(resize(sizes_of(inputs, layer_->inputs())));
    }
    Type type = Type::kHalf;
    RETURN_IF_FAILED(type_of(type_for(Holds::kNumbers, inputs[0].type), type));
    memory.workspace_bytes = memory.workspace == nullptr ? 0 : static_cast<std::size_t>(record_->workspace());
    return layer_->run(type, memory);
}

std::vector<std::byte> PluginBody::serialize() const {
    std::vector<std::byte> const parameters = layer_->parameter_bytes();
    BlobWriter writer(kMagic, kBlobVersion);
    writer.add(record_->workspace());
    writer.add(static_cast<uint32_t>(parameters.size()));
    for (std::byte const byte : parameters) {
        writer.add(static_cast<uint8_t>(byte));
    }
    return writer.finish();
}

Status PluginBody::deserialize(
    LayerKind const& kind, void const* bytes, std::size_t size, std::unique_ptr<PluginBody>& body) {
    BlobReader reader;
    RETURN_IF_FAILED(reader.open(bytes, size, kMagic, kBlobVersion, kind.name));
    uint64_t workspace = 0;
    uint32_t count = 0;
    reader.take(workspace);
    reader.take(count);
    std::vector<uint8_t> parameters(std::min<std::size_t>(count, size));
    for (uint8_t& byte : parameters) {
        reader.take(byte);
    }
    RETURN_IF_FAILED(reader.finish());
    std::unique_ptr<Layer> layer;
    RETURN_IF_FAILED(kind.from_bytes(parameters.data(), parameters.size(), layer));
    auto record = std::make_shared<EngineRecord>();
    record->lower_workspace(workspace);
    body = std::make_unique<PluginBody>(std::move(layer), std::move(record));
    return Status();
}

Status body_from_fields(LayerKind const& kind, nvinfer1::PluginFieldCollection const* collection,
    std::unique_ptr<PluginBody>& body) {
    Fields fields(collection);
    std::unique_ptr<Layer> layer;
    RETURN_IF_FAILED(kind.from_fields(fields, layer));
    auto record = std::make_shared<EngineRecord>();
    record->building = true;
    body = std::make_unique<PluginBody>(std::move(layer), std::move(record));
    return Status();
}

}  // namespace mha_deploy::trt
