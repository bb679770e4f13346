// Gradient of the weight of a 5x5 convolution of stride 2: from 16 channels of 64x64 pixels to 32, from 32 of 32x32 to 48.
//
// For each tap, X^T G summed over all outputs: X (outputs, channels), the pixels that the tap reads; G (outputs, columns),
// the outputs' gradients. A warp has some of the tiles, each 16 channels of a tap, and every SHARES-th 16 outputs.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

// OUT_ROWS = SIDE / 2 / PARTS rows of outputs are summed at a time. GROUPS of four warps share the tiles.
template <int CHANNELS_, int SIDE_, int COLUMNS_, int PARTS_, int GROUPS_, int SHARES_>
struct StridedWeight {
  static constexpr int CHANNELS = CHANNELS_, SIDE = SIDE_, COLUMNS = COLUMNS_, PARTS = PARTS_, SHARES = SHARES_;
  static constexpr int OUT_SIDE = SIDE / 2, OUT_ROWS = OUT_SIDE / PARTS, OUTPUTS = OUT_ROWS * OUT_SIDE;
  static constexpr int KERNEL = 5, STEPS = CHANNELS / 16, TILES = KERNEL * KERNEL * STEPS, FRAGMENTS = COLUMNS / 8;
  static constexpr int WARPS = 4 * GROUPS_, MINE = (TILES + WARPS - 1) / WARPS, THREADS = WARPS * SHARES * 32;
  static constexpr int FRAME = SIDE * SIDE * CHANNELS, GRADS = OUT_SIDE * OUT_SIDE * COLUMNS;
  static constexpr int SUMS = KERNEL * KERNEL * CHANNELS * COLUMNS;
  // Shared memory, in bytes: frames as in strided.cuh, and gradients, WIDE columns side by side.
  static constexpr int PIXEL = 2 * CHANNELS, PLANE = (OUT_SIDE + 1) * PIXEL, ROW = 2 * PLANE;
  static constexpr int ROWS = 2 * OUT_ROWS + KERNEL - 2, BUFFER = ROW * ROWS + 2 * PIXEL;
  static constexpr int WIDE = COLUMNS % 32 == 0 ? 32 : 16, CHUNKS = WIDE / 8, OUTPUT = 2 * WIDE;
  static constexpr int GRAD_PLANE = OUTPUTS * OUTPUT, GRAD_BYTES = OUTPUTS * 2 * COLUMNS;
  static constexpr int GRADS_AT = 2 * BUFFER, SHARED_BYTES = GRADS_AT + 2 * GRAD_BYTES;
  static_assert(GRADS_AT % 512 == 0 && (SHARES == 1 || SUMS * 4 <= GRADS_AT));  // where sums of shares meet

  char* shared;
  int thread, lane, first_tile, share;

  __device__ StridedWeight(char* memory, int thread)
      : shared(memory),
        thread(thread),
        lane(thread % 32),
        first_tile(thread / 32 % WARPS * MINE),
        share(thread / 32 / WARPS) {}

  // Chunks of an output change places, so that eight neighbours start in different banks.
  __device__ static int turn(int output) { return output * OUTPUT / 128 % CHUNKS; }

  __device__ void fetch(const bf16* frame, const bf16* grad, int part, int buffer) const {
    fetch_part<PIXEL, SIDE, OUT_ROWS, ROWS, THREADS>(shared_address(shared) + buffer * BUFFER, frame, part, thread);
    const uint32_t grads = shared_address(shared) + GRADS_AT + buffer * GRAD_BYTES;
    for (int i = thread; i < OUTPUTS * FRAGMENTS; i += THREADS) {
      const int output = i / FRAGMENTS, chunk = i % FRAGMENTS;
      copy16(grads + chunk / CHUNKS * GRAD_PLANE + output * OUTPUT + ((chunk % CHUNKS) ^ turn(output)) * 16,
             grad + (part * OUTPUTS * FRAGMENTS + i) * 8);
    }
  }

