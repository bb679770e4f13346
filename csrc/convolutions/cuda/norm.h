// A batch norm before a convolution: what came in, in bfloat16, and its parameters. Null pointers without one.
#pragma once

namespace drama::cuda {

struct Norm {
  const void* x;
  const float *mean, *var, *weight, *bias;
  float eps;
};

}  // namespace drama::cuda
