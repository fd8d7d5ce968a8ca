// MhaDeployLinear: sizes and pointers of TensorRT's for LinearWork.
#include "../linear_work.h"

#include "layer.h"

#include <cstdint>
#include <limits>

namespace mha_deploy::trt {

using nvinfer1::DimsExprs;

namespace {

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();

constexpr char const* kName = "MhaDeployLinear";

class LinearLayer final : public Layer {
public:
    explicit LinearLayer(LinearParameters const& parameters) : parameters_(parameters), work_(parameters) {}

    char const* name() const noexcept override { return kName; }
    std::unique_ptr<Layer> clone() const override { return std::make_unique<LinearLayer>(parameters_); }
    std::vector<std::byte> parameter_bytes() const override { return serialize(parameters_); }
    int32_t inputs() const noexcept override { return parameters_.inputs(); }
    int32_t outputs() const noexcept override { return 1; }
    bool is_integer(int32_t) const noexcept override { return false; }

    Status output_dims(int32_t output, DimsExprs const* inputs, nvinfer1::IExprBuilder& builder,
        DimsExprs& dims) const override;
    Status resize(std::vector<Dims> const& inputs) override;

    Status prepare(Type type) override { return work_.prepare(shape_, type); }
    std::size_t workspace_bytes(Type type) override { return work_.workspace_bytes(shape_, type); }
    Status run(Type type, CallMemory const& memory) override;

private:
    LinearParameters parameters_;
    LinearWork work_;
    LinearShape shape_;
};

Status LinearLayer::output_dims(
    int32_t, DimsExprs const* inputs, nvinfer1::IExprBuilder&, DimsExprs& dims) const {
    if (inputs[0].nbDims < 1 || inputs[1].nbDims != 2) {
        return Status::failed("x has rank " + std::to_string(inputs[0].nbDims) + " and the weight rank "
                              + std::to_string(inputs[1].nbDims) + "; give x [..., K] and the weight [K, N]");
    }
    dims = inputs[0];
    dims.d[dims.nbDims - 1] = inputs[1].d[1];
    return Status();
}

Status LinearLayer::resize(std::vector<Dims> const& inputs) {
    Dims const& x = inputs[0];
    Dims const& weight = inputs[1];
    if (x.empty() || weight.size() != 2 || x.back() != weight[0]) {
        return Status::failed("x is " + text_of(x) + " and the weight " + text_of(weight)
                              + "; give x [..., K] and the weight [K, N]");
    }
    if (parameters_.has_bias && inputs[2] != Dims{weight[1]}) {
        return Status::failed("the bias is " + text_of(inputs[2]) + "; give it " + text_of({weight[1]}));
    }
    int64_t rows = 1;
    for (auto size = x.begin(); size != x.end() - 1; ++size) {
        if (*size < 0 || (*size != 0 && rows > kMostRows / *size)) {
            return Status::failed("x is " + text_of(x) + "; it may have up to 2147483647 rows");
        }
        rows *= *size;
    }
    shape_ = LinearShape{rows, weight[0], weight[1]};
    return Status();
}

Status LinearLayer::run(Type type, CallMemory const& memory) {
    LinearPointers pointers;
    pointers.x = memory.inputs[0];
    pointers.weight = memory.inputs[1];
    pointers.bias = parameters_.has_bias ? memory.inputs[2] : nullptr;
    pointers.y = memory.outputs[0];
    return work_.run(shape_, type, pointers, memory.workspace, memory.workspace_bytes, memory.stream);
}

Status from_fields(Fields& fields, std::unique_ptr<Layer>& layer) {
    LinearParameters parameters;
    fields.take("has_bias", parameters.has_bias);
    if (fields.status().ok()) {
        layer = std::make_unique<LinearLayer>(parameters);
    }
    return fields.status();
}

Status from_bytes(void const* bytes, std::size_t size, std::unique_ptr<Layer>& layer) {
    LinearParameters parameters;
    Status status = deserialize(bytes, size, parameters);
    if (status.ok()) {
        layer = std::make_unique<LinearLayer>(parameters);
    }
    return status;
}

}  // namespace

LayerKind const& linear_kind() {
    static LayerKind const kind{
        kName, {{"has_bias", nullptr, nvinfer1::PluginFieldType::kINT32, 1}}, from_fields, from_bytes};
    return kind;
}

}  // namespace mha_deploy::trt
