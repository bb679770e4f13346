// Launches of the convolutions' kernels.
#include "convolution_kernels.h"

#include <algorithm>

#include "colour_weight.cuh"
#include "first.cuh"
#include "front.cuh"
#include "second_weight.cuh"
#include "spread.cuh"
#include "strided.cuh"

namespace drama::cuda {
namespace {

constexpr int FIRST_BLOCKS = 2, WEIGHT_BLOCKS = 2;  // of threads on a multiprocessor

extern __shared__ __align__(128) char memory[];

__global__ __launch_bounds__(Front::THREADS, 1) void front_kernel(const uint8_t* frames, const uint4* weights,
                                                                  const float* shifts, bf16* out, int count) {
  encode_front(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, shifts, out, count);
}

template <typename Stage, Output OUTPUT>
__global__ __launch_bounds__(Stage::THREADS, 1) void strided_kernel(const bf16* frames, const uint4* weights,
                                                                    const float* shifts, bf16* out, int count) {
  convolve_frames<Stage, OUTPUT>(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, shifts, out, count);
}

__global__ __launch_bounds__(Spread::THREADS, 1) void spread_kernel(const bf16* frames, const uint4* weights, bf16* out,
                                                                    int count) {
  spread(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, out, count);
}

__global__ __launch_bounds__(First::THREADS, FIRST_BLOCKS) void first_kernel(const bf16* frames, const uint4* weights,
                                                                             bf16* out, int count) {
  convolve_first(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, out, count);
}

__global__ __launch_bounds__(ColourWeight::THREADS, WEIGHT_BLOCKS) void colour_weight_kernel(const bf16* grads,
                                                                                             const bf16* frames,
                                                                                             float* partial, int count) {
  colour_weight(memory, threadIdx.x, blockIdx.x, gridDim.x, grads, frames, partial, count);
}

__global__ __launch_bounds__(SecondWeight::THREADS, 1) void second_weight_kernel(const bf16* frames, const bf16* grads,
                                                                                 float* partial, int count) {
  second_weight(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, grads, partial, count);
}

template <typename Stage, typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int blocks, cudaStream_t stream, Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Stage::SHARED_BYTES);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Stage::THREADS, Stage::SHARED_BYTES, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

// One block of threads on a multiprocessor: it keeps the weights and walks over its frames.
template <typename Stage, Output OUTPUT>
cudaError_t strided(const Launch& l) {
  const int blocks = std::min(multiprocessors(), l.count * Stage::PARTS);
  return launch<Stage>(strided_kernel<Stage, OUTPUT>, blocks, l.stream, l.frames, l.weights, l.shifts, l.out, l.count);
}

}  // namespace

int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

int colour_weight_blocks(int frames) { return std::min(WEIGHT_BLOCKS * multiprocessors(), ColourWeight::PARTS * frames); }

int second_weight_blocks(int frames) { return std::min(multiprocessors(), SecondWeight::PARTS * frames); }

cudaError_t encoder_front(const Launch& l) {
  const int blocks = std::min(multiprocessors(), l.count);
  return launch<Front>(front_kernel, blocks, l.stream, l.frames, l.weights, l.shifts, l.out, l.count);
}
cudaError_t encoder_third(const Launch& l) { return strided<StridedThird, Output::activated_blocks>(l); }
cudaError_t strided_second(const Launch& l) { return strided<StridedSecond, Output::numbers>(l); }
cudaError_t strided_third(const Launch& l) { return strided<StridedThird, Output::numbers>(l); }
cudaError_t to_colours(const Launch& l) { return strided<Colours, Output::numbers>(l); }

cudaError_t spread_pixels(const Launch& l) {
  const int blocks = std::min(multiprocessors(), l.count * Spread::PARTS);
  return launch<Spread>(spread_kernel, blocks, l.stream, l.frames, l.weights, l.out, l.count);
}

cudaError_t from_colours(const Launch& l) {
  const int blocks = std::min(FIRST_BLOCKS * multiprocessors(), l.count);
  return launch<First>(first_kernel, blocks, l.stream, l.frames, l.weights, l.out, l.count);
}

cudaError_t colour_weight_gradient(const Launch& l) {
  const int blocks = colour_weight_blocks(l.count);
  return launch<ColourWeight>(colour_weight_kernel, blocks, l.stream, l.frames, l.weights, l.out, l.count);
}

cudaError_t second_weight_gradient(const Launch& l) {
  const int blocks = second_weight_blocks(l.count);
  return launch<SecondWeight>(second_weight_kernel, blocks, l.stream, l.frames, l.weights, l.out, l.count);
}

}  // namespace drama::cuda
