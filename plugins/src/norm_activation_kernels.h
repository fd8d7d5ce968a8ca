// What the kernels of kernels/norm_activation.cu are given: read by both compilers.
#pragma once

#include <vector_types.h>

namespace mha_deploy {

// y = norm(x + residual) * scale + bias, row by row; the sum is kept where `sum` is not null.
struct NormCall {
    uint4 const* x;  // [rows, pieces], pieces of 16 bytes
    uint4 const* residual;  // may be null
    uint4 const* scale;     // [pieces]
    uint4 const* bias;      // may be null
    uint4* y;      // may be null
    uint4* sum;    // may be null
    uint2* fp8;    // y divided by its scale; may be null
    int pieces;
    int is_rms;
    float epsilon;
    float fp8_factor;  // one by the scale
};

// y = activation(x), times `gate` where that is not null, or times what stands behind each row of x.
struct ActivationCall {
    uint4 const* x;
    uint4 const* gate;
    uint4* y;    // may be null
    uint2* fp8;  // may be null
    long long pieces;      // of y
    long long row_pieces;  // of a row of y, where a row of x has twice as many; else 0
    int kind;  // as Operation
    float fp8_factor;
};

}  // namespace mha_deploy
