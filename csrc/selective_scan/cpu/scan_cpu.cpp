// The selective scan and its one-step update for CPU tensors: fills in the arguments of the kernels in scan_kernels.inl.
#include "../scan_ops.h"
#include "scan_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cstdlib>
#include <string_view>

namespace mamba_ssm::cpu {
namespace {

static_assert(kChunk == kStateChunk);

enum class InstructionSet { kGeneric, kAvx2, kAvx512 };

// The widest that this processor has; ATEN_CPU_CAPABILITY (default, avx2) lowers it as it does for torch's own kernels.
InstructionSet instruction_set() {
#if defined(__x86_64__)
  static const InstructionSet found = [] {
    const char* variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string_view limit = variable ? variable : "";
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (limit == "default" || !avx2) return InstructionSet::kGeneric;
    return limit == "avx2" || !avx512 ? InstructionSet::kAvx2 : InstructionSet::kAvx512;
  }();
  return found;
#else
  return InstructionSet::kGeneric;
#endif
}

Kernels select_kernels(Element element, bool complex_state) {
#if defined(__x86_64__)
  if (instruction_set() == InstructionSet::kAvx512) return avx512::kernels(element, complex_state);
  if (instruction_set() == InstructionSet::kAvx2) return avx2::kernels(element, complex_state);
#endif
  return generic::kernels(element, complex_state);
}

StepKernel select_step_kernel(bool float64) {
#if defined(__x86_64__)
  if (instruction_set() == InstructionSet::kAvx512) return avx512::step_kernel(float64);
  if (instruction_set() == InstructionSet::kAvx2) return avx2::step_kernel(float64);
#endif
  return generic::step_kernel(float64);
}

Element element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return Element::kFloat32;
    case at::kDouble: return Element::kFloat64;
    case at::kBFloat16: return Element::kBFloat16;
    case at::kHalf: return Element::kFloat16;
    default: TORCH_CHECK_TYPE(false, "selective_scan: dtype is ", dtype, ", expected float32, float64, bfloat16 or float16");
  }
}

Activation activation(const at::Tensor& x) {
  if (!x.defined()) return {};
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}
MutableActivation mutable_activation(const at::Tensor& x) {
  if (!x.defined()) return {};
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}
const void* data_of(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
void* mutable_data_of(const at::Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; }

// B or C as the kernels want it: (B, G, L, N) states, or (D, N) where constant.
at::Tensor rows_first(const at::Tensor& weight, at::ScalarType state) {
  if (weight.dim() == 2) return weight.to(state).contiguous();
  auto grouped = weight.dim() == 3 ? weight.unsqueeze(1) : weight;
  if (!c10::isComplexType(state)) return grouped.to(state).transpose(2, 3).contiguous();
  grouped = grouped.to(at::toRealValueType(state)).unflatten(3, {-1, 2}).contiguous();
  return at::view_as_complex(grouped).transpose(2, 3).contiguous();
}

// The gradient for B or C from the kernels' partial sums.
at::Tensor gradient_like(const at::Tensor& weight, const at::Tensor& partial) {
  if (weight.dim() == 2) return partial.sum(0);
  const auto groups = groups_of(weight);
  auto grad = partial.unflatten(1, {groups, -1}).sum(2).transpose(2, 3);  // (B, G, N, L)
  if (grad.is_complex()) grad = at::view_as_real(grad.contiguous()).flatten(3);
  return (weight.dim() == 3 ? grad.squeeze(1) : grad).to(weight.scalar_type()).contiguous();
}

// 1 where seq_idx differs from the row before.
at::Tensor sequence_starts(const OptionalTensor& seq_idx) {
  if (!seq_idx.has_value()) return {};
  auto starts = at::zeros(seq_idx->sizes(), seq_idx->options().dtype(at::kByte));
  const auto length = seq_idx->size(1);
  if (length > 1) starts.narrow(1, 1, length - 1).copy_(seq_idx->narrow(1, 1, length - 1).ne(seq_idx->narrow(1, 0, length - 1)));
  return starts;
}

// Tensors whose memory a ScanArguments points to.
struct Prepared {
  at::Tensor A, B, C, D, delta_bias, starts, initial;
  ScanArguments arguments{};
};

Prepared prepare(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
                 const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                 const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& seq_idx,
                 const OptionalTensor& initial_state) {
  Prepared prepared;
  const auto state = A.scalar_type();
  prepared.A = A.contiguous().resolve_conj();
  prepared.B = rows_first(B, state);
  prepared.C = rows_first(C, state);
  prepared.D = D.has_value() ? D->contiguous() : at::Tensor();
  prepared.delta_bias = delta_bias.has_value() ? delta_bias->contiguous() : at::Tensor();
  prepared.starts = sequence_starts(seq_idx);
  prepared.initial = initial_state.has_value() ? initial_state->contiguous().resolve_conj() : at::Tensor();
  auto& p = prepared.arguments;
  p.batch = u.size(0);
  p.channels = u.size(1);
  p.length = u.size(2);
  p.state = A.size(1);
  p.groups_B = groups_of(B);
  p.groups_C = groups_of(C);
  p.segment_channels = segment_channels(p.channels, p.groups_B, p.groups_C);
  p.delta_softplus = delta_softplus;
  p.u = activation(u);
  p.delta = activation(delta);
  p.z = activation(given(z));
  p.A = data_of(prepared.A);
  p.B = data_of(prepared.B);
  p.C = data_of(prepared.C);
  p.D = data_of(prepared.D);
  p.delta_bias = data_of(prepared.delta_bias);
  p.starts = static_cast<const uint8_t*>(data_of(prepared.starts));
  p.initial = data_of(prepared.initial);
  return prepared;
}

using ScanKernel = void (*)(const ScanArguments&, int64_t, int64_t, void*);

void run(const Kernels& kernels, ScanKernel kernel, const ScanArguments& p) {
  const auto bytes = kernels.scratch_bytes(p);
  at::parallel_for(0, p.batch * p.parts(), 1, [&](int64_t begin, int64_t end) {
    const auto scratch = c10::GetCPUAllocator()->allocate(bytes);
    kernel(p, begin, end, scratch.get());
  });
}

}  // namespace

