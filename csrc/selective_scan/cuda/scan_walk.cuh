// Forward of long rows: real A, N <= 16, variable B and C, whole vectors. Blocks whose warps have two roles.
//
// Warps that stage turn u, delta, B and C of the tile ahead into Δ, Δu and rows of B and C in shared memory, and write out
// of the tile behind; warps that scan walk over the tile between. One barrier a tile exchanges them, so that neither device
// memory nor softplus and silu are waited for.
//
// Each read of B and C serves three channels, each of Δ and Δu two states. H200, graph, ms, against the kernel in
// scan_forward.cuh (N = 16): B8 L2048 D1536 float32 0.304 to 0.192, bfloat16 0.258 to 0.201; B4 L8192 D1536 float32 0.867
// to 0.537, bfloat16 0.751 to 0.516. Of that, 3 % and 8 % are the staging's: places that move along instead of being
// computed, and blocks whose rows and channels are all real, which don't ask.
//
// What bounds it, by leaving parts out of B4 L8192 in float32, which gives each multiprocessor one block (H200, graph, ms):
// 0.537; 0.496 with an eighth of the scan; 0.551 with multiply-adds in the place of exponentials; 0.419 without loads, 0.405
// without softplus and silu besides, 0.093 without the scan besides. So the staging, which waits for its loads, is longer
// than the scan, and the scan longer than its exponentials.
//
// How far it could go, by count: a row of a channel takes N + 3 results of the special-function unit, 16 a clock and
// multiprocessor, 0.119 ms for B8 L2048 D1536 at 1.9 GHz. Reading and writing that in bfloat16 takes 0.048 ms, so that twice
// the time of the bytes is out of reach there. Polynomials on the multiply-add unit don't help: with 5.8 instructions for
// each state and 40 for each row the schedulers are at 0.104 ms already, and a polynomial takes ten more (measured with
// every sixth exponential moved: 0.216 ms instead of 0.212, and 0.561 instead of 0.525 for B4 L8192, float32).
#pragma once

#include <type_traits>

#include "scan_common.cuh"

