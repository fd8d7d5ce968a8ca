// What stands between the GEMMs of a block, in one kernel each: residual and normalisation, or an activation.
#pragma once

#include "attention.h"
#include "driver.h"
#include "status.h"

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mha_deploy {

enum class Operation : int32_t {
    kLayerNorm = 0,
    kRmsNorm = 1,
    kGelu = 2,
    kGeluTanh = 3,
    kSilu = 4,
    kCopy = 5,  // nothing, before it is written in FP8
    kLast = kCopy
};

// Whether the result is written in FP8 (E4M3), four numbers in a word of 32 bits: not, besides, or instead.
enum class Fp8Output : int32_t { kNone = 0, kBesides = 1, kOnly = 2, kLast = kOnly };

struct NormActivationParameters {
    Operation operation = Operation::kLayerNorm;
    bool has_second = false;  // the residual of a norm, added before it; the factor of an activation
    bool packed = false;      // x is [rows, 2 * width]: its second half is the factor of an activation
    bool has_bias = false;    // of a norm
    bool keeps_sum = false;   // x + residual is the second output
    float epsilon = 0.0F;
    Fp8Output fp8 = Fp8Output::kNone;
    float fp8_scale = 1.0F;  // what one in FP8 stands for

    bool is_norm() const noexcept { return operation <= Operation::kRmsNorm; }
    // x, residual or factor, scale, bias: those there are
    int32_t inputs() const noexcept {
        return 1 + static_cast<int32_t>(has_second) + (is_norm() ? 1 + static_cast<int32_t>(has_bias) : 0);
    }
    // The result, in FP8 where it is in FP8 only; the sum; the result in FP8: those there are
    int32_t outputs() const noexcept {
        return 1 + static_cast<int32_t>(keeps_sum) + static_cast<int32_t>(fp8 == Fp8Output::kBesides);
    }
    bool is_fp8(int32_t output) const noexcept {
        return fp8 == Fp8Output::kOnly ? output == 0 : fp8 == Fp8Output::kBesides && output == outputs() - 1;
    }
    Status check() const;

    template <typename Self, typename Visit>
    static void visit_fields(Self& p, Visit const& visit) {
        visit("operation", p.operation);
        visit("has_second", p.has_second);
        visit("packed", p.packed);
        visit("has_bias", p.has_bias);
        visit("keeps_sum", p.keeps_sum);
        visit("epsilon", p.epsilon);
        visit("fp8", p.fp8);
        visit("fp8_scale", p.fp8_scale);
    }
};

std::vector<std::byte> serialize(NormActivationParameters const& parameters);
Status deserialize(void const* bytes, std::size_t size, NormActivationParameters& parameters);

// The result is [rows, width]. Whether there is a kernel for the width.
Status check_width(int64_t width);

// Load the kernel for these sizes into the caller's slot, so that a call only launches.
Status prepare_norm_activation(
    NormActivationParameters const& parameters, int64_t width, Type type, KernelSlot& slot);

// Launch; no scratch memory is needed. `slot` is the caller's, who keeps it from call to call.
Status run_norm_activation(NormActivationParameters const& parameters, int64_t rows, int64_t width, Type type,
    void const* const* inputs, void* const* outputs, KernelSlot& slot, CUstream stream);

}  // namespace mha_deploy
