// The selective scan for CUDA tensors: fills in the arguments of the kernels in scan_forward.cuh and scan_backward.cuh.
#include "../scan_ops.h"
#include "scan_cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>

namespace mamba_ssm::cuda {
namespace {

static_assert(kTile == kStateChunk);

const void* data_of(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
void* mutable_data_of(const at::Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; }
float* floats_of(const at::Tensor& x) { return static_cast<float*>(mutable_data_of(x)); }

at::Tensor rows_contiguous(const at::Tensor& x) { return !x.defined() || x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous(); }
at::Tensor contiguous(const OptionalTensor& x) { return x.has_value() ? x->contiguous().resolve_conj() : at::Tensor(); }

Activation activation(const at::Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1)}; }
MutableActivation mutable_activation(const at::Tensor& x) { return {x.mutable_data_ptr(), x.stride(0), x.stride(1)}; }

Projection projection(const at::Tensor& x) {
  if (x.dim() == 2) return {x.const_data_ptr(), 0, 0, 0, 0};
  if (x.dim() == 3) return {x.const_data_ptr(), 1, x.stride(0), 0, x.stride(1)};
  return {x.const_data_ptr(), int(x.size(1)), x.stride(0), x.stride(1), x.stride(2)};
}

// Whether every row of x starts at a multiple of 16 bytes.
bool is_aligned(const at::Tensor& x) {
  if (!x.defined() || x.dim() == 2) return true;
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) {
    aligned = aligned && (x.size(axis) <= 1 || x.stride(axis) * x.itemsize() % 16 == 0);
  }
  return aligned;
}

int as_int(int64_t size, const char* name) {
  TORCH_CHECK_VALUE(size <= std::numeric_limits<int>::max() / 2, "selective_scan: ", name, " is ", size,
                    ", expected at most ", std::numeric_limits<int>::max() / 2);
  return int(size);
}

// Of the first device that is asked for: it decides no more than how fast a scan is.
int multiprocessors() {
  static const int found = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  return found;
}

void check(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

using Kernel = cudaError_t (*)(const Arguments&, const Plan&, cudaStream_t);
Kernel choose(at::ScalarType dtype, Kernel float32, Kernel float16, Kernel bfloat16) {
  switch (dtype) {
    case at::kFloat: return float32;
    case at::kHalf: return float16;
    case at::kBFloat16: return bfloat16;
    default: TORCH_CHECK_TYPE(false, "selective_scan: dtype is ", dtype, ", expected float32, float16 or bfloat16 on a GPU");
  }
}

// Tensors whose memory an Arguments points to.
struct Prepared {
  at::Tensor u, delta, z, A, B, C, D, delta_bias, seq_idx, initial;
  Arguments arguments{};
  Plan plan{};
};

Prepared prepare(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
                 const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                 const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& seq_idx,
                 const OptionalTensor& initial_state, Plan (*choose_plan)(const Arguments&)) {
  TORCH_CHECK_VALUE(A.size(1) <= kMaxState, "selective_scan: A has N = ", A.size(1), ", expected at most ", kMaxState,
                    " on a GPU");
  Prepared prepared;
  const auto parameter = [](const at::Tensor& x) { return x.dim() == 2 ? x.contiguous().resolve_conj() : rows_contiguous(x); };
  prepared.u = rows_contiguous(u);
  prepared.delta = rows_contiguous(delta);
  prepared.z = rows_contiguous(given(z));
  prepared.A = parameter(A);
  prepared.B = parameter(B);
  prepared.C = parameter(C);
  prepared.D = contiguous(D);
  prepared.delta_bias = contiguous(delta_bias);
  if (seq_idx.has_value()) prepared.seq_idx = seq_idx->to(at::kInt).contiguous();
  prepared.initial = contiguous(initial_state);
  auto& p = prepared.arguments;
  p.batch = as_int(u.size(0), "B");
  p.channels = as_int(u.size(1), "D");
  p.length = as_int(u.size(2), "L");
  p.state = int(A.size(1));
  p.complex_state = A.is_complex();
  p.delta_softplus = delta_softplus;
  p.multiprocessors = multiprocessors();
  p.u = activation(prepared.u);
  p.delta = activation(prepared.delta);
  if (z.has_value()) p.z = activation(prepared.z);
  p.B = projection(prepared.B);
  p.C = projection(prepared.C);
  p.segment_channels = int(segment_channels(p.channels, p.B.groups, p.C.groups));
  p.A = data_of(prepared.A);
  p.D = static_cast<const float*>(data_of(prepared.D));
  p.delta_bias = static_cast<const float*>(data_of(prepared.delta_bias));
  p.seq_idx = static_cast<const int32_t*>(data_of(prepared.seq_idx));
  p.initial = data_of(prepared.initial);
  p.aligned = is_aligned(prepared.u) && is_aligned(prepared.delta) && is_aligned(prepared.z) && is_aligned(prepared.B) &&
              is_aligned(prepared.C) && u.size(2) * u.itemsize() % 16 == 0;  // outputs are contiguous
  prepared.plan = choose_plan(p);
  TORCH_CHECK_VALUE(int64_t(p.batch) * prepared.plan.parts <= std::numeric_limits<int>::max(),
                    "selective_scan: u has shape ", u.sizes(), ", too many blocks for one launch");
  return prepared;
}

}  // namespace

