// Warp-wide instructions of the tensor cores, copies in the background, and what brings numbers into their format
// (compute capability 8.0 and later). ../emulated_tensor_core.h has the same functions for a CPU, and the same guard. What
// follows DRAMA_WARPGROUPS is that of architecture 9.0a alone.
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

// A barrier for THREADS threads of a block, one of several groups.
template <int THREADS>
__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(THREADS) : "memory");
}

// 16 bytes to global memory in one instruction.
__device__ __forceinline__ void store16(void* to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DRAMA_WARPGROUPS

// What names a matrix B (16, N) of a warpgroup's product in shared memory, whose chunks of 16 bytes change places. By column:
// N rows of 16 numbers, 32 bytes; halves turn with bit 2 of the row.   address: a multiple of 256.
__device__ __forceinline__ uint64_t rows_descriptor(uint32_t address) {
  constexpr uint64_t TURNED_32 = 3, EIGHT = 256;  // bytes from one 8 rows to the next
  return TURNED_32 << 62 | EIGHT / 16 << 32 | static_cast<uint64_t>(1) << 16 | (address & 0x3ffff) / 16;
}

// The transpose: 16 rows of WIDE numbers, the next WIDE of them `apart`; chunks turn with what 128 bytes they lie in.
// address: a multiple of 16 WIDE.
template <int WIDE>
__device__ __forceinline__ uint64_t columns_descriptor(uint32_t address, uint32_t apart) {
  static_assert(WIDE == 16 || WIDE == 32);
  constexpr uint64_t TURNED = WIDE == 16 ? 3 : 2, EIGHT = 16 * WIDE;
  return TURNED << 62 | EIGHT / 16 << 32 | static_cast<uint64_t>(apart / 16) << 16 | (address & 0x3ffff) / 16;
}

// Sets out acc += a B for the 64 rows that a warpgroup's four warps hold as in multiply_add, at columns 8 j of
// acc[j] for j < COUNT. Neither acc nor a may be touched before it has been awaited. TRANSPOSED: B is named by columns_descriptor.
#define ACC(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#define A_AND_B "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "n"(TRANSPOSED)
template <int COUNT, int TRANSPOSED = 0>
__device__ __forceinline__ void start_product(float (*acc)[4], const uint32_t (&a)[4], uint64_t descriptor) {
  static_assert(COUNT == 2 || COUNT == 4 || COUNT == 6 || COUNT == 8);
  if constexpr (COUNT == 2) {
    asm volatile(
        "{.reg .pred add; setp.eq.u32 add, 1, 1; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, %13;}"
        : ACC(0), ACC(1)
        : A_AND_B);
  } else if constexpr (COUNT == 4) {
    asm volatile(
        "{.reg .pred add; setp.eq.u32 add, 1, 1; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, add, 1, 1, %21;}"
        : ACC(0), ACC(1), ACC(2), ACC(3)
        : A_AND_B);
  } else if constexpr (COUNT == 6) {
    asm volatile(
        "{.reg .pred add; setp.eq.u32 add, 1, 1; wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, add, 1, 1, %29;}"
        : ACC(0), ACC(1), ACC(2), ACC(3), ACC(4), ACC(5)
        : A_AND_B);
  } else {
    asm volatile(
        "{.reg .pred add; setp.eq.u32 add, 1, 1; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, %37;}"
        : ACC(0), ACC(1), ACC(2), ACC(3), ACC(4), ACC(5), ACC(6), ACC(7)
        : A_AND_B);
  }
}
#undef ACC
#undef A_AND_B

// Before products, where registers that they read or add to have been written otherwise.
__device__ __forceinline__ void order_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Holds registers as they are until here.
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }
template <int ROWS, typename T>
__device__ __forceinline__ void keep_tiles(T (&tiles)[ROWS][4]) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) keep(tiles[i][k]);
}

#endif

// What a thread has written to shared memory, for products of warpgroups; a barrier has to follow.
__device__ __forceinline__ void show_to_products() {
#ifdef DRAMA_WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace drama::cuda

#endif
