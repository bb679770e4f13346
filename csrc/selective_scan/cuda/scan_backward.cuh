// Backward. With dh_t the gradient that reaches h_t, ḡ the conjugate, κ = 2 for complex A and 1 otherwise:
//   dh_t = κ dy_t C̄_t + g_{t+1},   g_t = dh_t ā_t,   dB_t = Δ_t u_t dh_t,   dC_t = κ dy_t h̄_t,   w_t = g_t h̄_{t-1},
//   dA = Σ_t Δ_t w_t,   d(Δ_t u_t) = Re Σ_n dh_t B̄_t,   dΔ_t = u_t d(Δ_t u_t) + Re Σ_n w_t Ā.
//
// A block walks over its rows from the last tile to the first. In a tile it runs the recurrence once from the state that
// forward kept, leaving a state in shared memory every four rows, and then takes those four rows at a time backwards
// with decays and states in registers. Sums over channels (dB, dC) go lane, warp, block, and then over blocks in a
// second kernel, always in one order: there are no atomics, and results are the same bits on every run.
#pragma once

#include "scan_common.cuh"

namespace mamba_ssm::cuda {

template <typename Shape>
constexpr int kCheckpointFloats = kSteps * Shape::kChannels * Shape::kStates * kReals<typename Shape::S> * Shape::kThreads;
// A warp's sums of dB and dC for kStep rows take the place of the checkpoints of those rows, where they fit: what that
// saves lets a multiprocessor hold eight blocks instead of six.
template <typename Shape>
constexpr bool kSumsReplaceCheckpoints = Shape::kFast;
// With one warp nothing is left to add up in shared memory.
template <typename Shape>
constexpr int kProjectionSumFloats =
    Shape::kWarps == 1 || kSumsReplaceCheckpoints<Shape> ? 0 : Shape::kWarps * 2 * Shape::kProjectionFloats;
// z of four-byte numbers is not fetched ahead: with its slots a block would be too large for eight on a multiprocessor.
template <typename Shape>
constexpr bool kFetchGate = Shape::kFast && sizeof(typename Shape::T) < 4;
template <typename Shape>
constexpr size_t backward_shared_bytes() {
  return sizeof(float) * (4 * Shape::kTileFloats + 2 * Shape::kProjectionFloats + kTile + kCheckpointFloats<Shape> +
                          kProjectionSumFloats<Shape>) +
         16 * (kFetchGate<Shape> ? 4 : 3) * Shape::kSlots;
}

struct BackwardTiles {
  float *delta, *drive, *dy, *through_decay;  // drive: Δu, then d(Δu); dy, then y
  float *B, *C, *offsets, *checkpoints, *projection_sums, *slots;

  template <typename Shape>
  __device__ static BackwardTiles in(float* shared) {
    BackwardTiles tiles;
    tiles.delta = shared;
    tiles.drive = tiles.delta + Shape::kTileFloats;
    tiles.dy = tiles.drive + Shape::kTileFloats;
    tiles.through_decay = tiles.dy + Shape::kTileFloats;
    tiles.B = tiles.through_decay + Shape::kTileFloats;
    tiles.C = tiles.B + Shape::kProjectionFloats;
    tiles.offsets = tiles.C + Shape::kProjectionFloats;
    tiles.checkpoints = tiles.offsets + kTile;
    tiles.projection_sums = tiles.checkpoints + kCheckpointFloats<Shape>;
    tiles.slots = tiles.projection_sums + kProjectionSumFloats<Shape>;
    return tiles;
  }
  // A warp's sums for one row of the tile: dB, then dC.
  template <typename Shape>
  __device__ float* sums_of(int warp, int row) const {
    constexpr int floats = 2 * Shape::kStateRow;
    if constexpr (kSumsReplaceCheckpoints<Shape>) {
      constexpr int warp_floats = 32 * Shape::kStates, step_floats = Shape::kChannels * Shape::kWarps * warp_floats;
      static_assert(kStep * floats <= warp_floats && kReals<typename Shape::S> == 1 && Shape::kStates == 4);
      return checkpoints + row / kStep * step_floats + warp * warp_floats + row % kStep * floats;
    } else {
      return projection_sums + (warp * kTile + row) * floats;
    }
  }
};

// dy = dout silu(z), or dout.
template <typename Shape>
__device__ inline void stage_output_gradient(const Arguments& p, const Part& part, int tile_row,
                                             const Pack<typename Shape::T>* dout_slots,
                                             const Pack<typename Shape::T>* z_slots, float* dy_tile) {
  using T = typename Shape::T;
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    const Piece<Shape> piece(part, i, tile_row, p.length);
    if (!piece.inside()) continue;
    float dy[kVector<T>] = {};
    if (piece.count > 0) {
      read_piece<Shape>(p, part, p.dout, piece, i, tile_row, dout_slots, dy);
      if (p.z.data) {
        float z[kVector<T>];
        read_piece<Shape, kFetchGate<Shape> >(p, part, p.z, piece, i, tile_row, z_slots, z);
#pragma unroll
        for (int k = 0; k < kVector<T>; ++k) dy[k] *= z[k] * sigmoid(z[k]);
      }
    }
    store_shared<kVector<T> >(dy_tile + piece.channel * kRowStride + piece.row, dy);
  }
}

