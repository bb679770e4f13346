// Gradient of the weight of a 5x5 convolution of stride 1 between 3 and 16 channels, 64x64 pixels.
//
// P = G^T W summed over all blocks of 2x2 pixels: G (blocks, 64), pixel of the block and channel; W (blocks, 108), the
// 6 x 18 numbers of the image that a block sees. A thread's pair of a fragment of W are neighbouring blocks, so the image
// is kept with equal places of neighbouring blocks side by side: a plane for each row and each of the 6 numbers (2 pixels
// of 3 channels) that a block has of it, twice, once moved by a block.
//
// G may be what comes of a batch norm with SiLU behind the convolution: then gradients are those of its outputs, and what
// it took from the convolution is read beside them.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

// LINES of blocks are summed at a time.
template <bool THROUGH_NORM, int LINES>
struct ColourWeight {
  static constexpr bool GOES_THROUGH_NORM = THROUGH_NORM;
  static constexpr int THREADS = 192, SIDE = 64, PARTS = SIDE / 2 / LINES;
  static constexpr int ROWS = 64, TILES = 5, COLUMNS = 3 * TILES * 8;  // of P: a third for each 2 columns of the window
  static constexpr int ACROSS = SIDE / 2, BLOCKS = ACROSS * ACROSS;
  static constexpr int NUMBERS = 16;  // of a block of the image, the last 4 without meaning
  static constexpr int GRAD_BYTES = LINES * 32 * 128;
  static constexpr int RAW_LINES = LINES + 2, RAW_LINE = ACROSS * NUMBERS * 2 + 16, RAW_BYTES = RAW_LINES * RAW_LINE;
  static constexpr int PLANE = 80, COPY = (2 * RAW_LINES + 1) * 6 * PLANE;  // the last row is read for columns to ignore
  static constexpr int RAW_AT = 2 * GRAD_BYTES, PLANES_AT = RAW_AT + 2 * RAW_BYTES;
  static constexpr int NORMED_AT = PLANES_AT + 2 * COPY, SLOPES_AT = NORMED_AT + 2 * GRAD_BYTES;  // with a norm
  static constexpr int CHANNELS = 16, SHARED_BYTES = THROUGH_NORM ? SLOPES_AT + CHANNELS * 16 : NORMED_AT;
  static_assert(ROWS * COLUMNS * 4 <= 2 * GRAD_BYTES);

  char* shared;
  int thread, lane, shift, share;  // a warp has a third of the columns and every other 16 blocks

  __device__ ColourWeight(char* memory, int thread)
      : shared(memory), thread(thread), lane(thread % 32), shift(thread / 32 % 3), share(thread / 96) {}

  // The part's lines of blocks, of the image also the one above and below. normed: as grad.
  __device__ void fetch(const bf16* grad, const bf16* normed, const bf16* image, int part, int buffer) const {
    const uint32_t memory = shared_address(shared);
    const uint32_t to = memory + buffer * GRAD_BYTES, raw = memory + RAW_AT + buffer * RAW_BYTES;
    for (int i = thread; i < GRAD_BYTES / 16; i += THREADS) {
      const int block = i / 8, chunk = i % 8, place = block * 128 + (chunk ^ (block % 8)) * 16;
      const int from = (part * LINES * ACROSS * 8 + i) * 8;
      copy16(to + place, grad + from);
      if constexpr (THROUGH_NORM) copy16(to + NORMED_AT + place, normed + from);
    }
    constexpr int PER_LINE = ACROSS * NUMBERS / 8;
    for (int i = thread; i < RAW_LINES * PER_LINE; i += THREADS) {
      const int line = part * LINES - 1 + i / PER_LINE;
      const bool inside = line >= 0 && line < ACROSS;
      copy16_or_clear(raw + i / PER_LINE * RAW_LINE + i % PER_LINE * 16,
                      image + ((inside ? line : 0) * PER_LINE + i % PER_LINE) * 8, inside);
    }
  }

