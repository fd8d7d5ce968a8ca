// What `host_test` asks the library that stands for a GPU.
#pragma once

#include <cstdint>

inline constexpr int kFakeAlgorithms = 4;  // that its cuBLASLt proposes

extern "C" {
int fake_gpu_launches();        // of all threads, of kernels, cuDNN and cuBLASLt
uint64_t fake_gpu_algorithm();  // of the latest GEMM, from 1 on
}
