// Sums over pixels that a batch norm beside a convolution needs: each lane adds what it holds, a block of threads leaves one
// sum of each channel.
//   The norm that follows: y, y^2 of outputs y, before rounding. Means are taken to be small against 4096 standard
//   deviations.
//   The norm before, of which the output is the gradient g, with SiLU between: dn, dn x, where n = scale x + shift and
//   dn = g s (1 + n (1 - s)), s = sigmoid(n).
#pragma once
#include "norm.h"
#include "tensor_core.cuh"

namespace drama::cuda {

enum class Sums { none, moments, gradients };

// Of n, from that of silu(n).
__device__ __forceinline__ float gradient_of_norm(float grad, float n) {
  const float s = sigmoid(n);
  return grad * s * fmaf(n, 1.0f - s, 1.0f);
}

// Scale and shift of C channels, by pairs: both scales, both shifts. room: 2 * C floats of shared memory.
__device__ __forceinline__ void store_norm(float* room, const Norm& norm, int channels, int thread) {
  if (thread >= channels) return;
  const float scale = norm.weight[thread] / sqrtf(norm.var[thread] + norm.eps);
  float* pair = room + thread / 2 * 4 + thread % 2;
  pair[0] = scale;
  pair[2] = norm.bias[thread] - scale * norm.mean[thread];
}

// COUNT channels of each of CHANNELS / COUNT neighbouring lanes: eight channels side by side, then four more, as
// `write_pixels` puts them.
template <int CHANNELS_, int COUNT>
struct ChannelSums {
  static constexpr int CHANNELS = CHANNELS_, LANES = CHANNELS / COUNT, EIGHTS = COUNT / 8 * 8;
  static_assert(COUNT == 4 || COUNT == 8 || COUNT == 12);

  float first[COUNT] = {}, second[COUNT] = {};

  // What the fragments of a tile hold: two columns of two rows each.
  template <int TILES, int FRAGMENTS>
  __device__ __forceinline__ void add_tiles(const float (&acc)[TILES][FRAGMENTS][4]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = (2 * f + k % 2) % COUNT;
          first[i] += acc[m][f][k];
          second[i] = fmaf(acc[m][f][k], acc[m][f][k], second[i]);
        }
  }

  // Two neighbouring channels, from number I of the lane's on. x: both; norm: what `store_norm` has of the pair.
  template <int I>
  __device__ __forceinline__ void add_pair(const float* grad, uint32_t x, const float* norm) {
    const float4 pair = *reinterpret_cast<const float4*>(norm);
    add_gradient<I>(grad[0], low_half(x), pair.x, pair.z);
    add_gradient<I + 1>(grad[1], high_half(x), pair.y, pair.w);
  }

  template <int I>
  __device__ __forceinline__ void add_gradient(float grad, float x, float scale, float shift) {
    const float dn = gradient_of_norm(grad, fmaf(x, scale, shift));
    first[I] += dn;
    second[I] = fmaf(dn, x, second[I]);
  }

  // partial (2, CHANNELS); shared memory holds nothing else now.
  template <int THREADS>
  __device__ void finish(char* shared, int thread, float* partial) const {
    constexpr int PITCH = THREADS + 4;  // neighbouring channels start in different banks
    float* table = reinterpret_cast<float*>(shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      table[i * PITCH + thread] = first[i];
      table[(COUNT + i) * PITCH + thread] = second[i];
    }
    __syncthreads();
    if (thread >= 2 * CHANNELS) return;
    const int channel = thread % CHANNELS, more = channel - EIGHTS * LANES;
    const int lane = more < 0 ? channel / 8 : more / 4, i = more < 0 ? channel % 8 : EIGHTS + more % 4;
    const float* from = table + (thread / CHANNELS * COUNT + i) * PITCH + lane;
    float total = 0.0f;
#pragma unroll 16
    for (int t = 0; t < THREADS; t += LANES) total += from[t];
    partial[thread] = total;
  }
};

}  // namespace drama::cuda
