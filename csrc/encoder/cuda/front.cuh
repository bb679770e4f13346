// First two convolutions of the encoder, 5x5 of stride 1 and 2, from frames of bytes: what lies between them stays in
// shared memory.
//
// A block of threads takes whole frames. The first convolution is a product of one row for each 2x2 block of pixels with
// 64 columns, a column for each pixel of the block and channel: a block sees 6 rows of 18 neighbouring numbers, which are
// read as pairs straight from the image (first 16 of each row, then what is left of all rows). Batch norm's scale is in
// the weights, with the 1/2 that silu_of_double wants; its shift is added.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

struct Front {
  static constexpr int SIDE = 64;  // of a frame, in pixels
  static constexpr int THREADS = 512, WARPS = THREADS / 32;
  static constexpr int FRAME_BYTES = SIDE * SIDE * 3, OUT = SIDE * SIDE / 4 * 32;
  static constexpr int CHUNKS = FRAME_BYTES / 8 / THREADS;  // of 8 bytes that a thread carries
  static constexpr int STEPS = 7, COLUMNS = 64;             // of the first product
  static constexpr int FIRST_ROWS = STEPS * COLUMNS, SECOND_ROWS = KERNEL * KERNEL * 32;  // of weights
  static constexpr int SHIFTS = 16 + 32;
  // Shared memory, in bytes. The image has a border of 2 pixels and 2 rows more, where weights are zero; its rows are
  // apart so far that `down` meets every bank once.
  static constexpr int IMAGE_ROW = 480, IMAGE_ROWS = SIDE + 6;
  static constexpr int PIXEL = 32, PLANE = (SIDE / 2 + 2) * PIXEL, HIDDEN_ROW = 2 * PLANE, HIDDEN_ROWS = SIDE + 3;
  static constexpr int SECOND_AT = FIRST_ROWS * WEIGHT_ROW;
  static constexpr int SHIFTS_AT = SECOND_AT + SECOND_ROWS * WEIGHT_ROW;
  static constexpr int IMAGE_AT = SHIFTS_AT + SHIFTS * 4;
  static constexpr int HIDDEN_AT = IMAGE_AT + IMAGE_ROW * IMAGE_ROWS;
  static constexpr int SHARED_BYTES = HIDDEN_AT + HIDDEN_ROW * HIDDEN_ROWS;

  char* shared;
  int thread, lane, warp, quad;

  __device__ Front(char* memory, int thread)
      : shared(memory), thread(thread), lane(thread % 32), warp(thread / 32), quad(thread % 4) {}

  __device__ const float* shifts() const { return reinterpret_cast<const float*>(shared + SHIFTS_AT); }

  __device__ void begin(const uint4* weights, const float* shifts) const {
    store_weights(shared, weights, FIRST_ROWS + SECOND_ROWS, thread, THREADS);
    if (thread < SHIFTS) reinterpret_cast<float*>(shared + SHIFTS_AT)[thread] = shifts[thread];
    clear(shared + IMAGE_AT, SHARED_BYTES - IMAGE_AT, thread, THREADS);
  }

