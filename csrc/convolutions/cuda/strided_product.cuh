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
  show_to_products();
}

// Where the row of a weight matrix lies that this lane names to load_matrices.
__device__ __forceinline__ int weight_row(int lane) {
  return (lane % 8 + lane / 16 * 8) * WEIGHT_ROW + ((lane / 8 % 2) ^ (lane / 4 % 2)) * 16;
}

// acc[m], of which COUNT fragments of 8 columns from `first` on, += tiles[m] (16 rows, 16) times `weights`, at a multiple of
// 256. TOGETHER: four warps as a warpgroup, where the GPU has them; what this sets out may then still run when it returns, and
// `finish_before` and `finish_products` wait for it.
template <bool TOGETHER, int COUNT, int TILES, int FRAGMENTS>
__device__ __forceinline__ void multiply_tiles(float (&acc)[TILES][FRAGMENTS][4], int first,
                                               const uint32_t (&tiles)[TILES][4], uint32_t weights, int lane) {
#ifdef DRAMA_WARPGROUPS
  if constexpr (TOGETHER) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) start_product<COUNT>(acc[m] + first, tiles[m], rows_descriptor(weights));
  } else
#endif
  {
#pragma unroll
    for (int j = 0; j < COUNT; j += 2) {
      uint32_t b[4];
      load_matrices(b, weights + weight_row(lane) + j * 8 * WEIGHT_ROW);
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        multiply_add(acc[m][first + j], tiles[m], b[0], b[1]);
        multiply_add(acc[m][first + j + 1], tiles[m], b[2], b[3]);
      }
    }
  }
}

// Between what tiles are made of and the first product with them.
template <bool TOGETHER>
__device__ __forceinline__ void start_products() {
#ifdef DRAMA_WARPGROUPS
  if constexpr (TOGETHER) order_registers();
#endif
}

// Until products before those set out since `start_products` are done: so their tiles may be taken for others.
template <bool TOGETHER, int TILES>
__device__ __forceinline__ void finish_before(uint32_t (&tiles)[TILES][4]) {
#ifdef DRAMA_WARPGROUPS
  if constexpr (TOGETHER) {
    commit_products();
    wait_for_products<1>();
    keep_tiles(tiles);
  }
#endif
}

// Until all products are done. tiles: of the last.
template <bool TOGETHER, int TILES, int FRAGMENTS, int MADE>
__device__ __forceinline__ void finish_products(float (&acc)[TILES][FRAGMENTS][4], uint32_t (&tiles)[MADE][4]) {
#ifdef DRAMA_WARPGROUPS
  if constexpr (TOGETHER) {
    wait_for_products<0>();
    keep_tiles(tiles);
#pragma unroll
    for (int m = 0; m < TILES; ++m) keep_tiles(acc[m]);
  }
#endif
}

__device__ __forceinline__ void clear(void* shared, int bytes, int thread, int threads) {
  for (int i = thread; i < bytes / 16; i += threads) static_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
}

// A block's walk over its tasks, every one of `blocks`: while compute(task, buffer) runs, the copies of the next task into
// the other of two buffers, which fetch(task, buffer) starts, are on their way. Those of the first task have been started.
// prepare(task) may start a group of copies that compute waits for, by wait_for_copies<1>. SHOWN: warpgroups read matrices B
// of what is copied. GROUP: so many threads walk on their own, group number `group` of the block, which then counts as
// several.
template <bool SHOWN = false, int GROUP = 0, typename Fetch, typename Prepare, typename Compute>
__device__ __forceinline__ void walk_over_tasks(int block, int blocks, int tasks, const Fetch& fetch,
                                                const Prepare& prepare, const Compute& compute, int group = 0) {
  for (int task = block, buffer = 0; task < tasks; task += blocks, buffer ^= 1) {
    wait_for_copies<0>();
    if constexpr (SHOWN) show_to_products();
    if constexpr (GROUP == 0) {
      __syncthreads();  // all have left the task before, whose buffer is free
    } else {
      group_barrier<GROUP>(group);
    }
    prepare(task);
    if (task + blocks < tasks) fetch(task + blocks, buffer ^ 1);
    commit_copies();
    compute(task, buffer);
  }
}

