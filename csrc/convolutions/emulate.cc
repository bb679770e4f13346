// The convolutions' kernels on a CPU; tests/sub_models/conftest.py builds and calls this:
//     c++ -O1 -std=c++17 -shared -fPIC -o emulated.so emulate.cc
// Functions return how many matrices were read with two rows in the same banks.
#include "emulated_tensor_core.h"

#include <algorithm>

#include "cuda/colour_weight.cuh"
#include "cuda/first.cuh"
#include "cuda/front.cuh"
#include "cuda/spread.cuh"
#include "cuda/strided.cuh"
#include "cuda/strided_weight.cuh"

namespace {

using namespace drama::cuda;

template <typename Stage>
constexpr auto norm_bytes(int) -> decltype(Stage::NORM_BYTES) {
  return Stage::NORM_BYTES;
}
template <typename Stage>
constexpr int norm_bytes(...) {
  return 0;
}

template <typename Stage>
int emulate(int blocks, const std::function<void(int, int)>& kernel) {
  static_assert(Stage::SHARED_BYTES + norm_bytes<Stage>(0) <= emulated::SHARED);
  emulated::block.conflicts = 0;
  for (int i = 0; i < blocks; ++i) {
    emulated::run_block(Stage::THREADS, [&](int thread) { kernel(thread, i); });
  }
  return emulated::block.conflicts;
}

template <typename Stage, Output OUTPUT>
int strided(const bf16* rows, const uint4* weights, const float* shifts, bf16* out, float* partial, const Norm& norm,
            int count, int blocks) {
  blocks = std::min(blocks, count * Stage::PARTS);  // as it is launched: every block has a task
  return emulate<Stage>(blocks, [&](int thread, int i) {
    convolve_frames<Stage, OUTPUT>(emulated::block.shared, thread, i, blocks, rows, weights, shifts, out, partial,
                                   norm, count);
  });
}

template <typename Stage, Sums SUMS>
int spread_frames(const bf16* rows, const uint4* weights, bf16* out, float* partial, const Norm& norm, int count,
                  int blocks) {
  blocks = std::min(blocks, count * Stage::PARTS);
  return emulate<Stage>(blocks, [&](int thread, int i) {
    spread<Stage, SUMS>(emulated::block.shared, thread, i, blocks, rows, weights, out, partial, norm, count);
  });
}

template <Sums SUMS>
int first(const bf16* rows, const uint4* weights, bf16* out, float* partial, const Norm& norm, int count, int blocks) {
  return emulate<First>(blocks, [&](int thread, int i) {
    convolve_first<SUMS>(emulated::block.shared, thread, i, blocks, rows, weights, out, partial, norm, count);
  });
}

template <typename Stage>
int colour_weight_of(const bf16* grads, const bf16* rows, float* partial, const NormGradient& through, int count,
                     int blocks) {
  return emulate<Stage>(blocks, [&](int thread, int i) {
    colour_weight<Stage>(emulated::block.shared, thread, i, blocks, grads, rows, partial, through, count);
  });
}

template <typename Stage>
int strided_weight_of(const bf16* rows, const bf16* grads, float* partial, int count, int blocks) {
  return emulate<Stage>(blocks, [&](int thread, int i) {
    strided_weight<Stage>(emulated::block.shared, thread, i, blocks, rows, grads, partial, count);
  });
}

}  // namespace