// This thread's vectors of a tile for write_gradients, read before the barrier that ends the scan: the scan's registers
// are free, and all loads are under way at once.
template <typename Shape>
struct GradientInputs {
  using T = typename Shape::T;
  Pack<T> u[Shape::kPieces], dout[Shape::kPieces], z[Shape::kPieces];
  __device__ GradientInputs(const Arguments& p, const Part& part, int tile_row) {
#pragma unroll
    for (int i = 0; i < Shape::kPieces; ++i) {
      const Piece<Shape> piece(part, i, tile_row, p.length);
      const int row = tile_row + piece.row, count = piece.inside() ? piece.count : 0;
      u[i] = load_pack<Shape::kFast>(at<T>(p.u, part, piece.channel, row), count, p.aligned);
      dout[i] = load_pack<Shape::kFast>(at<T>(p.dout, part, piece.channel, row), count, p.aligned);
      if (p.z.data) z[i] = load_pack<Shape::kFast>(at<T>(p.z, part, piece.channel, row), count, p.aligned);
    }
  }
};

// The slope of softplus from its value: 1 - exp(-softplus), by its Taylor series where that difference would lose digits.
// Its identity part has slope 1, and so has this there.
__device__ inline float softplus_slope(float value) {
  float series = fmaf(value, -1.0f / 720.0f, 1.0f / 120.0f);
  series = fmaf(value, series, -1.0f / 24.0f);
  series = fmaf(value, series, 1.0f / 6.0f);
  series = fmaf(value, series, -0.5f);
  series = fmaf(value * value, series, value);
  return value < 0.25f ? series : 1.0f - exp2_approx(-value * kLog2e);
}

// du, ddelta and dz of a tile, and this thread's share of dD and ddelta_bias.
template <typename Shape>
__device__ inline void write_gradients(const Arguments& p, const Part& part, int tile_row, const BackwardTiles& tiles,
                                       const GradientInputs<Shape>& inputs, const ChannelValues<Shape>& skips,
                                       float (&dD)[Shape::kPieces],
                                       float (&dbias)[Shape::kPieces]) {
  using T = typename Shape::T;
  constexpr int K = kVector<T>;
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    const Piece<Shape> piece(part, i, tile_row, p.length);
    if (!piece.inside() || piece.count == 0) continue;
    const int row = tile_row + piece.row, place = piece.channel * kRowStride + piece.row;
    const float skip = skips.of[i];
    float u[K], dy[K], x[K], delta[K], ddrive[K];
    unpack(inputs.u[i], u);
    unpack(inputs.dout[i], dy);
    if (p.z.data) {
      float z[K], y[K];
      unpack(inputs.z[i], z);
      load_shared<K>(tiles.dy + place, y);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const float gate = sigmoid(z[k]);
        x[k] = dy[k] * fmaf(skip, u[k], y[k]) * gate * fmaf(z[k], 1.0f - gate, 1.0f);
        dy[k] *= z[k] * gate;
      }
      store_vector<Shape::kFast>(at<T>(p.dz, part, piece.channel, row), piece.count, p.aligned, x);
    }
    load_shared<K>(tiles.delta + place, delta);
    load_shared<K>(tiles.drive + place, ddrive);
    load_shared<K>(tiles.through_decay + place, x);
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = fmaf(u[k], ddrive[k], x[k]);
    if (p.delta_softplus) {
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] *= softplus_slope(delta[k]);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (Shape::kFast || k < piece.count) {
        dD[i] = fmaf(dy[k], u[k], dD[i]);
        dbias[i] += x[k];
      }
      u[k] = fmaf(skip, dy[k], delta[k] * ddrive[k]);
    }
    store_vector<Shape::kFast>(at<T>(p.ddelta, part, piece.channel, row), piece.count, p.aligned, x);
    store_vector<Shape::kFast>(at<T>(p.du, part, piece.channel, row), piece.count, p.aligned, u);
  }
}

