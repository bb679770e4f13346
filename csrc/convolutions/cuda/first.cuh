// A 5x5 convolution of stride 1 from 3 channels to 16, from blocks of pixels to blocks: the encoder's first in training, and
// the gradient of the decoder's last.
#pragma once
#include "windows.cuh"

namespace drama::cuda {

struct First {
  static constexpr int THREADS = 256, WARPS = THREADS / 32, BLOCKS = Windows::SIDE * Windows::SIDE / 4;
  static constexpr int RESIDENT = 2;  // blocks of threads on a multiprocessor
  static constexpr int IN = 16, OUT = 64;  // numbers of a block, the last 4 that come in without meaning
  static constexpr int IMAGE_AT = Windows::WEIGHT_ROWS * WEIGHT_ROW;  // in shared memory, in bytes
  static constexpr int SHARED_BYTES = IMAGE_AT + Windows::IMAGE_BYTES;
  // With sums of gradients: the norm, and what a lane takes of a line of its input.
  static constexpr int NORM_AT = SHARED_BYTES, NORMED_AT = NORM_AT + 2 * 16 * 4, PIECES = 8;
  static constexpr int NORM_BYTES = NORMED_AT + PIECES * 16 * THREADS - SHARED_BYTES;

  using Channels = ChannelSums<16, 8>;

  char* shared;
  int thread, lane, warp;

  __device__ First(char* memory, int thread) : shared(memory), thread(thread), lane(thread % 32), warp(thread / 32) {}

  __device__ void begin(const uint4* weights) const {
    store_weights(shared, weights, Windows::WEIGHT_ROWS, thread, THREADS);
    clear(shared + IMAGE_AT, Windows::IMAGE_BYTES, thread, THREADS);
  }

  __device__ void load(const bf16* frame) const {
#pragma unroll
    for (int i = 0; i < BLOCKS / THREADS; ++i) {
      const int block = i * THREADS + thread;
      const uint4* from = reinterpret_cast<const uint4*>(frame + block * IN);
      const uint4 v = from[0], w = from[1];
      Windows::store_block(shared + IMAGE_AT, block, {v.x, v.y, v.z}, {v.w, w.x, w.y});
    }
  }

  // A lane holds 8 channels, half of them or the other by its parity, of two pixels of each of its four blocks of a line.
  template <typename Visit>
  __device__ __forceinline__ static void each_piece(const Visit& visit) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int eight = 0; eight < 2; ++eight)
#pragma unroll
        for (int half = 0; half < 2; ++half) visit(m, eight, half);
  }

  // Where such a piece lies in a line, and what was normed of it in shared memory.
  __device__ __forceinline__ int piece(int m, int eight, int half) const {
    return (m * 16 + eight * 8 + lane / 4) * OUT + half * 32 + lane % 4 * 8;
  }
  __device__ __forceinline__ int place(int m, int eight, int half) const {
    return NORMED_AT + (((m * 2 + eight) * 2 + half) * THREADS + thread) * 16;
  }

  // x (32, 64), a line: copies of the lane's pieces set out, for itself.
  __device__ __forceinline__ void fetch_normed(const bf16* x) const {
    each_piece([&](int m, int eight, int half) {
      copy16(shared_address(shared) + place(m, eight, half), x + piece(m, eight, half));
    });
    commit_copies();
  }

  __device__ __forceinline__ void add_gradients(Channels& sums, const float (&acc)[2][8][4]) const {
    const float* norm = reinterpret_cast<const float*>(shared + NORM_AT) + 2 * (lane % 2 * 8);
    wait_for_copies<0>();
    each_piece([&](int m, int eight, int half) {
      const uint4 v = *reinterpret_cast<const uint4*>(shared + place(m, eight, half));
      sums.add_pair<0>(acc[m][4 * half] + 2 * eight, v.x, norm);
      sums.add_pair<2>(acc[m][4 * half + 1] + 2 * eight, v.y, norm + 4);
      sums.add_pair<4>(acc[m][4 * half + 2] + 2 * eight, v.z, norm + 8);
      sums.add_pair<6>(acc[m][4 * half + 3] + 2 * eight, v.w, norm + 12);
    });
  }

  // out (32, 32, 64); x: as out, for sums of gradients.
  template <Sums SUMS>
  __device__ void convolve(bf16* out, Channels& sums, const bf16* x) const {
#pragma unroll 1
    for (int line = warp; line < Windows::SIDE / 2; line += WARPS) {
      if constexpr (SUMS == Sums::gradients) fetch_normed(x + line * 32 * OUT);
      float acc[2][8][4];
      Windows::multiply(acc, shared + IMAGE_AT, line, shared_address(shared), lane);
      if constexpr (SUMS == Sums::moments) sums.add_tiles(acc);
      if constexpr (SUMS == Sums::gradients) add_gradients(sums, acc);
      each_piece([&](int m, int eight, int half) {
        uint32_t v[4];
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          const float* n = acc[m][4 * half + f] + 2 * eight;
          v[f] = pack(n[0], n[1]);
        }
        store16(out + line * 32 * OUT + piece(m, eight, half), v);
      });
    }
  }
};

// frames (count, 32, 32, 16); weights: rows of 16 numbers; out (count, 32, 32, 64), norm.x likewise; partial (blocks, 2, 16):
// sums, see channel_sums.cuh.
template <Sums SUMS>
__device__ void convolve_first(char* shared, int thread, int block, int blocks, const bf16* frames,
                               const uint4* weights, bf16* out, float* partial, const Norm& norm, int count) {
  const First stage(shared, thread);
  stage.begin(weights);
  if constexpr (SUMS == Sums::gradients) {
    store_norm(reinterpret_cast<float*>(shared + First::NORM_AT), norm, First::Channels::CHANNELS, thread);
  }
  First::Channels sums;
  for (int frame = block; frame < count; frame += blocks) {
    __syncthreads();
    stage.load(frames + static_cast<int64_t>(frame) * First::BLOCKS * First::IN);
    __syncthreads();
    const int64_t at = static_cast<int64_t>(frame) * First::BLOCKS * First::OUT;
    stage.convolve<SUMS>(out + at, sums, static_cast<const bf16*>(norm.x) + at);
  }
  if constexpr (SUMS != Sums::none) {
    sums.finish<First::THREADS>(shared, thread, partial + block * 2 * First::Channels::CHANNELS);
  }
}

}  // namespace drama::cuda
