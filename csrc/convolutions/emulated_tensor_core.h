// cuda/tensor_core.cuh on a CPU, so that the kernels' indices can be tested without a GPU. A thread of the GPU is a fiber;
// a block's threads take turns, one step each, and a warp's instruction takes two turns: all lanes lay their registers
// down, then each takes what it gets.
#ifndef DRAMA_TENSOR_CORE
#define DRAMA_TENSOR_CORE
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __forceinline__ inline

struct uint4 {
  uint32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, int selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}

namespace emulated {

constexpr int THREADS = 1024, STACK = 1 << 16, SHARED = 232448;  // shared memory of a block on compute capability 9.0

struct Block {
  alignas(128) char shared[SHARED];
  uint32_t registers[THREADS][8];
  ucontext_t scheduler, fibers[THREADS];
  bool ended[THREADS];
  int threads, current, arrived, barriers, conflicts;
  int group_arrived[16], group_barriers[16];  // of groups of threads
  std::function<void(int)> body;
  std::vector<char> stacks = std::vector<char>(size_t(THREADS) * STACK);
};
static Block block;  // not shared with another emulation that the same process has loaded

inline void take_turns() { swapcontext(&block.fibers[block.current], &block.scheduler); }

inline void start(int thread) {
  block.body(thread);
  block.ended[thread] = true;
}

// Runs body(thread) for every thread of a block; shared memory begins as NaN.
inline void run_block(int threads, std::function<void(int)> body) {
  std::memset(block.shared, 0xff, SHARED);
  block.body = std::move(body);
  block.threads = threads;
  block.arrived = 0;
  std::memset(block.group_arrived, 0, sizeof block.group_arrived);
  for (int t = 0; t < threads; ++t) {
    auto& fiber = block.fibers[t];
    block.ended[t] = false;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = &block.stacks[size_t(t) * STACK];
    fiber.uc_stack.ss_size = STACK;
    fiber.uc_link = &block.scheduler;
    makecontext(&fiber, reinterpret_cast<void (*)()>(start), 1, t);
  }
  for (bool more = true; more;) {
    more = false;
    for (int t = 0; t < threads; ++t) {
      if (block.ended[t]) continue;
      block.current = t;
      swapcontext(&block.scheduler, &block.fibers[t]);
      more = more || !block.ended[t];
    }
    if (block.arrived == threads) {
      block.arrived = 0;
      ++block.barriers;
    }
  }
}

inline uint32_t* of_lane(int lane) { return block.registers[block.current / 32 * 32 + lane]; }
inline float widen(uint32_t pair, int high) {
  const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace emulated

inline void __syncthreads() {
  const int before = emulated::block.barriers;
  ++emulated::block.arrived;
  do emulated::take_turns();
  while (before == emulated::block.barriers);
}

namespace drama::cuda {

using bf16 = uint16_t;

template <int THREADS>
inline void group_barrier(int group) {
  const int before = emulated::block.group_barriers[group];
  if (++emulated::block.group_arrived[group] == THREADS) {
    emulated::block.group_arrived[group] = 0;
    ++emulated::block.group_barriers[group];
  }
  while (before == emulated::block.group_barriers[group]) emulated::take_turns();
}

inline uint32_t shared_address(const void* p) { return static_cast<const char*>(p) - emulated::block.shared; }

inline char* place16(uint32_t address) {
  if (address % 16 != 0 || address + 16 > emulated::SHARED) std::abort();
  return emulated::block.shared + address;
}

template <bool TRANSPOSED>
inline void load_four(uint32_t (&r)[4], uint32_t row) {
  const int lane = emulated::block.current % 32;
  emulated::of_lane(lane)[0] = row;
  emulated::take_turns();
  for (int m = 0; m < 4; ++m) {
    char* rows[8];
    int banks = 0;
    for (int i = 0; i < 8; ++i) {
      rows[i] = place16(emulated::of_lane(8 * m + i)[0]);
      banks |= 1 << emulated::of_lane(8 * m + i)[0] / 16 % 8;
    }
    emulated::block.conflicts += banks != 255;
    for (int e = 0; e < 2; ++e) {
      const int along = lane % 4 * 2 + e, across = lane / 4;
      std::memcpy(reinterpret_cast<char*>(&r[m]) + 2 * e, TRANSPOSED ? rows[along] + 2 * across : rows[across] + 2 * along, 2);
    }
  }
  emulated::take_turns();
}
inline void load_matrices(uint32_t (&r)[4], uint32_t row) { load_four<false>(r, row); }
inline void load_transposed(uint32_t (&r)[4], uint32_t row) { load_four<true>(r, row); }

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = emulated::block.current % 32;
  uint32_t* mine = emulated::of_lane(lane);
  std::memcpy(mine, a, 16);
  mine[4] = b0;
  mine[5] = b1;
  emulated::take_turns();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t left = emulated::of_lane(row % 8 * 4 + k % 8 / 2)[k / 8 * 2 + row / 8];
      const uint32_t right = emulated::of_lane(column * 4 + k % 8 / 2)[4 + k / 8];
      c[i] += emulated::widen(left, k % 2) * emulated::widen(right, k % 2);
    }
  }
  emulated::take_turns();
}

inline float silu_of_double(float h) { return h + h * std::tanh(h); }

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float low_half(uint32_t pair) { return emulated::widen(pair, 0); }
inline float high_half(uint32_t pair) { return emulated::widen(pair, 1); }

inline uint32_t pack(float low, float high) {
  uint32_t bits[2];
  const float values[2] = {low, high};
  std::memcpy(bits, values, 8);
  for (uint32_t& b : bits) b = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return bits[0] | bits[1] << 16;
}

template <int I>
inline float byte_of(uint32_t word) {
  return static_cast<float>(word >> 8 * I & 255);
}

inline void copy16(uint32_t to, const void* from) { std::memcpy(place16(to), from, 16); }
inline void copy8(uint32_t to, const void* from) { std::memcpy(emulated::block.shared + to, from, 8); }
inline void copy16_or_clear(uint32_t to, const void* from, bool copied) {
  copied ? std::memcpy(place16(to), from, 16) : std::memset(place16(to), 0, 16);
}
inline void commit_copies() {}
template <int PENDING>
inline void wait_for_copies() {}
inline void show_to_products() {}
inline void store16(void* to, const uint32_t (&v)[4]) { std::memcpy(to, v, 16); }

}  // namespace drama::cuda

#endif