// The threads that share a channel's tile are neighbours in a warp.
template <typename Shape>
__device__ inline void write_channel_sums(const Arguments& p, const Part& part, float (&sums)[Shape::kPieces], float* to) {
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
#pragma unroll
    for (int mask = 1; mask < Shape::kVectors; mask *= 2) sums[i] += __shfl_xor_sync(kFull, sums[i], mask);
    const int index = threadIdx.x + i * Shape::kThreads, channel = index / Shape::kVectors;
    if (to && index % Shape::kVectors == 0 && channel < part.count) {
      to[int64_t(part.batch) * p.channels + part.first + channel] = sums[i];
    }
  }
}

// What a lane keeps of B or C: the row's, or its channel's where constant.
template <typename S, int kStates>
__device__ inline S pick(bool variable, const S (&row)[kStates], const S (&constant)[kStates], int j) {
  return variable ? row[j] : constant[j];
}

// Four rows' dB and dC of one warp, summed over its channels, into [row][B or C][state].
template <typename Shape, typename S>
__device__ inline void write_projection_sums(const S (&dB)[Shape::kStates], const S (&dC)[Shape::kStates], float* to) {
  constexpr int reals = kReals<S>, half = Shape::kStates * reals, lowest = Shape::kLanes;
  float values[2 * half];
#pragma unroll
  for (int j = 0; j < Shape::kStates; ++j) {
    if constexpr (reals == 1) {
      values[j] = dB[j], values[half + j] = dC[j];
    } else {
      values[2 * j] = dB[j].re, values[2 * j + 1] = dB[j].im;
      values[half + 2 * j] = dC[j].re, values[half + 2 * j + 1] = dC[j].im;
    }
  }
  int first = 0;
  bool writes = true;
  sum_scatter<2 * half, 16, lowest>(values, first, writes);
  constexpr int sharers = 32 / Shape::kLanes, left = 2 * half / sharers > 0 ? 2 * half / sharers : 1;
  if (!writes) return;
  const int own = (threadIdx.x % Shape::kLanes) * half;
#pragma unroll
  for (int i = 0; i < left; ++i) {
    const int index = first + i;
    to[index / half * Shape::kStateRow + own + index % half] = values[i];
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks) scan_backward_kernel(const __grid_constant__ Arguments p,
                                                                                           const __grid_constant__ Plan plan) {
  using S = typename Shape::S;
  using T = typename Shape::T;
  constexpr int kStates = Shape::kStates, kChannels = Shape::kChannels;
  constexpr int kHeld = kStates * kReals<S>;                   // floats of a lane's states of one channel
  constexpr int kSumRow = 2 * Shape::kStateRow;                // floats of a row of dB and dC
  extern __shared__ float4 shared_memory[];
  const BackwardTiles tiles = BackwardTiles::in<Shape>(reinterpret_cast<float*>(shared_memory));
  auto* u_slots = reinterpret_cast<Pack<T>*>(tiles.slots);
  auto *delta_slots = u_slots + Shape::kSlots, *dout_slots = delta_slots + Shape::kSlots, *z_slots = dout_slots + Shape::kSlots;

  const Part part = part_of_block<Shape>(p, plan);
  const LaneView<Shape> view;
  const bool variable_B = Shape::kFast || p.variable_B(), variable_C = Shape::kFast || p.variable_C();
  S A[kChannels][kStates], dA[kChannels][kStates] = {}, dh[kChannels][kStates];
  S constant_B[kChannels][kStates], constant_C[kChannels][kStates];
  S constant_dB[kChannels][kStates] = {}, constant_dC[kChannels][kStates] = {};
  if (!variable_B) view.load(p.B.data, 0, p, part, constant_B);
  if (!variable_C) view.load(p.C.data, 0, p, part, constant_C);
  view.load(p.dlast_state, part.batch, p, part, dh);
  float dD[Shape::kPieces] = {}, dbias[Shape::kPieces] = {};

  const ChannelValues<Shape> bias(p.delta_bias, part), skip(p.D, part);
  const T *B_group = group_of<T>(p, part, p.B), *C_group = group_of<T>(p, part, p.C);
  ProjectionAhead<Shape> B_ahead, C_ahead;
  OffsetsAhead offsets_ahead;
  S next_h[kChannels][kStates];
  const auto fetch_inputs = [&](int chunk) {
    const int tile_row = chunk * kTile;
    fetch_tile<Shape>(p, part, p.u, tile_row, u_slots);
    fetch_tile<Shape>(p, part, p.delta, tile_row, delta_slots);
    fetch_tile<Shape>(p, part, p.dout, tile_row, dout_slots);
    if (kFetchGate<Shape> && p.z.data) fetch_tile<Shape>(p, part, p.z, tile_row, z_slots);
    B_ahead.load(p, B_group, p.B.state_stride, tile_row);
    C_ahead.load(p, C_group, p.C.state_stride, tile_row);
    offsets_ahead.load(p, part, tile_row);
    view.load(p.states, int64_t(part.batch) * p.chunks() + chunk, p, part, next_h);
  };
  if constexpr (Shape::kFast) {
    if (p.length > 0) fetch_inputs(p.chunks() - 1);  // first, for the loads below wait for what they load
  }
  view.load(p.A, 0, p, part, A);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) A[c][j] = kLog2e * A[c][j];
  }
  if (!p.seq_idx) offsets_ahead.store(p, 0, tiles.offsets);

  for (int chunk = p.chunks() - 1; chunk >= 0; --chunk) {
    const int tile_row = chunk * kTile;
    S h[kChannels][kStates];
    if constexpr (Shape::kFast) wait_for_fetches();
    else view.load(p.states, int64_t(part.batch) * p.chunks() + chunk, p, part, h);
    stage_inputs<Shape>(p, part, tile_row, bias, u_slots, delta_slots, tiles.delta, tiles.drive);
    stage_output_gradient<Shape>(p, part, tile_row, dout_slots, z_slots, tiles.dy);
    if (!Shape::kFast) offsets_ahead.load(p, part, tile_row);
    if (p.seq_idx) offsets_ahead.store(p, tile_row, tiles.offsets);
    if constexpr (Shape::kFast) {
      B_ahead.store(p, tile_row, tiles.B);
      C_ahead.store(p, tile_row, tiles.C);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int j = 0; j < kStates; ++j) h[c][j] = next_h[c][j];
      }
    } else {
      if (variable_B) stage_projection<Shape>(p, B_group, p.B.state_stride, tile_row, tiles.B);
      if (variable_C) stage_projection<Shape>(p, C_group, p.C.state_stride, tile_row, tiles.C);
    }
    __syncthreads();
    if constexpr (Shape::kFast) {
      if (chunk > 0) fetch_inputs(chunk - 1);
    }

    // A state in shared memory every kStep rows: [step][channel][states of four floats][thread], only read by its thread.
    const auto checkpoint = [&](int step, int c, int four) {
      return tiles.checkpoints + (((step * kChannels + c) * (kHeld / 4) + four) * Shape::kThreads + int(threadIdx.x)) * 4;
    };
    const auto keep = [&](int step) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int four = 0; four < kHeld / 4; ++four) {
          constexpr int held = 4 / kReals<S>;
          S some[held];
#pragma unroll
          for (int j = 0; j < held; ++j) some[j] = h[c][four * held + j];
          store_states<held>(checkpoint(step, c, four), some);
        }
      }
    };
    for (int step = 0; step < kSteps - 1; ++step) {
      const int t = step * kStep;
      float offset[kStep];
      load_shared<kStep>(tiles.offsets + t, offset);
      float delta[kChannels][kStep], drive[kChannels][kStep];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        load_shared<kStep>(tiles.delta + view.channel[c] * kRowStride + t, delta[c]);
        load_shared<kStep>(tiles.drive + view.channel[c] * kRowStride + t, drive[c]);
      }
      keep(step);                                               // after the loads: stores bar them
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        S B[kStates];
        if (variable_B) load_states<kStates>(tiles.B + (t + k) * Shape::kStateRow + view.first_state * kReals<S>, B);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int j = 0; j < kStates; ++j) {
            h[c][j] = decay_of(delta[c][k], A[c][j], offset[k]) * h[c][j] +
                      drive[c][k] * pick(variable_B, B, constant_B[c], j);
          }
        }
      }
    }
    keep(kSteps - 1);

