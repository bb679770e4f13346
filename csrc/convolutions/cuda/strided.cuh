// Convolutions from blocks of pixels in memory, see strided_product.cuh; parts of a frame come in the background while the
// one before is computed. Those of stride 2 may have norm and activation follow, as in front.cuh. One of stride 1 to 3
// channels, the decoder's last, is one of stride 2 and kernel 6 whose columns are the 12 numbers of a block, and 4 zeros.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

// Frames of SIDE x SIDE pixels as blocks of 2x2, PIXEL bytes each; PARTS of SIDE / 2 / PARTS rows of outputs are computed
// at a time, in COLUMNS, by each of RESIDENT blocks of threads on a multiprocessor.
template <int KERNEL_, int PIXEL_, int SIDE_, int COLUMNS_, int PARTS_, int RESIDENT_>
struct Strided {
  static constexpr int KERNEL = KERNEL_, PIXEL = PIXEL_, SIDE = SIDE_, COLUMNS = COLUMNS_, PARTS = PARTS_;
  static constexpr int RESIDENT = RESIDENT_;
  static constexpr int THREADS = 256, WARPS = THREADS / 32, CHANNELS = PIXEL / 2;
  static constexpr int FRAME = SIDE * SIDE * CHANNELS, OUT_SIDE = SIDE / 2, OUT_ROWS = OUT_SIDE / PARTS;
  static constexpr int WEIGHT_ROWS = KERNEL * KERNEL * CHANNELS / 16 * COLUMNS;
  static constexpr int WARP_ROWS = OUT_ROWS / WARPS, TILES = WARP_ROWS * OUT_SIDE / 16, FRAGMENTS = COLUMNS / 8;
  static constexpr bool TOGETHER = FRAGMENTS > 2;  // the warps; with few columns they are faster alone
  static_assert(WARP_ROWS * WARPS == OUT_ROWS);
  // Shared memory, in bytes. The border right of a half row is the one left of the next.
  static constexpr int PLANE = (OUT_SIDE + 1) * PIXEL, ROW = 2 * PLANE, ROWS = 2 * OUT_ROWS + KERNEL - 2;
  static constexpr int SHIFTS_AT = WEIGHT_ROWS * WEIGHT_ROW, BUFFERS_AT = SHIFTS_AT + COLUMNS * 4;
  static constexpr int BUFFER = ROW * ROWS + 2 * PIXEL;
  static constexpr int SHARED_BYTES = BUFFERS_AT + 2 * BUFFER;
  static constexpr int NORM_AT = SHARED_BYTES, NORM_BYTES = 2 * COLUMNS * 4;  // with sums of gradients

  char* shared;
  int thread, lane, first_row;  // of the warp's outputs

  __device__ Strided(char* memory, int thread)
      : shared(memory), thread(thread), lane(thread % 32), first_row(thread / 32 * WARP_ROWS) {}

  __device__ const float* shifts() const { return reinterpret_cast<const float*>(shared + SHIFTS_AT); }

  // shifts: of the norm, null without one.
  __device__ void begin(const uint4* weights, const float* shifts) const {
    store_weights(shared, weights, WEIGHT_ROWS, thread, THREADS);
    if (shifts != nullptr && thread < COLUMNS) reinterpret_cast<float*>(shared + SHIFTS_AT)[thread] = shifts[thread];
    clear(shared + BUFFERS_AT, 2 * BUFFER, thread, THREADS);
  }

  __device__ void fetch(const bf16* frame, int part, int buffer) const {
    const uint32_t to = shared_address(shared) + BUFFERS_AT + buffer * BUFFER;
    fetch_part<PIXEL, SIDE, OUT_ROWS, ROWS, THREADS>(to, frame, part, thread);
  }

  __device__ __forceinline__ void convolve(float (&acc)[TILES][FRAGMENTS][4], int buffer) const {
    set_zero(acc);
    const uint32_t memory = shared_address(shared);
    const uint32_t rows = memory + BUFFERS_AT + buffer * BUFFER + first_row * 2 * ROW;
    strided_product<TOGETHER, KERNEL, PIXEL, PLANE, OUT_SIDE>(acc, rows, memory, lane);
  }
};

enum class Output { numbers, numbers_and_moments, numbers_and_gradients, activated_blocks };

// frames (count, SIDE / 2, SIDE / 2, 4, channels); weights: rows of 16 numbers; out (count, SIDE / 2, SIDE / 2, COLUMNS), or
// the same as blocks of 2x2; partial (blocks, 2, COLUMNS): sums, see channel_sums.cuh. norm.x: as blocks of 2x2.
template <typename Stage, Output OUTPUT>
__device__ void convolve_frames(char* shared, int thread, int block, int blocks, const bf16* frames,
                                const uint4* weights, const float* shifts, bf16* out, float* partial, const Norm& norm,
                                int count) {
  constexpr int OUT = Stage::OUT_SIDE * Stage::OUT_SIDE * Stage::COLUMNS;
  const Stage stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    stage.fetch(frames + static_cast<int64_t>(task / Stage::PARTS) * Stage::FRAME, task % Stage::PARTS, buffer);
  };
  stage.begin(weights, shifts);
  float* scales = reinterpret_cast<float*>(shared + Stage::NORM_AT);
  if constexpr (OUTPUT == Output::numbers_and_gradients) store_norm(scales, norm, Stage::COLUMNS, thread);
  __syncthreads();
  ChannelSums<Stage::COLUMNS, Stage::COLUMNS / 4> sums;
  const int tasks = count * Stage::PARTS;
  fetch(block, 0);
  commit_copies();
  walk_over_tasks(block, blocks, tasks, fetch, [](int) {}, [&](int task, int buffer) {
    float acc[Stage::TILES][Stage::FRAGMENTS][4];
    stage.convolve(acc, buffer);
    bf16* frame = out + static_cast<int64_t>(task / Stage::PARTS) * OUT;
    const int row = task % Stage::PARTS * Stage::OUT_ROWS + stage.first_row;
    if constexpr (OUTPUT == Output::activated_blocks) {
      write_blocks<Stage::OUT_SIDE>(frame, acc, stage.shifts(), row, stage.lane);
    } else {
      if constexpr (OUTPUT == Output::numbers_and_moments) sums.add_tiles(acc);
      if constexpr (OUTPUT == Output::numbers_and_gradients) {
        const bf16* normed = static_cast<const bf16*>(norm.x) + (frame - out);
        add_gradients<Stage::OUT_SIDE>(sums, acc, normed, scales, row, stage.lane);
      }
      write_pixels<Stage::OUT_SIDE>(frame, acc, row, stage.lane);
    }
  });
  if constexpr (OUTPUT == Output::numbers_and_moments || OUTPUT == Output::numbers_and_gradients) {
    sums.template finish<Stage::THREADS>(shared, thread, partial + block * 2 * Stage::COLUMNS);
  }
}

using StridedSecond = Strided<5, 32, 64, 32, 4, 2>;
using StridedThird = Strided<5, 64, 32, 48, 1, 1>;
using Colours = Strided<6, 32, 64, 16, 2, 1>;

}  // namespace drama::cuda
