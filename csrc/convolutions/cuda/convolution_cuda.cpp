// The convolutions' operators for CUDA tensors: shapes and memory of what the kernels take.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>

#include "convolution_kernels.h"

namespace drama::cuda {
namespace {

void expect(const char* what, const at::Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.is_cuda() && x.scalar_type() == dtype && x.sizes() == sizes, "convolution: ", what, " has shape ",
                    x.sizes(), " and dtype ", x.scalar_type(), ", expected ", sizes, " and ", dtype, " on a GPU");
}

// Contiguous, and at an address that 16 bytes can be read from.
at::Tensor dense(const at::Tensor& x) {
  const auto y = x.contiguous();
  return reinterpret_cast<uintptr_t>(y.const_data_ptr()) % 16 == 0 ? y : y.clone();
}

int count_of(const at::Tensor& frames) {
  TORCH_CHECK_VALUE(frames.size(0) <= std::numeric_limits<int>::max() / 8, "convolution: ", frames.size(0), " frames");
  return static_cast<int>(frames.size(0));
}

using Kernel = cudaError_t (*)(const Launch&);
using WithSums = std::tuple<at::Tensor, at::Tensor>;

// Runs `kernel` on frames and weights, with shifts unless they are undefined, into `out` and `partial` unless that is.
template <typename Run>
at::Tensor run(const Run& kernel, const at::Tensor& frames, const at::Tensor& weights, const at::Tensor& shifts,
               const at::Tensor& out, const at::Tensor& partial = {}, const Norm& norm = {}) {
  const auto x = dense(frames), w = dense(weights), s = shifts.defined() ? dense(shifts) : shifts;
  const auto error = kernel({x.const_data_ptr(), w.const_data_ptr(), s.defined() ? s.const_data_ptr<float>() : nullptr,
                             out.mutable_data_ptr(), partial.defined() ? partial.mutable_data_ptr<float>() : nullptr, norm,
                             count_of(x), c10::cuda::getCurrentCUDAStream()});
  TORCH_CHECK(error == cudaSuccess, "convolution: ", cudaGetErrorString(error));
  return out;
}

// The norm before a convolution: x, dense, of so many numbers.
Norm norm_of(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& var, const at::Tensor& weight,
             const at::Tensor& bias, double eps, int64_t numbers, int64_t channels) {
  TORCH_CHECK_VALUE(x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.numel() == numbers,
                    "convolution: what was normed has ", x.numel(), " numbers, expected ", numbers, " in bfloat16");
  for (const auto& part : {mean, var, weight, bias}) expect("a norm's part", part, {channels}, at::kFloat);
  return {x.const_data_ptr(),            mean.const_data_ptr<float>(), var.const_data_ptr<float>(),
          weight.const_data_ptr<float>(), bias.const_data_ptr<float>(), static_cast<float>(eps)};
}

// A convolution with sums for a batch norm beside it: what it checks and lays its output in, how it is run.
struct Summed {
  at::Tensor (*output)(const at::Tensor& rows, const at::Tensor& weights);
  Kernel with_moments, with_gradients;
  int (*blocks)(int frames);
  int64_t channels;

  at::Tensor partial(const at::Tensor& rows) const {
    return at::empty({blocks(count_of(rows)), 2, channels}, rows.options().dtype(at::kFloat));
  }

  WithSums moments(const at::Tensor& rows, const at::Tensor& weights) const {
    const c10::cuda::CUDAGuard guard(rows.device());
    const auto out = output(rows, weights), sums = partial(rows);
    return {run(with_moments, rows, weights, {}, out, sums), sums};
  }

