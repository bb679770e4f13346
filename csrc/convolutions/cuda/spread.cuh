// A transposed 5x5 convolution of stride 2 from 32 channels of 32x32 pixels to 16 of 64x64: each pixel of a 2x2 block takes
// of its own 3 or 2 by 3 or 2 neighbours, 25 taps for all four.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

struct Spread {
  static constexpr int SIDE = 32, CHANNELS = 32, COLUMNS = 16, TAPS = 25, STEPS = CHANNELS / 16;  // 16 numbers a step
  static constexpr int THREADS = 256, WARPS = THREADS / 32, PARTS = 4, ROWS = SIDE / PARTS, TILES = ROWS * 2 / WARPS;
  static constexpr int RESIDENT = 2;  // blocks of threads on a multiprocessor
  static constexpr int FRAME = SIDE * SIDE * CHANNELS, OUT = SIDE * SIDE * 4 * COLUMNS;
  static constexpr int WEIGHT_ROWS = TAPS * STEPS * COLUMNS;
  // Shared memory, in bytes: frames with a border of one pixel.
  static constexpr int PIXEL = 64, ROW = (SIDE + 2) * PIXEL, BUFFER = (ROWS + 2) * ROW;
  static constexpr int BUFFERS_AT = WEIGHT_ROWS * WEIGHT_ROW, NORM_AT = BUFFERS_AT + 2 * BUFFER;
  static constexpr int SHARED_BYTES = NORM_AT + 2 * COLUMNS * 4;

  using Channels = ChannelSums<COLUMNS, COLUMNS / 4>;

  char* shared;
  int thread, lane, warp;

  __device__ Spread(char* memory, int thread) : shared(memory), thread(thread), lane(thread % 32), warp(thread / 32) {}

  __device__ void begin(const uint4* weights) const {
    store_weights(shared, weights, WEIGHT_ROWS, thread, THREADS);
    clear(shared + BUFFERS_AT, 2 * BUFFER, thread, THREADS);
  }

  __device__ void fetch(const bf16* frame, int part, int buffer) const {
    constexpr int PER_ROW = SIDE * PIXEL / 16;  // chunks
    const uint32_t to = shared_address(shared) + BUFFERS_AT + buffer * BUFFER;
    for (int i = thread; i < (ROWS + 2) * PER_ROW; i += THREADS) {
      const int row = part * ROWS - 1 + i / PER_ROW, entry = i % PER_ROW / 4 + 1;
      const bool inside = row >= 0 && row < SIDE;
      copy16_or_clear(to + i / PER_ROW * ROW + entry * PIXEL + chunk_at<PIXEL>(i % 4, entry, 0),
                      frame + ((inside ? row : 0) * PER_ROW + i % PER_ROW) * 8, inside);
    }
  }