#pragma unroll 1
    for (int step = kSteps - 1; step >= 0; --step) {
      const int t = step * kStep;
      float delta[kChannels][kStep], drive[kChannels][kStep], dy[kChannels][kStep], offset[kStep];
      load_shared<kStep>(tiles.offsets + t, offset);
      S before[kStep][kChannels][kStates], decay[kStep][kChannels][kStates];
      float y[kChannels][kStep] = {}, ddrive[kChannels][kStep] = {}, through_decay[kChannels][kStep] = {};
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        load_shared<kStep>(tiles.delta + view.channel[c] * kRowStride + t, delta[c]);
        load_shared<kStep>(tiles.drive + view.channel[c] * kRowStride + t, drive[c]);
        load_shared<kStep>(tiles.dy + view.channel[c] * kRowStride + t, dy[c]);
#pragma unroll
        for (int four = 0; four < kHeld / 4; ++four) {
          constexpr int held = 4 / kReals<S>;
          S some[held];
          load_states<held>(checkpoint(step, c, four), some);
#pragma unroll
          for (int j = 0; j < held; ++j) h[c][four * held + j] = some[j];
        }
      }
      if constexpr (kSumsReplaceCheckpoints<Shape>) __syncwarp();
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        S B[kStates];
        if (variable_B) load_states<kStates>(tiles.B + (t + k) * Shape::kStateRow + view.first_state * kReals<S>, B);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int j = 0; j < kStates; ++j) {
            before[k][c][j] = h[c][j];
            decay[k][c][j] = decay_of(delta[c][k], A[c][j], offset[k]);
            h[c][j] = decay[k][c][j] * h[c][j] + drive[c][k] * pick(variable_B, B, constant_B[c], j);
          }
        }
      }
