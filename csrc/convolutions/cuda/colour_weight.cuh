// Gradient of the weight of a 5x5 convolution of stride 1 between 3 and 16 channels, 64x64 pixels.
//
// P = G^T W summed over all blocks of 2x2 pixels: G (blocks, 64), pixel of the block and channel; W (blocks, 108), the
// 6 x 18 numbers of the image that a block sees. A thread's pair of a fragment of W are neighbouring blocks, so the image
// is kept with equal places of neighbouring blocks side by side: a plane for each row and each of the 6 numbers (2 pixels
// of 3 channels) that a block has of it, twice, once moved by a block.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

struct ColourWeight {
  static constexpr int THREADS = 192, SIDE = 64, LINES = 8, PARTS = SIDE / 2 / LINES;  // lines of blocks at a time
  static constexpr int ROWS = 64, TILES = 5, COLUMNS = 3 * TILES * 8;  // of P: a third for each 2 columns of the window
  static constexpr int ACROSS = SIDE / 2, BLOCKS = ACROSS * ACROSS;
  static constexpr int NUMBERS = 16;  // of a block of the image, the last 4 without meaning
  static constexpr int GRAD_BYTES = LINES * 32 * 128;
  static constexpr int RAW_LINES = LINES + 2, RAW_LINE = ACROSS * NUMBERS * 2 + 16, RAW_BYTES = RAW_LINES * RAW_LINE;
  static constexpr int PLANE = 80, COPY = (2 * RAW_LINES + 1) * 6 * PLANE;  // the last row is read for columns to ignore
  static constexpr int RAW_AT = 2 * GRAD_BYTES, PLANES_AT = RAW_AT + 2 * RAW_BYTES;
  static constexpr int SHARED_BYTES = PLANES_AT + 2 * COPY;
  static_assert(ROWS * COLUMNS * 4 <= 2 * GRAD_BYTES);

  char* shared;
  int thread, lane, shift, share;  // a warp has a third of the columns and every other 16 blocks

  __device__ ColourWeight(char* memory, int thread)
      : shared(memory), thread(thread), lane(thread % 32), shift(thread / 32 % 3), share(thread / 96) {}

  // The part's lines of blocks, of the image also the one above and below.
  __device__ void fetch(const bf16* grad, const bf16* image, int part, int buffer) const {
    const uint32_t memory = shared_address(shared);
    const uint32_t to = memory + buffer * GRAD_BYTES, raw = memory + RAW_AT + buffer * RAW_BYTES;
    for (int i = thread; i < GRAD_BYTES / 16; i += THREADS) {
      const int block = i / 8, chunk = i % 8;
      copy16(to + block * 128 + (chunk ^ (block % 8)) * 16, grad + (part * LINES * ACROSS * 8 + i) * 8);
    }
    constexpr int PER_LINE = ACROSS * NUMBERS / 8;
    for (int i = thread; i < RAW_LINES * PER_LINE; i += THREADS) {
      const int line = part * LINES - 1 + i / PER_LINE;
      const bool inside = line >= 0 && line < ACROSS;
      copy16_or_clear(raw + i / PER_LINE * RAW_LINE + i % PER_LINE * 16,
                      image + ((inside ? line : 0) * PER_LINE + i % PER_LINE) * 8, inside);
    }
  }

  // The 6 numbers of a block, two to a word; zeros beside the image.
  __device__ __forceinline__ void numbers(uint32_t (&v)[3], const char* row, int block) const {
    const bool inside = block >= 0 && block < ACROSS;
#pragma unroll
    for (int i = 0; i < 3; ++i) v[i] = inside ? *reinterpret_cast<const uint32_t*>(row + block * NUMBERS * 2 + i * 4) : 0;
  }

