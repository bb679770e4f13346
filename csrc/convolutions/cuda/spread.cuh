// A transposed 5x5 convolution of stride 2, from 32 channels of 32x32 pixels to 16 of 64x64 or from 48 of 16x16 to 32 of
// 32x32: each pixel of a 2x2 block takes of its own 3 or 2 by 3 or 2 neighbours, 25 taps for all four.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

// From CHANNELS of SIDE x SIDE pixels to COLUMNS; PARTS of SIDE / PARTS rows are computed at a time, by each of GROUPS of
// WARPS, which walk on their own, of each of RESIDENT blocks of threads on a multiprocessor: while one writes, another
// multiplies. What a norm before took lies in blocks, too, or line by line with NORMED_LINES.
template <int CHANNELS_, int COLUMNS_, int SIDE_, int PARTS_, int RESIDENT_, bool NORMED_LINES, int GROUPS_,
          int WARPS_>
struct Spread {
  static constexpr int CHANNELS = CHANNELS_, COLUMNS = COLUMNS_, SIDE = SIDE_, PARTS = PARTS_, RESIDENT = RESIDENT_;
  static constexpr int TAPS = 25, STEPS = CHANNELS / 16;  // 16 numbers a step
  static constexpr int GROUPS = GROUPS_, WARPS = WARPS_, GROUP = WARPS * 32, THREADS = GROUPS * GROUP;
  static constexpr int ROWS = SIDE / PARTS, ACROSS = SIDE / 16;
  static constexpr int TILES = ROWS * ACROSS / WARPS, FRAGMENTS = COLUMNS / 8;  // of a pixel
  static constexpr int FRAME = SIDE * SIDE * CHANNELS, OUT = SIDE * SIDE * 4 * COLUMNS;
  static constexpr int WEIGHT_ROWS = TAPS * STEPS * COLUMNS;
  // Shared memory, in bytes: frames with a border of one pixel.
  static constexpr int PIXEL = 2 * CHANNELS, ROW = (SIDE + 2) * PIXEL, BUFFER = (ROWS + 2) * ROW;
  static constexpr int BUFFERS_AT = WEIGHT_ROWS * WEIGHT_ROW, SHARED_BYTES = BUFFERS_AT + 2 * GROUPS * BUFFER;
  // With sums of gradients: the norm, and what a lane takes of a part of its input, PIECES of PIECE bytes.
  static constexpr int PIECES = TILES * 2 * 4, PIECE = COLUMNS / 2, NORM_AT = SHARED_BYTES;
  static constexpr int NORMED_AT = NORM_AT + 2 * COLUMNS * 4;
  static constexpr int NORM_BYTES = NORMED_AT + PIECES * PIECE * THREADS - SHARED_BYTES;
  static_assert(FRAGMENTS == 2 || FRAGMENTS == 4);

  using Channels = ChannelSums<COLUMNS, COLUMNS / 4>;

  char* shared;
  int thread, lane, warp, group;  // warp: of the group

  __device__ Spread(char* memory, int thread)
      : shared(memory), thread(thread), lane(thread % 32), warp(thread / 32 % WARPS), group(thread / GROUP) {}

  __device__ void begin(const uint4* weights) const {
    store_weights(shared, weights, WEIGHT_ROWS, thread, THREADS);
    clear(shared + BUFFERS_AT, 2 * GROUPS * BUFFER, thread, THREADS);
  }

  __device__ __forceinline__ uint32_t buffer_at(int buffer) const {
    return shared_address(shared) + BUFFERS_AT + (2 * group + buffer) * BUFFER;
  }

  __device__ void fetch(const bf16* frame, int part, int buffer) const {
    constexpr int CHUNKS = PIXEL / 16, PER_ROW = SIDE * CHUNKS;
    const uint32_t to = buffer_at(buffer);
    for (int i = thread % GROUP; i < (ROWS + 2) * PER_ROW; i += GROUP) {
      const int row = part * ROWS - 1 + i / PER_ROW, entry = i % PER_ROW / CHUNKS + 1;
      const bool inside = row >= 0 && row < SIDE;
      copy16_or_clear(to + i / PER_ROW * ROW + entry * PIXEL + chunk_at<PIXEL>(i % CHUNKS, entry, 0),
                      frame + ((inside ? row : 0) * PER_ROW + i % PER_ROW) * 8, inside);
    }
  }

