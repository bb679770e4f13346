// What convolution_cuda.cpp asks of the kernels. Pointers are to device memory; the .cuh files say what they hold.
#pragma once
#include <cuda_runtime.h>

#include "norm.h"

namespace drama::cuda {

struct Launch {
  const void* frames;
  const void* weights;  // or what meets the frames
  const float* shifts;  // of norms; null without
  void* out;
  float* partial;  // sums of each block of threads; null without
  Norm norm;
  int count;
  cudaStream_t stream;
};

int multiprocessors();  // of the current device
int strided_second_blocks(int frames);  // of threads, each leaves its sums in `partial`
int strided_third_blocks(int frames);
int spread_to_16_blocks(int frames);
int spread_to_32_blocks(int frames);
int first_blocks(int frames);
int colour_weight_blocks(int frames);  // of threads, each leaves its sums in `out`
int second_weight_blocks(int frames);
int third_weight_blocks(int frames);

cudaError_t encoder_front(const Launch& l);
cudaError_t encoder_third(const Launch& l);
cudaError_t strided_second(const Launch& l);
cudaError_t strided_third(const Launch& l);
cudaError_t spread_to_16(const Launch& l);
cudaError_t spread_to_32(const Launch& l);
cudaError_t to_colours(const Launch& l);
cudaError_t from_colours(const Launch& l);
cudaError_t strided_second_and_moments(const Launch& l);
cudaError_t strided_third_and_moments(const Launch& l);
cudaError_t spread_to_16_and_moments(const Launch& l);
cudaError_t spread_to_32_and_moments(const Launch& l);
cudaError_t from_colours_and_moments(const Launch& l);
cudaError_t strided_second_and_gradients(const Launch& l);
cudaError_t strided_third_and_gradients(const Launch& l);
cudaError_t spread_to_16_and_gradients(const Launch& l);
cudaError_t spread_to_32_and_gradients(const Launch& l);
cudaError_t from_colours_and_gradients(const Launch& l);
cudaError_t colour_weight_gradient(const Launch& l);
cudaError_t colour_weight_gradient_through_norm(const Launch& l, const NormGradient& through);
cudaError_t second_weight_gradient(const Launch& l);
cudaError_t third_weight_gradient(const Launch& l);

}  // namespace drama::cuda