#pragma unroll
      for (int k = kStep - 1; k >= 0; --k) {
        S B[kStates], C[kStates], dB[kStates] = {}, dC[kStates] = {};
        if (variable_B) load_states<kStates>(tiles.B + (t + k) * Shape::kStateRow + view.first_state * kReals<S>, B);
        if (variable_C) load_states<kStates>(tiles.C + (t + k) * Shape::kStateRow + view.first_state * kReals<S>, C);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const float dy_k = kKappa<S> * dy[c][k];
#pragma unroll
          for (int j = 0; j < kStates; ++j) {
            const S after = k == kStep - 1 ? h[c][j] : before[k == kStep - 1 ? k : k + 1][c][j];
            const S C_j = pick(variable_C, C, constant_C[c], j), B_j = pick(variable_B, B, constant_B[c], j);
            y[c][k] += real_of_product(after, C_j);
            const S d = dy_k * conj(C_j) + dh[c][j], dC_j = dy_k * conj(after), dB_j = drive[c][k] * d;
            if (variable_C) dC[j] = dC[j] + dC_j;
            else constant_dC[c][j] = constant_dC[c][j] + dC_j;
            if (variable_B) dB[j] = dB[j] + dB_j;
            else constant_dB[c][j] = constant_dB[c][j] + dB_j;
            ddrive[c][k] += real_of_product(d, conj(B_j));
            const S g = d * conj(decay[k][c][j]), w = g * conj(before[k][c][j]);
            dA[c][j] = delta[c][k] * w + dA[c][j];
            through_decay[c][k] += real_of_product(w, conj(A[c][j]));
            dh[c][j] = g;
          }
        }
        if (variable_B || variable_C) {
          if constexpr (Shape::kWarps == 1) {
            const int64_t row = (int64_t(part.batch) * plan.parts + part.index) * p.length + tile_row + t + k;
            if (tile_row + t + k < p.length) write_projection_sums<Shape>(dB, dC, p.partial_BC + row * kSumRow);
          } else {
            write_projection_sums<Shape>(dB, dC, tiles.template sums_of<Shape>(threadIdx.x / 32, t + k));
          }
        }
      }
      __syncwarp();  // all lanes of a channel have read drive and dy before sums replace them
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          y[c][k] *= kKappa<S>;
          through_decay[c][k] *= kLn2;
        }
        const int place = view.channel[c] * kRowStride + t;
        sum_rows<Shape::kLanes>(y[c], tiles.dy + place);
        sum_rows<Shape::kLanes>(ddrive[c], tiles.drive + place);
        sum_rows<Shape::kLanes>(through_decay[c], tiles.through_decay + place);
      }
    }
    const GradientInputs<Shape> inputs(p, part, tile_row);
    __syncthreads();
    write_gradients<Shape>(p, part, tile_row, tiles, inputs, skip, dD, dbias);
    if constexpr (Shape::kWarps > 1) {
      if (variable_B || variable_C) {
        const int64_t first = (int64_t(part.batch) * plan.parts + part.index) * p.length + tile_row;
        const int rows = min(kTile, p.length - tile_row);
#pragma unroll 4
        for (int i = 4 * threadIdx.x; i < rows * kSumRow; i += 4 * Shape::kThreads) {
          float sum[4] = {};
#pragma unroll
          for (int warp = 0; warp < Shape::kWarps; ++warp) {
            float of_warp[4];
            load_shared<4>(tiles.template sums_of<Shape>(warp, i / kSumRow) + i % kSumRow, of_warp);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[k] += of_warp[k];
          }
          *reinterpret_cast<float4*>(p.partial_BC + first * kSumRow + i) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
      }
    }
    // The next tile needs no barrier here: a thread stages into the places that it just read, and sums over warps are
    // read before the barrier that opens the next scan.
  }
  view.store(p.partial_A, part.batch, p, part, dA);
  if (!variable_B) view.store(p.partial_B, part.batch, p, part, constant_dB);
  if (!variable_C) view.store(p.partial_C, part.batch, p, part, constant_dC);
  view.store(p.dinitial, part.batch, p, part, dh);
  write_channel_sums<Shape>(p, part, dD, p.partial_D);
  write_channel_sums<Shape>(p, part, dbias, p.partial_bias);
}

