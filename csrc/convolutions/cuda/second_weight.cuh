// Gradient of the weight of a 5x5 convolution of stride 2 from 16 channels of 64x64 pixels to 32; of the next one, from 32
// to 48, cuDNN is faster.
//
// For each tap, X^T G summed over all outputs: X (outputs, channels), the pixels that the tap reads; G (outputs, columns),
// the outputs' gradients. A warp has the 5 taps of a row of the kernel and every third 16 outputs.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

struct SecondWeight {
  static constexpr int CHANNELS = 16, SIDE = 64, COLUMNS = 32, PARTS = 2;
  static constexpr int OUT_SIDE = SIDE / 2, OUT_ROWS = OUT_SIDE / PARTS, KERNEL = 5, FRAGMENTS = COLUMNS / 8;
  static constexpr int SHARES = 3, THREADS = KERNEL * SHARES * 32;
  static constexpr int FRAME = SIDE * SIDE * CHANNELS, GRADS = OUT_SIDE * OUT_SIDE * COLUMNS;
  static constexpr int SUMS = KERNEL * KERNEL * CHANNELS * COLUMNS;
  // Shared memory, in bytes: frames as in strided.cuh, and gradients.
  static constexpr int PIXEL = 2 * CHANNELS, PLANE = (OUT_SIDE + 1) * PIXEL, ROW = 2 * PLANE;
  static constexpr int ROWS = 2 * OUT_ROWS + KERNEL - 2, BUFFER = ROW * ROWS + 2 * PIXEL;
  static constexpr int OUTPUT = 2 * COLUMNS, GRAD_BYTES = OUT_ROWS * OUT_SIDE * OUTPUT;
  static constexpr int GRADS_AT = 2 * BUFFER, SHARED_BYTES = GRADS_AT + 2 * GRAD_BYTES;
  static_assert(SUMS * 4 <= GRADS_AT);  // where sums of shares meet

  char* shared;
  int thread, lane, down, share;  // down: of the taps

  __device__ SecondWeight(char* memory, int thread)
      : shared(memory),
        thread(thread),
        lane(thread % 32),
        down(thread / 32 % KERNEL),
        share(thread / 32 / KERNEL) {}

  // Chunks of an output change places, so that eight neighbours start in different banks.
  __device__ static int turn(int output) { return output / 2 % 4; }

  __device__ void fetch(const bf16* frame, const bf16* grad, int part, int buffer) const {
    constexpr int PER_LINE = SIDE * PIXEL / 8;  // chunks of a row of blocks
    const uint32_t to = shared_address(shared) + buffer * BUFFER;
    for (int i = thread; i < (OUT_ROWS + 2) * PER_LINE; i += THREADS) {
      const int line = part * OUT_ROWS - 1 + i / PER_LINE, chunk = i % PER_LINE;
      const int entry = chunk / (PIXEL / 4) + 1, pixel = chunk / (PIXEL / 16) % 4, row = 2 * (i / PER_LINE) + pixel / 2;
      const bool inside = line >= 0 && line < OUT_SIDE;
      if (row < ROWS) {
        const int place = chunk_at<PIXEL>(chunk % (PIXEL / 16), entry, row);
        copy16_or_clear(to + row * ROW + pixel % 2 * PLANE + entry * PIXEL + place,
                        frame + ((inside ? line : 0) * PER_LINE + chunk) * 8, inside);
      }
    }
    const uint32_t grads = shared_address(shared) + GRADS_AT + buffer * GRAD_BYTES;
    for (int i = thread; i < OUT_ROWS * OUT_SIDE * FRAGMENTS; i += THREADS) {
      const int output = i / FRAGMENTS, chunk = (i % FRAGMENTS) ^ turn(output);
      copy16(grads + output * OUTPUT + chunk * 16, grad + (part * OUT_ROWS * OUT_SIDE * FRAGMENTS + i) * 8);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[KERNEL][FRAGMENTS][4], int buffer) const {
    const uint32_t memory = shared_address(shared);
    uint32_t at[3];  // by columns moved
#pragma unroll
    for (int moved = 0; moved < 3; ++moved) {
      const int entry = lane % 8 + lane / 16 * 8 + moved;
      at[moved] = memory + buffer * BUFFER + down * ROW + entry * PIXEL + chunk_at<PIXEL>(lane / 8 % 2, entry, down);
    }
    const int output = lane % 16;
    const uint32_t grads = memory + GRADS_AT + buffer * GRAD_BYTES + output * OUTPUT;
    constexpr int ACROSS = OUT_SIDE / 16;
#pragma unroll 1
    for (int step = share; step < OUT_ROWS * OUT_SIDE / 16; step += SHARES) {
      uint32_t b[FRAGMENTS / 2][4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS / 2; ++f) {
        load_transposed(b[f], grads + step * 16 * OUTPUT + ((2 * f + lane / 16) ^ turn(output)) * 16);
      }
      const int place = step / ACROSS * 2 * ROW + step % ACROSS * 16 * PIXEL;
#pragma unroll
      for (int dx = 0; dx < KERNEL; ++dx) {
        uint32_t a[4];
        load_transposed(a, at[dx / 2] + place + dx % 2 * PLANE);
#pragma unroll
        for (int f = 0; f < FRAGMENTS / 2; ++f) {
          multiply_add(acc[dx][2 * f], a, b[f][0], b[f][1]);
          multiply_add(acc[dx][2 * f + 1], a, b[f][2], b[f][3]);
        }
      }
    }
  }

  // partial (25, 16, 32)
  __device__ void finish(float* partial, const float (&acc)[KERNEL][FRAGMENTS][4]) const {
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll 1
    for (int turn = SHARES - 1; turn >= 0; --turn) {
      __syncthreads();
      if (share != turn) continue;
#pragma unroll
      for (int dx = 0; dx < KERNEL; ++dx)
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int channel = lane / 4 + k / 2 * 8, column = f * 8 + lane % 4 * 2 + k % 2;
            const int place = ((down * KERNEL + dx) * CHANNELS + channel) * COLUMNS + column;
            const float total = turn == SHARES - 1 ? acc[dx][f][k] : sums[place] + acc[dx][f][k];
            (turn == 0 ? partial : sums)[place] = total;
          }
    }
  }
};

// frames (count, 32, 32, 4, 16); grads (count, 32, 32, 32); partial (blocks, 25, 16, 32)
__device__ void second_weight(char* shared, int thread, int block, int blocks, const bf16* frames, const bf16* grads,
                              float* partial, int count) {
  using Stage = SecondWeight;
  const Stage stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    const int64_t frame = task / Stage::PARTS;
    stage.fetch(frames + frame * Stage::FRAME, grads + frame * Stage::GRADS, task % Stage::PARTS, buffer);
  };
  clear(shared, Stage::GRADS_AT, thread, Stage::THREADS);
  __syncthreads();
  float acc[Stage::KERNEL][Stage::FRAGMENTS][4];
  set_zero(acc);
  const int tasks = count * Stage::PARTS;
  if (block < tasks) fetch(block, 0);
  commit_copies();
  walk_over_tasks(block, blocks, tasks, fetch, [&](int task, int buffer) {
    stage.multiply(acc, buffer);
  });
  wait_for_copies<0>();
  stage.finish(partial + static_cast<int64_t>(block) * Stage::SUMS, acc);
}

}  // namespace drama::cuda