  // Where this lane's row of a tile lies in a buffer, for the first outputs. Tiles that there are not read the last one's.
  __device__ __forceinline__ void find_tiles(uint32_t (&at)[MINE]) const {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int tile = first_tile + i < TILES ? first_tile + i : TILES - 1, tap = tile / STEPS;
      const int down = tap / KERNEL, right = tap % KERNEL, entry = lane % 8 + lane / 16 * 8 + right / 2;
      at[i] = down * ROW + right % 2 * PLANE + entry * PIXEL +
              chunk_at<PIXEL>(2 * (tile % STEPS) + lane / 8 % 2, entry, down);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[MINE][FRAGMENTS][4], const uint32_t (&at)[MINE],
                                           int buffer) const {
    constexpr int ACROSS = OUT_SIDE / 16, HALF = (MINE + 1) / 2;
    const uint32_t pixels = shared_address(shared) + buffer * BUFFER;
    const uint32_t grads = shared_address(shared) + GRADS_AT + buffer * GRAD_BYTES;
    uint32_t a[MINE][4] = {};
#pragma unroll 1
    for (int step = share; step < OUTPUTS / 16; step += SHARES) {
      const uint32_t place = pixels + step / ACROSS * 2 * ROW + step % ACROSS * 16 * PIXEL;
      const Gradients b(grads + step * 16 * OUTPUT, lane);
#pragma unroll
      for (int from = 0; from < MINE; from += HALF) {  // a half is multiplied while the other is read
        const int to = from + HALF < MINE ? from + HALF : MINE;
#pragma unroll
        for (int i = from; i < to; ++i) load_transposed(a[i], at[i] + place);
        start_products<true>();
#pragma unroll
        for (int i = from; i < to; ++i) b.multiply(acc[i], a[i]);
        finish_before<true>(a);
      }
    }
    finish_products<true>(acc, a);
  }

  // Of 16 outputs, all columns.
  struct Gradients {
#ifdef DRAMA_WARPGROUPS
    uint64_t descriptor;

    __device__ __forceinline__ Gradients(uint32_t grads, int)
        : descriptor(columns_descriptor<WIDE>(grads, GRAD_PLANE)) {}
    __device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4], const uint32_t (&a)[4]) const {
      start_product<FRAGMENTS, 1>(acc, a, descriptor);
    }
#else
    uint32_t b[FRAGMENTS / 2][4];

    __device__ __forceinline__ Gradients(uint32_t grads, int lane) {
      const int output = lane % 16;
#pragma unroll
      for (int f = 0; f < FRAGMENTS / 2; ++f) {
        const int chunk = 2 * f + lane / 16;
        load_transposed(b[f], grads + chunk / CHUNKS * GRAD_PLANE + output * OUTPUT +
                                  ((chunk % CHUNKS) ^ turn(output)) * 16);
      }
    }
    __device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4], const uint32_t (&a)[4]) const {
#pragma unroll
      for (int f = 0; f < FRAGMENTS / 2; ++f) {
        multiply_add(acc[2 * f], a, b[f][0], b[f][1]);
        multiply_add(acc[2 * f + 1], a, b[f][2], b[f][3]);
      }
    }
#endif
  };

  // partial (25, CHANNELS, COLUMNS)
  __device__ void finish(float* partial, const float (&acc)[MINE][FRAGMENTS][4]) const {
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll 1
    for (int turn = SHARES - 1; turn >= 0; --turn) {
      __syncthreads();
      if (share != turn) continue;
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        if (first_tile + i >= TILES) continue;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int channel = lane / 4 + k / 2 * 8, column = f * 8 + lane % 4 * 2 + k % 2;  // tiles: by tap, 16 channels
            const int place = ((first_tile + i) * 16 + channel) * COLUMNS + column;
            const float total = turn == SHARES - 1 ? acc[i][f][k] : sums[place] + acc[i][f][k];
            (turn == 0 ? partial : sums)[place] = total;
          }
      }
    }
  }
};

// frames (count, SIDE / 2, SIDE / 2, 4, CHANNELS); grads (count, SIDE / 2, SIDE / 2, COLUMNS); partial (blocks, 25, CHANNELS,
// COLUMNS)
template <typename Stage>
__device__ void strided_weight(char* shared, int thread, int block, int blocks, const bf16* frames, const bf16* grads,
                               float* partial, int count) {
  const Stage stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    const int64_t frame = task / Stage::PARTS;
    stage.fetch(frames + frame * Stage::FRAME, grads + frame * Stage::GRADS, task % Stage::PARTS, buffer);
  };
  clear(shared, Stage::GRADS_AT, thread, Stage::THREADS);
  __syncthreads();
  float acc[Stage::MINE][Stage::FRAGMENTS][4];
  set_zero(acc);
  uint32_t at[Stage::MINE];
  stage.find_tiles(at);
  const int tasks = count * Stage::PARTS;
  if (block < tasks) fetch(block, 0);
  commit_copies();
  walk_over_tasks<true>(block, blocks, tasks, fetch, [](int) {}, [&](int task, int buffer) {
    stage.multiply(acc, at, buffer);
  });
  wait_for_copies<0>();
  stage.finish(partial + static_cast<int64_t>(block) * Stage::SUMS, acc);
}

using SecondWeight = StridedWeight<16, 64, 32, 2, 1, 3>;
using ThirdWeight = StridedWeight<32, 32, 48, 1, 3, 1>;

}  // namespace drama::cuda
