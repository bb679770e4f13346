// The encoder's kernels on a CPU; tests/sub_models/test_fused_encoder.py builds and calls this:
//     c++ -O1 -std=c++17 -shared -fPIC -o emulated_encoder.so emulate.cc
// Returns how many matrices were read with two rows in the same banks.
#include "emulated_tensor_core.h"

#include "cuda/front.cuh"
#include "cuda/third.cuh"

namespace {

template <typename Stage, typename Number>
int emulate(void (*encode)(char*, int, int, int, const Number*, const uint4*, const float*, uint16_t*, int),
            const Number* frames, const void* weights, const float* shifts, uint16_t* out, int count, int blocks) {
  static_assert(Stage::SHARED_BYTES <= emulated::SHARED);
  emulated::block.conflicts = 0;
  for (int i = 0; i < blocks; ++i) {
    emulated::run_block(Stage::THREADS, [&](int thread) {
      encode(emulated::block.shared, thread, i, blocks, frames, static_cast<const uint4*>(weights), shifts, out, count);
    });
  }
  return emulated::block.conflicts;
}

}  // namespace

extern "C" int encoder_front(const uint8_t* frames, const void* weights, const float* shifts, uint16_t* out, int count,
                             int blocks) {
  return emulate<drama::cuda::Front>(drama::cuda::encode_front, frames, weights, shifts, out, count, blocks);
}

extern "C" int encoder_third(const uint16_t* frames, const void* weights, const float* shifts, uint16_t* out, int count,
                             int blocks) {
  return emulate<drama::cuda::Third>(drama::cuda::encode_third, frames, weights, shifts, out, count, blocks);
}
