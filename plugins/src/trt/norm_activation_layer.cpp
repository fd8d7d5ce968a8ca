// MhaDeployNormActivation: residual and normalisation, or an activation.
#include "../norm_activation.h"

#include "layer.h"

#include <cstdint>

namespace mha_deploy::trt {

using nvinfer1::DimsExprs;

namespace {

constexpr char const* kName = "MhaDeployNormActivation";
constexpr int32_t kNumbersOfWord = 4;

class NormActivationLayer final : public Layer {
public:
    explicit NormActivationLayer(NormActivationParameters const& parameters) : parameters_(parameters) {}

    char const* name() const noexcept override { return kName; }
    std::unique_ptr<Layer> clone() const override {
        return std::make_unique<NormActivationLayer>(parameters_);
    }
    std::vector<std::byte> parameter_bytes() const override { return serialize(parameters_); }
    int32_t inputs() const noexcept override { return parameters_.inputs(); }
    int32_t outputs() const noexcept override { return parameters_.outputs(); }
    Holds holds(int32_t position) const noexcept override {
        bool const words = position >= inputs() && parameters_.is_fp8(position - inputs());
        return words ? Holds::kWords : Holds::kNumbers;
    }

    Status output_dims(int32_t output, DimsExprs const* inputs, nvinfer1::IExprBuilder& builder,
        DimsExprs& dims) const override {
        dims = inputs[0];
        int32_t const divisor = (parameters_.packed ? 2 : 1) * (parameters_.is_fp8(output) ? kNumbersOfWord : 1);
        if (dims.nbDims > 0 && divisor > 1) {
            nvinfer1::IDimensionExpr const*& width = dims.d[dims.nbDims - 1];
            width =
                builder.operation(nvinfer1::DimensionOperation::kFLOOR_DIV, *width, *builder.constant(divisor));
        }
        return Status();
    }
    Status resize(std::vector<Dims> const& inputs) override;

    Status prepare(Type type) override { return prepare_norm_activation(parameters_, width_, type, kernel_); }
    std::size_t workspace_bytes(Type, bool) override { return 0; }
    Status run(Type type, CallMemory const& memory) override {
        return run_norm_activation(
            parameters_, rows_, width_, type, memory.inputs, memory.outputs, kernel_, memory.stream);
    }

private:
    NormActivationParameters parameters_;
    int64_t rows_ = 0;
    int64_t width_ = 0;
    KernelSlot kernel_;
};

Status NormActivationLayer::resize(std::vector<Dims> const& inputs) {
    Dims const& x = inputs[0];
    if (x.empty()) {
        return Status::failed("x has no axis; give it [..., width]");
    }
    int64_t const parts = parameters_.packed ? 2 : 1;
    if (x.back() % parts != 0) {
        return Status::failed("x is " + text_of(x) + "; give it [..., 2 * width]");
    }
    RETURN_IF_FAILED(check_width(x.back() / parts));
    for (std::size_t i = 1; i < inputs.size(); ++i) {
        bool const whole = i == 1 && parameters_.has_second;
        if (inputs[i] != (whole ? x : Dims{x.back()})) {
            return Status::failed("input " + std::to_string(i) + " is " + text_of(inputs[i]) + "; give it "
                                  + text_of(whole ? x : Dims{x.back()}));
        }
    }
    RETURN_IF_FAILED(rows_of(x, rows_));
    width_ = x.back() / parts;
    return Status();
}

}  // namespace

LayerKind const& norm_activation_kind() {
    static LayerKind const kind = kind_of<NormActivationLayer, NormActivationParameters>(kName);
    return kind;
}

}  // namespace mha_deploy::trt
