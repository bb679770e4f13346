// What encoder_cuda.cpp asks of the kernels.
#pragma once
#include <cuda_runtime.h>

namespace drama::cuda {

// Device pointers; see front.cuh and third.cuh for what they hold.
struct Launch {
  const void* frames;
  const void* weights;
  const float* shifts;
  void* out;
  int count;
  cudaStream_t stream;
};

cudaError_t encoder_front(const Launch& l);
cudaError_t encoder_third(const Launch& l);

}  // namespace drama::cuda