// ---- sums over blocks: dB and dC over the parts of a group, dA and its like over the batch ----

constexpr int kFinishThreads = 256;
constexpr int kFinishRows = 8;       // rows of dB or dC for one block: few, so that many loads are under way
constexpr int kFinishColumns = 32;   // floats of a row for one block

// Sums over the batch: `count` columns of (B, count).
struct ColumnSum {
  const float* from = nullptr;
  float* to = nullptr;
  int64_t count = 0;
};
struct FinishPlan {
  ColumnSum sums[5];
  int64_t column_blocks;             // blocks that do these
  int row_tiles, column_tiles;       // of the rest, for one group of one batch item
};

// dB (which = 0) or dC (1) of one group: (rows, states) summed over parts, written as (states, rows).
template <typename T, int kReals_>
__device__ inline void finish_projection(const Arguments& p, const Plan& plan, const FinishPlan& finish, int64_t block, int which) {
  __shared__ float tile[kFinishColumns][kFinishRows + 1];
  const int groups = which == 0 ? p.B.groups : p.C.groups, state_row = plan.padded_state * kReals_;
  const int column_tile = block % finish.column_tiles;
  block /= finish.column_tiles;
  const int row_tile = block % finish.row_tiles;
  block /= finish.row_tiles;
  const int group = block % groups, batch = block / groups, parts = plan.parts / groups;
  const int column = threadIdx.x % kFinishColumns, i = column_tile * kFinishColumns + column;
  for (int r = threadIdx.x / kFinishColumns; r < kFinishRows; r += kFinishThreads / kFinishColumns) {
    const int row = row_tile * kFinishRows + r;
    float sum = 0.0f;
    if (row < p.length && i < p.state * kReals_) {
      const float* from = p.partial_BC + ((int64_t(batch) * plan.parts + group * parts) * p.length + row) * 2 * state_row +
                          which * state_row + i;
      const int64_t stride = int64_t(p.length) * 2 * state_row;
#pragma unroll 16
      for (int part = 0; part < parts; ++part) sum += from[part * stride];
    }
    tile[column][r] = sum;
  }
  __syncthreads();
  T* to = static_cast<T*>(which == 0 ? p.dB : p.dC) + (int64_t(batch) * groups + group) * p.state * p.length * kReals_;
  constexpr int columns = kFinishColumns / kReals_, values = kFinishRows * kReals_;
  for (int index = threadIdx.x; index < columns * values; index += kFinishThreads) {
    const int n = column_tile * columns + index / values, r = index % values / kReals_, part = index % kReals_;
    const int row = row_tile * kFinishRows + r;
    if (n < p.state && row < p.length) {
      narrow(tile[index / values * kReals_ + part][r], to[(int64_t(n) * p.length + row) * kReals_ + part]);
    }
  }
}

