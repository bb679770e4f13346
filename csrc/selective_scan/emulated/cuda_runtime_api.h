// The names that scan_cuda.h needs; see cuda_runtime.h.
#pragma once

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
