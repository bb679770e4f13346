// Device code that forward and backward share: numbers, tiles in shared memory, reductions over the lanes of a warp.
//
// A block walks over its part's rows tile by tile. Staging turns u and delta into Δ and Δu once for each row and channel
// and writes B and C transposed; the scan then runs from shared memory with its states in registers; a last pass adds
// what is elementwise and writes 16 bytes for each thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>

#include "scan_cuda.h"
#include "scan_ptx.cuh"

namespace mamba_ssm::cuda {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2e = 1.442695040888963407f;
constexpr int kStep = 4;                 // rows between two reductions over lanes
constexpr int kSteps = kTile / kStep;
constexpr int kRowStride = kTile + 4;    // floats; 4 of padding keep 16-byte rows of different channels in other banks
constexpr unsigned kFull = 0xffffffffu;

// ---- numbers ----

struct Complex {
  float re, im;
};
__device__ inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
__device__ inline Complex operator*(Complex a, Complex b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
__device__ inline Complex operator*(float a, Complex b) { return {a * b.re, a * b.im}; }
__device__ inline Complex conj(Complex a) { return {a.re, -a.im}; }
__device__ inline float conj(float a) { return a; }
__device__ inline float real_of_product(float a, float b) { return a * b; }
__device__ inline float real_of_product(Complex a, Complex b) { return a.re * b.re - a.im * b.im; }

template <typename S>
constexpr int kReals = sizeof(S) / sizeof(float);
template <typename S>
constexpr float kKappa = kReals<S>;      // y is twice the real part where states are complex

// exp(Δ A) from A log2(e); an offset of -inf resets the state.
__device__ inline float decay_of(float delta, float A_log2e, float offset) { return exp2_approx(fmaf(delta, A_log2e, offset)); }
__device__ inline Complex decay_of(float delta, Complex A_log2e, float offset) {
  const float size = exp2_approx(fmaf(delta, A_log2e.re, offset));
  float sine, cosine;
  sincosf(delta * A_log2e.im * kLn2, &sine, &cosine);
  return {size * cosine, size * sine};
}

// max(x, 0) + log1p(e), e = exp(-|x|); log1p(e) / e as its Chebyshev interpolant of degree 8 on [0, 1], 5e-7 off at most.
__device__ inline float softplus(float x) {
  constexpr float coefficients[] = {0.07751608628f, -0.1360224783f, 0.1907688081f, -0.2483539879f,
                                    0.3331812024f,  -0.4999944568f, 0.9999999404f};
  const float e = exp2_approx(fabsf(x) * -kLog2e);
  float ratio = fmaf(0.0051261019f, e, -0.02907406539f);
#pragma unroll
  for (int i = 0; i < 7; ++i) ratio = fmaf(ratio, e, coefficients[i]);
  return fmaf(ratio, e, fmaxf(x, 0.0f));
}
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2_approx(-x * kLog2e)); }

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void narrow(float x, float& y) { y = x; }
__device__ inline void narrow(float x, __half& y) { y = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// ---- memory ----

template <typename T>
constexpr int kVector = 16 / sizeof(T);

// A vector as it lies in memory: its numbers are taken apart where they are used, and not where they arrive, for that
// would wait for them there.
template <typename T>
struct Pack {
  uint4 raw;
};
template <typename T>
__device__ inline Pack<T> packed(const T (&values)[kVector<T>]) {
  Pack<T> pack;
  memcpy(&pack.raw, values, sizeof pack.raw);
  return pack;
}
template <typename T>
__device__ inline void unpack(const Pack<T>& pack, float (&x)[kVector<T>]) {
  T values[kVector<T>];
  memcpy(values, &pack.raw, sizeof pack.raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) x[i] = widen(values[i]);
}

// Count elements at `from`, the rest zero. kWhole: vectors are aligned, and count is 0 or a whole vector.
template <bool kWhole, typename T>
__device__ inline Pack<T> load_pack(const T* from, int count, bool aligned) {
  if (kWhole ? count > 0 : aligned && count >= kVector<T>) return {*reinterpret_cast<const uint4*>(from)};
  if constexpr (kWhole) {
    return {make_uint4(0, 0, 0, 0)};
  } else {
    T values[kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      narrow(0.0f, values[i]);
      if (i < count) values[i] = from[i];
    }
    return packed(values);
  }
}
template <bool kWhole, typename T>
__device__ inline void store_vector(T* to, int count, bool aligned, const float (&x)[kVector<T>]) {
  T values[kVector<T>];
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) narrow(x[i], values[i]);
  if (kWhole ? count > 0 : aligned && count >= kVector<T>) {
    *reinterpret_cast<uint4*>(to) = packed(values).raw;
  } else if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (i < count) to[i] = values[i];
    }
  }
}
// A whole vector into shared memory, where this thread finds it after wait_for_fetches(); zeros if it is not wanted.
template <typename T>
__device__ inline void fetch_pack(const T* from, bool wanted, Pack<T>* to) {
  if (wanted) fetch_16_bytes(from, to);
  else *to = load_pack<true>(from, 0, true);
}