template <typename T, int kReals_>
__global__ void __launch_bounds__(kFinishThreads) finish_backward_kernel(const __grid_constant__ Arguments p,
                                                                         const __grid_constant__ Plan plan,
                                                                         const __grid_constant__ FinishPlan finish) {
  if (blockIdx.x < finish.column_blocks) {
    int64_t column = int64_t(blockIdx.x) * kFinishThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const ColumnSum& sums = finish.sums[i];
      if (column >= 0 && column < sums.count) {
        float sum = 0.0f;
#pragma unroll 16
        for (int b = 0; b < p.batch; ++b) sum += sums.from[b * sums.count + column];
        sums.to[column] = sum;
      }
      column -= sums.count;
    }
    return;
  }
  const int64_t block = blockIdx.x - finish.column_blocks;
  const int64_t blocks_B = int64_t(p.batch) * p.B.groups * finish.row_tiles * finish.column_tiles;
  if (block < blocks_B) finish_projection<T, kReals_>(p, plan, finish, block, 0);
  else finish_projection<T, kReals_>(p, plan, finish, block - blocks_B, 1);
}

template <typename T, int kReals_>
cudaError_t finish_backward(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  FinishPlan finish{};
  const int64_t states = int64_t(p.channels) * p.state * kReals_;
  const auto sum = [&](int i, const void* from, void* to, int64_t count) {
    finish.sums[i] = {static_cast<const float*>(from), static_cast<float*>(to), count};
  };
  sum(0, p.partial_A, p.dA, states);
  sum(1, p.partial_B, p.dB, p.variable_B() ? 0 : states);
  sum(2, p.partial_C, p.dC, p.variable_C() ? 0 : states);
  sum(3, p.partial_D, p.dD, p.dD ? p.channels : 0);
  sum(4, p.partial_bias, p.ddelta_bias, p.ddelta_bias ? p.channels : 0);
  int64_t columns = 0;
  for (const ColumnSum& sums : finish.sums) columns += sums.count;
  finish.column_blocks = (columns + kFinishThreads - 1) / kFinishThreads;
  finish.row_tiles = (p.length + kFinishRows - 1) / kFinishRows;
  finish.column_tiles = (p.state * kReals_ + kFinishColumns - 1) / kFinishColumns;
  const int64_t tiles = int64_t(p.batch) * (p.B.groups + p.C.groups) * finish.row_tiles * finish.column_tiles;
  if (finish.column_blocks + tiles == 0) return cudaSuccess;
  finish_backward_kernel<T, kReals_><<<unsigned(finish.column_blocks + tiles), kFinishThreads, 0, stream>>>(p, plan, finish);
  return cudaGetLastError();
}

template <typename T>
cudaError_t backward_of(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  const auto error = dispatch<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    return launch<Shape>(scan_backward_kernel<Shape>, p, plan, backward_shared_bytes<Shape>(), stream);
  });
  if (error != cudaSuccess) return error;
  return p.complex_state ? finish_backward<T, 2>(p, plan, stream) : finish_backward<T, 1>(p, plan, stream);
}

}  // namespace mamba_ssm::cuda
