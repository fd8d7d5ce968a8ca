// MhaDeployLinear: sizes and pointers of TensorRT's for LinearWork.
#include "../linear.h"

#include "layer.h"

#include <utility>

namespace mha_deploy::trt {

using nvinfer1::DimsExprs;

namespace {

constexpr char const* kName = "MhaDeployLinear";

class LinearLayer final : public Layer {
public:
    LinearLayer(LinearParameters const& parameters, std::shared_ptr<LinearTuning> tuning)
        : parameters_(parameters), tuning_(std::move(tuning)), work_(parameters, tuning_) {}

    char const* name() const noexcept override { return kName; }
    std::unique_ptr<Layer> clone() const override {
        auto made = std::make_unique<LinearLayer>(parameters_, tuning_);
        made->set_tactic(tactic_);
        return made;
    }
    std::vector<std::byte> parameter_bytes() const override { return serialize(parameters_, tuning_->record()); }
    int32_t inputs() const noexcept override { return parameters_.inputs(); }
    int32_t outputs() const noexcept override { return 1; }
    Holds holds(int32_t position) const noexcept override {
        if (!parameters_.in_fp8() || position >= inputs()) {
            return Holds::kNumbers;
        }
        return position < 2 ? Holds::kWords : position == inputs() - 1 ? Holds::kScales : Holds::kNumbers;
    }

    Status output_dims(
        int32_t, DimsExprs const* inputs, nvinfer1::IExprBuilder&, DimsExprs& dims) const override {
        if (inputs[0].nbDims < 1 || inputs[1].nbDims != 2) {
            return Status::failed("x has rank " + std::to_string(inputs[0].nbDims) + " and the weight rank "
                                  + std::to_string(inputs[1].nbDims) + "; give x [..., K] and the weight "
                                  + weight_text());
        }
        dims = inputs[0];
        dims.d[dims.nbDims - 1] = inputs[1].d[parameters_.transposed ? 0 : 1];
        return Status();
    }

    Status resize(std::vector<Dims> const& inputs) override {
        Dims const& x = inputs[0];
        Dims const& weight = inputs[1];
        std::size_t const summed = parameters_.transposed ? 1 : 0;
        if (x.empty() || weight.size() != 2 || x.back() != weight[summed]) {
            return Status::failed("x is " + text_of(x) + " and the weight " + text_of(weight)
                                  + "; give x [..., K] and the weight " + weight_text());
        }
        int64_t const outputs = weight[1 - summed];
        if (parameters_.has_bias && inputs[2] != Dims{outputs}) {
            return Status::failed("the bias is " + text_of(inputs[2]) + "; give it " + text_of({outputs}));
        }
        Dims const scales{parameters_.quantized == Quantized::kPerOutput ? outputs : 1};
        if (parameters_.in_fp8() && inputs.back() != scales) {
            return Status::failed("the scale is " + text_of(inputs.back()) + "; give it " + text_of(scales));
        }
        int64_t rows = 0;
        Status status = rows_of(x, rows);
        shape_ = LinearShape{rows, x.back() * (parameters_.in_fp8() ? 4 : 1), outputs};
        return status;
    }

    void tune(Type type) override { tuning_->measure(parameters_, shape_, type); }
    int32_t tactics(Type type) override { return tuning_->propose(parameters_, shape_, type); }
    void offer_tactics(Type type) override { tuning_->offer(shape_, type); }
    void set_tactic(int32_t tactic) noexcept override {
        tactic_ = tactic;
        work_.set_tactic(tactic);
    }
    std::string timing_key() const override { return mha_deploy::timing_key(parameters_); }
    Status prepare(Type type) override { return work_.prepare(shape_, type); }
    std::size_t workspace_bytes(Type type, bool) override { return work_.workspace_bytes(shape_, type); }

    Status run(Type type, CallMemory const& memory) override {
        LinearPointers const pointers{memory.inputs[0], memory.inputs[1],
            parameters_.has_bias ? memory.inputs[2] : nullptr, memory.outputs[0],
            parameters_.in_fp8() ? memory.inputs[inputs() - 1] : nullptr};
        return work_.run(shape_, type, pointers, memory.workspace, memory.workspace_bytes, memory.stream);
    }

private:
    char const* weight_text() const {
        return parameters_.in_fp8() ? "[N, K], four numbers in a word" : parameters_.transposed ? "[N, K]" : "[K, N]";
    }

    LinearParameters parameters_;
    std::shared_ptr<LinearTuning> tuning_;  // of all clones
    LinearWork work_;
    LinearShape shape_;
    int32_t tactic_ = 0;
};

Status from_fields(Fields& fields, std::unique_ptr<Layer>& layer) {
    LinearParameters parameters;
    Status status = take_fields(fields, parameters);
    layer =
        status.ok() ? std::make_unique<LinearLayer>(parameters, std::make_shared<LinearTuning>()) : nullptr;
    return status;
}

Status from_bytes(void const* bytes, std::size_t size, std::unique_ptr<Layer>& layer) {
    LinearParameters parameters;
    LinearTuning::Record record;
    Status status = deserialize(bytes, size, parameters, record);
    layer = status.ok() ? std::make_unique<LinearLayer>(
                parameters, std::make_shared<LinearTuning>(std::move(record)))
                        : nullptr;
    return status;
}

}  // namespace

LayerKind const& linear_kind() {
    static LayerKind const kind{kName, field_names<LinearParameters>(), from_fields, from_bytes};
    return kind;
}

}  // namespace mha_deploy::trt
