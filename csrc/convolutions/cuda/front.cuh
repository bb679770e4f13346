// First two convolutions of the encoder with norms and activations, 5x5 of stride 1 and 2, from frames of bytes: what lies
// between them stays in shared memory. A block of threads takes whole frames. Batch norm's scale is in the weights, with
// the 1/2 that silu_of_double wants; its shift is added.
#pragma once
#include "windows.cuh"

namespace drama::cuda {

struct Front {
  static constexpr int SIDE = Windows::SIDE, THREADS = 512, WARPS = THREADS / 32, OUT = SIDE * SIDE / 4 * 32;
  static constexpr int CHUNKS = Windows::FRAME / 8 / THREADS;  // of 8 numbers that a thread carries
  static constexpr int SECOND_ROWS = 25 * 32, SHIFTS = 16 + 32;
  // Shared memory, in bytes.
  static constexpr int PIXEL = 32, PLANE = (SIDE / 2 + 2) * PIXEL, HIDDEN_ROW = 2 * PLANE, HIDDEN_ROWS = SIDE + 3;
  static constexpr int SECOND_AT = Windows::WEIGHT_ROWS * WEIGHT_ROW;
  static constexpr int SHIFTS_AT = SECOND_AT + SECOND_ROWS * WEIGHT_ROW;
  static constexpr int IMAGE_AT = SHIFTS_AT + SHIFTS * 4;
  static constexpr int HIDDEN_AT = IMAGE_AT + Windows::IMAGE_BYTES;
  static constexpr int SHARED_BYTES = HIDDEN_AT + HIDDEN_ROW * HIDDEN_ROWS;

  char* shared;
  int thread, lane, warp, quad;

  __device__ Front(char* memory, int thread)
      : shared(memory), thread(thread), lane(thread % 32), warp(thread / 32), quad(thread % 4) {}

  __device__ const float* shifts() const { return reinterpret_cast<const float*>(shared + SHIFTS_AT); }

  __device__ void begin(const uint4* weights, const float* shifts) const {
    store_weights(shared, weights, Windows::WEIGHT_ROWS + SECOND_ROWS, thread, THREADS);
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
      Windows::store_chunk(shared + IMAGE_AT, i * THREADS + thread, Windows::widen(bytes[i]));
    }
  }

  __device__ void first() const {
#pragma unroll 1
    for (int line = warp; line < SIDE / 2; line += WARPS) {
      float acc[2][8][4];
      Windows::multiply(acc, shared + IMAGE_AT, line, shared_address(shared), lane);
      keep_hidden(acc, 2 * line + quad / 2);
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
    const uint32_t pixels = memory + HIDDEN_AT + warp * TILES * HIDDEN_ROW;
    strided_product<false, 5, PIXEL, PLANE, SIDE / 2>(acc, pixels, memory + SECOND_AT, lane);
    write_blocks<SIDE / 2>(out, acc, shifts() + 16, warp * TILES / 2, lane);
  }
};

// frames (count, 64, 64, 3); weights: rows of 16 numbers, of the first product, then of the second; shifts (16 + 32);
// out (count, 16, 16, 4, 32).
__device__ void encode_front(char* shared, int thread, int block, int blocks, const uint8_t* frames,
                             const uint4* weights, const float* shifts, bf16* out, int count) {
  const Front front(shared, thread);
  const auto frame_at = [&](int frame) { return frames + static_cast<int64_t>(frame) * Windows::FRAME; };
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