// K floats, a multiple of 4, in shared memory.
template <int K>
__device__ inline void load_shared(const float* from, float (&x)[K]) {
#pragma unroll
  for (int i = 0; i < K; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}
template <int K>
__device__ inline void store_shared(float* to, const float (&x)[K]) {
#pragma unroll
  for (int i = 0; i < K; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}
template <int K>
__device__ inline void load_states(const float* from, float (&x)[K]) { load_shared<K>(from, x); }
template <int K>
__device__ inline void load_states(const float* from, Complex (&x)[K]) {
  float flat[2 * K];
  load_shared<2 * K>(from, flat);
#pragma unroll
  for (int i = 0; i < K; ++i) x[i] = {flat[2 * i], flat[2 * i + 1]};
}
template <int K>
__device__ inline void store_states(float* to, const float (&x)[K]) { store_shared<K>(to, x); }
template <int K>
__device__ inline void store_states(float* to, const Complex (&x)[K]) {
  float flat[2 * K];
#pragma unroll
  for (int i = 0; i < K; ++i) flat[2 * i] = x[i].re, flat[2 * i + 1] = x[i].im;
  store_shared<2 * K>(to, flat);
}

// ---- reductions over lanes ----

// Four rows' sums over the kLanes lanes of a channel, written to four places of a row by its first lanes.
template <int kLanes>
__device__ inline void sum_rows(float (&x)[kStep], float* to) {
  if constexpr (kLanes == 1) {
    store_shared<kStep>(to, x);
  } else {
    static_assert(kLanes >= 4);
    const int lane = threadIdx.x & 31;
    const bool upper = lane & 2, odd = lane & 1;
    const float a = (upper ? x[2] : x[0]) + __shfl_xor_sync(kFull, upper ? x[0] : x[2], 2);
    const float b = (upper ? x[3] : x[1]) + __shfl_xor_sync(kFull, upper ? x[1] : x[3], 2);
    float sum = (odd ? b : a) + __shfl_xor_sync(kFull, odd ? a : b, 1);
#pragma unroll
    for (int mask = 4; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(kFull, sum, mask);
    if (lane % kLanes < 4) to[lane & 3] = sum;
  }
}

// Sums K values over the lanes that differ in bits kMask, kMask / 2, ..., kLowest: each round halves what a lane holds.
// What is left, K / (lanes summed over) values or one, starts at index `first` of the K; `writes` is false on lanes that
// hold a copy of another's.
template <int K, int kMask, int kLowest, int kSize>
__device__ inline void sum_scatter(float (&x)[kSize], int& first, bool& writes) {
  if constexpr (kMask >= kLowest) {
    const bool upper = threadIdx.x & kMask;
    if constexpr (K > 1) {
      constexpr int half = K / 2;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(kFull, upper ? x[i] : x[i + half], kMask);
      }
      first += upper ? half : 0;
      sum_scatter<half, kMask / 2, kLowest>(x, first, writes);
    } else {
      x[0] += __shfl_xor_sync(kFull, x[0], kMask);
      writes = writes && !upper;
      sum_scatter<1, kMask / 2, kLowest>(x, first, writes);
    }
  }
}

// ---- what a block works on ----

// T: storage, S: state, kStates x kLanes states of kChannels channels for each lane. kFast: B and C are both variable,
// rows are whole aligned vectors, and a tile's inputs are fetched while the tile before is scanned: with few warps on a
// multiprocessor nothing else hides the latency of device memory. What a thread fetches it alone reads, so no barrier
// guards these slots.
template <typename T_, typename S_, int kStates_, int kLanes_, int kChannels_, int kWarps_, bool kFast_>
struct Shape {
  using T = T_;
  using S = S_;
  static constexpr int kStates = kStates_, kLanes = kLanes_, kChannels = kChannels_, kWarps = kWarps_;
  static constexpr bool kFast = kFast_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = kFast && kChannels == 1 ? 8 : 1;    // of a multiprocessor, that registers must allow
  static constexpr int kWarpChannels = 32 / kLanes * kChannels;
  static constexpr int kBlockChannels = kWarpChannels * kWarps;
  static constexpr int kPadded = kStates * kLanes;
  static constexpr int kStateRow = kPadded * kReals<S>;                 // floats of one row of B or C in shared memory
  static constexpr int kVectors = kTile / kVector<T>;                   // vectors of a channel's tile
  static constexpr int kPieces = (kBlockChannels * kVectors + kThreads - 1) / kThreads;  // vectors for each thread
  static constexpr int kTileFloats = kBlockChannels * kRowStride;       // one activation's tile
  static constexpr int kProjectionFloats = kTile * kStateRow;
  static constexpr int kProjectionVectors = kPadded * kTile * kReals<S> / kVector<T>;  // vectors of a tile of B or C
  static constexpr int kSlots = kFast ? kPieces * kThreads : 0;         // vectors fetched ahead of one activation's tile
};

struct Part {
  int batch, index, first, count;
};

template <typename Shape>
__device__ inline Part part_of_block(const Arguments& p, const Plan& plan) {
  Part part;
  part.batch = blockIdx.x / plan.parts;
  part.index = blockIdx.x % plan.parts;
  const int parts_of_segment = (p.segment_channels + Shape::kBlockChannels - 1) / Shape::kBlockChannels;
  const int segment = part.index / parts_of_segment;
  const int offset = part.index % parts_of_segment * Shape::kBlockChannels;
  part.first = segment * p.segment_channels + offset;
  part.count = min(Shape::kBlockChannels, p.segment_channels - offset);
  return part;
}

// Vector `piece` of this thread in a tile: which channel of the block, which row of the tile, how many rows are real.
template <typename Shape>
struct Piece {
  int channel, row, count;
  __device__ Piece(const Part& part, int piece, int tile_row, int length) {
    const int index = threadIdx.x + piece * Shape::kThreads;
    channel = index / Shape::kVectors;
    row = index % Shape::kVectors * kVector<typename Shape::T>;
    count = channel < part.count ? max(0, min(kVector<typename Shape::T>, length - tile_row - row)) : 0;
  }
  __device__ bool inside() const { return channel < Shape::kBlockChannels; }
};

template <typename T>
__device__ inline const T* at(const Activation& x, const Part& part, int channel, int row) {
  return static_cast<const T*>(x.data) + part.batch * x.batch_stride + int64_t(part.first + channel) * x.channel_stride + row;
}
template <typename T>
__device__ inline T* at(const MutableActivation& x, const Part& part, int channel, int row) {
  return static_cast<T*>(x.data) + part.batch * x.batch_stride + int64_t(part.first + channel) * x.channel_stride + row;
}

// A number for each channel whose vectors this thread stages, zero where there is none.
template <typename Shape>
struct ChannelValues {
  float of[Shape::kPieces];
  __device__ ChannelValues(const float* from, const Part& part) {
#pragma unroll
    for (int i = 0; i < Shape::kPieces; ++i) {
      const int channel = (threadIdx.x + i * Shape::kThreads) / Shape::kVectors;
      of[i] = from != nullptr && channel < part.count ? from[part.first + channel] : 0.0f;
    }
  }
};

// Start to fetch this thread's vectors of a tile into its slots.
template <typename Shape>
__device__ inline void fetch_tile(const Arguments& p, const Part& part, const Activation& from, int tile_row,
                                  Pack<typename Shape::T>* slots) {
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    const Piece<Shape> piece(part, i, tile_row, p.length);
    if (!piece.inside()) continue;
    const auto* source = at<typename Shape::T>(from, part, piece.channel, tile_row + piece.row);
    fetch_pack(source, piece.count > 0, slots + threadIdx.x + i * Shape::kThreads);
  }
}
// Vector i of this thread: from its slot where it was fetched ahead, else from device memory.
template <typename Shape, bool kFetched = Shape::kFast>
__device__ inline void read_piece(const Arguments& p, const Part& part, const Activation& from, const Piece<Shape>& piece, int i,
                                  int tile_row, const Pack<typename Shape::T>* slots,
                                  float (&x)[kVector<typename Shape::T>]) {
  using T = typename Shape::T;
  if constexpr (kFetched) unpack(slots[threadIdx.x + i * Shape::kThreads], x);
  else unpack(load_pack<Shape::kFast>(at<T>(from, part, piece.channel, tile_row + piece.row), piece.count, p.aligned), x);
}

// Δ and Δu of a tile; rows past the end get Δ = 0, which leaves the state as it is.
template <typename Shape>
__device__ inline void stage_inputs(const Arguments& p, const Part& part, int tile_row, const ChannelValues<Shape>& bias,
                                    const Pack<typename Shape::T>* u_slots, const Pack<typename Shape::T>* delta_slots,
                                    float* delta_tile, float* drive_tile) {
  using T = typename Shape::T;
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    const Piece<Shape> piece(part, i, tile_row, p.length);
    if (!piece.inside()) continue;
    float u[kVector<T>] = {}, delta[kVector<T>] = {};
    if (piece.count > 0) {
      read_piece<Shape>(p, part, p.u, piece, i, tile_row, u_slots, u);
      read_piece<Shape>(p, part, p.delta, piece, i, tile_row, delta_slots, delta);
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) delta[k] += bias.of[i];
      if (p.delta_softplus) {               // one branch, so that the vector's chains run side by side
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) delta[k] = softplus(delta[k]);
      }
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) {
        if (!Shape::kFast && k >= piece.count) delta[k] = 0.0f;
        u[k] *= delta[k];
      }
    }
    store_shared<kVector<T> >(delta_tile + piece.channel * kRowStride + piece.row, delta);
    store_shared<kVector<T> >(drive_tile + piece.channel * kRowStride + piece.row, u);
  }
}
// What decay_of adds in a tile's rows. Without seq_idx it is all zeros, staged once; with it each of the first kTile
// threads loads its row's two indices ahead, and compares them where the tile is staged.
struct OffsetsAhead {
  int32_t index = 0, before = 0;
  __device__ void load(const Arguments& p, const Part& part, int tile_row) {
    const int row = tile_row + int(threadIdx.x);
    if (!p.seq_idx || threadIdx.x >= kTile || row >= p.length) return;
    const int32_t* place = p.seq_idx + int64_t(part.batch) * p.length + row;
    index = place[0];
    before = place[row > 0 ? -1 : 0];       // row 0 continues the entering state
  }
  __device__ void store(const Arguments& p, int tile_row, float* offsets) const {
    if (threadIdx.x >= kTile) return;
    const bool start = tile_row + int(threadIdx.x) < p.length && index != before;
    offsets[threadIdx.x] = start ? -INFINITY : 0.0f;
  }
};