namespace mamba_ssm::cuda {

// T: storage. kLanes lanes of kStateWarps warps share a channel; each lane holds kStates states of kChannels channels.
template <typename T_, int kStates_, int kStateWarps_, int kChannels_, int kChannelWarps_, int kStageWarps_, int kMinBlocks_,
          int kUnroll_>
struct Walk {
  using T = T_;
  static constexpr int kStates = kStates_, kStateWarps = kStateWarps_, kChannels = kChannels_;
  static constexpr int kMinBlocks = kMinBlocks_, kUnroll = kUnroll_;
  static constexpr int kLanes = 4, kPadded = kStates * kLanes * kStateWarps;
  static constexpr int kWarpChannels = 32 / kLanes * kChannels;
  static constexpr int kBlockChannels = kWarpChannels * kChannelWarps_;
  static constexpr int kStageThreads = 32 * kStageWarps_, kThreads = kStageThreads + 32 * kStateWarps * kChannelWarps_;
  static constexpr int kPieces = kBlockChannels * kSteps / kStageThreads;              // of kStep rows, for each thread
  static constexpr int kProjectionPieces = 2 * kPadded * kSteps / kStageThreads;
  static constexpr int kTileFloats = kBlockChannels * kRowStride, kProjectionFloats = kTile * 2 * kPadded;
  static constexpr int kStageFloats = (2 + kStateWarps) * kTileFloats + kProjectionFloats + kTile;
  static constexpr size_t kSharedBytes = 2 * sizeof(float) * kStageFloats;
  static_assert(kPadded == 16 && kStageThreads >= kTile);
  static_assert(kPieces * kStageThreads == kBlockChannels * kSteps);
  static_assert(kProjectionPieces * kStageThreads == 2 * kPadded * kSteps);
};

// One of the two sets of tiles.
template <typename Walk>
struct WalkTiles {
  // (channel, row), y once for each of kStateWarps; a row's B and C, those of a lane's states side by side; what decay_of adds
  float *delta, *drive, *y, *projections, *offsets;
  __device__ WalkTiles(float* shared, int chunk) {
    delta = shared + (chunk & 1) * Walk::kStageFloats;
    drive = delta + Walk::kTileFloats;
    y = drive + Walk::kTileFloats;
    projections = y + Walk::kStateWarps * Walk::kTileFloats;
    offsets = projections + Walk::kProjectionFloats;
  }
};

// kStep numbers of a row as they lie in memory.
template <typename T>
struct StepPack {
  using Raw = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  static_assert(sizeof(Raw) == kStep * sizeof(T));
  Raw raw;
};
template <typename T>
__device__ inline StepPack<T> load_step(const T* from, bool wanted) {
  StepPack<T> pack{};
  if (wanted) pack.raw = *reinterpret_cast<const typename StepPack<T>::Raw*>(from);
  return pack;
}
template <typename T>
__device__ inline void store_step(T* to, const float (&x)[kStep]) {
  T values[kStep];
#pragma unroll
  for (int k = 0; k < kStep; ++k) narrow(x[k], values[k]);
  typename StepPack<T>::Raw raw;
  memcpy(&raw, values, sizeof raw);
  __stwb(reinterpret_cast<typename StepPack<T>::Raw*>(to), raw);
}
template <typename T>
__device__ inline void unpack(const StepPack<T>& pack, float (&x)[kStep]) {
  T values[kStep];
  memcpy(values, &pack.raw, sizeof pack.raw);
#pragma unroll
  for (int k = 0; k < kStep; ++k) x[k] = widen(values[k]);
}

// A thread that stages takes kPieces pieces of kStep rows: the same rows of channels that are kChannelStep apart.
template <typename Walk>
struct WalkPieces {
  static constexpr int kChannelStep = Walk::kStageThreads / kSteps;
  int channel, row;                                      // of the first piece
  __device__ WalkPieces() : channel(threadIdx.x / kSteps), row(threadIdx.x % kSteps * kStep) {}
  __device__ int place(int i) const { return (channel + i * kChannelStep) * kRowStride + row; }
  __device__ bool real(int i, const Part& part) const { return channel + i * kChannelStep < part.count; }
  __device__ void load(const float* from, const Part& part, float (&x)[Walk::kPieces]) const {
#pragma unroll
    for (int i = 0; i < Walk::kPieces; ++i) x[i] = from && real(i, part) ? from[part.first + channel + i * kChannelStep] : 0.0f;
  }
};

// A thread's pieces of an activation in one tile after another. kWhole: every row and channel of the block is real, and
// every state.
template <typename Walk, bool kWhole>
struct WalkStream {
  using T = typename Walk::T;
  T* place;
  int row;
  int64_t step;
  template <typename Rows>
  __device__ WalkStream(const Rows& rows, const Part& part, const WalkPieces<Walk>& pieces)
      : place(const_cast<T*>(at<T>(rows, part, pieces.channel, pieces.row))), row(pieces.row),
        step(WalkPieces<Walk>::kChannelStep * rows.channel_stride) {}
  __device__ T* of(int i) const { return place + i * step; }
  __device__ bool real(int i, const Arguments& p, const Part& part, const WalkPieces<Walk>& pieces) const {
    return kWhole || (row < p.length && pieces.real(i, part));
  }
  __device__ void load(const Arguments& p, const Part& part, const WalkPieces<Walk>& pieces, StepPack<T> (&to)[Walk::kPieces]) {
#pragma unroll
    for (int i = 0; i < Walk::kPieces; ++i) to[i] = load_step(of(i), real(i, p, part, pieces));
    advance();
  }
  __device__ void advance() { place += kTile, row += kTile; }
};

// A thread's pieces of B | C: its column stays the same.
template <typename Walk, bool kWhole>
struct WalkProjections {
  using T = typename Walk::T;
  const T* column;                                       // nullptr past the last state
  StepPack<T> pieces[Walk::kProjectionPieces];
  __device__ WalkProjections(const Arguments& p, const Part& part) {
    const bool is_C = threadIdx.x & Walk::kPadded;
    const int n = threadIdx.x % Walk::kPadded;
    const Projection& from = is_C ? p.C : p.B;
    column = n < p.state ? group_of<T>(p, part, from) + n * from.state_stride : nullptr;
  }
  __device__ static int row(int i) { return (threadIdx.x / 32 + i * Walk::kStageThreads / 32) * kStep; }
  __device__ void load(const Arguments& p, int tile_row) {
#pragma unroll
    for (int i = 0; i < Walk::kProjectionPieces; ++i) {
      pieces[i] = load_step(column + tile_row + row(i), kWhole || (column != nullptr && tile_row + row(i) < p.length));
    }
  }
  __device__ void store(float* tile) const {
    constexpr int kStates = Walk::kStates;
    const int n = threadIdx.x % Walk::kPadded, half = threadIdx.x & Walk::kPadded ? kStates : 0;
    tile += n / kStates * 2 * kStates + half + n % kStates;
#pragma unroll
    for (int i = 0; i < Walk::kProjectionPieces; ++i) {
      float values[kStep];
      unpack(pieces[i], values);
#pragma unroll
      for (int k = 0; k < kStep; ++k) tile[(row(i) + k) * 2 * Walk::kPadded] = values[k];
    }
  }
};

// Δ and Δu of a tile.
template <typename Walk, bool kWhole>
__device__ inline void stage_pieces(const Arguments& p, const WalkPieces<Walk>& pieces, int tile_row,
                                    const float (&bias)[Walk::kPieces], const StepPack<typename Walk::T> (&u)[Walk::kPieces],
                                    const StepPack<typename Walk::T> (&delta)[Walk::kPieces], const WalkTiles<Walk>& tiles) {
#pragma unroll
  for (int i = 0; i < Walk::kPieces; ++i) {
    float step[kStep], drive[kStep];
    unpack(delta[i], step);
    unpack(u[i], drive);
#pragma unroll
    for (int k = 0; k < kStep; ++k) step[k] += bias[i];
    if (p.delta_softplus) {
#pragma unroll
      for (int k = 0; k < kStep; ++k) step[k] = softplus(step[k]);
    }
    if (!kWhole && tile_row + pieces.row >= p.length) {  // rows past the end leave the state as it is
#pragma unroll
      for (int k = 0; k < kStep; ++k) step[k] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) drive[k] *= step[k];
    store_shared<kStep>(tiles.delta + pieces.place(i), step);
    store_shared<kStep>(tiles.drive + pieces.place(i), drive);
  }
}

// out of a tile from the sums that the scan left.
template <typename Walk, bool kWhole>
__device__ inline void write_pieces(const Arguments& p, const Part& part, const WalkPieces<Walk>& pieces,
                                    const float (&skip)[Walk::kPieces], const StepPack<typename Walk::T> (&u)[Walk::kPieces],
                                    const StepPack<typename Walk::T> (&z)[Walk::kPieces], const WalkTiles<Walk>& tiles,
                                    WalkStream<Walk, kWhole>& to) {
#pragma unroll
  for (int i = 0; i < Walk::kPieces; ++i) {
    float y[kStep], x[kStep];
    load_shared<kStep>(tiles.y + pieces.place(i), y);
#pragma unroll
    for (int s = 1; s < Walk::kStateWarps; ++s) {
      float more[kStep];
      load_shared<kStep>(tiles.y + s * Walk::kTileFloats + pieces.place(i), more);
#pragma unroll
      for (int k = 0; k < kStep; ++k) y[k] += more[k];
    }
    unpack(u[i], x);
#pragma unroll
    for (int k = 0; k < kStep; ++k) y[k] = fmaf(skip[i], x[k], y[k]);
    if (p.z.data) {
      unpack(z[i], x);
#pragma unroll
      for (int k = 0; k < kStep; ++k) y[k] *= x[k] * sigmoid(x[k]);
    }
    if (to.real(i, p, part, pieces)) store_step(to.of(i), y);
  }
  to.advance();
}

// The part of warps that stage: loads run a tile ahead of their use.
template <typename Walk, bool kWhole>
__device__ inline void walk_stage(const Arguments& p, const Part& part, float* shared) {
  using T = typename Walk::T;
  const WalkPieces<Walk> pieces;
  WalkStream<Walk, kWhole> u_rows(p.u, part, pieces), delta_rows(p.delta, part, pieces), u_rows_again(p.u, part, pieces),
      z_rows(p.z, part, pieces), out_rows(p.out, part, pieces);
  StepPack<T> u[Walk::kPieces], delta[Walk::kPieces];        // of the tile to stage next
  StepPack<T> u_again[Walk::kPieces] = {}, z[Walk::kPieces];  // of the tile to write next
  WalkProjections<Walk, kWhole> projections(p, part);
  OffsetsAhead offsets;
  float bias[Walk::kPieces], skip[Walk::kPieces];
  pieces.load(p.delta_bias, part, bias);
  pieces.load(p.D, part, skip);
  const auto load = [&](int tile_row) {
    if (tile_row >= p.length) return;
    u_rows.load(p, part, pieces, u);
    delta_rows.load(p, part, pieces, delta);
    projections.load(p, tile_row);
    offsets.load(p, part, tile_row);
  };
  const auto stage = [&](int chunk) {
    const WalkTiles<Walk> tiles(shared, chunk);
    stage_pieces<Walk, kWhole>(p, pieces, chunk * kTile, bias, u, delta, tiles);
    projections.store(tiles.projections);
    if (p.seq_idx) offsets.store(p, chunk * kTile, tiles.offsets);
    load((chunk + 1) * kTile);
  };
  const auto write = [&](int chunk) {
    write_pieces<Walk, kWhole>(p, part, pieces, skip, u_again, z, WalkTiles<Walk>(shared, chunk), out_rows);
  };
  const int chunks = p.chunks();
  load(0);
  stage(0);
  meet();
  for (int chunk = 0; chunk < chunks; ++chunk) {         // the tile that is scanned meanwhile
    if (chunk > 0) write(chunk - 1);
    if (p.D) u_rows_again.load(p, part, pieces, u_again);
    if (p.z.data) z_rows.load(p, part, pieces, z);
    if (chunk + 1 < chunks) stage(chunk + 1);
    meet();
  }
  if (chunks > 0) write(chunks - 1);
}

template <int kStates>
struct alignas(4 * kStates) StateVector {
  float of[kStates];
};

// Which channels of the block, and which states, a lane scans.
template <typename Walk>
struct WalkView {
  int first_state, first_channel, state_warp;            // channels are 32 / kLanes apart
  __device__ WalkView() {
    const int thread = threadIdx.x - Walk::kStageThreads, lane = thread & 31, warp = thread / 32;
    state_warp = warp % Walk::kStateWarps;
    first_state = (state_warp * Walk::kLanes + lane % Walk::kLanes) * Walk::kStates;
    first_channel = warp / Walk::kStateWarps * Walk::kWarpChannels + lane / Walk::kLanes;
  }
  __device__ int channel(int c) const { return first_channel + c * (32 / Walk::kLanes); }
  // Calls `use` with every place of (..., D, N) that is this lane's and real.
  template <typename Float, typename Use>
  __device__ void each(Float* states, int64_t index, const Arguments& p, const Part& part, Use use) const {
#pragma unroll
    for (int c = 0; c < Walk::kChannels; ++c) {
      if (channel(c) >= part.count) continue;
#pragma unroll
      for (int j = 0; j < Walk::kStates; ++j) {
        const int n = first_state + j;
        if (n < p.state) use(states + (index * p.channels + part.first + channel(c)) * p.state + n, c, j);
      }
    }
  }
  __device__ void load(const void* from, int64_t index, const Arguments& p, const Part& part,
                       float (&x)[Walk::kChannels][Walk::kStates]) const {
#pragma unroll
    for (int c = 0; c < Walk::kChannels; ++c) {
#pragma unroll
      for (int j = 0; j < Walk::kStates; ++j) x[c][j] = 0.0f;
    }
    if (from) each(static_cast<const float*>(from), index, p, part, [&](const float* place, int c, int j) { x[c][j] = *place; });
  }
  __device__ void store(void* to, int64_t index, const Arguments& p, const Part& part,
                        const float (&x)[Walk::kChannels][Walk::kStates]) const {
    if (to == nullptr) return;
    if (p.state == Walk::kPadded && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
      for (int c = 0; c < Walk::kChannels; ++c) {
        if (channel(c) >= part.count) continue;
        StateVector<Walk::kStates> vector;
#pragma unroll
        for (int j = 0; j < Walk::kStates; ++j) vector.of[j] = x[c][j];
        float* place = static_cast<float*>(to) + (index * p.channels + part.first + channel(c)) * Walk::kPadded + first_state;
        *reinterpret_cast<StateVector<Walk::kStates>*>(place) = vector;
      }
      return;
    }
    each(static_cast<float*>(to), index, p, part, [&](float* place, int c, int j) { *place = x[c][j]; });
  }
};

// What a lane reads from shared memory for kStep rows.
template <typename Walk>
struct WalkInputs {
  float delta[Walk::kChannels][kStep], drive[Walk::kChannels][kStep], offset[kStep];
  float projections[kStep][2 * Walk::kStates];           // B, then C
  __device__ void load(const WalkView<Walk>& view, int t, bool resets, const WalkTiles<Walk>& tiles) {
#pragma unroll
    for (int c = 0; c < Walk::kChannels; ++c) {
      load_shared<kStep>(tiles.delta + view.channel(c) * kRowStride + t, delta[c]);
      load_shared<kStep>(tiles.drive + view.channel(c) * kRowStride + t, drive[c]);
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      load_shared<2 * Walk::kStates>(tiles.projections + 2 * ((t + k) * Walk::kPadded + view.first_state), projections[k]);
      offset[k] = 0.0f;
    }
    if (resets) load_shared<kStep>(tiles.offsets + t, offset);
  }
};

template <typename Walk>
__device__ inline void walk_rows(const WalkInputs<Walk>& now, const float (&A)[Walk::kChannels][Walk::kStates],
                                 float (&h)[Walk::kChannels][Walk::kStates], float (&y)[Walk::kChannels][kStep]) {
#pragma unroll
  for (int k = 0; k < kStep; ++k) {
#pragma unroll
    for (int c = 0; c < Walk::kChannels; ++c) {
#pragma unroll
      for (int j = 0; j < Walk::kStates; ++j) {
        const float a = decay_of(now.delta[c][k], A[c][j], now.offset[k]);
        h[c][j] = fmaf(a, h[c][j], now.drive[c][k] * now.projections[k][j]);
        y[c][k] = j == 0 ? h[c][j] * now.projections[k][Walk::kStates + j] : fmaf(h[c][j], now.projections[k][Walk::kStates + j], y[c][k]);
      }
    }
  }
}

// The part of warps that scan.
template <typename Walk>
__device__ inline void walk_scan(const Arguments& p, const Part& part, float* shared) {
  const WalkView<Walk> view;
  float A[Walk::kChannels][Walk::kStates], h[Walk::kChannels][Walk::kStates];
  view.load(p.A, 0, p, part, A);
#pragma unroll
  for (int c = 0; c < Walk::kChannels; ++c) {
#pragma unroll
    for (int j = 0; j < Walk::kStates; ++j) A[c][j] *= kLog2e;
  }
  view.load(p.initial, part.batch, p, part, h);
  const bool resets = p.seq_idx != nullptr;
  const int chunks = p.chunks();
  meet();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    view.store(p.states, int64_t(part.batch) * chunks + chunk, p, part, h);
    const WalkTiles<Walk> tiles(shared, chunk);
    WalkInputs<Walk> next;
    next.load(view, 0, resets, tiles);
#pragma unroll Walk::kUnroll
    for (int t = 0; t < kTile; t += kStep) {
      const WalkInputs<Walk> now = next;
      next.load(view, (t + kStep) % kTile, resets, tiles);    // before y is stored, for stores bar loads
      float y[Walk::kChannels][kStep];
      walk_rows<Walk>(now, A, h, y);
#pragma unroll
      for (int c = 0; c < Walk::kChannels; ++c) {
        sum_rows<Walk::kLanes>(y[c], tiles.y + view.state_warp * Walk::kTileFloats + view.channel(c) * kRowStride + t);
      }
    }
    meet();
  }
  view.store(p.last_state, part.batch, p, part, h);
}

template <typename Walk>
__global__ void __launch_bounds__(Walk::kThreads, Walk::kMinBlocks) scan_walk_kernel(const __grid_constant__ Arguments p,
                                                                                     const __grid_constant__ Plan plan) {
  extern __shared__ float4 shared_memory[];
  auto* shared = reinterpret_cast<float*>(shared_memory);
  const Part part = part_of_block<Walk>(p, plan);
  if (threadIdx.x < Walk::kStageThreads) {
    const bool whole = part.count == Walk::kBlockChannels && p.length % kTile == 0 && p.state == Walk::kPadded;
    if (whole) walk_stage<Walk, true>(p, part, shared);
    else walk_stage<Walk, false>(p, part, shared);
  } else {
    walk_scan<Walk>(p, part, shared);
  }
}

// Blocks of kWalkChannels channels.
template <typename T>
cudaError_t walk_of(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  using Walk = Walk<T, 2, 2, 3, 2, 4, 2, sizeof(T) == 4 ? 8 : 4>;
  static_assert(Walk::kBlockChannels == kWalkChannels);
  return launch<Walk>(scan_walk_kernel<Walk>, p, plan, Walk::kSharedBytes, stream);
}

}  // namespace mamba_ssm::cuda
