// cuBLASLt, found when it is first needed, and its objects with an owner.
#pragma once

#include "status.h"

#include <cublasLt.h>

#include <memory>
#include <string>

namespace mha_deploy {

// The functions of libcublasLt that are used, and no others.
struct CublasLt {
    decltype(&cublasLtCreate) create = nullptr;
    decltype(&cublasLtDestroy) destroy = nullptr;
    decltype(&cublasLtMatmulDescCreate) create_operation = nullptr;
    decltype(&cublasLtMatmulDescDestroy) destroy_operation = nullptr;
    decltype(&cublasLtMatmulDescSetAttribute) set_operation = nullptr;
    decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
    decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
    decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
    decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
    decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
    decltype(&cublasLtMatmulAlgoGetHeuristic) find_algorithms = nullptr;
    decltype(&cublasLtMatmulAlgoCheck) check_algorithm = nullptr;
    decltype(&cublasLtMatmul) multiply = nullptr;
    decltype(&cublasLtGetVersion) version = nullptr;
};

using LtHandle = std::unique_ptr<cublasLtContext, decltype(&cublasLtDestroy)>;
using LtOperation = std::unique_ptr<cublasLtMatmulDescOpaque_t, decltype(&cublasLtMatmulDescDestroy)>;
using LtLayout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, decltype(&cublasLtMatrixLayoutDestroy)>;
using LtPreference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, decltype(&cublasLtMatmulPreferenceDestroy)>;

// The newest libcublasLt that works with this machine's driver, and a handle of it for the current device.
// A handle is for one thread at a time.
Status make_handle(CublasLt const*& library, LtHandle& handle);

// A status of cuBLASLt as words, with its number where it is one that the library does not name here.
std::string name_of(cublasStatus_t status);

// A status of cuBLASLt as one of ours: what was tried, and what cuBLASLt says.
Status status_of(cublasStatus_t status, std::string const& tried);

}  // namespace mha_deploy