ForwardResult forward(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B,
                      const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                      const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& seq_idx,
                      const OptionalTensor& initial_state, bool save_states) {
  auto prepared = prepare(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state);
  auto& p = prepared.arguments;
  const auto out = at::empty(u.sizes(), u.options());
  const auto last_state = at::empty({p.batch, p.channels, p.state}, A.options());
  const auto states = at::empty({p.batch, save_states ? p.chunks() : 0, p.channels, p.state}, A.options());
  p.out = mutable_activation(out);
  p.last_state = mutable_data_of(last_state);
  p.states = save_states ? mutable_data_of(states) : nullptr;
  const auto kernels = select_kernels(element_of(u.scalar_type()), A.is_complex());
  run(kernels, kernels.forward, p);
  return {out, last_state, states};
}

BackwardResult backward(const at::Tensor& dout, const OptionalTensor& dlast_state, const at::Tensor& u,
                        const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
                        const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                        bool delta_softplus, const OptionalTensor& seq_idx, const OptionalTensor& initial_state,
                        const at::Tensor& states) {
  auto prepared = prepare(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state);
  auto& p = prepared.arguments;
  const auto real = at::toRealValueType(A.scalar_type());
  const auto dlast = dlast_state.has_value() ? dlast_state->contiguous().resolve_conj() : at::Tensor();
  const auto kept = states.contiguous();
  const auto per_channel = A.options().dtype(real);
  const auto du = at::empty(u.sizes(), u.options()), ddelta = at::empty(u.sizes(), u.options());
  const auto dz = z.has_value() ? at::empty(u.sizes(), u.options()) : at::empty({0}, u.options());
  const auto partial = [&](int64_t groups) {
    if (groups == 0) return at::empty({p.batch, p.channels, p.state}, A.options());
    return at::empty({p.batch, p.parts(), p.length, p.state}, A.options());
  };
  const auto dA = at::empty({p.batch, p.channels, p.state}, A.options());
  const auto dB = partial(p.groups_B), dC = partial(p.groups_C);
  const auto dD = at::empty({p.batch, D.has_value() ? p.channels : 0}, per_channel);
  const auto ddelta_bias = at::empty({p.batch, delta_bias.has_value() ? p.channels : 0}, per_channel);
  const auto dinitial = initial_state.has_value() ? at::empty({p.batch, p.channels, p.state}, A.options())
                                                  : at::empty({0}, A.options());
  p.dout = activation(dout);
  p.dlast_state = data_of(dlast);
  p.states = const_cast<void*>(kept.const_data_ptr());
  p.du = mutable_activation(du);
  p.ddelta = mutable_activation(ddelta);
  if (z.has_value()) p.dz = mutable_activation(dz);
  p.dA = mutable_data_of(dA);
  p.dB = mutable_data_of(dB);
  p.dC = mutable_data_of(dC);
  p.dD = D.has_value() ? mutable_data_of(dD) : nullptr;
  p.ddelta_bias = delta_bias.has_value() ? mutable_data_of(ddelta_bias) : nullptr;
  p.dinitial = initial_state.has_value() ? mutable_data_of(dinitial) : nullptr;
  const auto kernels = select_kernels(element_of(u.scalar_type()), A.is_complex());
  run(kernels, kernels.backward, p);
  return {du, ddelta, dA.sum(0), gradient_like(B, dB), gradient_like(C, dC), dD.sum(0), dz, ddelta_bias.sum(0), dinitial};
}

