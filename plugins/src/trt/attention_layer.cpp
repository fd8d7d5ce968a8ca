// MhaDeployAttention: fields, sizes and pointers of TensorRT's for AttentionWork.
#include "layer.h"

#include <utility>

namespace mha_deploy::trt {

using nvinfer1::DimsExprs;

namespace {

constexpr char const* kName = "MhaDeployAttention";

class AttentionLayer final : public Layer {
public:
    explicit AttentionLayer(AttentionParameters const& parameters)
        : parameters_(parameters), places_(parameters), work_(parameters) {}

    char const* name() const noexcept override { return kName; }
    std::unique_ptr<Layer> clone() const override { return std::make_unique<AttentionLayer>(parameters_); }
    std::vector<std::byte> parameter_bytes() const override { return serialize(parameters_); }
    int32_t inputs() const noexcept override { return parameters_.inputs(); }
    int32_t outputs() const noexcept override { return parameters_.outputs(); }

    Holds holds(int32_t position) const noexcept override {
        bool const words = position < inputs() ? places_.is_integer(position) : is_fp8(position - inputs());
        return words ? Holds::kWords : Holds::kNumbers;
    }
    int32_t aliased_input(int32_t output) const noexcept override {
        return output == 1 ? places_.past_key : output == 2 ? places_.past_value : -1;
    }

    Status output_dims(int32_t output, DimsExprs const* inputs, nvinfer1::IExprBuilder& builder,
        DimsExprs& dims) const override;
    Status resize(std::vector<Dims> const& inputs) override;

    Status prepare(Type type) override { return work_.prepare(shapes_, type); }
    std::size_t workspace_bytes(Type type, bool dynamic) override {
        return work_.workspace_bytes(shapes_, type, dynamic);
    }
    Status run(Type type, CallMemory const& memory) override;

private:
    Status check_others(std::vector<Dims> const& inputs, AttentionShapes const& shapes) const;
    bool is_fp8(int32_t output) const noexcept {
        return (parameters_.fp8 && output == 0) || (parameters_.fp8_copy && output == outputs() - 1);
    }

    AttentionParameters parameters_;
    InputPlaces places_;
    AttentionWork work_;
    AttentionShapes shapes_;
    AttentionPointers pointers_;  // kept, so that a call allocates nothing
};

Status AttentionLayer::output_dims(
    int32_t output, DimsExprs const* inputs, nvinfer1::IExprBuilder& builder, DimsExprs& dims) const {
    if (output > 0 && !is_fp8(output)) {
        dims = inputs[output == 1 ? places_.past_key : places_.past_value];
        return Status();
    }
    DimsExprs const& query = inputs[parameters_.sources[0]];
    if (query.nbDims != 3 && query.nbDims != 4) {
        return Status::failed("the input with the queries has rank " + std::to_string(query.nbDims)
                              + "; give [B, S, width] or [B, heads, S, head size]");
    }
    dims.nbDims = 3;
    dims.d[0] = query.d[0];
    dims.d[1] = query.nbDims == 3 ? query.d[1] : query.d[2];
    int32_t const width = parameters_.query_heads * parameters_.value_size;
    dims.d[2] = builder.constant(is_fp8(output) ? width / 4 : width);
    return Status();
}

Status expect_dims(char const* what, Dims const& got, Dims const& expected) {
    if (got == expected) {
        return Status();
    }
    return Status::failed(
        std::string("input '") + what + "' has the size " + text_of(got) + "; give it " + text_of(expected));
}

// The inputs that AttentionShapes does not hold, because their sizes follow from the others.
Status AttentionLayer::check_others(std::vector<Dims> const& inputs, AttentionShapes const& shapes) const {
    int64_t const batch = shapes.batch();
    auto const expect = [&](int32_t place, char const* what, Dims const& expected) {
        return place < 0 ? Status() : expect_dims(what, inputs[static_cast<std::size_t>(place)], expected);
    };
    AttentionParameters const& p = parameters_;
    Dims table{shapes.table_rows, p.rotary_size / 2};
    if (p.rotary_positions == RotaryPositions::kPerToken) {
        table = {batch, shapes.queries(p), p.rotary_size / 2};
    }
    for (Status const& status : {
             expect(places_.key_lengths, "key_lengths", {batch}),
             expect(places_.key_mask, "key_mask", {batch, shapes.keys(p)}),
             expect(places_.gates, "gates", {batch, shapes.queries(p), p.query_heads}),
             expect(places_.past_key, "past_key", {batch, p.key_heads, shapes.cache_rows, p.head_size}),
             expect(places_.past_value, "past_value", {batch, p.key_heads, shapes.cache_rows, p.value_size}),
             expect(places_.starts, "starts", {batch}),
             expect(places_.cos, "cos", table),
             expect(places_.sin, "sin", table),
             expect(places_.positions, "positions", {batch, shapes.queries(p)}),
         }) {
        if (!status.ok()) {
            return status;
        }
    }
    return Status();
}

Status AttentionLayer::resize(std::vector<Dims> const& inputs) {
    AttentionShapes shapes;
    shapes.operands.assign(inputs.begin(), inputs.begin() + parameters_.operands());
    if (parameters_.has_bias) {
        shapes.bias = inputs[static_cast<std::size_t>(places_.bias)];
    }
    if (parameters_.has_cache) {
        Dims const& past = inputs[static_cast<std::size_t>(places_.past_key)];
        if (past.size() != 4) {
            return Status::failed("input 'past_key' has the size " + text_of(past)
                                  + "; give it [batch, key heads, rows, head size]");
        }
        shapes.cache_rows = past[2];
    }
    if (parameters_.rotates()) {
        Dims const& table = inputs[static_cast<std::size_t>(places_.cos)];
        bool const per_token = parameters_.rotary_positions == RotaryPositions::kPerToken;
        shapes.table_rows = table.empty()                   ? 0
                            : per_token && table.size() > 1 ? table[0] * table[1]
                                                            : table[0];
    }
    RETURN_IF_FAILED(check_shapes(parameters_, shapes));
    RETURN_IF_FAILED(check_others(inputs, shapes));
    shapes_ = std::move(shapes);
    return Status();
}

Status AttentionLayer::run(Type type, CallMemory const& memory) {
    pointers_.inputs.assign(memory.inputs, memory.inputs + inputs());
    pointers_.outputs.assign(memory.outputs, memory.outputs + outputs());
    return work_.run(shapes_, type, pointers_, memory.workspace, memory.workspace_bytes, memory.stream);
}

}  // namespace

LayerKind const& attention_kind() {
    static LayerKind const kind = kind_of<AttentionLayer, AttentionParameters>(kName);
    return kind;
}

}  // namespace mha_deploy::trt
