// cuBLASLt, found when it is first needed, and its objects with an owner.
#pragma once

#include "status.h"

#include <cublasLt.h>

#include <memory>
#include <string>

namespace mha_deploy {

// The functions of libcublasLt that are used, and no others.
#define MHA_DEPLOY_CUBLASLT_FUNCTIONS(X) \
    X(create, cublasLtCreate) \
    X(destroy, cublasLtDestroy) \
    X(create_operation, cublasLtMatmulDescCreate) \
    X(destroy_operation, cublasLtMatmulDescDestroy) \
    X(set_operation, cublasLtMatmulDescSetAttribute) \
    X(create_layout, cublasLtMatrixLayoutCreate) \
    X(destroy_layout, cublasLtMatrixLayoutDestroy) \
    X(create_preference, cublasLtMatmulPreferenceCreate) \
    X(destroy_preference, cublasLtMatmulPreferenceDestroy) \
    X(set_preference, cublasLtMatmulPreferenceSetAttribute) \
    X(find_algorithms, cublasLtMatmulAlgoGetHeuristic) \
    X(check_algorithm, cublasLtMatmulAlgoCheck) \
    X(multiply, cublasLtMatmul) \
    X(version, cublasLtGetVersion)

struct CublasLt {
#define MHA_DEPLOY_MEMBER(member, function) decltype(&function) member = nullptr;
    MHA_DEPLOY_CUBLASLT_FUNCTIONS(MHA_DEPLOY_MEMBER)
#undef MHA_DEPLOY_MEMBER
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
