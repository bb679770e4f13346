// Schemas of the convolutions' operators; the kernels are in cuda/, what they compute in sub_models/fused_encoder.py and
// sub_models/native_convolutions.py, the latter with the fake implementations.
#include <torch/library.h>

#define NORM "Tensor normed, Tensor mean, Tensor var, Tensor weight, Tensor bias, float eps"

TORCH_LIBRARY(drama_native, m) {
  // Moves on with how kernels take weights, and with it WEIGHTS_ORDER in native_convolutions.py.
  m.def("weights_order() -> int", []() -> int64_t { return 2; });
  m.def("encoder_front(Tensor frames, Tensor weights, Tensor shifts) -> Tensor");
  m.def("encoder_third(Tensor rows, Tensor weights, Tensor shifts) -> Tensor");
  m.def("strided(Tensor rows, Tensor weights) -> Tensor");
  m.def("spread(Tensor rows, Tensor weights) -> Tensor");
  m.def("to_colours(Tensor rows, Tensor weights) -> Tensor");
  m.def("from_colours(Tensor rows, Tensor weights) -> Tensor");
  m.def("strided_and_moments(Tensor rows, Tensor weights) -> (Tensor, Tensor)");
  m.def("strided_and_gradients(Tensor rows, Tensor weights, " NORM ") -> (Tensor, Tensor)");
  m.def("spread_and_moments(Tensor rows, Tensor weights) -> (Tensor, Tensor)");
  m.def("spread_and_gradients(Tensor rows, Tensor weights, " NORM ") -> (Tensor, Tensor)");
  m.def("from_colours_and_moments(Tensor rows, Tensor weights) -> (Tensor, Tensor)");
  m.def("from_colours_and_gradients(Tensor rows, Tensor weights, " NORM ") -> (Tensor, Tensor)");
  m.def("colour_weight_gradient(Tensor grads, Tensor rows) -> Tensor");
  m.def("colour_weight_gradient_through_norm(Tensor grads, Tensor rows, " NORM
        ", Tensor grad_weight, Tensor grad_bias) -> Tensor");
  m.def("strided_weight_gradient(Tensor rows, Tensor grads) -> Tensor");
}
