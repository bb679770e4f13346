// The encoder's operators for CUDA tensors: shapes and memory of what the kernels take.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>

#include "encoder_kernels.h"

namespace drama::cuda {
namespace {

// Contiguous, and at an address that 16 bytes can be read from.
at::Tensor dense(const at::Tensor& x) {
  const auto y = x.contiguous();
  return reinterpret_cast<uintptr_t>(y.const_data_ptr()) % 16 == 0 ? y : y.clone();
}

void expect(const char* what, const at::Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.is_cuda() && x.scalar_type() == dtype && x.sizes() == sizes, "encoder: ", what, " has shape ",
                    x.sizes(), " and dtype ", x.scalar_type(), ", expected ", sizes, " and ", dtype, " on a GPU");
}

at::Tensor run(cudaError_t (*stage)(const Launch&), const at::Tensor& frames, const at::Tensor& weights,
               const at::Tensor& shifts, at::IntArrayRef sizes) {
  const c10::cuda::CUDAGuard guard(frames.device());
  TORCH_CHECK_VALUE(frames.size(0) <= std::numeric_limits<int>::max() / 2, "encoder: ", frames.size(0), " frames");
  const auto x = dense(frames), w = dense(weights), s = dense(shifts);
  const auto out = at::empty(sizes, weights.options());
  const auto error = stage({x.const_data_ptr(), w.const_data_ptr(), s.const_data_ptr<float>(), out.mutable_data_ptr(),
                            static_cast<int>(x.size(0)), c10::cuda::getCurrentCUDAStream()});
  TORCH_CHECK(error == cudaSuccess, "encoder: ", cudaGetErrorString(error));
  return out;
}

at::Tensor front(const at::Tensor& frames, const at::Tensor& weights, const at::Tensor& shifts) {
  expect("frames", frames, {frames.size(0), 64, 64, 3}, at::kByte);
  expect("weights", weights, {7 * 64 + 25 * 32, 16}, at::kBFloat16);
  expect("shifts", shifts, {16 + 32}, at::kFloat);
  return run(encoder_front, frames, weights, shifts, {frames.size(0), 16, 16, 4 * 32});
}

at::Tensor third(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& shifts) {
  expect("rows", rows, {rows.size(0), 16, 16, 4 * 32}, at::kBFloat16);
  expect("weights", weights, {25 * 2 * 48, 16}, at::kBFloat16);
  expect("shifts", shifts, {48}, at::kFloat);
  return run(encoder_third, rows, weights, shifts, {rows.size(0), 8, 8, 4 * 48});
}

}  // namespace

TORCH_LIBRARY_IMPL(drama_native, CUDA, m) {
  m.impl("encoder_front", front);
  m.impl("encoder_third", third);
}

}  // namespace drama::cuda
