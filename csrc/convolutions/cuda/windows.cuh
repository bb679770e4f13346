// A 5x5 convolution of stride 1 from 3 channels to 16 as a product of matrices, read from an image in shared memory.
//
// The product has a row for each 2x2 block of pixels and 64 columns, one for each pixel of the block and channel. A block
// sees 6 rows of 18 neighbouring numbers, which are read as pairs straight from the image: the first 16 of each row, then
// what is left of all rows.
#pragma once
#include "strided_product.cuh"

namespace drama::cuda {

struct Windows {
  static constexpr int SIDE = 64, FRAME = SIDE * SIDE * 3;  // of an image: pixels, numbers
  static constexpr int STEPS = 7, COLUMNS = 64, WEIGHT_ROWS = STEPS * COLUMNS;
  // The image has a border of 2 pixels and 2 rows more, where weights are zero; its rows, in bytes, are apart so far that
  // `down` meets every bank once.
  static constexpr int IMAGE_ROW = 480, IMAGE_ROWS = SIDE + 6, IMAGE_BYTES = IMAGE_ROW * IMAGE_ROWS;

  // Puts 8 neighbouring numbers in their place, of which the frame has FRAME / 8.
  __device__ static void store_chunk(char* image, int chunk, uint4 numbers) {
    constexpr int PER_ROW = SIDE * 3 / 8;
    const int row = chunk / PER_ROW, place = chunk % PER_ROW;
    *reinterpret_cast<uint4*>(image + (row + 2) * IMAGE_ROW + (1 + place) * 16) = numbers;
  }

  // Puts both rows of a block's 2 x 6 numbers in their place.
  __device__ static void store_block(char* image, int block, uint3 upper, uint3 lower) {
    char* to = image + (2 * (block / (SIDE / 2)) + 2) * IMAGE_ROW + 16 + block % (SIDE / 2) * 12;
    store_row(to, upper);
    store_row(to + IMAGE_ROW, lower);
  }

  __device__ static void store_row(char* to, uint3 numbers) {
    uint32_t* words = reinterpret_cast<uint32_t*>(to);
    words[0] = numbers.x;
    words[1] = numbers.y;
    words[2] = numbers.z;
  }

  __device__ static uint4 widen(uint2 bytes) {
    const uint32_t x = bytes.x, y = bytes.y;
    return make_uint4(pack(byte_of<0>(x), byte_of<1>(x)), pack(byte_of<2>(x), byte_of<3>(x)),
                      pack(byte_of<0>(y), byte_of<1>(y)), pack(byte_of<2>(y), byte_of<3>(y)));
  }

  // acc[m]: 16 of the 32 blocks of a line.
  __device__ static __forceinline__ void multiply(float (&acc)[2][8][4], const char* image, int line, uint32_t weights,
                                                  int lane) {
    const char* window = image + 2 * line * IMAGE_ROW + 4 + lane / 4 * 12;  // 2 pixels left of the first block and above
    const char* along = window + lane % 4 * 4;
    const char* down = window + 32 + lane % 4 * IMAGE_ROW;
    weights += weight_row(lane);
    set_zero(acc);
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
};

}  // namespace drama::cuda
