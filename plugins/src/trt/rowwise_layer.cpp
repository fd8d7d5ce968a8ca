// MhaDeployRowwise: residual and normalisation, or an activation.
#include "../rowwise_work.h"

#include "layer.h"

#include <cstdint>
#include <limits>

namespace mha_deploy::trt {

using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

constexpr char const* kName = "MhaDeployRowwise";

class RowwiseLayer final : public Layer {
public:
    explicit RowwiseLayer(RowwiseParameters const& parameters) : parameters_(parameters) {}

    char const* name() const noexcept override { return kName; }
    std::unique_ptr<Layer> clone() const override { return std::make_unique<RowwiseLayer>(parameters_); }
    std::vector<std::byte> parameter_bytes() const override { return serialize(parameters_); }
    int32_t inputs() const noexcept override { return parameters_.inputs(); }
    int32_t outputs() const noexcept override { return parameters_.outputs(); }
    bool is_integer(int32_t) const noexcept override { return false; }

    Status output_dims(int32_t, DimsExprs const* inputs, nvinfer1::IExprBuilder&,
        DimsExprs& dims) const override {
        dims = inputs[0];
        return Status();
    }
    Status resize(std::vector<Dims> const& inputs) override;

    Status prepare(Type) override { return Status(); }
    std::size_t workspace_bytes(Type) override { return 0; }
    Status run(Type type, CallMemory const& memory) override {
        return run_rowwise(parameters_, rows_, width_, type, memory.inputs, memory.outputs, memory.stream);
    }

private:
    RowwiseParameters parameters_;
    int64_t rows_ = 0;
    int64_t width_ = 0;
};

Status RowwiseLayer::resize(std::vector<Dims> const& inputs) {
    Dims const& x = inputs[0];
    if (x.empty()) {
        return Status::failed("x has no axis; give it [..., width]");
    }
    if (Status status = check_width(x.back()); !status.ok()) {
        return status;
    }
    for (std::size_t i = 1; i < inputs.size(); ++i) {
        bool const whole = i == 1 && parameters_.has_second;
        if (inputs[i] != (whole ? x : Dims{x.back()})) {
            return Status::failed("input " + std::to_string(i) + " is " + text_of(inputs[i]) + "; give it "
                                  + text_of(whole ? x : Dims{x.back()}));
        }
    }
    int64_t rows = 1;
    for (auto size = x.begin(); size != x.end() - 1; ++size) {
        if (*size < 0 || (*size != 0 && rows > std::numeric_limits<int32_t>::max() / *size)) {
            return Status::failed("x is " + text_of(x) + "; it may have up to 2147483647 rows");
        }
        rows *= *size;
    }
    rows_ = rows;
    width_ = x.back();
    return Status();
}

Status made(RowwiseParameters const& parameters, std::unique_ptr<Layer>& layer) {
    if (Status status = parameters.check(); !status.ok()) {
        return status;
    }
    layer = std::make_unique<RowwiseLayer>(parameters);
    return Status();
}

Status from_fields(Fields& fields, std::unique_ptr<Layer>& layer) {
    RowwiseParameters p;
    int32_t operation = 0;
    fields.take_between("operation", 0, 4, operation);
    fields.take("has_second", p.has_second);
    fields.take("has_bias", p.has_bias);
    fields.take("keeps_sum", p.keeps_sum);
    fields.take("epsilon", p.epsilon);
    p.operation = static_cast<Rowwise>(operation);
    return fields.status().ok() ? made(p, layer) : fields.status();
}

Status from_bytes(void const* bytes, std::size_t size, std::unique_ptr<Layer>& layer) {
    RowwiseParameters parameters;
    Status const status = deserialize(bytes, size, parameters);
    return status.ok() ? made(parameters, layer) : status;
}

std::vector<PluginField> field_names() {
    std::vector<PluginField> fields;
    for (char const* const name : {"operation", "has_second", "has_bias", "keeps_sum"}) {
        fields.emplace_back(name, nullptr, PluginFieldType::kINT32, 1);
    }
    fields.emplace_back("epsilon", nullptr, PluginFieldType::kFLOAT32, 1);
    return fields;
}

}  // namespace

LayerKind const& rowwise_kind() {
    static LayerKind const kind{kName, field_names(), from_fields, from_bytes};
    return kind;
}

}  // namespace mha_deploy::trt