// Vectors of a tile of variable B or C, threads side by side along the states.
template <typename Shape>
struct ProjectionPiece {
  using T = typename Shape::T;
  static constexpr int reals = kReals<typename Shape::S>;
  int n, first, count;  // state, first number of its row in the tile, how many are real
  __device__ ProjectionPiece(const Arguments& p, int index, int tile_row) {
    n = index % Shape::kPadded;
    first = index / Shape::kPadded * kVector<T>;
    count = n < p.state ? min(kVector<T>, (p.length - tile_row) * reals - first) : 0;
  }
  __device__ Pack<T> load(const Arguments& p, const T* group, int64_t state_stride, int tile_row) const {
    return load_pack<Shape::kFast>(group + n * state_stride + int64_t(tile_row) * reals + first, count, p.aligned);
  }
  // Into [row][state].
  __device__ void store(const Pack<T>& pack, float* tile) const {
    float values[kVector<T>];
    unpack(pack, values);
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      tile[(first + k) / reals * Shape::kStateRow + n * reals + (first + k) % reals] = values[k];
    }
  }
};
// The part's group of variable B or C; found once, for it takes divisions.
template <typename T>
__device__ inline const T* group_of(const Arguments& p, const Part& part, const Projection& from) {
  if (from.groups == 0) return nullptr;
  const int group = part.first / (p.channels / from.groups);
  return static_cast<const T*>(from.data) + part.batch * from.batch_stride + group * from.group_stride;
}
// A tile of it as [row][state], zero where there is none.
template <typename Shape>
__device__ inline void stage_projection(const Arguments& p, const typename Shape::T* group, int64_t state_stride, int tile_row,
                                        float* tile) {
  for (int index = threadIdx.x; index < Shape::kProjectionVectors; index += Shape::kThreads) {
    const ProjectionPiece<Shape> piece(p, index, tile_row);
    piece.store(piece.load(p, group, state_stride, tile_row), tile);
  }
}
// The same in two parts, with this thread's vectors in registers between them.
template <typename Shape>
struct ProjectionAhead {
  static constexpr int kCount = Shape::kFast ? Shape::kProjectionVectors / Shape::kThreads : 1;
  static_assert(!Shape::kFast || Shape::kProjectionVectors % Shape::kThreads == 0);
  Pack<typename Shape::T> packs[kCount];
  __device__ void load(const Arguments& p, const typename Shape::T* group, int64_t state_stride, int tile_row) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      packs[i] = ProjectionPiece<Shape>(p, threadIdx.x + i * Shape::kThreads, tile_row).load(p, group, state_stride, tile_row);
    }
  }
  __device__ void store(const Arguments& p, int tile_row, float* tile) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ProjectionPiece<Shape>(p, threadIdx.x + i * Shape::kThreads, tile_row).store(packs[i], tile);
    }
  }
};

