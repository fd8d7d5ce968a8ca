// What a plugin computes, seen from TensorRT's side and behind both of its plugin interfaces.
#pragma once

#include "../attention.h"
#include "../status.h"
#include "fields.h"

#include <NvInferRuntime.h>
#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mha_deploy::trt {

inline constexpr char const* kPluginNamespace = "mha_deploy";
inline constexpr char const* kPluginVersion = "1";

// Device memory of one call.
struct CallMemory {
    void const* const* inputs = nullptr;
    void* const* outputs = nullptr;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
    CUstream stream = nullptr;
};

// What a tensor of a node holds: FP16 or BF16, the same type for all such tensors of a node; INT32 for lengths,
// positions and words of four FP8 numbers; FP32 for scales of these.
enum class Holds { kNumbers, kWords, kScales };

// One node with its work.
class Layer {
public:
    Layer() = default;
    virtual ~Layer() = default;
    Layer(Layer const&) = delete;
    Layer& operator=(Layer const&) = delete;

    virtual char const* name() const noexcept = 0;
    virtual std::unique_ptr<Layer> clone() const = 0;  // the same parameters, with work of its own
    virtual std::vector<std::byte> parameter_bytes() const = 0;

    virtual int32_t inputs() const noexcept = 0;
    virtual int32_t outputs() const noexcept = 0;
    virtual Holds holds(int32_t position) const noexcept = 0;  // inputs first, then outputs
    // Whether the first input is of the type of all numbers; else they are FP16.
    bool typed_by_input() const noexcept { return holds(0) == Holds::kNumbers; }

    virtual Status output_dims(int32_t output, nvinfer1::DimsExprs const* inputs,
        nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs& dims) const = 0;

    // Take these sizes of the inputs for what follows, or say why they do not fit.
    virtual Status resize(std::vector<Dims> const& inputs) = 0;

    // The input whose memory an output uses, or -1.
    virtual int32_t aliased_input(int32_t) const noexcept { return -1; }

    // While an engine is built, on a machine with a GPU: measure what TensorRT does not.
    virtual void tune(Type) {}

    // Ways to compute these sizes that TensorRT is to time, as numbers from 1 on: how many there are, that it
    // took them, which one to use (0: none of them), and what tells their times from those of other layers.
    virtual int32_t tactics(Type) { return 0; }
    virtual void offer_tactics(Type) {}
    virtual void set_tactic(int32_t) noexcept {}
    virtual std::string timing_key() const { return ""; }

    virtual Status prepare(Type type) = 0;
    virtual std::size_t workspace_bytes(Type type, bool dynamic) = 0;
    virtual Status run(Type type, CallMemory const& memory) = 0;
};

// One kind of plugin: its name, its fields, and how one is made from fields and from bytes.
struct LayerKind {
    char const* name;
    std::vector<nvinfer1::PluginField> fields;
    Status (*from_fields)(Fields& fields, std::unique_ptr<Layer>& layer);
    Status (*from_bytes)(void const* bytes, std::size_t size, std::unique_ptr<Layer>& layer);
};

// The kind of a layer that is made of its parameters alone.
template <typename Made, typename Parameters>
LayerKind kind_of(char const* name) {
    return {name, field_names<Parameters>(),
        [](Fields& fields, std::unique_ptr<Layer>& layer) {
            Parameters parameters;
            Status status = take_fields(fields, parameters);
            layer = status.ok() ? std::make_unique<Made>(parameters) : nullptr;
            return status;
        },
        [](void const* bytes, std::size_t size, std::unique_ptr<Layer>& layer) {
            Parameters parameters;
            Status status = deserialize(bytes, size, parameters);
            layer = status.ok() ? std::make_unique<Made>(parameters) : nullptr;
            return status;
        }};
}

LayerKind const& attention_kind();
LayerKind const& linear_kind();
LayerKind const& norm_activation_kind();

// All sizes of x but the last, multiplied.
Status rows_of(Dims const& x, int64_t& rows);

}  // namespace mha_deploy::trt
