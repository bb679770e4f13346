// What convolution_cuda.cpp asks of the kernels. Pointers are to device memory; the .cuh files say what they hold.
#pragma once
#include <cuda_runtime.h>

namespace drama::cuda {

struct Launch {
  const void* frames;
  const void* weights;  // or what meets the frames
  const float* shifts;  // of norms; null without
  void* out;
  int count;
  cudaStream_t stream;
};

int multiprocessors();                 // of the current device
int colour_weight_blocks(int frames);  // of threads, each leaves its sums in `out`
int second_weight_blocks(int frames);

cudaError_t encoder_front(const Launch& l);
cudaError_t encoder_third(const Launch& l);
cudaError_t strided_second(const Launch& l);
cudaError_t strided_third(const Launch& l);
cudaError_t spread_pixels(const Launch& l);
cudaError_t to_colours(const Launch& l);
cudaError_t from_colours(const Launch& l);
cudaError_t colour_weight_gradient(const Launch& l);
cudaError_t second_weight_gradient(const Launch& l);

}  // namespace drama::cuda