  // acc[m][FRAGMENTS p + f]: of 16 blocks' pixel p, 8 columns.
  template <bool TOGETHER>
  __device__ __forceinline__ void multiply(float (&acc)[TILES][4 * FRAGMENTS][4], int buffer) const {
    uint32_t at[3][STEPS];
#pragma unroll
    for (int right = 0; right < 3; ++right)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int entry = lane % 16 + right;
        at[right][step] = buffer_at(buffer) + warp * (TILES / ACROSS) * ROW + entry * PIXEL +
                          chunk_at<PIXEL>(2 * step + lane / 16, entry, 0);
      }
    uint32_t weights = shared_address(shared), a[2][TILES][4];
#pragma unroll
    for (int i = 0; i < 9 * STEPS; ++i) {
      const int down = i / STEPS / 3, right = i / STEPS % 3, step = i % STEPS;
      const int pixels = (down == 0 ? 1 : 2) * (right == 0 ? 1 : 2);  // that take of this neighbour
      uint32_t(&tiles)[TILES][4] = a[i % 2], (&before)[TILES][4] = a[i == 0 ? 0 : (i + 1) % 2];
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        load_matrices(tiles[m], at[right][step] + (m / ACROSS + down) * ROW + m % ACROSS * 16 * PIXEL);
      }
      start_products<TOGETHER>();
#pragma unroll
      for (int row = 0; row < (down == 0 ? 1 : 2); ++row) {  // of the pixels
        if (right == 0) {
          multiply_tiles<TOGETHER, FRAGMENTS>(acc, row * 2 * FRAGMENTS, tiles, weights + row * COLUMNS * WEIGHT_ROW, lane);
        } else {
          multiply_tiles<TOGETHER, 2 * FRAGMENTS>(acc, row * 2 * FRAGMENTS, tiles, weights + row * 2 * COLUMNS * WEIGHT_ROW, lane);
        }
      }
      finish_before<TOGETHER>(before);
      weights += pixels * COLUMNS * WEIGHT_ROW;
    }
    finish_products<TOGETHER>(acc, a[(9 * STEPS + 1) % 2]);
  }

  // A lane holds COLUMNS / 4 columns of each pixel of the blocks that its rows of the product are.
  template <typename Visit>
  __device__ __forceinline__ static void each_piece(const Visit& visit) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int eight = 0; eight < 2; ++eight)
#pragma unroll
        for (int pixel = 0; pixel < 4; ++pixel) visit(m, eight, pixel);
  }

  // Where such a piece lies, line by line or in blocks; first_row: of the warp's blocks.
  template <bool LINES>
  __device__ __forceinline__ int place(int first_row, int m, int eight, int pixel) const {
    const int row = first_row + m / ACROSS, column = m % ACROSS * 16 + eight * 8 + lane / 4;
    const int in_line = (2 * row + pixel / 2) * 2 * SIDE + 2 * column + pixel % 2;
    return (LINES ? in_line : (row * SIDE + column) * 4 + pixel) * COLUMNS + lane % 4 * (COLUMNS / 4);
  }

  // And what was normed of it in shared memory.
  __device__ __forceinline__ int piece_at(int m, int eight, int pixel) const {
    return NORMED_AT + (((m * 2 + eight) * 4 + pixel) * THREADS + thread) * PIECE;
  }

  // x: a frame; copies of the lane's pieces set out, for itself.
  __device__ __forceinline__ void fetch_normed(const bf16* x, int first_row) const {
    each_piece([&](int m, int eight, int pixel) {
      const bf16* from = x + place<NORMED_LINES>(first_row, m, eight, pixel);
      const uint32_t to = shared_address(shared) + piece_at(m, eight, pixel);
      if constexpr (FRAGMENTS == 2) {
        copy8(to, from);
      } else {
        copy16(to, from);
      }
    });
    commit_copies();
  }

  __device__ __forceinline__ void add_gradients(Channels& sums, const float (&acc)[TILES][4 * FRAGMENTS][4]) const {
    const float* norm = reinterpret_cast<const float*>(shared + NORM_AT) + 2 * (lane % 4 * (COLUMNS / 4));
    wait_for_copies<1>();
    each_piece([&](int m, int eight, int pixel) {
      const char* from = shared + piece_at(m, eight, pixel);
      const auto* of_pixel = acc[m] + FRAGMENTS * pixel;
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      sums.template add_pair<0>(of_pixel[0] + 2 * eight, v.x, norm);
      sums.template add_pair<2>(of_pixel[1] + 2 * eight, v.y, norm + 4);
      if constexpr (FRAGMENTS == 4) {
        const uint2 w = *reinterpret_cast<const uint2*>(from + 8);
        sums.template add_pair<4>(of_pixel[2] + 2 * eight, w.x, norm + 8);
        sums.template add_pair<6>(of_pixel[3] + 2 * eight, w.y, norm + 12);
      }
    });
  }

  // out (SIDE, SIDE, 4, COLUMNS)
  __device__ __forceinline__ void write(bf16* out, const float (&acc)[TILES][4 * FRAGMENTS][4], int first_row) const {
    each_piece([&](int m, int eight, int pixel) {
      uint32_t v[FRAGMENTS];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        const float* n = acc[m][FRAGMENTS * pixel + f] + 2 * eight;
        v[f] = pack(n[0], n[1]);
      }
      bf16* to = out + place<false>(first_row, m, eight, pixel);
      if constexpr (FRAGMENTS == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(v[0], v[1]);
      } else {
        store16(to, v);
      }
    });
  }
};

