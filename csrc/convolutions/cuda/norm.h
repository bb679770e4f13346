// A batch norm before a convolution: what came in, in bfloat16, and its parameters. Null pointers without one.
#pragma once

namespace drama::cuda {

struct Norm {
  const void* x;
  const float *mean, *var, *weight, *bias;
  float eps;
};

// And what came of it: the gradients of weight and bias.
struct NormGradient {
  Norm norm;
  const float *grad_weight, *grad_bias;
};

}  // namespace drama::cuda