  WithSums gradients(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& normed, const at::Tensor& mean,
                     const at::Tensor& var, const at::Tensor& weight, const at::Tensor& bias, double eps) const {
    const c10::cuda::CUDAGuard guard(rows.device());
    const auto out = output(rows, weights), sums = partial(rows), x = dense(normed);
    const auto norm = norm_of(x, mean, var, weight, bias, eps, out.numel(), channels);
    return {run(with_gradients, rows, weights, {}, out, sums, norm), sums};
  }
};

at::Tensor front(const at::Tensor& frames, const at::Tensor& weights, const at::Tensor& shifts) {
  expect("frames", frames, {frames.size(0), 64, 64, 3}, at::kByte);
  expect("weights", weights, {7 * 64 + 25 * 32, 16}, at::kBFloat16);
  expect("shifts", shifts, {16 + 32}, at::kFloat);
  const c10::cuda::CUDAGuard guard(frames.device());
  return run(encoder_front, frames, weights, shifts, at::empty({frames.size(0), 16, 16, 4 * 32}, weights.options()));
}

at::Tensor third(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& shifts) {
  expect("rows", rows, {rows.size(0), 16, 16, 4 * 32}, at::kBFloat16);
  expect("weights", weights, {25 * 2 * 48, 16}, at::kBFloat16);
  expect("shifts", shifts, {48}, at::kFloat);
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(encoder_third, rows, weights, shifts, at::empty({rows.size(0), 8, 8, 4 * 48}, rows.options()));
}

// Of two kernels of a kind, the one for the larger frames.
bool is_second(const at::Tensor& rows) { return rows.dim() == 4 && rows.size(1) == 32; }

at::Tensor strided_output(const at::Tensor& rows, const at::Tensor& weights) {
  const bool second = is_second(rows);
  const int64_t side = second ? 32 : 16, channels = second ? 16 : 32, columns = second ? 32 : 48;
  expect("rows", rows, {rows.size(0), side, side, 4 * channels}, at::kBFloat16);
  expect("weights", weights, {25 * channels / 16 * columns, 16}, at::kBFloat16);
  return at::empty({rows.size(0), side, side, columns}, rows.options());
}

at::Tensor spread_output(const at::Tensor& rows, const at::Tensor& weights) {
  const bool to_16 = is_second(rows);
  const int64_t side = to_16 ? 32 : 16, channels = to_16 ? 32 : 48, columns = to_16 ? 16 : 32;
  expect("rows", rows, {rows.size(0), side, side, channels}, at::kBFloat16);
  expect("weights", weights, {25 * channels / 16 * columns, 16}, at::kBFloat16);
  return at::empty({rows.size(0), side, side, 4 * columns}, rows.options());
}

at::Tensor from_colours_output(const at::Tensor& rows, const at::Tensor& weights) {
  expect("rows", rows, {rows.size(0), 32, 32, 16}, at::kBFloat16);
  expect("weights", weights, {7 * 64, 16}, at::kBFloat16);
  return at::empty({rows.size(0), 32, 32, 4 * 16}, rows.options());
}

constexpr Summed SECOND{strided_output, strided_second_and_moments, strided_second_and_gradients, strided_second_blocks, 32};
constexpr Summed THIRD{strided_output, strided_third_and_moments, strided_third_and_gradients, strided_third_blocks, 48};
constexpr Summed TO_16{spread_output, spread_to_16_and_moments, spread_to_16_and_gradients, spread_to_16_blocks, 16};
constexpr Summed TO_32{spread_output, spread_to_32_and_moments, spread_to_32_and_gradients, spread_to_32_blocks, 32};
constexpr Summed FROM_COLOURS{from_colours_output, from_colours_and_moments, from_colours_and_gradients, first_blocks, 16};

at::Tensor strided(const at::Tensor& rows, const at::Tensor& weights) {
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(is_second(rows) ? strided_second : strided_third, rows, weights, {}, strided_output(rows, weights));
}

at::Tensor spread(const at::Tensor& rows, const at::Tensor& weights) {
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(is_second(rows) ? spread_to_16 : spread_to_32, rows, weights, {}, spread_output(rows, weights));
}

const Summed& strided_of(const at::Tensor& rows) { return is_second(rows) ? SECOND : THIRD; }
const Summed& spread_of(const at::Tensor& rows) { return is_second(rows) ? TO_16 : TO_32; }
const Summed& from_colours_of(const at::Tensor&) { return FROM_COLOURS; }

template <const Summed& (*OF)(const at::Tensor&)>
WithSums with_moments(const at::Tensor& rows, const at::Tensor& weights) {
  return OF(rows).moments(rows, weights);
}

template <const Summed& (*OF)(const at::Tensor&)>
WithSums with_gradients(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& normed,
                        const at::Tensor& mean, const at::Tensor& var, const at::Tensor& weight, const at::Tensor& bias,
                        double eps) {
  return OF(rows).gradients(rows, weights, normed, mean, var, weight, bias, eps);
}

at::Tensor blocks_to_colours(const at::Tensor& rows, const at::Tensor& weights) {
  expect("rows", rows, {rows.size(0), 32, 32, 4 * 16}, at::kBFloat16);
  expect("weights", weights, {36 * 16, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(to_colours, rows, weights, {}, at::empty({rows.size(0), 32, 32, 16}, rows.options()));
}

at::Tensor blocks_from_colours(const at::Tensor& rows, const at::Tensor& weights) {
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(from_colours, rows, weights, {}, from_colours_output(rows, weights));
}

at::Tensor weight_of_colours(const at::Tensor& grads, const at::Tensor& rows) {
  expect("grads", grads, {grads.size(0), 32, 32, 4 * 16}, at::kBFloat16);
  expect("rows", rows, {grads.size(0), 32, 32, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(grads.device());
  const auto options = grads.options().dtype(at::kFloat);
  return run(colour_weight_gradient, grads, rows, {}, at::empty({colour_weight_blocks(count_of(grads)), 64, 120}, options))
      .sum(0);
}

at::Tensor weight_of_colours_through_norm(const at::Tensor& grads, const at::Tensor& rows, const at::Tensor& normed,
                                          const at::Tensor& mean, const at::Tensor& var, const at::Tensor& weight,
                                          const at::Tensor& bias, double eps, const at::Tensor& grad_weight,
                                          const at::Tensor& grad_bias) {
  expect("grads", grads, {grads.size(0), 32, 32, 4 * 16}, at::kBFloat16);
  expect("rows", rows, {grads.size(0), 32, 32, 16}, at::kBFloat16);
  for (const auto& part : {grad_weight, grad_bias}) expect("a norm's gradient", part, {16}, at::kFloat);
  const c10::cuda::CUDAGuard guard(grads.device());
  const auto x = dense(normed);
  const auto norm = norm_of(x, mean, var, weight, bias, eps, grads.numel(), 16);
  const NormGradient through{norm, grad_weight.const_data_ptr<float>(), grad_bias.const_data_ptr<float>()};
  const auto kernel = [&](const Launch& l) { return colour_weight_gradient_through_norm(l, through); };
  const auto options = grads.options().dtype(at::kFloat);
  return run(kernel, grads, rows, {}, at::empty({colour_weight_blocks(count_of(grads)), 64, 120}, options)).sum(0);
}

at::Tensor weight_of_strided(const at::Tensor& rows, const at::Tensor& grads) {
  const bool second = is_second(rows);
  const int64_t side = second ? 32 : 16, channels = second ? 16 : 32, columns = second ? 32 : 48;
  expect("rows", rows, {rows.size(0), side, side, 4 * channels}, at::kBFloat16);
  expect("grads", grads, {rows.size(0), side, side, columns}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  const int blocks = (second ? second_weight_blocks : third_weight_blocks)(count_of(rows));
  const auto partial = at::empty({blocks, 25, channels, columns}, rows.options().dtype(at::kFloat));
  return run(second ? second_weight_gradient : third_weight_gradient, rows, grads, {}, partial).sum(0);
}

}  // namespace

TORCH_LIBRARY_IMPL(drama_native, CUDA, m) {
  m.impl("encoder_front", front);
  m.impl("encoder_third", third);
  m.impl("strided", strided);
  m.impl("spread", spread);
  m.impl("to_colours", blocks_to_colours);
  m.impl("from_colours", blocks_from_colours);
  m.impl("strided_and_moments", with_moments<strided_of>);
  m.impl("strided_and_gradients", with_gradients<strided_of>);
  m.impl("spread_and_moments", with_moments<spread_of>);
  m.impl("spread_and_gradients", with_gradients<spread_of>);
  m.impl("from_colours_and_moments", with_moments<from_colours_of>);
  m.impl("from_colours_and_gradients", with_gradients<from_colours_of>);
  m.impl("colour_weight_gradient", weight_of_colours);
  m.impl("colour_weight_gradient_through_norm", weight_of_colours_through_norm);
  m.impl("strided_weight_gradient", weight_of_strided);
}

}  // namespace drama::cuda
