// What `host_test` asks the library that stands for a GPU.
#pragma once

#include <cstdint>

inline constexpr int kFakeAlgorithms = 4;  // that its cuBLASLt proposes, numbered from 1 on
inline constexpr int kFakeFastest = 3;     // takes half as long as the others

extern "C" {
int fake_gpu_launches();        // of all threads, of kernels, cuDNN and cuBLASLt
uint64_t fake_gpu_algorithm();  // of the latest GEMM of this thread
}
