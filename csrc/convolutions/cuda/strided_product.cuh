// A convolution of stride 2 as a product of matrices, read from a frame in shared memory.
//
// The frame is held with a border of zeros, 2 pixels wide on the left. Its pixels, of PIXEL = 32 or 64 bytes, lie by row,
// by parity of the column, then by column: the columns that 16 neighbouring outputs read are neighbours in memory. A
// pixel's 16-byte chunks change places with its column and row, so that eight neighbours start in different banks. Weights
// lie as (step, column of the product, 16 numbers), a step being a tap's 16 channels, and change places likewise.
#pragma once
#include "channel_sums.cuh"
#include "tensor_core.cuh"

namespace drama::cuda {

constexpr int WEIGHT_ROW = 32;  // bytes

// Where a chunk of a pixel lies in it. entry: the pixel's place in its half of a row, the border included.
template <int PIXEL>
__device__ __forceinline__ int chunk_at(int chunk, int entry, int row) {
  if constexpr (PIXEL == 96) return (chunk ^ (entry / 4 % 2)) * 16;  // of rows of even number alone
  return (chunk ^ (entry * PIXEL / 128 % (PIXEL / 16)) ^ (row % 2)) * 16;
}

// weights: rows of 16 numbers.
__device__ __forceinline__ void store_weights(char* shared, const uint4* weights, int rows, int thread, int threads) {
  for (int i = thread; i < 2 * rows; i += threads) {
    const int row = i / 2, half = i % 2;
    *reinterpret_cast<uint4*>(shared + row * WEIGHT_ROW + (half ^ (row / 4 % 2)) * 16) = weights[i];
  }
}

// Where the row of a weight matrix lies that this lane names to load_matrices.
__device__ __forceinline__ int weight_row(int lane) {
  return (lane % 8 + lane / 16 * 8) * WEIGHT_ROW + ((lane / 8 % 2) ^ (lane / 4 % 2)) * 16;
}

__device__ __forceinline__ void clear(void* shared, int bytes, int thread, int threads) {
  for (int i = thread; i < bytes / 16; i += threads) static_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
}

// A block's walk over its tasks, every one of `blocks`: while compute(task, buffer) runs, the copies of the next task into
// the other of two buffers, which fetch(task, buffer) starts, are on their way. Those of the first task have been started.
template <typename Fetch, typename Compute>
__device__ __forceinline__ void walk_over_tasks(int block, int blocks, int tasks, const Fetch& fetch,
                                                const Compute& compute) {
  for (int task = block, buffer = 0; task < tasks; task += blocks, buffer ^= 1) {
    if (task + blocks < tasks) fetch(task + blocks, buffer ^ 1);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    compute(task, buffer);
    __syncthreads();
  }
}

// acc: TILES tiles of 16 outputs, ACROSS of them a row of the frame.   pixels: the first tile's first row of the frame.
template <int KERNEL, int PIXEL, int PLANE, int ACROSS, int TILES, int FRAGMENTS>
__device__ __forceinline__ void strided_product(float (&acc)[TILES][FRAGMENTS][4], uint32_t pixels, uint32_t weights,
                                                int lane) {
  constexpr int STEPS = PIXEL / 32, ROW = 2 * PLANE, MOVES = (KERNEL + 1) / 2;
  uint32_t at[MOVES][STEPS];  // by columns moved; the tile's first pixel, of a row of even number
#pragma unroll
  for (int moved = 0; moved < MOVES; ++moved)
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int entry = lane % 16 + moved;
      at[moved][step] = pixels + entry * PIXEL + chunk_at<PIXEL>(2 * step + lane / 16, entry, 0);
    }
  weights += weight_row(lane);
#pragma unroll 1  // unrolled, addresses of all rows would be kept and registers run out
  for (int dy = 0; dy < KERNEL; ++dy) {
#pragma unroll
    for (int dx = 0; dx < KERNEL; ++dx)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32_t b[FRAGMENTS / 2][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS / 2; ++f) {
          load_matrices(b[f], weights + ((dx * STEPS + step) * FRAGMENTS * 8 + f * 16) * WEIGHT_ROW);
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
          uint32_t a[4];
          load_matrices(a, at[dx / 2][step] + m / ACROSS * 2 * ROW + dx % 2 * PLANE + m % ACROSS * 16 * PIXEL);
#pragma unroll
          for (int f = 0; f < FRAGMENTS / 2; ++f) {
            multiply_add(acc[m][2 * f], a, b[f][0], b[f][1]);
            multiply_add(acc[m][2 * f + 1], a, b[f][2], b[f][3]);
          }
        }
      }
    weights += KERNEL * STEPS * FRAGMENTS * 8 * WEIGHT_ROW;
#pragma unroll
    for (int moved = 0; moved < MOVES; ++moved)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) at[moved][step] = (at[moved][step] + ROW) ^ 16;  // the next row's places
  }
}

