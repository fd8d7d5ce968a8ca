#include "linear_matmul.h"

namespace mha_deploy {

namespace {

// Partial sums of a split K in FP32, added in a fixed order. The other schemes keep them in 16 bits, which is
// what these projections are here to avoid.
constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

constexpr cublasLtMatmulPreferenceAttributes_t kAlignments[] = {
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};

std::string matrix(int64_t rows, int64_t columns) {
    return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

cudaDataType_t data_type(Type type) noexcept { return type == Type::kHalf ? CUDA_R_16F : CUDA_R_16BF; }

}  // namespace

bool LinearShape::operator==(LinearShape const& other) const noexcept {
    return rows == other.rows && inputs == other.inputs && outputs == other.outputs;
}

bool LinearProblem::operator==(LinearProblem const& other) const noexcept {
    return shape == other.shape && type == other.type && has_bias == other.has_bias
           && alignment == other.alignment;
}

std::string LinearProblem::text() const {
    return matrix(shape.rows, shape.inputs) + " x " + matrix(shape.inputs, shape.outputs) + " in "
           + (type == Type::kHalf ? "FP16" : "BF16") + (has_bias ? " with bias" : " without bias");
}

Status LinearMatmul::make(
    CublasLt const& library, cublasLtHandle_t handle, LinearProblem const& problem) {
    library_ = &library;
    problem_ = problem;
    LinearShape const& shape = problem.shape;
    if (Status status = make_operation(); !status.ok()) {
        return status;
    }
    // cuBLASLt's matrices are column-major: a row-major matrix is its transpose to it, so it is asked for
    // y^T [N, rows] = W^T [N, K] x^T [K, rows], which moves nothing. Its bias has one number for each row.
    if (Status status = make_layout(weight_, shape.outputs, shape.inputs, "weight"); !status.ok()) {
        return status;
    }
    if (Status status = make_layout(x_, shape.inputs, shape.rows, "x"); !status.ok()) {
        return status;
    }
    if (Status status = make_layout(y_, shape.outputs, shape.rows, "y"); !status.ok()) {
        return status;
    }
    return find_algorithm(handle);
}

Status LinearMatmul::make_operation() {
    cublasLtMatmulDesc_t made = nullptr;
    cublasStatus_t const status = library_->create_operation(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status_of(status, "describe a product");
    }
    operation_ = LtOperation(made, library_->destroy_operation);
    bias_ = nullptr;
    if (!problem_.has_bias) {
        return Status();
    }
    cublasLtEpilogue_t const epilogue = CUBLASLT_EPILOGUE_BIAS;
    return status_of(
        library_->set_operation(made, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)),
        "add a bias to a product");
}

Status LinearMatmul::make_layout(LtLayout& layout, int64_t rows, int64_t columns, char const* of) const {
    cublasLtMatrixLayout_t made = nullptr;
    cublasStatus_t const status = library_->create_layout(&made, data_type(problem_.type),
        static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status_of(status, std::string("describe ") + of + " of " + problem_.text());
    }
    layout = LtLayout(made, library_->destroy_layout);
    return Status();
}

Status LinearMatmul::make_preference(LtPreference& preference) const {
    cublasLtMatmulPreference_t made = nullptr;
    Status status = status_of(library_->create_preference(&made), "describe what algorithms are wanted");
    if (!status.ok()) {
        return status;
    }
    preference = LtPreference(made, library_->destroy_preference);
    status = status_of(
        library_->set_preference(
            made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceLimit, sizeof(kWorkspaceLimit)),
        "limit the workspace");
    if (!status.ok()) {
        return status;
    }
    status = status_of(
        library_->set_preference(
            made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &kReductions, sizeof(kReductions)),
        "limit the ways of adding partial sums");
    for (auto const attribute : kAlignments) {
        if (status.ok()) {
            status = status_of(
                library_->set_preference(made, attribute, &problem_.alignment, sizeof(problem_.alignment)),
                "state the alignment");
        }
    }
    return status;
}

Status LinearMatmul::set_bias(void const* bias) {
    if (!problem_.has_bias || bias == bias_) {
        return Status();
    }
    cublasStatus_t const status =
        library_->set_operation(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
    if (status == CUBLAS_STATUS_SUCCESS) {
        bias_ = bias;
    }
    return status_of(status, "set the bias");
}

Status LinearMatmul::find_algorithm(cublasLtHandle_t handle) {
    LtPreference preference(nullptr, nullptr);
    if (Status status = make_preference(preference); !status.ok()) {
        return status;
    }
    // The library reads the alignment of the bias from its address, and no more: any such number does.
    auto const* const aligned = reinterpret_cast<void const*>(uintptr_t{problem_.alignment});
    if (Status status = set_bias(aligned); !status.ok()) {
        return status;
    }
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    cublasStatus_t const status = library_->find_algorithms(handle, operation_.get(), weight_.get(), x_.get(),
        y_.get(), y_.get(), preference.get(), 1, &result, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0 || result.state != CUBLAS_STATUS_SUCCESS) {
        return Status::failed("cuBLASLt has no algorithm for " + problem_.text() + "; got \""
                              + name_of(status) + "\"; try sizes that are multiples of 8");
    }
    algorithm_ = result.algo;
    workspace_bytes_ = result.workspaceSize;
    return Status();
}

Status LinearMatmul::launch(
    cublasLtHandle_t handle, LinearPointers const& pointers, void* workspace, CUstream stream) {
    if (Status status = set_bias(pointers.bias); !status.ok()) {
        return status;
    }
    float const one = 1.0F;
    float const zero = 0.0F;
    cublasStatus_t const status = library_->multiply(handle, operation_.get(), &one, pointers.weight,
        weight_.get(), pointers.x, x_.get(), &zero, pointers.y, y_.get(), pointers.y, y_.get(),
        &algorithm_, workspace, workspace_bytes_, stream);
    if (status == CUBLAS_STATUS_SUCCESS) {
        return Status();  // before any text is made: this is every call
    }
    return status_of(status, "launch " + problem_.text());
}

}  // namespace mha_deploy
