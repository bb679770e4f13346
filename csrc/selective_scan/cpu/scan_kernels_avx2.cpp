// The CPU kernels for AVX2 with FMA.
#include "scan_kernels.h"  // before the target changes: it includes standard headers

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define SCAN_VECTOR_BYTES 32
#define SCAN_NAMESPACE avx2
#include "scan_kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