// Which channel of the block, and which states, a lane scans.
template <typename Shape>
struct LaneView {
  using S = typename Shape::S;
  int first_state;
  int channel[Shape::kChannels];  // in the block
  __device__ LaneView() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    first_state = lane % Shape::kLanes * Shape::kStates;
#pragma unroll
    for (int c = 0; c < Shape::kChannels; ++c) {
      channel[c] = warp * Shape::kWarpChannels + c * (32 / Shape::kLanes) + lane / Shape::kLanes;
    }
  }
  // (..., D, N) states of one item; `index` counts items of D x N.
  __device__ void load(const void* from, int64_t index, const Arguments& p, const Part& part,
                       S (&x)[Shape::kChannels][Shape::kStates]) const {
    if constexpr (Shape::kFast) {
      if (from != nullptr && in_vectors(from, p)) {
#pragma unroll
        for (int c = 0; c < Shape::kChannels; ++c) {
          const bool real = channel[c] < part.count && first_state < p.state;
          const auto* place = reinterpret_cast<const float4*>(static_cast<const float*>(from) + offset(index, p, part, c, 0));
          const float4 four = real ? *place : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          x[c][0] = four.x, x[c][1] = four.y, x[c][2] = four.z, x[c][3] = four.w;
        }
        return;
      }
    }
#pragma unroll
    for (int c = 0; c < Shape::kChannels; ++c) {
#pragma unroll
      for (int j = 0; j < Shape::kStates; ++j) {
        const bool real = from != nullptr && channel[c] < part.count && first_state + j < p.state;
        x[c][j] = real ? static_cast<const S*>(from)[offset(index, p, part, c, j)] : S{};
      }
    }
  }
  __device__ void store(void* to, int64_t index, const Arguments& p, const Part& part,
                        const S (&x)[Shape::kChannels][Shape::kStates]) const {
    if (to == nullptr) return;
    if constexpr (Shape::kFast) {
      if (in_vectors(to, p)) {
#pragma unroll
        for (int c = 0; c < Shape::kChannels; ++c) {
          if (channel[c] >= part.count || first_state >= p.state) continue;
          *reinterpret_cast<float4*>(static_cast<float*>(to) + offset(index, p, part, c, 0)) =
              make_float4(x[c][0], x[c][1], x[c][2], x[c][3]);
        }
        return;
      }
    }
#pragma unroll
    for (int c = 0; c < Shape::kChannels; ++c) {
#pragma unroll
      for (int j = 0; j < Shape::kStates; ++j) {
        if (channel[c] < part.count && first_state + j < p.state) static_cast<S*>(to)[offset(index, p, part, c, j)] = x[c][j];
      }
    }
  }
  // Whether a lane's four states are one aligned vector.
  __device__ static bool in_vectors(const void* states, const Arguments& p) {
    static_assert(!Shape::kFast || (Shape::kStates == 4 && kReals<S> == 1));
    return p.state % 4 == 0 && reinterpret_cast<uintptr_t>(states) % 16 == 0;
  }
  __device__ int64_t offset(int64_t index, const Arguments& p, const Part& part, int c, int j) const {
    return (index * p.channels + part.first + channel[c]) * p.state + first_state + j;
  }
};

