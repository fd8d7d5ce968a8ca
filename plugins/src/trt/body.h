// What both plugin interfaces do the same way: types, sizes, plans, workspace, bytes for the engine.
#pragma once

#include "layer.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace mha_deploy::trt {

// What is known of an engine while it is built, for all clones of a plugin.
struct EngineRecord {
    bool building = false;             // made from fields, not from the bytes of an engine
    std::atomic<bool> dynamic{false};  // the sizes differ from call to call

    // How much workspace TensorRT was asked for. `enqueue` is given memory but not its size, and a machine
    // without a GPU asks for none, so what was asked has to travel with the engine. With several profiles
    // TensorRT asks several times; the smallest answer is the one that always holds.
    void lower_workspace(std::uint64_t bytes) noexcept {
        std::uint64_t known = workspace_.load();
        while (bytes < known && !workspace_.compare_exchange_weak(known, bytes)) {
        }
    }
    std::uint64_t workspace() const noexcept {
        std::uint64_t const bytes = workspace_.load();
        return bytes == kNothingAsked ? 0 : bytes;
    }

private:
    static constexpr std::uint64_t kNothingAsked = std::numeric_limits<std::uint64_t>::max();
    std::atomic<std::uint64_t> workspace_{kNothingAsked};
};

// One plugin object. TensorRT clones it for each execution context: every clone has work of its own.
class PluginBody {
public:
    PluginBody(std::unique_ptr<Layer> layer, std::shared_ptr<EngineRecord> record);

    std::unique_ptr<PluginBody> clone() const;
    Layer const& layer() const noexcept { return *layer_; }

    // The type of an output, given that of the first input.
    nvinfer1::DataType output_type(int32_t output, nvinfer1::DataType first) const noexcept;

    // Whether the tensor at this position, inputs first, may be so.
    bool supports(int32_t position, nvinfer1::PluginTensorDesc const& tensor,
        nvinfer1::PluginTensorDesc const& first) const noexcept;

    // Sizes of an output, as expressions of those of the inputs. Those that are all known are checked here.
    Status output_dims(int32_t output, nvinfer1::DimsExprs const* inputs, int32_t count,
        nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs& dims);

    // At build time: refuse sizes that fit the parameters neither at their largest nor at their smallest. The
    // largest sizes of several inputs need not belong to the same call.
    Status configure(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t count);

    // Find the plans of these sizes. Without a GPU there are none: an engine may be built for another
    // machine.
    Status prepare(nvinfer1::PluginTensorDesc const* inputs, int32_t count);

    void tune(std::vector<Dims> const& inputs, nvinfer1::DataType type);

    // Tactics for the usual sizes, where TensorRT can time them: how many, what they are timed for, and the one
    // to use from now on.
    int32_t propose_tactics(std::vector<Dims> const& inputs, nvinfer1::DataType type);
    void offer_tactics();
    void set_tactic(int32_t tactic) noexcept { layer_->set_tactic(tactic); }
    std::size_t workspace_bytes(std::vector<Dims> const& inputs, nvinfer1::DataType type);
    Status run(nvinfer1::PluginTensorDesc const* inputs, CallMemory memory);

    std::vector<std::byte> serialize() const;
    static Status deserialize(
        LayerKind const& kind, void const* bytes, std::size_t size, std::unique_ptr<PluginBody>& body);

private:
    Status check_count(std::size_t inputs) const;
    Status resize(std::vector<Dims> sizes);
    nvinfer1::DataType type_for(Holds holds, nvinfer1::DataType first) const noexcept;

    std::unique_ptr<Layer> layer_;
    std::shared_ptr<EngineRecord> record_;
    std::vector<Dims> sizes_;  // those that the layer works with now; empty: none
    std::vector<Dims> proposed_;  // those that tactics were proposed for
    Type proposed_type_ = Type::kHalf;
};

Status body_from_fields(LayerKind const& kind, nvinfer1::PluginFieldCollection const* collection,
    std::unique_ptr<PluginBody>& body);

Dims dims_of(nvinfer1::Dims const& dims);
bool is_concrete(nvinfer1::Dims const& dims) noexcept;
std::optional<Dims> dims_of(nvinfer1::DimsExprs const& dims);  // nothing where a size is not known yet
std::vector<Dims> sizes_of(nvinfer1::PluginTensorDesc const* tensors, int32_t count);
// Of the smallest, the usual or the largest sizes.
std::vector<Dims> sizes_of(nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t count,
    nvinfer1::Dims nvinfer1::DynamicPluginTensorDesc::*which);

}  // namespace mha_deploy::trt
