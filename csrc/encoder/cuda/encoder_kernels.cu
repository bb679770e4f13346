// Launches of the encoder's kernels.
#include "encoder_kernels.h"

#include <algorithm>

#include "front.cuh"
#include "third.cuh"

namespace drama::cuda {
namespace {

extern __shared__ __align__(128) char memory[];

__global__ __launch_bounds__(Front::THREADS, 1) void encoder_front_kernel(const uint8_t* frames, const uint4* weights,
                                                                          const float* shifts, bf16* out, int count) {
  encode_front(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, shifts, out, count);
}

__global__ __launch_bounds__(Third::THREADS, 1) void encoder_third_kernel(const bf16* frames, const uint4* weights,
                                                                          const float* shifts, bf16* out, int count) {
  encode_third(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, shifts, out, count);
}

// One block of threads for each multiprocessor: it keeps the weights and walks over its frames.
template <typename Stage, typename Number>
cudaError_t launch(void (*kernel)(const Number*, const uint4*, const float*, bf16*, int), const Launch& l) {
  if (l.count == 0) return cudaSuccess;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Stage::SHARED_BYTES);
  }
  if (error != cudaSuccess) return error;
  kernel<<<std::min(multiprocessors, l.count), Stage::THREADS, Stage::SHARED_BYTES, l.stream>>>(
      static_cast<const Number*>(l.frames), static_cast<const uint4*>(l.weights), l.shifts, static_cast<bf16*>(l.out),
      l.count);
  return cudaGetLastError();
}

}  // namespace

cudaError_t encoder_front(const Launch& l) { return launch<Front>(encoder_front_kernel, l); }
cudaError_t encoder_third(const Launch& l) { return launch<Third>(encoder_third_kernel, l); }

}  // namespace drama::cuda
