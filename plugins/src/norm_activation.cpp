#include "norm_activation.h"

#include "driver.h"
#include "norm_activation_kernels.h"
#include "serializer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace mha_deploy {
namespace {

constexpr uint32_t kMagic = 0x5241484dU;  // "MHAR"
constexpr uint32_t kVersion = 3;
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostPieces = 4;  // of one thread

// By type: FP16, BF16. Norms by the pieces of a thread: 1, 2, 4.
constexpr char const* kActivations[] = {
    "mha_deploy_norm_activation_act_fp16", "mha_deploy_norm_activation_act_bf16"};
constexpr char const* kNorms[][2] = {
    {"mha_deploy_norm_activation_norm1_fp16", "mha_deploy_norm_activation_norm1_bf16"},
    {"mha_deploy_norm_activation_norm2_fp16", "mha_deploy_norm_activation_norm2_bf16"},
    {"mha_deploy_norm_activation_norm4_fp16", "mha_deploy_norm_activation_norm4_bf16"}};

unsigned threads_for(int64_t pieces) {
    return static_cast<unsigned>((pieces + 31) / 32 * 32);
}

// Pieces of one thread of a norm.
int64_t pieces_of_thread(int64_t pieces) {
    return pieces <= kMostThreads ? 1 : pieces <= 2 * kMostThreads ? 2 : 4;
}

Status find_kernel(Driver const& driver, NormActivationParameters const& parameters, int64_t width, Type type,
    KernelSlot& slot, CUfunction& kernel) {
    std::size_t const column = type == Type::kHalf ? 0 : 1;
    auto const row = static_cast<std::size_t>(pieces_of_thread(width / kElementsOfLoad) / 2);
    return slot.find(driver, parameters.is_norm() ? kNorms[row][column] : kActivations[column], kernel);
}

}  // namespace

Status NormActivationParameters::check() const {
    auto const number = static_cast<int32_t>(operation);
    if (number < 0 || number > static_cast<int32_t>(Operation::kLast)) {
        return Status::failed("norm or activation: operation must be 0 to 5, got " + std::to_string(number));
    }
    if (fp8 < Fp8Output::kNone || fp8 > Fp8Output::kLast) {
        return Status::failed("fp8 must be 0 to 2, got " + std::to_string(static_cast<int32_t>(fp8)));
    }
    if (operation == Operation::kCopy && (has_second || fp8 != Fp8Output::kOnly)) {
        return Status::failed("a copy is in FP8 and has one input; set fp8 to 2 and has_second to 0");
    }
    if (fp8 != Fp8Output::kNone && !(std::isfinite(fp8_scale) && fp8_scale > 0.0F)) {
        return Status::failed("a scale must be a number above 0, got " + std::to_string(fp8_scale));
    }
    if (!is_norm() && (has_bias || keeps_sum)) {
        return Status::failed("an activation has no bias and no second output; set both to 0");
    }
    if (packed && (is_norm() || operation == Operation::kCopy || has_second)) {
        return Status::failed("a factor beside x is that of an activation; set packed or has_second to 0");
    }
    if (keeps_sum && !has_second) {
        return Status::failed("keeps_sum needs a residual; set has_second to 1");
    }
    if (is_norm() && !(std::isfinite(epsilon) && epsilon >= 0.0F)) {
        return Status::failed("a norm's epsilon must be a number from 0 on, got " + std::to_string(epsilon));
    }
    return Status();
}

std::vector<std::byte> serialize(NormActivationParameters const& parameters) {
    return fields_to_bytes(parameters, kMagic, kVersion);
}

Status deserialize(void const* bytes, std::size_t size, NormActivationParameters& parameters) {
    return fields_from_bytes(bytes, size, kMagic, kVersion, "norm or activation", parameters);
}

Status check_width(int64_t width) {
    if (width >= kElementsOfLoad && width % kElementsOfLoad == 0
        && width <= kElementsOfLoad * kMostThreads * kMostPieces) {
        return Status();
    }
    return Status::failed("norm or activation: the last axis must be a multiple of 8 from 8 to 32768, got "
                          + std::to_string(width) + "; leave this node to TensorRT");
}

Status prepare_norm_activation(
    NormActivationParameters const& parameters, int64_t width, Type type, KernelSlot& slot) {
    Driver const* driver = nullptr;
    CUfunction kernel = nullptr;
    RETURN_IF_FAILED(load_driver(driver));
    return find_kernel(*driver, parameters, width, type, slot, kernel);
}

Status run_norm_activation(NormActivationParameters const& parameters, int64_t rows, int64_t width, Type type,
    void const* const* inputs, void* const* outputs, KernelSlot& slot, CUstream stream) {
    return guarded("run a normalisation or activation", [&]() -> Status {
        if (rows == 0) {
            return Status();
        }
        Driver const* driver = nullptr;
        RETURN_IF_FAILED(load_driver(driver));
        auto const piece = [](void const* address) { return static_cast<uint4 const*>(address); };
        int64_t const pieces = width / kElementsOfLoad;
        bool const only = parameters.fp8 == Fp8Output::kOnly;
        auto* const y = only ? nullptr : static_cast<uint4*>(outputs[0]);
        void* const last = outputs[only ? 0 : parameters.outputs() - 1];
        auto* const fp8 = parameters.fp8 == Fp8Output::kNone ? nullptr : static_cast<uint2*>(last);
        CUfunction kernel = nullptr;
        RETURN_IF_FAILED(find_kernel(*driver, parameters, width, type, slot, kernel));
        if (!parameters.is_norm()) {
            ActivationCall call{};
            call.x = piece(inputs[0]);
            call.gate = parameters.has_second ? piece(inputs[1]) : nullptr;
            call.row_pieces = parameters.packed ? pieces : 0;
            call.y = y;
            call.fp8 = fp8;
            call.fp8_factor = 1.0F / parameters.fp8_scale;
            call.pieces = rows * pieces;
            call.kind = static_cast<int>(parameters.operation);
            void* arguments[] = {&call};
            constexpr unsigned threads = 256;
            auto const blocks = static_cast<unsigned>((call.pieces + threads - 1) / threads);
            return status_of(
                driver->launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr),
                "launch an activation");
        }
        std::size_t next = 1;
        NormCall call{};
        call.x = piece(inputs[0]);
        call.residual = parameters.has_second ? piece(inputs[next++]) : nullptr;
        call.scale = piece(inputs[next++]);
        call.bias = parameters.has_bias ? piece(inputs[next++]) : nullptr;
        call.y = y;
        call.fp8 = fp8;
        call.fp8_factor = 1.0F / parameters.fp8_scale;
        call.sum = parameters.keeps_sum ? static_cast<uint4*>(outputs[1]) : nullptr;
        call.pieces = static_cast<int>(pieces);
        call.is_rms = parameters.operation == Operation::kRmsNorm ? 1 : 0;
        call.epsilon = parameters.epsilon;
        int64_t const each = pieces_of_thread(pieces);
        void* arguments[] = {&call};
        unsigned const threads = threads_for((pieces + each - 1) / each);
        return status_of(driver->launch(kernel, static_cast<unsigned>(rows), 1, 1, threads, 1, 1, 0, stream,
                             arguments, nullptr),
            "launch a normalisation");
    });
}

}  // namespace mha_deploy
