// What the scan's kernels take from CUDA, on a CPU, so that their indices and barriers can be tested without a GPU. A
// thread of the GPU is a fiber; a block's threads take turns, and a warp's exchange takes two: all lanes lay their number
// down, then each takes the one that it gets. Blocks run one after another.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda_runtime_api.h"

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

constexpr int kThreads = 1024, kStack = 1 << 16, kSharedBytes = 232448;  // shared memory as on compute capability 9.0
struct Index { unsigned x = 0; };
struct Block {
  float lane_values[kThreads];
  ucontext_t scheduler, fibers[kThreads];
  bool ended[kThreads];
  int threads = 0, arrived = 0, barriers = 0;
  std::function<void()> body;
  std::vector<char> stacks = std::vector<char>(size_t(kThreads) * kStack);
};
static Block block;  // not shared with another emulation that the same process has loaded
static Index thread_index, block_index;

inline void take_turns() {
  const unsigned own = thread_index.x;
  swapcontext(&block.fibers[own], &block.scheduler);
}
inline void start() {
  block.body();
  block.ended[thread_index.x] = true;
}
inline void run_block(int threads, float4* shared, std::function<void()> body) {
  std::memset(shared, 0xff, kSharedBytes);                 // NaN
  block.body = std::move(body);
  block.threads = threads;
  for (int t = 0; t < threads; ++t) {
    ucontext_t& fiber = block.fibers[t];
    block.ended[t] = false;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = &block.stacks[size_t(t) * kStack];
    fiber.uc_stack.ss_size = kStack;
    fiber.uc_link = &block.scheduler;
    makecontext(&fiber, start, 0);
  }
  for (bool more = true; more;) {
    more = false;
    for (int t = 0; t < threads; ++t) {
      if (block.ended[t]) continue;
      thread_index.x = t;
      swapcontext(&block.scheduler, &block.fibers[t]);
      more = more || !block.ended[t];
    }
    if (block.arrived == threads) {
      block.arrived = 0;
      ++block.barriers;
    }
  }
}

}  // namespace emulated

inline emulated::Index &threadIdx = emulated::thread_index, &blockIdx = emulated::block_index;
namespace mamba_ssm::cuda {
inline float4 shared_memory[emulated::kSharedBytes / sizeof(float4)];  // where a kernel's `extern __shared__` finds it
}

inline void __syncthreads() {
  const int before = emulated::block.barriers;
  ++emulated::block.arrived;
  do emulated::take_turns();
  while (before == emulated::block.barriers);
}
inline void __syncwarp() { emulated::take_turns(); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
  emulated::block.lane_values[threadIdx.x] = x;
  emulated::take_turns();
  const float other = emulated::block.lane_values[threadIdx.x ^ mask];
  emulated::take_turns();
  return other;
}
inline float __fdividef(float a, float b) { return a / b; }
template <typename T>
void __stwb(T* to, T value) { *to = value; }

struct cudaLaunchConfig_t {
  struct { unsigned x; } gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};
template <typename Kernel, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Given&... given) {
  for (unsigned i = 0; i < config->gridDim.x; ++i) {
    blockIdx.x = i;
    emulated::run_block(int(config->blockDim.x), mamba_ssm::cuda::shared_memory, [&] { kernel(given...); });
  }
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes <= emulated::kSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
