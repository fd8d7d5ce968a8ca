#include "body.h"

#include "log.h"

#include "../driver.h"
#include "../serializer.h"

#include <algorithm>
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

void WorkspacePromise::lower(std::uint64_t bytes) noexcept {
    std::uint64_t seen = bytes_.load();
    while (bytes < seen && !bytes_.compare_exchange_weak(seen, bytes)) {
    }
}

std::uint64_t WorkspacePromise::bytes() const noexcept {
    std::uint64_t const bytes = bytes_.load();
    return bytes == kNothingAsked ? 0 : bytes;
}

PluginBody::PluginBody(std::unique_ptr<Layer> layer, std::shared_ptr<WorkspacePromise> promise)
    : layer_(std::move(layer)), promise_(std::move(promise)) {}

std::unique_ptr<PluginBody> PluginBody::clone() const {
    return std::make_unique<PluginBody>(layer_->clone(), promise_);
}

bool PluginBody::supports(
    int32_t position, PluginTensorDesc const& tensor, PluginTensorDesc const& first) const noexcept {
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) {
        return false;
    }
    if (position < layer_->inputs() && layer_->is_integer(position)) {
        return tensor.type == DataType::kINT32;
    }
    return is_floating(tensor.type) && tensor.type == first.type;
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
    if (Status status = check_count(static_cast<std::size_t>(count)); !status.ok()) {
        return status;
    }
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

Status PluginBody::check_largest(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t count) {
    return resize(largest_sizes_of(inputs, count));
}

Status PluginBody::prepare(PluginTensorDesc const* inputs, int32_t count) {
    Type type = Type::kHalf;
    if (Status status = resize(sizes_of(inputs, count)); !status.ok()) {
        return status;
    }
    if (Status status = type_of(inputs[0].type, type); !status.ok()) {
        return status;
    }
    return has_gpu() ? layer_->prepare(type) : Status();
}

std::size_t PluginBody::workspace_bytes(std::vector<Dims> const& inputs, DataType from) {
    Type type = Type::kHalf;
    std::size_t bytes = 0;
    if (resize(inputs).ok() && type_of(from, type).ok()) {
        if (has_gpu()) {
            // Logged here: a kernel that is missing would only show at the first call.
            logged_ok(layer_->name(), layer_->prepare(type));
        }
        std::size_t const wanted = layer_->workspace_bytes(type);
        bytes = (wanted + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    }
    promise_->lower(bytes);
    return bytes;
}

Status PluginBody::run(PluginTensorDesc const* inputs, CallMemory memory) {
    bool known = !sizes_.empty();
    for (std::size_t i = 0; known && i < sizes_.size(); ++i) {
        known = is_same(inputs[i].dims, sizes_[i]);
    }
    if (!known) {
        if (Status status = resize(sizes_of(inputs, layer_->inputs())); !status.ok()) {
            return status;
        }
    }
    Type type = Type::kHalf;
    if (Status status = type_of(inputs[0].type, type); !status.ok()) {
        return status;
    }
    memory.workspace_bytes = memory.workspace == nullptr ? 0 : static_cast<std::size_t>(promise_->bytes());
    return layer_->run(type, memory);
}

std::vector<std::byte> PluginBody::serialize() const {
    std::vector<std::byte> const parameters = layer_->parameter_bytes();
    BlobWriter writer(kMagic, kBlobVersion);
    writer.add(promise_->bytes());
    writer.add(static_cast<uint32_t>(parameters.size()));
    for (std::byte const byte : parameters) {
        writer.add(static_cast<uint8_t>(byte));
    }
    return writer.finish();
}

Status PluginBody::deserialize(
    LayerKind const& kind, void const* bytes, std::size_t size, std::unique_ptr<PluginBody>& body) {
    BlobReader reader;
    if (Status status = reader.open(bytes, size, kMagic, kBlobVersion, kind.name); !status.ok()) {
        return status;
    }
    uint64_t workspace = 0;
    uint32_t count = 0;
    reader.take(workspace);
    reader.take(count);
    std::vector<uint8_t> parameters(std::min<std::size_t>(count, size));
    for (uint8_t& byte : parameters) {
        reader.take(byte);
    }
    if (Status status = reader.finish(); !status.ok()) {
        return status;
    }
    std::unique_ptr<Layer> layer;
    if (Status status = kind.from_bytes(parameters.data(), parameters.size(), layer); !status.ok()) {
        return status;
    }
    auto promise = std::make_shared<WorkspacePromise>();
    promise->lower(workspace);
    body = std::make_unique<PluginBody>(std::move(layer), std::move(promise));
    return Status();
}

Status body_from_fields(LayerKind const& kind, nvinfer1::PluginFieldCollection const* collection,
    std::unique_ptr<PluginBody>& body) {
    Fields fields(collection);
    std::unique_ptr<Layer> layer;
    if (Status status = kind.from_fields(fields, layer); !status.ok()) {
        return status;
    }
    body = std::make_unique<PluginBody>(std::move(layer), std::make_shared<WorkspacePromise>());
    return Status();
}

}  // namespace mha_deploy::trt