  __device__ void fetch(const uint8_t* frame, uint2 (&bytes)[CHUNKS]) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) bytes[i] = reinterpret_cast<const uint2*>(frame)[i * THREADS + thread];
  }

  __device__ void store_image(const uint2 (&bytes)[CHUNKS]) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      constexpr int PER_ROW = SIDE * 3 / 8;
      const int chunk = i * THREADS + thread, row = chunk / PER_ROW, place = chunk % PER_ROW;
      const uint32_t x = bytes[i].x, y = bytes[i].y;
      *reinterpret_cast<uint4*>(shared + IMAGE_AT + (row + 2) * IMAGE_ROW + (1 + place) * 16) =
          make_uint4(pack(byte_of<0>(x), byte_of<1>(x)), pack(byte_of<2>(x), byte_of<3>(x)),
                     pack(byte_of<0>(y), byte_of<1>(y)), pack(byte_of<2>(y), byte_of<3>(y)));
    }
  }

  // A row of blocks at a time; acc[m]: 16 of its 32 blocks.
  __device__ void first() const {
#pragma unroll 1
    for (int line = warp; line < SIDE / 2; line += WARPS) {
      float acc[2][8][4];
      set_zero(acc);
      multiply_windows(acc, shared + IMAGE_AT + 2 * line * IMAGE_ROW + 4 + lane / 4 * 12);
      keep_hidden(acc, 2 * line + quad / 2);
    }
  }

  // window: what the lane's first block sees, 2 pixels to its left and above it.
  __device__ __forceinline__ void multiply_windows(float (&acc)[2][8][4], const char* window) const {
    const uint32_t weights = shared_address(shared) + weight_row(lane);
    const char* along = window + quad * 4;
    const char* down = window + 32 + quad * IMAGE_ROW;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* pair = step < 6 ? along + step * IMAGE_ROW + half * 16 : down + half * 4 * IMAGE_ROW;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int eight = 0; eight < 2; ++eight)
            a[m][2 * half + eight] = *reinterpret_cast<const uint32_t*>(pair + (m * 16 + eight * 8) * 12);
      }
#pragma unroll
      for (int f = 0; f < 8; f += 2) {
        uint32_t b[4];
        load_matrices(b, weights + (step * COLUMNS + f * 8) * WEIGHT_ROW);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add(acc[m][f], a[m], b[0], b[1]);
          multiply_add(acc[m][f + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // A lane holds all 16 channels of pixel `quad` of its blocks.   row: of that pixel.
  __device__ __forceinline__ void keep_hidden(const float (&acc)[2][8][4], int row) const {
    char* to = shared + HIDDEN_AT + (row + 2) * HIDDEN_ROW + quad % 2 * PLANE;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int entry = m * 16 + eight * 8 + lane / 4 + 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t v[4];
#pragma unroll
          for (int f = 0; f < 4; ++f) v[f] = activated(acc[m][4 * half + f] + 2 * eight, shifts() + 8 * half + 2 * f);
          *reinterpret_cast<uint4*>(to + entry * PIXEL + chunk_at<PIXEL>(half, entry, row)) =
              make_uint4(v[0], v[1], v[2], v[3]);
        }
      }
  }

  __device__ void second(bf16* out) const {
    constexpr int TILES = SIDE / WARPS;
    float acc[TILES][4][4];
    set_zero(acc);
    const uint32_t memory = shared_address(shared);
    strided_product<PIXEL, PLANE, 2>(acc, memory + HIDDEN_AT + warp * TILES * HIDDEN_ROW, memory + SECOND_AT, lane);
    write_blocks<SIDE / 2>(out, acc, shifts() + 16, warp * TILES / 2, lane);
  }
};

// frames (count, 64, 64, 3); weights: rows of 16 numbers, of the first product, then of the second; shifts (16 + 32);
// out (count, 16, 16, 4, 32).
__device__ void encode_front(char* shared, int thread, int block, int blocks, const uint8_t* frames,
                             const uint4* weights, const float* shifts, bf16* out, int count) {
  const Front front(shared, thread);
  const auto frame_at = [&](int frame) { return frames + static_cast<int64_t>(frame) * Front::FRAME_BYTES; };
  uint2 bytes[Front::CHUNKS];
  front.fetch(frame_at(block), bytes);
  front.begin(weights, shifts);
  __syncthreads();
  front.store_image(bytes);
  for (int frame = block; frame < count; frame += blocks) {
    __syncthreads();
    front.first();
    __syncthreads();
    const int next = frame + blocks;
    if (next < count) front.fetch(frame_at(next), bytes);
    front.second(out + static_cast<int64_t>(frame) * Front::OUT);
    if (next < count) front.store_image(bytes);
  }
}

}  // namespace drama::cuda