extern "C" {

int encoder_front(const uint8_t* frames, const uint4* weights, const float* shifts, bf16* out, int count, int blocks) {
  blocks = std::min(blocks, count);
  return emulate<Front>(blocks, [&](int thread, int i) {
    encode_front(emulated::block.shared, thread, i, blocks, frames, weights, shifts, out, count);
  });
}
int encoder_third(const bf16* rows, const uint4* weights, const float* shifts, bf16* out, int count, int blocks) {
  return strided<StridedThird, Output::activated_blocks>(rows, weights, shifts, out, nullptr, {}, count, blocks);
}
int strided_second(const bf16* rows, const uint4* weights, bf16* out, int count, int blocks) {
  return strided<StridedSecond, Output::numbers>(rows, weights, nullptr, out, nullptr, {}, count, blocks);
}
int strided_third(const bf16* rows, const uint4* weights, bf16* out, int count, int blocks) {
  return strided<StridedThird, Output::numbers>(rows, weights, nullptr, out, nullptr, {}, count, blocks);
}
int spread_to_16(const bf16* rows, const uint4* weights, bf16* out, int count, int blocks) {
  return spread_frames<SpreadTo16, Sums::none>(rows, weights, out, nullptr, {}, count, blocks);
}
int spread_to_32(const bf16* rows, const uint4* weights, bf16* out, int count, int blocks) {
  return spread_frames<SpreadTo32, Sums::none>(rows, weights, out, nullptr, {}, count, blocks);
}
int to_colours(const bf16* rows, const uint4* weights, bf16* out, int count, int blocks) {
  return strided<Colours, Output::numbers>(rows, weights, nullptr, out, nullptr, {}, count, blocks);
}
int from_colours(const bf16* rows, const uint4* weights, bf16* out, int count, int blocks) {
  return first<Sums::none>(rows, weights, out, nullptr, {}, count, blocks);
}
int strided_second_and_moments(const bf16* rows, const uint4* weights, bf16* out, float* partial, int count,
                               int blocks) {
  return strided<StridedSecond, Output::numbers_and_moments>(rows, weights, nullptr, out, partial, {}, count, blocks);
}
int strided_third_and_moments(const bf16* rows, const uint4* weights, bf16* out, float* partial, int count,
                              int blocks) {
  return strided<StridedThird, Output::numbers_and_moments>(rows, weights, nullptr, out, partial, {}, count, blocks);
}
int spread_to_16_and_moments(const bf16* rows, const uint4* weights, bf16* out, float* partial, int count,
                              int blocks) {
  return spread_frames<SpreadTo16, Sums::moments>(rows, weights, out, partial, {}, count, blocks);
}
int spread_to_32_and_moments(const bf16* rows, const uint4* weights, bf16* out, float* partial, int count,
                              int blocks) {
  return spread_frames<SpreadTo32, Sums::moments>(rows, weights, out, partial, {}, count, blocks);
}
int from_colours_and_moments(const bf16* rows, const uint4* weights, bf16* out, float* partial, int count,
                             int blocks) {
  return first<Sums::moments>(rows, weights, out, partial, {}, count, blocks);
}
int strided_second_and_gradients(const bf16* rows, const uint4* weights, const Norm* norm, bf16* out, float* partial,
                                 int count, int blocks) {
  return strided<StridedSecond, Output::numbers_and_gradients>(rows, weights, nullptr, out, partial, *norm, count, blocks);
}
int strided_third_and_gradients(const bf16* rows, const uint4* weights, const Norm* norm, bf16* out, float* partial,
                                int count, int blocks) {
  return strided<StridedThird, Output::numbers_and_gradients>(rows, weights, nullptr, out, partial, *norm, count, blocks);
}
int spread_to_16_and_gradients(const bf16* rows, const uint4* weights, const Norm* norm, bf16* out, float* partial,
                                int count, int blocks) {
  return spread_frames<SpreadTo16, Sums::gradients>(rows, weights, out, partial, *norm, count, blocks);
}
int spread_to_32_and_gradients(const bf16* rows, const uint4* weights, const Norm* norm, bf16* out, float* partial,
                                int count, int blocks) {
  return spread_frames<SpreadTo32, Sums::gradients>(rows, weights, out, partial, *norm, count, blocks);
}
int from_colours_and_gradients(const bf16* rows, const uint4* weights, const Norm* norm, bf16* out, float* partial,
                               int count, int blocks) {
  return first<Sums::gradients>(rows, weights, out, partial, *norm, count, blocks);
}
int colour_weight_gradient(const bf16* grads, const bf16* rows, float* partial, int count, int blocks) {
  return colour_weight_of<PlainColourWeight>(grads, rows, partial, {}, count, blocks);
}
int colour_weight_gradient_through_norm(const bf16* grads, const bf16* rows, const NormGradient* through, float* partial,
                                        int count, int blocks) {
  return colour_weight_of<ColourWeightThroughNorm>(grads, rows, partial, *through, count, blocks);
}
int second_weight_gradient(const bf16* rows, const bf16* grads, float* partial, int count, int blocks) {
  return strided_weight_of<SecondWeight>(rows, grads, partial, count, blocks);
}
int third_weight_gradient(const bf16* rows, const bf16* grads, float* partial, int count, int blocks) {
  return strided_weight_of<ThirdWeight>(rows, grads, partial, count, blocks);
}

}  // extern "C"