  // Of each channel, what takes the gradient g of silu(n), n = scale x + shift, to that of x: with dn of channel_sums.cuh it
  // is scale dn + constant - slope x.
  __device__ void store_slopes(const NormGradient& through, int count) const {
    if (thread >= CHANNELS) return;
    const Norm& norm = through.norm;
    const float rows = static_cast<float>(count) * SIDE * SIDE, root = 1.0f / sqrtf(norm.var[thread] + norm.eps);
    const float scale = norm.weight[thread] * root, slope = scale * through.grad_weight[thread] * (root / rows);
    float* to = reinterpret_cast<float*>(shared + SLOPES_AT) + 4 * thread;
    to[0] = scale;
    to[1] = norm.bias[thread] - scale * norm.mean[thread];
    to[2] = norm.mean[thread] * slope - scale * (through.grad_bias[thread] / rows);
    to[3] = slope;
  }

  // Takes the gradients in their place.
  __device__ __forceinline__ void go_through_norm(int buffer) const {
    static_assert(THREADS / 8 % 2 == 0);  // a thread's chunks are all of the same 8 channels
    const float4* slopes = reinterpret_cast<const float4*>(shared + SLOPES_AT) + (thread ^ thread / 8) % 2 * 8;
#pragma unroll 2
    for (int i = thread; i < GRAD_BYTES / 16; i += THREADS) {
      uint4* grads = reinterpret_cast<uint4*>(shared + buffer * GRAD_BYTES) + i;
      const uint4 g = *grads, x = grads[NORMED_AT / 16];
      *grads = make_uint4(gradient(g.x, x.x, slopes), gradient(g.y, x.y, slopes + 2), gradient(g.z, x.z, slopes + 4),
                          gradient(g.w, x.w, slopes + 6));
    }
  }

  // Of two neighbouring channels.
  __device__ static __forceinline__ uint32_t gradient(uint32_t g, uint32_t x, const float4* slopes) {
    return pack(gradient(low_half(g), low_half(x), slopes[0]), gradient(high_half(g), high_half(x), slopes[1]));
  }
  __device__ static __forceinline__ float gradient(float g, float x, float4 slopes) {
    return fmaf(slopes.x, gradient_of_norm(g, fmaf(x, slopes.x, slopes.y)), fmaf(-slopes.w, x, slopes.z));
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

// grads (count, 32, 32, 64); images (count, 32, 32, 16); partial (blocks, 64, 120); through.norm.x as grads.
template <typename Stage>
__device__ void colour_weight(char* shared, int thread, int block, int blocks, const bf16* grads, const bf16* images,
                              float* partial, const NormGradient& through, int count) {
  const Stage stage(shared, thread);
  const auto fetch = [&](int task, int buffer) {
    const int64_t first = static_cast<int64_t>(task / Stage::PARTS) * Stage::BLOCKS;
    const bf16* normed = static_cast<const bf16*>(through.norm.x) + first * Stage::ROWS;
    stage.fetch(grads + first * Stage::ROWS, normed, images + first * Stage::NUMBERS, task % Stage::PARTS, buffer);
  };
  clear(shared + Stage::PLANES_AT, 2 * Stage::COPY, thread, Stage::THREADS);
  if constexpr (Stage::GOES_THROUGH_NORM) stage.store_slopes(through, count);
  float acc[4][Stage::TILES][4];
  set_zero(acc);
  const int tasks = count * Stage::PARTS;
  if (block < tasks) fetch(block, 0);
  commit_copies();
  walk_over_tasks(block, blocks, tasks, fetch, [](int) {}, [&](int task, int buffer) {
    stage.make_planes(buffer);
    if constexpr (Stage::GOES_THROUGH_NORM) stage.go_through_norm(buffer);
    __syncthreads();
    stage.multiply(acc, buffer);
  });
  wait_for_copies<0>();
  stage.finish(partial + static_cast<int64_t>(block) * Stage::ROWS * Stage::COLUMNS, acc);
}

using PlainColourWeight = ColourWeight<false, 8>;
using ColourWeightThroughNorm = ColourWeight<true, 4>;

}  // namespace drama::cuda