  // A warp takes 4 rows of 8 words, whose planes start in different banks.
  __device__ void make_planes(int buffer) const {
    constexpr int GROUPS = 2 * RAW_LINES / 4;
    for (int i = thread; i < GROUPS * 3 * 32; i += THREADS) {
      const int row = i / 32 % GROUPS * 4 + i % 32 / 8, word = i / (32 * GROUPS) * 8 + i % 8;
      if (word > ACROSS / 2) continue;
      const char* raw = shared + RAW_AT + buffer * RAW_BYTES + row / 2 * RAW_LINE + row % 2 * 12;
      uint32_t left[3], middle[3], right[3];
      numbers(left, raw, 2 * word - 1);
      numbers(middle, raw, 2 * word);
      numbers(right, raw, 2 * word + 1);
      char* to = shared + PLANES_AT + row * 6 * PLANE + word * 4;
#pragma unroll
      for (int r = 0; r < 6; ++r) {
        const int pick = r % 2 == 0 ? 0x5410 : 0x7632;  // low halves of both words, or high
        *reinterpret_cast<uint32_t*>(to + r * PLANE) = __byte_perm(left[r / 2], middle[r / 2], pick);
        *reinterpret_cast<uint32_t*>(to + r * PLANE + COPY) = __byte_perm(middle[r / 2], right[r / 2], pick);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[4][TILES][4], int buffer) const {
    const int block = lane % 8 + lane / 16 * 8;
    const uint32_t grad = shared_address(shared) + buffer * GRAD_BYTES + block * 128;
    const char* planes = shared + PLANES_AT + lane / 4 * PLANE + lane % 4 * 4 + (shift == 1 ? COPY : shift * 2);
#pragma unroll 1
    for (int step = share; step < LINES * 2; step += 2) {
      uint32_t a[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        load_transposed(a[m], grad + step * 16 * 128 + ((2 * m + lane / 8 % 2) ^ (block % 8)) * 16);
      }
      const char* at = planes + step / 2 * 12 * PLANE + step % 2 * 32;
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const uint32_t b0 = *reinterpret_cast<const uint32_t*>(at + t * 8 * PLANE);
        const uint32_t b1 = *reinterpret_cast<const uint32_t*>(at + t * 8 * PLANE + 16);
#pragma unroll
        for (int m = 0; m < 4; ++m) multiply_add(acc[m][t], a[m], b0, b1);
      }
    }
  }

  // partial (64, 120)
  __device__ void finish(float* partial, const float (&acc)[4][TILES][4]) const {
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll 1
    for (int turn = 1; turn >= 0; --turn) {
      __syncthreads();
      if (share != turn) continue;
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int row = m * 16 + lane / 4 + k / 2 * 8, column = (shift * TILES + t) * 8 + lane % 4 * 2 + k % 2;
            if (turn == 1) {
              sums[row * COLUMNS + column] = acc[m][t][k];
            } else {
              partial[row * COLUMNS + column] = sums[row * COLUMNS + column] + acc[m][t][k];
            }
          }
    }
  }
};

// grads (count, 32, 32, 64); images (count, 32, 32, 16); partial (blocks, 64, 120)
__device__ void colour_weight(char* shared, int thread, int block, int blocks, const bf16* grads, const bf16* images,
                              float* partial, int count) {
  using Stage = ColourWeight;
  const Stage stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    const int64_t first = static_cast<int64_t>(task / Stage::PARTS) * Stage::BLOCKS;
    stage.fetch(grads + first * Stage::ROWS, images + first * Stage::NUMBERS, task % Stage::PARTS, buffer);
  };
  clear(shared + Stage::PLANES_AT, 2 * Stage::COPY, thread, Stage::THREADS);
  float acc[4][Stage::TILES][4];
  set_zero(acc);
  const int tasks = count * Stage::PARTS;
  if (block < tasks) fetch(block, 0);
  commit_copies();
  walk_over_tasks(block, blocks, tasks, fetch, [&](int task, int buffer) {
    stage.make_planes(buffer);
    __syncthreads();
    stage.multiply(acc, buffer);
  });
  wait_for_copies<0>();
  stage.finish(partial + static_cast<int64_t>(block) * Stage::ROWS * Stage::COLUMNS, acc);
}

}  // namespace drama::cuda