// Starts copies of a part of a frame of SIDE x SIDE pixels, given as blocks: ROWS rows from 2 above the part's
// 2 * OUT_ROWS on. A thread copies one place of each row of blocks.
template <int PIXEL, int SIDE, int OUT_ROWS, int ROWS, int THREADS>
__device__ __forceinline__ void fetch_part(uint32_t to, const bf16* frame, int part, int thread) {
  constexpr int CHUNKS = PIXEL / 16, PLACES = SIDE / 2 * 4 * CHUNKS;
  constexpr int PLANE = (SIDE / 2 + 1) * PIXEL, ROW = 2 * PLANE;
  static_assert(PLACES <= THREADS);
  if (thread >= PLACES) return;
  const int entry = thread / (4 * CHUNKS) + 1, pixel = thread / CHUNKS % 4, chunk = thread % CHUNKS, down = pixel / 2;
  to += down * ROW + pixel % 2 * PLANE + entry * PIXEL + chunk_at<PIXEL>(chunk, entry, down);
  const int above = part * OUT_ROWS - 1;
#pragma unroll 6
  for (int i = 0; i < OUT_ROWS + 2; ++i) {
    const int line = above + i;
    const bool inside = line >= 0 && line < SIDE / 2;
    if (2 * i + down < ROWS) {
      copy16_or_clear(to + i * 2 * ROW, frame + ((inside ? line : 0) * PLACES + thread) * 8, inside);
    }
  }
}

// Outputs of a frame, SIDE to a row: a tile's 16 are neighbours in it.
template <int SIDE>
struct Outputs {
  static constexpr int ACROSS = SIDE / 16;  // tiles

  // Of tile m of those that begin with row first_row: what a lane holds of its first or second eight.
  __device__ static __forceinline__ int row(int first_row, int m) { return first_row + m / ACROSS; }
  __device__ static __forceinline__ int column(int m, int eight, int lane) {
    return m % ACROSS * 16 + eight * 8 + lane / 4;
  }
  // Where the tile's pixels begin in a frame with rows of so many bytes.
  __device__ static __forceinline__ int at(int m, int row_bytes, int pixel_bytes) {
    return m / ACROSS * 2 * row_bytes + m % ACROSS * 16 * pixel_bytes;
  }
  __device__ static __forceinline__ int number_in_blocks(int row, int column) {
    return (row / 2 * (SIDE / 2) + column / 2) * 4 + row % 2 * 2 + column % 2;
  }
};

// acc: TILES tiles of outputs, SIDE of them a row.   pixels: the first tile's first row of the frame
template <bool TOGETHER, int KERNEL, int PIXEL, int PLANE, int SIDE, int TILES, int FRAGMENTS>
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
#pragma unroll 1  // unrolled, addresses of all rows would be kept and registers run out
  for (int dy = 0; dy < KERNEL; ++dy) {
    uint32_t a[2][TILES][4];
#pragma unroll
    for (int i = 0; i < KERNEL * STEPS; ++i) {
      const int dx = i / STEPS, step = i % STEPS;
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        load_matrices(a[i % 2][m],
                      at[dx / 2][step] + Outputs<SIDE>::at(m, ROW, PIXEL) + dx % 2 * PLANE);
      }
      start_products<TOGETHER>();
      multiply_tiles<TOGETHER, FRAGMENTS>(acc, 0, a[i % 2], weights + i * FRAGMENTS * 8 * WEIGHT_ROW, lane);
      finish_before<TOGETHER>(a[i == 0 ? 0 : (i + 1) % 2]);
    }
    finish_products<TOGETHER>(acc, a[(KERNEL * STEPS + 1) % 2]);
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
  constexpr int CHANNELS = FRAGMENTS * 8, WHOLE = CHANNELS / 32 * 32;
  const int quad = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = Outputs<SIDE>::row(first_row, m), column = Outputs<SIDE>::column(m, eight, lane);
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
  constexpr int CHANNELS = FRAGMENTS * 8, WHOLE = CHANNELS / 32 * 32;
  const int quad = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    uint4 v[2];
    uint2 w[2];
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = Outputs<SIDE>::row(first_row, m), column = Outputs<SIDE>::column(m, eight, lane);
      const bf16* pixel = x + Outputs<SIDE>::number_in_blocks(row, column) * CHANNELS;
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
  constexpr int CHANNELS = FRAGMENTS * 8;
  const int quad = lane % 4;
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = Outputs<SIDE>::row(first_row, m), column = Outputs<SIDE>::column(m, eight, lane);
      bf16* pixel = out + Outputs<SIDE>::number_in_blocks(row, column) * CHANNELS;
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
