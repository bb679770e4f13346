// The CPU kernels for AVX-512.
#include "scan_kernels.h"  // before the target changes: it includes standard headers

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define SCAN_VECTOR_BYTES 64
#define SCAN_NAMESPACE avx512
#include "scan_kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
