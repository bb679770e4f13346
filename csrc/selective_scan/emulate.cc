// The CUDA kernels of the forward pass on a CPU; tests/mamba_ssm/ops/test_selective_scan_emulated.py builds and calls this:
//     c++ -O1 -std=c++17 -shared -fPIC -Iemulated -o emulated.so emulate.cc
#include "emulated/scan_ptx.cuh"

#include "cuda/scan_forward.cuh"
#include "cuda/scan_plan.cpp"

using namespace mamba_ssm::cuda;

// Contiguous tensors of `Arguments`' shapes, nullptr where not given. `multiprocessors` sways which kernel runs; its
// index is returned, or -1 after an error.
extern "C" int emulate_forward(int bfloat16, int batch, int channels, int length, int state, int groups, int multiprocessors,
                               const void* u, const void* delta, const void* A, const void* B, const void* C, const float* D,
                               const void* z, const float* delta_bias, int delta_softplus, const int32_t* seq_idx,
                               const void* initial, void* out, void* last_state, void* states) {
  Arguments p{};
  p.batch = batch, p.channels = channels, p.length = length, p.state = state;
  p.segment_channels = channels / groups;
  p.delta_softplus = delta_softplus;
  p.aligned = length * (bfloat16 ? 2 : 4) % 16 == 0;
  p.multiprocessors = multiprocessors;
  const int64_t rows = int64_t(channels) * length, columns = int64_t(state) * length;
  p.u = {u, rows, length}, p.delta = {delta, rows, length};
  if (z) p.z = {z, rows, length};
  p.B = {B, groups, groups * columns, columns, length}, p.C = {C, groups, groups * columns, columns, length};
  p.A = A, p.D = D, p.delta_bias = delta_bias, p.seq_idx = seq_idx, p.initial = initial;
  p.out = {out, rows, length};
  p.last_state = last_state, p.states = states;
  const Plan plan = make_forward_plan(p);
  const auto error = bfloat16 ? forward_of<__nv_bfloat16>(p, plan, nullptr) : forward_of<float>(p, plan, nullptr);
  return error == cudaSuccess ? plan.index : -1;
}
