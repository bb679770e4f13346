// What the operators of the selective scan share between devices: argument bundles, dtypes, group bookkeeping.
//
// Letters: B batch, L length, D channels, N state size, G groups. `selective_scan_forward` and `_backward` take
// activations (u, delta, z, variable B and C) of one dtype and parameters and states in float32, or float64 where the
// activations are; states and A may be complex. `selective_scan` brings its arguments there.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

namespace mamba_ssm {

using OptionalTensor = std::optional<at::Tensor>;
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, last_state, states
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                  at::Tensor, at::Tensor>;

// Rows between two states that forward keeps for backward, on every device.
constexpr int64_t kStateChunk = 32;

// D must be a multiple of both groups; 0 groups: constant. Channels that share one group of B and one of C.
inline int64_t segment_channels(int64_t channels, int64_t groups_B, int64_t groups_C) {
  const auto size = [&](int64_t groups) { return groups == 0 ? channels : channels / groups; };
  int64_t a = size(groups_B), b = size(groups_C);
  while (b != 0) std::tie(a, b) = std::make_tuple(b, a % b);
  return a;
}

// Groups of B or C: 0 where constant (D, N), 1 where (B, N, L).
inline int64_t groups_of(const at::Tensor& weight) {
  return weight.dim() == 2 ? 0 : weight.dim() == 3 ? 1 : weight.size(1);
}

inline at::Tensor given(const OptionalTensor& tensor) { return tensor.has_value() ? *tensor : at::Tensor(); }

ForwardResult selective_scan_forward(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                     const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                     const OptionalTensor& z, const OptionalTensor& delta_bias, bool delta_softplus,
                                     const OptionalTensor& seq_idx, const OptionalTensor& initial_state,
                                     bool save_states);

}  // namespace mamba_ssm
