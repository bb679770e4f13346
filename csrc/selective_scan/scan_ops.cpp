// Schemas, argument preparation and autograd of the selective scan. The kernels are in cpu/ and cuda/, the fake
// implementations in mamba_ssm/ops/_native.py.
#include "scan_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace mamba_ssm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::ScalarType widest(std::initializer_list<const at::Tensor*> activations,
                      std::initializer_list<const at::Tensor*> parameters) {
  auto dtype = (*activations.begin())->scalar_type();
  for (const auto* x : activations) {
    if (x->defined()) dtype = at::promote_types(dtype, x->scalar_type());
  }
  for (const auto* x : parameters) {
    if (x->defined() && at::toRealValueType(x->scalar_type()) == at::kDouble) dtype = at::kDouble;
  }
  return dtype;
}

at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) {
  return !x.defined() || x.scalar_type() == dtype ? x : x.to(dtype);
}

OptionalTensor optional(const at::Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

bool any_requires_grad(std::initializer_list<const at::Tensor*> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto* x : tensors) {
    if (x->defined() && x->requires_grad()) return true;
  }
  return false;
}

const auto& forward_operator() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mamba_ssm_native::selective_scan_forward", "")
                             .typed<decltype(selective_scan_forward)>();
  return op;
}

// The public operator: brings activations to their widest dtype and parameters to float32 (float64 beside float64).
std::tuple<at::Tensor, at::Tensor> selective_scan(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                  const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                                  const OptionalTensor& z, const OptionalTensor& delta_bias,
                                                  bool delta_softplus, const OptionalTensor& seq_idx,
                                                  const OptionalTensor& initial_state) {
  const auto skip = given(D), gate = given(z), bias = given(delta_bias), initial = given(initial_state);
  const at::Tensor none;
  const bool variable_B = B.dim() != 2, variable_C = C.dim() != 2;
  const auto dtype = widest({&u, &delta, &gate, variable_B ? &B : &none, variable_C ? &C : &none},
                            {&A, &skip, &bias, &initial, variable_B ? &none : &B, variable_C ? &none : &C});
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto state = A.is_complex() ? at::toComplexType(real) : real;
  const bool save_states = any_requires_grad({&u, &delta, &A, &B, &C, &skip, &gate, &bias, &initial});
  auto [out, last_state, states] =
      forward_operator().call(cast(u, dtype), cast(delta, dtype), cast(A, state), cast(B, variable_B ? dtype : state),
                              cast(C, variable_C ? dtype : state), optional(cast(skip, real)),
                              optional(cast(gate, dtype)), optional(cast(bias, real)), delta_softplus, seq_idx,
                              optional(cast(initial, state)), save_states);
  return {cast(out, u.scalar_type()), last_state};
}

class SelectiveScanFunction : public torch::autograd::Function<SelectiveScanFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& u, const Variable& delta, const Variable& A,
                               const Variable& B, const Variable& C, const OptionalTensor& D, const OptionalTensor& z,
                               const OptionalTensor& delta_bias, bool delta_softplus, const OptionalTensor& seq_idx,
                               const OptionalTensor& initial_state, bool save_states) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, last_state, states] = forward_operator().call(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx,
                                                             initial_state, save_states);
    ctx->save_for_backward({u, delta, A, B, C, given(D), given(z), given(delta_bias), given(seq_idx),
                            given(initial_state), states});
    ctx->saved_data["delta_softplus"] = delta_softplus;
    ctx->saved_data["save_states"] = save_states;
    ctx->mark_non_differentiable({states});
    ctx->set_materialize_grads(false);
    return {out, last_state, states};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    TORCH_CHECK(ctx->saved_data["save_states"].toBool(),
                "selective_scan_forward: backward needs save_states=True in forward");
    using Backward = BackwardResult(const at::Tensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                                    const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                    const OptionalTensor&, const OptionalTensor&, bool, const OptionalTensor&,
                                    const OptionalTensor&, const at::Tensor&);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mamba_ssm_native::selective_scan_backward", "")
                               .typed<Backward>();
    const auto& u = saved[0];
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(12);
    const auto dout = grads[0].defined() ? grads[0] : at::zeros_like(u);
    auto [du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial] =
        op.call(dout, optional(grads[1]), u, saved[1], saved[2], saved[3], saved[4], optional(saved[5]),
                optional(saved[6]), optional(saved[7]), ctx->saved_data["delta_softplus"].toBool(), optional(saved[8]),
                optional(saved[9]), saved[10]);
    const auto of = [&](const at::Tensor& grad, size_t i) { return saved[i].defined() ? grad : at::Tensor(); };
    return {du, ddelta, dA, dB, dC, of(dD, 5), of(dz, 6), of(ddelta_bias, 7), {}, {}, of(dinitial, 9), {}};
  }
};

ForwardResult forward_with_autograd(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                    const at::Tensor& B, const at::Tensor& C, const OptionalTensor& D,
                                    const OptionalTensor& z, const OptionalTensor& delta_bias, bool delta_softplus,
                                    const OptionalTensor& seq_idx, const OptionalTensor& initial_state,
                                    bool save_states) {
  const auto skip = given(D), gate = given(z), bias = given(delta_bias), initial = given(initial_state);
  if (!any_requires_grad({&u, &delta, &A, &B, &C, &skip, &gate, &bias, &initial})) {  // a node would only cost time
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward_operator().call(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx, initial_state,
                                   save_states);
  }
  auto results = SelectiveScanFunction::apply(u, delta, A, B, C, D, z, delta_bias, delta_softplus, seq_idx,
                                              initial_state, save_states);
  return {results[0], results[1], results[2]};
}

}  // namespace

TORCH_LIBRARY(mamba_ssm_native, m) {
  m.def(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "bool delta_softplus, Tensor? seq_idx, Tensor? initial_state) -> (Tensor, Tensor)",
      selective_scan);
  m.def(
      "selective_scan_forward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, bool delta_softplus, Tensor? seq_idx, Tensor? initial_state, bool save_states) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "selective_scan_backward(Tensor dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, Tensor? seq_idx, Tensor? initial_state, "
      "Tensor states) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices) -> Tensor");
}

TORCH_LIBRARY_IMPL(mamba_ssm_native, Autograd, m) { m.impl("selective_scan_forward", forward_with_autograd); }

}  // namespace mamba_ssm
