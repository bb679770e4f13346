// Warp-wide instructions of the tensor cores, copies in the background, and what brings numbers into their format
// (compute capability 8.0 and later). ../emulated_tensor_core.h has the same functions for a CPU, and the same guard.
#ifndef DRAMA_TENSOR_CORE
#define DRAMA_TENSOR_CORE
#include <cuda_bf16.h>

#include <cstdint>

namespace drama::cuda {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit numbers from shared memory; lane 8m + r names row r of matrix m, 16 bytes.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

// c (16, 8) += a (16, 16) b (16, 8), in float32. A lane holds c at row lane / 4 (the second half: 8 further down) and
// columns 2 (lane % 4), + 1.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// silu(2 h) = h + h tanh(h): one special function, good to 2^-11 of h.
__device__ __forceinline__ float silu_of_double(float h) {
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h));
  return fmaf(h, t, h);
}

// Good to 2^-12.
__device__ __forceinline__ float sigmoid(float x) {
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x));
  return fmaf(t, 0.5f, 0.5f);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Byte number I of a word as a float: 2^23 + byte, less 2^23.
template <int I>
__device__ __forceinline__ float byte_of(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 | I)) - 8388608.0f;
}

// 16 bytes from global to shared memory, in the background.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// The same, or 16 bytes of zeros.
__device__ __forceinline__ void copy16_or_clear(uint32_t to, const void* from, bool copied) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copied ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than PENDING groups of this thread's copies are on their way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 16 bytes to global memory in one instruction.
__device__ __forceinline__ void store16(void* to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

}  // namespace drama::cuda

#endif
