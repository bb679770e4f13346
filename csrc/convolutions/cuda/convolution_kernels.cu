// Launches of the convolutions' kernels.
#include "convolution_kernels.h"

#include <algorithm>

#include "colour_weight.cuh"
#include "first.cuh"
#include "front.cuh"
#include "spread.cuh"
#include "strided.cuh"
#include "strided_weight.cuh"

namespace drama::cuda {
namespace {

constexpr int WEIGHT_BLOCKS = 2;  // of threads on a multiprocessor

extern __shared__ __align__(512) char memory[];

__global__ __launch_bounds__(Front::THREADS, 1) void front_kernel(const uint8_t* frames, const uint4* weights,
                                                                  const float* shifts, bf16* out, int count) {
  encode_front(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, shifts, out, count);
}

template <typename Stage, Output OUTPUT>
__global__ __launch_bounds__(Stage::THREADS, Stage::RESIDENT) void strided_kernel(const bf16* frames,
                                                                                  const uint4* weights,
                                                                                  const float* shifts, bf16* out,
                                                                                  float* partial, Norm norm, int count) {
  convolve_frames<Stage, OUTPUT>(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, shifts, out, partial, norm,
                                 count);
}

template <typename Stage, Sums SUMS>
__global__ __launch_bounds__(Stage::THREADS, Stage::RESIDENT) void spread_kernel(const bf16* frames,
                                                                                 const uint4* weights, bf16* out,
                                                                                 float* partial, Norm norm, int count) {
  spread<Stage, SUMS>(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, out, partial, norm, count);
}

template <Sums SUMS>
__global__ __launch_bounds__(First::THREADS, First::RESIDENT) void first_kernel(const bf16* frames,
                                                                                const uint4* weights, bf16* out,
                                                                                float* partial, Norm norm, int count) {
  convolve_first<SUMS>(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, weights, out, partial, norm, count);
}

template <typename Stage>
__global__ __launch_bounds__(Stage::THREADS, WEIGHT_BLOCKS) void colour_weight_kernel(const bf16* grads,
                                                                                      const bf16* frames,
                                                                                      float* partial,
                                                                                      NormGradient through, int count) {
  colour_weight<Stage>(memory, threadIdx.x, blockIdx.x, gridDim.x, grads, frames, partial, through, count);
}

template <typename Stage>
__global__ __launch_bounds__(Stage::THREADS, 1) void strided_weight_kernel(const bf16* frames, const bf16* grads,
                                                                           float* partial, int count) {
  strided_weight<Stage>(memory, threadIdx.x, blockIdx.x, gridDim.x, frames, grads, partial, count);
}

template <typename Stage, int MORE_BYTES = 0, typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int blocks, cudaStream_t stream, Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  constexpr int BYTES = Stage::SHARED_BYTES + MORE_BYTES;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Stage::THREADS, BYTES, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

template <typename Stage, Sums SUMS>
constexpr int MORE_BYTES = SUMS == Sums::gradients ? Stage::NORM_BYTES : 0;

// Blocks of threads that keep the weights and walk over their tasks.
template <typename Stage>
int blocks_of(int tasks) {
  return std::min(Stage::RESIDENT * multiprocessors(), tasks);
}

template <typename Stage, Output OUTPUT>
cudaError_t strided(const Launch& l) {
  const int blocks = blocks_of<Stage>(l.count * Stage::PARTS);
  constexpr int MORE = OUTPUT == Output::numbers_and_gradients ? Stage::NORM_BYTES : 0;
  return launch<Stage, MORE>(strided_kernel<Stage, OUTPUT>, blocks, l.stream, l.frames, l.weights, l.shifts, l.out,
                             l.partial, l.norm, l.count);
}

template <typename Stage, Sums SUMS>
cudaError_t spread_frames(const Launch& l) {
  const int blocks = blocks_of<Stage>(l.count * Stage::PARTS);
  constexpr int MORE = MORE_BYTES<Stage, SUMS>;
  return launch<Stage, MORE>(spread_kernel<Stage, SUMS>, blocks, l.stream, l.frames, l.weights, l.out, l.partial, l.norm,
                             l.count);
}

template <Sums SUMS>
cudaError_t first(const Launch& l) {
  const int blocks = first_blocks(l.count);
  constexpr int MORE = MORE_BYTES<First, SUMS>;
  return launch<First, MORE>(first_kernel<SUMS>, blocks, l.stream, l.frames, l.weights, l.out, l.partial, l.norm,
                             l.count);
}

template <typename Stage>
cudaError_t weight_of_strided(const Launch& l) {
  const int blocks = std::min(multiprocessors(), Stage::PARTS * l.count);
  return launch<Stage>(strided_weight_kernel<Stage>, blocks, l.stream, l.frames, l.weights, l.out, l.count);
}

}  // namespace

int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

int strided_second_blocks(int frames) { return blocks_of<StridedSecond>(StridedSecond::PARTS * frames); }

int strided_third_blocks(int frames) { return blocks_of<StridedThird>(StridedThird::PARTS * frames); }

int spread_to_16_blocks(int frames) { return blocks_of<SpreadTo16>(SpreadTo16::PARTS * frames); }

int spread_to_32_blocks(int frames) { return blocks_of<SpreadTo32>(SpreadTo32::PARTS * frames); }

int first_blocks(int frames) { return blocks_of<First>(frames); }

int colour_weight_blocks(int frames) {
  return std::min(WEIGHT_BLOCKS * multiprocessors(), PlainColourWeight::PARTS * frames);
}

int second_weight_blocks(int frames) { return std::min(multiprocessors(), SecondWeight::PARTS * frames); }

int third_weight_blocks(int frames) { return std::min(multiprocessors(), ThirdWeight::PARTS * frames); }

cudaError_t encoder_front(const Launch& l) {
  const int blocks = std::min(multiprocessors(), l.count);
  return launch<Front>(front_kernel, blocks, l.stream, l.frames, l.weights, l.shifts, l.out, l.count);
}
cudaError_t encoder_third(const Launch& l) { return strided<StridedThird, Output::activated_blocks>(l); }
cudaError_t strided_second(const Launch& l) { return strided<StridedSecond, Output::numbers>(l); }
cudaError_t strided_third(const Launch& l) { return strided<StridedThird, Output::numbers>(l); }
cudaError_t to_colours(const Launch& l) { return strided<Colours, Output::numbers>(l); }
cudaError_t spread_to_16(const Launch& l) { return spread_frames<SpreadTo16, Sums::none>(l); }
cudaError_t spread_to_32(const Launch& l) { return spread_frames<SpreadTo32, Sums::none>(l); }
cudaError_t from_colours(const Launch& l) { return first<Sums::none>(l); }

cudaError_t strided_second_and_moments(const Launch& l) { return strided<StridedSecond, Output::numbers_and_moments>(l); }
cudaError_t strided_third_and_moments(const Launch& l) { return strided<StridedThird, Output::numbers_and_moments>(l); }
cudaError_t spread_to_16_and_moments(const Launch& l) { return spread_frames<SpreadTo16, Sums::moments>(l); }
cudaError_t spread_to_32_and_moments(const Launch& l) { return spread_frames<SpreadTo32, Sums::moments>(l); }
cudaError_t from_colours_and_moments(const Launch& l) { return first<Sums::moments>(l); }

cudaError_t strided_second_and_gradients(const Launch& l) {
  return strided<StridedSecond, Output::numbers_and_gradients>(l);
}
cudaError_t strided_third_and_gradients(const Launch& l) {
  return strided<StridedThird, Output::numbers_and_gradients>(l);
}
cudaError_t spread_to_16_and_gradients(const Launch& l) { return spread_frames<SpreadTo16, Sums::gradients>(l); }
cudaError_t spread_to_32_and_gradients(const Launch& l) { return spread_frames<SpreadTo32, Sums::gradients>(l); }
cudaError_t from_colours_and_gradients(const Launch& l) { return first<Sums::gradients>(l); }

cudaError_t colour_weight_gradient(const Launch& l) {
  using Stage = PlainColourWeight;
  const int blocks = colour_weight_blocks(l.count);
  return launch<Stage>(colour_weight_kernel<Stage>, blocks, l.stream, l.frames, l.weights, l.out, NormGradient{},
                       l.count);
}

cudaError_t colour_weight_gradient_through_norm(const Launch& l, const NormGradient& through) {
  using Stage = ColourWeightThroughNorm;
  const int blocks = colour_weight_blocks(l.count);
  return launch<Stage>(colour_weight_kernel<Stage>, blocks, l.stream, l.frames, l.weights, l.out, through, l.count);
}

cudaError_t second_weight_gradient(const Launch& l) { return weight_of_strided<SecondWeight>(l); }
cudaError_t third_weight_gradient(const Launch& l) { return weight_of_strided<ThirdWeight>(l); }

}  // namespace drama::cuda
