// Instructions that the kernels ask for by name. ../emulated/scan_ptx.cuh has the same functions for a CPU, and the same
// guard.
#ifndef MAMBA_SSM_SCAN_PTX
#define MAMBA_SSM_SCAN_PTX

namespace mamba_ssm::cuda {

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Into shared memory, in the background: there after wait_for_fetches(), for this thread.
__device__ inline void fetch_16_bytes(const void* from, void* to) {
  const auto place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}
__device__ inline void wait_for_fetches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// __syncthreads() for warps that come to it in different places of the code.
__device__ inline void meet() { asm volatile("barrier.sync 0;" ::: "memory"); }

}  // namespace mamba_ssm::cuda
#endif