// Writes the numbers themselves, line by line.
template <int SIDE, int TILES, int FRAGMENTS>
__device__ __forceinline__ void write_pixels(bf16* out, const float (&acc)[TILES][FRAGMENTS][4], int first_row,
                                             int lane) {
  static_assert(FRAGMENTS == 2 || FRAGMENTS == 4 || FRAGMENTS == 6);
  constexpr int ACROSS = SIDE / 16, CHANNELS = FRAGMENTS * 8, WHOLE = CHANNELS / 32 * 32;
  const int quad = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = first_row + m / ACROSS, column = m % ACROSS * 16 + eight * 8 + lane / 4;
      bf16* pixel = out + (row * SIDE + column) * CHANNELS;
      uint32_t v[FRAGMENTS];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) v[f] = pack(acc[m][f][2 * eight], acc[m][f][2 * eight + 1]);
      if constexpr (FRAGMENTS >= 4) store16(pixel + quad * 8, {v[0], v[1], v[2], v[3]});
      if constexpr (FRAGMENTS % 4 == 2) {
        *reinterpret_cast<uint2*>(pixel + WHOLE + quad * 4) = make_uint2(v[FRAGMENTS - 2], v[FRAGMENTS - 1]);
      }
    }
}

// Adds sums of gradients: acc as `write_pixels` takes it, x the same pixels in blocks of 2x2.
template <int SIDE, int TILES, int FRAGMENTS, typename ChannelSums>
__device__ __forceinline__ void add_gradients(ChannelSums& sums, const float (&acc)[TILES][FRAGMENTS][4], const bf16* x,
                                              const float* norm, int first_row, int lane) {
  constexpr int ACROSS = SIDE / 16, CHANNELS = FRAGMENTS * 8, WHOLE = CHANNELS / 32 * 32;
  const int quad = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    uint4 v[2];
    uint2 w[2];
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = first_row + m / ACROSS, column = m % ACROSS * 16 + eight * 8 + lane / 4;
      const bf16* pixel = x + ((row / 2 * (SIDE / 2) + column / 2) * 4 + row % 2 * 2 + column % 2) * CHANNELS;
      v[eight] = *reinterpret_cast<const uint4*>(pixel + quad * 8);
      if constexpr (FRAGMENTS % 4 == 2) w[eight] = *reinterpret_cast<const uint2*>(pixel + WHOLE + quad * 4);
    }
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const float* eights = norm + 2 * (quad * 8);
      sums.template add_pair<0>(acc[m][0] + 2 * eight, v[eight].x, eights);
      sums.template add_pair<2>(acc[m][1] + 2 * eight, v[eight].y, eights + 4);
      sums.template add_pair<4>(acc[m][2] + 2 * eight, v[eight].z, eights + 8);
      sums.template add_pair<6>(acc[m][3] + 2 * eight, v[eight].w, eights + 12);
      if constexpr (FRAGMENTS % 4 == 2) {
        const float* fours = norm + 2 * (WHOLE + quad * 4);
        sums.template add_pair<8>(acc[m][4] + 2 * eight, w[eight].x, fours);
        sums.template add_pair<10>(acc[m][5] + 2 * eight, w[eight].y, fours + 4);
      }
    }
  }
}

template <int TILES, int FRAGMENTS>
__device__ __forceinline__ void set_zero(float (&acc)[TILES][FRAGMENTS][4]) {
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[m][f][k] = 0.0f;
}

// silu(2 (n + shift)) of two neighbouring columns
__device__ __forceinline__ uint32_t activated(const float* n, const float* shift) {
  const float2 s = *reinterpret_cast<const float2*>(shift);
  return pack(silu_of_double(n[0] + s.x), silu_of_double(n[1] + s.y));
}

// Writes a warp's tiles to global memory as blocks of 2x2 pixels, SIDE pixels to a row; columns of the product are
// channels in the order that lets a lane write 16 bytes (`lane_columns` in native_convolutions.py).
template <int SIDE, int TILES, int FRAGMENTS>
__device__ __forceinline__ void write_blocks(bf16* out, float (&acc)[TILES][FRAGMENTS][4], const float* shifts,
                                             int first_row, int lane) {
  static_assert(FRAGMENTS == 4 || FRAGMENTS == 6);
  constexpr int ACROSS = SIDE / 16, CHANNELS = FRAGMENTS * 8;
  const int quad = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = first_row + m / ACROSS, column = m % ACROSS * 16 + eight * 8 + lane / 4;
      bf16* pixel = out + ((row / 2 * (SIDE / 2) + column / 2) * 4 + row % 2 * 2 + column % 2) * CHANNELS;
      uint32_t v[4];
#pragma unroll
      for (int f = 0; f < 4; ++f) v[f] = activated(acc[m][f] + 2 * eight, shifts + quad * 8 + 2 * f);
      store16(pixel + quad * 8, v);
      if constexpr (FRAGMENTS == 6) {
        const float* more = shifts + 32 + quad * 4;
        *reinterpret_cast<uint2*>(pixel + 32 + quad * 4) =
            make_uint2(activated(acc[m][4] + 2 * eight, more), activated(acc[m][5] + 2 * eight, more + 2));
      }
    }
}

}  // namespace drama::cuda
