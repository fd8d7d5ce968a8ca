// A plugin that computes nothing: it shows what the library does around the work.
#pragma once

#include "../src/trt/layer.h"

#include <memory>
#include <new>
#include <string>
#include <vector>

namespace mha_deploy::trt {

// Its workspace is 1000 bytes for each row, a call fails with the size it was given, and there is never any
// memory.
class Probe final : public Layer {
public:
    char const* name() const noexcept override { return "Probe"; }
    std::unique_ptr<Layer> clone() const override { throw std::bad_alloc(); }
    std::vector<std::byte> parameter_bytes() const override { return {}; }
    int32_t inputs() const noexcept override { return 1; }
    int32_t outputs() const noexcept override { return 1; }
    Holds holds(int32_t) const noexcept override { return Holds::kNumbers; }
    Status output_dims(
        int32_t, nvinfer1::DimsExprs const*, nvinfer1::IExprBuilder&, nvinfer1::DimsExprs&) const override {
        throw std::bad_alloc();
    }
    Status resize(std::vector<Dims> const& sizes) override {
        rows_ = sizes[0][0];
        return Status();
    }
    Status prepare(Type) override { return Status(); }
    std::size_t workspace_bytes(Type, bool) override { return static_cast<std::size_t>(rows_) * 1000; }
    Status run(Type, CallMemory const& memory) override {
        return Status::failed("probe of " + std::to_string(memory.workspace_bytes) + " bytes");
    }

private:
    int64_t rows_ = 0;
};

inline LayerKind const& probe_kind() {
    static LayerKind const kind{"Probe", {},
        [](Fields&, std::unique_ptr<Layer>& layer) {
            layer = std::make_unique<Probe>();
            return Status();
        },
        [](void const*, std::size_t, std::unique_ptr<Layer>& layer) {
            layer = std::make_unique<Probe>();
            return Status();
        }};
    return kind;
}

}  // namespace mha_deploy::trt
