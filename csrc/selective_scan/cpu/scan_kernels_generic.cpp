// The CPU kernels for the instruction set the compiler targets by default (16-byte vectors: SSE2, NEON).
#define SCAN_VECTOR_BYTES 16
#define SCAN_NAMESPACE generic
#include "scan_kernels.inl"
