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

// Runs `kernel` on frames and weights, with shifts unless they are undefined, into `out`.
at::Tensor run(cudaError_t (*kernel)(const Launch&), const at::Tensor& frames, const at::Tensor& weights,
               const at::Tensor& shifts, const at::Tensor& out) {
  const auto x = dense(frames), w = dense(weights), s = shifts.defined() ? dense(shifts) : shifts;
  const auto error = kernel({x.const_data_ptr(), w.const_data_ptr(), s.defined() ? s.const_data_ptr<float>() : nullptr,
                             out.mutable_data_ptr(), count_of(x), c10::cuda::getCurrentCUDAStream()});
  TORCH_CHECK(error == cudaSuccess, "convolution: ", cudaGetErrorString(error));
  return out;
}

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

at::Tensor strided(const at::Tensor& rows, const at::Tensor& weights) {
  const bool second = rows.dim() == 4 && rows.size(1) == 32;
  const int64_t side = second ? 32 : 16, channels = second ? 16 : 32, columns = second ? 32 : 48;
  expect("rows", rows, {rows.size(0), side, side, 4 * channels}, at::kBFloat16);
  expect("weights", weights, {25 * channels / 16 * columns, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  const auto out = at::empty({rows.size(0), side, side, columns}, rows.options());
  return run(second ? strided_second : strided_third, rows, weights, {}, out);
}

at::Tensor spread(const at::Tensor& rows, const at::Tensor& weights) {
  expect("rows", rows, {rows.size(0), 32, 32, 32}, at::kBFloat16);
  expect("weights", weights, {25 * 2 * 16, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(spread_pixels, rows, weights, {}, at::empty({rows.size(0), 32, 32, 4 * 16}, rows.options()));
}

at::Tensor blocks_to_colours(const at::Tensor& rows, const at::Tensor& weights) {
  expect("rows", rows, {rows.size(0), 32, 32, 4 * 16}, at::kBFloat16);
  expect("weights", weights, {36 * 16, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(to_colours, rows, weights, {}, at::empty({rows.size(0), 32, 32, 16}, rows.options()));
}

at::Tensor blocks_from_colours(const at::Tensor& rows, const at::Tensor& weights) {
  expect("rows", rows, {rows.size(0), 32, 32, 16}, at::kBFloat16);
  expect("weights", weights, {7 * 64, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  return run(from_colours, rows, weights, {}, at::empty({rows.size(0), 32, 32, 4 * 16}, rows.options()));
}

at::Tensor weight_of_colours(const at::Tensor& grads, const at::Tensor& rows) {
  expect("grads", grads, {grads.size(0), 32, 32, 4 * 16}, at::kBFloat16);
  expect("rows", rows, {grads.size(0), 32, 32, 16}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(grads.device());
  const auto options = grads.options().dtype(at::kFloat);
  return run(colour_weight_gradient, grads, rows, {}, at::empty({colour_weight_blocks(count_of(grads)), 64, 120}, options))
      .sum(0);
}

at::Tensor weight_of_strided(const at::Tensor& rows, const at::Tensor& grads) {
  expect("rows", rows, {rows.size(0), 32, 32, 4 * 16}, at::kBFloat16);
  expect("grads", grads, {rows.size(0), 32, 32, 32}, at::kBFloat16);
  const c10::cuda::CUDAGuard guard(rows.device());
  const auto options = rows.options().dtype(at::kFloat);
  const auto partial = at::empty({second_weight_blocks(count_of(rows)), 25, 16, 32}, options);
  return run(second_weight_gradient, rows, grads, {}, partial).sum(0);
}

}  // namespace

TORCH_LIBRARY_IMPL(drama_native, CUDA, m) {
  m.impl("encoder_front", front);
  m.impl("encoder_third", third);
  m.impl("strided", strided);
  m.impl("spread", spread);
  m.impl("to_colours", blocks_to_colours);
  m.impl("from_colours", blocks_from_colours);
  m.impl("colour_weight_gradient", weight_of_colours);
  m.impl("strided_weight_gradient", weight_of_strided);
}

}  // namespace drama::cuda