template <typename Shape, typename Launch>
cudaError_t launch(Launch kernel, const Arguments& p, const Plan& plan, size_t shared_bytes, cudaStream_t stream) {
  if (int64_t(p.batch) * plan.parts == 0) return cudaSuccess;
  if (shared_bytes > 48 * 1024) {
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim.x = unsigned(p.batch) * plan.parts;
  config.blockDim.x = Shape::kThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, p, plan);
}

// Calls run(Shape) with the instantiation that the plan names; the order is that of kShapes in scan_plan.cpp.
template <typename T, typename Run>
cudaError_t dispatch(const Plan& plan, Run run) {
  switch (plan.index) {
    case 0: return run(Shape<T, float, 4, 4, 2, 2, true>{});
    case 1: return run(Shape<T, float, 4, 4, 1, 2, true>{});
    case 2: return run(Shape<T, float, 4, 4, 1, 2, false>{});
    case 3: return run(Shape<T, float, 4, 1, 1, 2, false>{});
    case 4: return run(Shape<T, float, 4, 16, 1, 4, false>{});
    case 5: return run(Shape<T, float, 4, 32, 1, 2, false>{});
    case 6: return run(Shape<T, float, 8, 32, 1, 1, false>{});
    case 7: return run(Shape<T, Complex, 2, 8, 1, 2, false>{});
    case 8: return run(Shape<T, Complex, 2, 32, 1, 2, false>{});
    case 9: return run(Shape<T, Complex, 4, 32, 1, 1, false>{});
    case 10: return run(Shape<T, Complex, 8, 32, 1, 1, false>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace mamba_ssm::cuda