namespace {

// (B, H, P) from (B, D) or (B, H, P), (H, P) from (D) or (H, P): channels without heads are taken P at a time.
Strided strided(const at::Tensor& x, bool has_batch, bool has_heads_and_channels, int64_t head_channels) {
  if (!x.defined()) return {};
  const int64_t first = has_batch ? 1 : 0, stride = x.stride(first);
  return {x.const_data_ptr(), has_batch ? x.stride(0) : 0, has_heads_and_channels ? stride : stride * head_channels,
          has_heads_and_channels ? x.stride(first + 1) : stride};
}

// How many of `channels`, all of one group, make a head where there are none: whole vectors, and some items of work.
int64_t channels_at_a_time(int64_t channels) {
  constexpr int64_t few = 64;
  return channels % few == 0 ? std::min(channels, few) : channels;
}

at::Tensor state_contiguous(const at::Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

}  // namespace

at::Tensor state_update(at::Tensor& state, const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A,
                        const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                        const OptionalTensor& dt_bias, bool dt_softplus, const OptionalTensor& state_batch_indices) {
  const bool by_head = x.dim() == 3;  // (B, H, P); otherwise (B, D)
  const bool wide = state.scalar_type() == at::kDouble || x.scalar_type() == at::kDouble || A.scalar_type() == at::kDouble;
  const auto real = wide ? at::kDouble : at::kFloat;
  const auto prepared = [&](const at::Tensor& tensor) { return tensor.scalar_type() == real ? tensor : tensor.to(real); };
  const auto maybe = [&](const OptionalTensor& tensor) { return tensor.has_value() ? prepared(*tensor) : at::Tensor(); };
  const auto h = state_contiguous(prepared(state)), input = prepared(x), step_size = prepared(dt);
  const auto B_rows = state_contiguous(prepared(B)), C_rows = state_contiguous(prepared(C));
  const auto skip = maybe(D), gate = maybe(z), bias = maybe(dt_bias);
  auto decay = prepared(A);
  if (decay.stride(-1) != 0) decay = state_contiguous(decay);
  const auto indices = state_batch_indices.has_value() ? state_batch_indices->to(at::kLong).contiguous() : at::Tensor();
  for (int64_t b = 0; indices.defined() && b < indices.numel(); ++b) {
    const auto row = indices.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_INDEX(row >= 0 && row < state.size(0), "selective_state_update: state_batch_indices holds ", row,
                      ", expected rows of state, 0 to ", state.size(0) - 1);
  }
  const at::Tensor out = at::detail::empty_cpu(input.sizes(), real);  // not dispatched, as at::empty would be

  StepArguments p{};
  p.batch = x.size(0);
  p.state = state.size(-1);
  const auto projection = [](const at::Tensor& weight, int64_t& groups) -> Strided {
    groups = weight.dim() == 2 ? 1 : weight.size(1);
    return {weight.const_data_ptr(), weight.stride(0), weight.dim() == 2 ? 0 : weight.stride(1), 0};
  };
  p.B = projection(B_rows, p.groups_B);
  p.C = projection(C_rows, p.groups_C);
  p.head_channels = by_head ? x.size(2) : channels_at_a_time(segment_channels(x.size(1), p.groups_B, p.groups_C));
  p.heads = by_head || p.head_channels == 0 ? x.size(1) : x.size(1) / p.head_channels;
  const auto per_channel = [&](const at::Tensor& tensor, bool has_batch) {
    return strided(tensor, has_batch, by_head, p.head_channels);
  };
  p.A = per_channel(decay, false);
  p.A_state_stride = p.state == 1 ? 1 : decay.stride(-1);
  p.dt_softplus = dt_softplus;
  p.h = h.mutable_data_ptr();
  p.h_row_stride = h.stride(0);
  p.h_head_stride = by_head ? h.stride(1) : h.stride(1) * p.head_channels;
  p.h_channel_stride = by_head ? h.stride(2) : h.stride(1);
  p.rows = static_cast<const int64_t*>(data_of(indices));
  p.x = per_channel(input, true);
  p.dt = per_channel(step_size, true);
  p.z = per_channel(gate, true);
  p.D = per_channel(skip, false);
  p.dt_bias = per_channel(bias, false);
  p.out = out.mutable_data_ptr();
  const auto kernel = select_step_kernel(real == at::kDouble);
  // Two items that name one row of the state must not run side by side: with indices, one thread.
  const int64_t items = p.batch * p.heads;
  const int64_t work = p.head_channels * p.state;
  const int64_t grain = p.rows ? std::max<int64_t>(items, 1) : std::max<int64_t>(1, 32768 / std::max<int64_t>(work, 1));
  at::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  if (!h.is_same(state)) state.copy_(h);
  return out.scalar_type() == x.scalar_type() ? out : out.to(x.scalar_type());
}

TORCH_LIBRARY_IMPL(mamba_ssm_native, CPU, m) {
  m.impl("selective_scan_forward", forward);
  m.impl("selective_scan_backward", backward);
  m.impl("selective_state_update", state_update);
}

}  // namespace mamba_ssm::cpu
