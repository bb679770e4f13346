// Schemas of the encoder's operators; the kernels are in cuda/, what they compute and the fake implementations in
// sub_models/fused_encoder.py.
#include <torch/library.h>

TORCH_LIBRARY(drama_native, m) {
  m.def("encoder_front(Tensor frames, Tensor weights, Tensor shifts) -> Tensor");
  m.def("encoder_third(Tensor rows, Tensor weights, Tensor shifts) -> Tensor");
}