ForwardResult forward(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
                      const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                      const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& seq_idx,
                      const OptionalTensor& initial_state, bool save_states) {
  const c10::cuda::CUDAGuard guard(u.device());
  auto prepared = prepare(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state, make_forward_plan);
  auto& p = prepared.arguments;
  const auto out = at::empty(u.sizes(), u.options());
  const auto last_state = at::empty({p.batch, p.channels, p.state}, A.options());
  const auto states = at::empty({p.batch, save_states ? p.chunks() : 0, p.channels, p.state}, A.options());
  p.out = mutable_activation(out);
  p.last_state = mutable_data_of(last_state);
  p.states = save_states ? mutable_data_of(states) : nullptr;
  const auto kernel = choose(u.scalar_type(), forward_float32, forward_float16, forward_bfloat16);
  check(kernel(p, prepared.plan, c10::cuda::getCurrentCUDAStream()), "selective_scan forward");
  return {out, last_state, states};
}

BackwardResult backward(const at::Tensor& dout, const OptionalTensor& dlast_state, const at::Tensor& u,
                        const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                        const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                        bool delta_softplus, const OptionalTensor& seq_idx, const OptionalTensor& initial_state,
                        const at::Tensor& states) {
  const c10::cuda::CUDAGuard guard(u.device());
  auto prepared = prepare(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state, make_plan);
  auto& p = prepared.arguments;
  const auto& plan = prepared.plan;
  auto dout_rows = rows_contiguous(dout);
  if (p.aligned && !is_aligned(dout_rows)) dout_rows = dout_rows.clone(at::MemoryFormat::Contiguous);  // the plan needs it
  const auto dlast = contiguous(dlast_state), kept = states.contiguous();
  const auto real = A.options().dtype(at::kFloat);
  const auto du = at::empty(u.sizes(), u.options()), ddelta = at::empty(u.sizes(), u.options());
  const auto dz = at::empty(z.has_value() ? u.sizes() : at::IntArrayRef({0}), u.options());
  const auto dA = at::empty(A.sizes(), A.options()), dB = at::empty(B.sizes(), B.options()), dC = at::empty(C.sizes(), C.options());
  const auto dD = at::empty({D.has_value() ? p.channels : 0}, real);
  const auto dbias = at::empty({delta_bias.has_value() ? p.channels : 0}, real);
  const std::vector<int64_t> per_state{p.batch, p.channels, p.state};
  const auto dinitial = at::empty(initial_state.has_value() ? at::IntArrayRef(per_state) : at::IntArrayRef({0}), A.options());

  // One allocation for all that blocks leave behind for the sums over them.
  const int64_t reals = p.complex_state ? 2 : 1, state_floats = int64_t(p.batch) * p.channels * p.state * reals;
  const int64_t row_floats = 2 * plan.padded_state * reals, channel_floats = int64_t(p.batch) * p.channels;
  int64_t used = 0;
  const auto reserve = [&](bool wanted, int64_t floats) {
    const int64_t start = used;
    used += wanted ? (floats + 3) / 4 * 4 : 0;
    return wanted ? start : -1;
  };
  const auto place_A = reserve(true, state_floats);
  const auto place_B = reserve(!p.variable_B(), state_floats), place_C = reserve(!p.variable_C(), state_floats);
  const auto place_D = reserve(D.has_value(), channel_floats), place_bias = reserve(delta_bias.has_value(), channel_floats);
  const auto place_BC = reserve(p.variable_B() || p.variable_C(), int64_t(p.batch) * plan.parts * p.length * row_floats);
  const auto workspace = at::empty({used}, real);
  const auto at_place = [&](int64_t place) { return place < 0 ? nullptr : floats_of(workspace) + place; };

  p.dout = activation(dout_rows);
  p.dlast_state = data_of(dlast);
  p.states = const_cast<void*>(kept.const_data_ptr());
  p.du = mutable_activation(du);
  p.ddelta = mutable_activation(ddelta);
  if (z.has_value()) p.dz = mutable_activation(dz);
  p.partial_A = at_place(place_A);
  p.partial_B = at_place(place_B);
  p.partial_C = at_place(place_C);
  p.partial_D = at_place(place_D);
  p.partial_bias = at_place(place_bias);
  p.partial_BC = at_place(place_BC);
  p.dA = mutable_data_of(dA);
  p.dB = mutable_data_of(dB);
  p.dC = mutable_data_of(dC);
  p.dD = D.has_value() ? floats_of(dD) : nullptr;
  p.ddelta_bias = delta_bias.has_value() ? floats_of(dbias) : nullptr;
  p.dinitial = initial_state.has_value() ? mutable_data_of(dinitial) : nullptr;
  const auto kernel = choose(u.scalar_type(), backward_float32, backward_float16, backward_bfloat16);
  check(kernel(p, plan, c10::cuda::getCurrentCUDAStream()), "selective_scan backward");
  return {du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial};
}

TORCH_LIBRARY_IMPL(mamba_ssm_native, CUDA, m) {
  m.impl("selective_scan_forward", forward);
  m.impl("selective_scan_backward", backward);
}

}  // namespace mamba_ssm::cuda