// frames (count, SIDE, SIDE, CHANNELS); weights: rows of 16 numbers; out (count, SIDE, SIDE, 4, COLUMNS); partial (blocks, 2,
// COLUMNS): sums, see channel_sums.cuh.
template <typename Stage, Sums SUMS>
__device__ void spread(char* shared, int thread, int block, int blocks, const bf16* frames, const uint4* weights,
                       bf16* out, float* partial, const Norm& norm, int count) {
  // With 128 sums a lane, what a warpgroup's products need besides does not fit.
  constexpr bool TOGETHER = SUMS != Sums::gradients || Stage::FRAGMENTS == 2;
  const Stage stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    stage.fetch(frames + static_cast<int64_t>(task / Stage::PARTS) * Stage::FRAME, task % Stage::PARTS, buffer);
  };
  stage.begin(weights);
  if constexpr (SUMS == Sums::gradients) {
    store_norm(reinterpret_cast<float*>(shared + Stage::NORM_AT), norm, Stage::COLUMNS, thread);
  }
  __syncthreads();
  typename Stage::Channels sums;
  const int tasks = count * Stage::PARTS;
  const int first = block * Stage::GROUPS + stage.group;
  if (first < tasks) fetch(first, 0);
  commit_copies();
  const auto frame_of = [](int task) { return static_cast<int64_t>(task / Stage::PARTS) * Stage::OUT; };
  const auto row_of = [&](int task) {
    return task % Stage::PARTS * Stage::ROWS + stage.warp * (Stage::TILES / Stage::ACROSS);
  };
  const auto prepare = [&](int task) {
    if constexpr (SUMS == Sums::gradients) {
      stage.fetch_normed(static_cast<const bf16*>(norm.x) + frame_of(task), row_of(task));
    }
  };
  const auto compute = [&](int task, int buffer) {
    const int row = row_of(task);
    float acc[Stage::TILES][4 * Stage::FRAGMENTS][4];
    set_zero(acc);
    stage.template multiply<TOGETHER>(acc, buffer);
    if constexpr (SUMS == Sums::moments) sums.add_tiles(acc);
    if constexpr (SUMS == Sums::gradients) stage.add_gradients(sums, acc);
    stage.write(out + frame_of(task), acc, row);
  };
  walk_over_tasks<false, Stage::GROUP>(first, blocks * Stage::GROUPS, tasks, fetch, prepare, compute, stage.group);
  if constexpr (SUMS != Sums::none) {
    sums.template finish<Stage::THREADS>(shared, thread, partial + block * 2 * Stage::COLUMNS);
  }
}

using SpreadTo16 = Spread<32, 16, 32, 8, 1, false, 4, 4>;
using SpreadTo32 = Spread<48, 32, 16, 2, 1, true, 2, 4>;

}  // namespace drama::cuda