  // acc[m][2 p + f]: of 16 blocks' pixel p, 8 columns.
  __device__ __forceinline__ void multiply(float (&acc)[TILES][8][4], int buffer) const {
    const uint32_t memory = shared_address(shared);
    const uint32_t weights = memory + weight_row(lane);
    uint32_t at[3][STEPS];
#pragma unroll
    for (int right = 0; right < 3; ++right)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int entry = lane % 16 + right;
        at[right][step] = memory + BUFFERS_AT + buffer * BUFFER + warp * (TILES / 2) * ROW + entry * PIXEL +
                          chunk_at<PIXEL>(2 * step + lane / 16, entry, 0);
      }
    int tap = 0;
#pragma unroll
    for (int down = 0; down < 3; ++down)
#pragma unroll
      for (int right = 0; right < 3; ++right) {
        const int pixels = (down == 0 ? 1 : 2) * (right == 0 ? 1 : 2);  // that take of this neighbour
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          uint32_t a[TILES][4];
#pragma unroll
          for (int m = 0; m < TILES; ++m) {
            load_matrices(a[m], at[right][step] + (m / 2 + down) * ROW + m % 2 * 16 * PIXEL);
          }
#pragma unroll
          for (int i = 0; i < pixels; ++i) {
            const int pixel = right == 0 ? 2 * i : i;
            uint32_t b[4];
            load_matrices(b, weights + ((tap + i) * STEPS + step) * COLUMNS * WEIGHT_ROW);
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
              multiply_add(acc[m][2 * pixel], a[m], b[0], b[1]);
              multiply_add(acc[m][2 * pixel + 1], a[m], b[2], b[3]);
            }
          }
        }
        tap += pixels;
      }
  }

  // x (32, 32, 4, 16)
  __device__ __forceinline__ void add_gradients(Channels& sums, const float (&acc)[TILES][8][4], const bf16* x,
                                                const float* norm, int first_row) const {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int row = first_row + m / 2, column = m % 2 * 16 + eight * 8 + lane / 4;
        const bf16* block = x + (row * SIDE + column) * 4 * COLUMNS + lane % 4 * 4;
        uint2 v[4];
#pragma unroll
        for (int pixel = 0; pixel < 4; ++pixel) v[pixel] = *reinterpret_cast<const uint2*>(block + pixel * COLUMNS);
#pragma unroll
        for (int pixel = 0; pixel < 4; ++pixel) {
          sums.add_pair<0>(acc[m][2 * pixel] + 2 * eight, v[pixel].x, norm + lane % 4 * 4);
          sums.add_pair<2>(acc[m][2 * pixel + 1] + 2 * eight, v[pixel].y, norm + lane % 4 * 4 + 2);
        }
      }
  }

  // out (32, 32, 4, 16)
  __device__ __forceinline__ void write(bf16* out, const float (&acc)[TILES][8][4], int first_row) const {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int row = first_row + m / 2, column = m % 2 * 16 + eight * 8 + lane / 4;
        bf16* block = out + (row * SIDE + column) * 4 * COLUMNS + lane % 4 * 4;
#pragma unroll
        for (int pixel = 0; pixel < 4; ++pixel) {
          const float* low = acc[m][2 * pixel] + 2 * eight;
          const float* high = acc[m][2 * pixel + 1] + 2 * eight;
          *reinterpret_cast<uint2*>(block + pixel * COLUMNS) = make_uint2(pack(low[0], low[1]), pack(high[0], high[1]));
        }
      }
  }
};

// frames (count, 32, 32, 32); weights: rows of 16 numbers; out (count, 32, 32, 4, 16), norm.x likewise; partial (blocks, 2,
// 16): sums, see channel_sums.cuh.
template <Sums SUMS>
__device__ void spread(char* shared, int thread, int block, int blocks, const bf16* frames, const uint4* weights,
                       bf16* out, float* partial, const Norm& norm, int count) {
  const Spread stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    stage.fetch(frames + static_cast<int64_t>(task / Spread::PARTS) * Spread::FRAME, task % Spread::PARTS, buffer);
  };
  stage.begin(weights);
  float* scales = reinterpret_cast<float*>(shared + Spread::NORM_AT);
  if constexpr (SUMS == Sums::gradients) store_norm(scales, norm, Spread::COLUMNS, thread);
  __syncthreads();
  Spread::Channels sums;
  const int tasks = count * Spread::PARTS;
  fetch(block, 0);
  commit_copies();
  walk_over_tasks(block, blocks, tasks, fetch, [&](int task, int buffer) {
    float acc[Spread::TILES][8][4];
    set_zero(acc);
    stage.multiply(acc, buffer);
    const int64_t frame = static_cast<int64_t>(task / Spread::PARTS) * Spread::OUT;
    const int row = task % Spread::PARTS * Spread::ROWS + stage.warp * (Spread::TILES / 2);
    if constexpr (SUMS == Sums::moments) sums.add_tiles(acc);
    if constexpr (SUMS == Sums::gradients) stage.add_gradients(sums, acc, static_cast<const bf16*>(norm.x) + frame, scales, row);
    stage.write(out + frame, acc, row);
  });
  if constexpr (SUMS != Sums::none) {
    sums.template finish<Spread::THREADS>(shared, thread, partial + block * 2 * Spread::COLUMNS);
  }
}

}  // namespace drama::cuda
