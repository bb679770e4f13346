// Third convolution of the encoder, 5x5 of stride 2, 32 channels of 32x32 pixels -> 48 of 16x16; frames come in the
// background while the one before is computed. Norm and activation as in front.cuh.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

struct Third {
  static constexpr int THREADS = 256, WARPS = THREADS / 32;
  static constexpr int SIDE = 32, FRAME = SIDE * SIDE * 32, COLUMNS = 48, OUT = SIDE * SIDE / 4 * COLUMNS;
  static constexpr int WEIGHT_ROWS = KERNEL * KERNEL * 2 * COLUMNS;
  // Shared memory, in bytes. The border right of a half row is the one left of the next.
  static constexpr int PIXEL = 64, PLANE = (SIDE / 2 + 1) * PIXEL, ROW = 2 * PLANE, BUFFER = ROW * (SIDE + 3) + PIXEL;
  static constexpr int SHIFTS_AT = WEIGHT_ROWS * WEIGHT_ROW, BUFFERS_AT = SHIFTS_AT + COLUMNS * 4;
  static constexpr int SHARED_BYTES = BUFFERS_AT + 2 * BUFFER;

  char* shared;
  int thread, lane, warp;

  __device__ Third(char* memory, int thread) : shared(memory), thread(thread), lane(thread % 32), warp(thread / 32) {}

  __device__ void begin(const uint4* weights, const float* shifts) const {
    store_weights(shared, weights, WEIGHT_ROWS, thread, THREADS);
    if (thread < COLUMNS) reinterpret_cast<float*>(shared + SHIFTS_AT)[thread] = shifts[thread];
    clear(shared + BUFFERS_AT, 2 * BUFFER, thread, THREADS);
  }

  // frame (16, 16, 4, 32): blocks of pixels.
  __device__ void fetch(const bf16* frame, int buffer) const {
    const int entry = thread / 16 + 1, pixel = thread / 4 % 4, row = pixel / 2 + 2;
    const uint32_t to = shared_address(shared) + BUFFERS_AT + buffer * BUFFER + row * ROW + pixel % 2 * PLANE +
                        entry * PIXEL + chunk_at<PIXEL>(thread % 4, entry, row);
#pragma unroll
    for (int i = 0; i < SIDE / 2; ++i) copy16(to + i * 2 * ROW, frame + (i * THREADS + thread) * 8);
  }

  __device__ void convolve(bf16* out, int buffer) const {
    constexpr int TILES = SIDE / 2 / WARPS;
    float acc[TILES][COLUMNS / 8][4];
    set_zero(acc);
    const uint32_t memory = shared_address(shared);
    strided_product<PIXEL, PLANE, 1>(acc, memory + BUFFERS_AT + buffer * BUFFER + warp * TILES * 2 * ROW, memory, lane);
    write_blocks<SIDE / 2>(out, acc, reinterpret_cast<const float*>(shared + SHIFTS_AT), warp * TILES, lane);
  }
};

// frames (count, 16, 16, 4, 32); weights: rows of 16 numbers; shifts (48); out (count, 8, 8, 4, 48).
__device__ void encode_third(char* shared, int thread, int block, int blocks, const bf16* frames, const uint4* weights,
                             const float* shifts, bf16* out, int count) {
  const Third third(shared, thread);
  const auto frame_at = [&](int frame) { return frames + static_cast<int64_t>(frame) * Third::FRAME; };
  third.begin(weights, shifts);
  __syncthreads();
  third.fetch(frame_at(block), 0);
  commit_copies();
  for (int frame = block, buffer = 0; frame < count; frame += blocks, buffer ^= 1) {
    const int next = frame + blocks;
    if (next < count) third.fetch(frame_at(next), buffer ^ 1);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    third.convolve(out + static_cast<int64_t>(frame) * Third::OUT, buffer);
    __syncthreads();
  }
}

}  // namespace drama::cuda
