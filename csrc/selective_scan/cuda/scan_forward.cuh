// Forward:  h_t = a_t h_{t-1} + Δ_t u_t B_t,  a_t = exp(Δ_t A),  y_t = κ Re Σ_n C_t h_t + D u_t,  out = y silu(z),
// κ = 2 for complex A.
//
// Work: one exp, one multiply and three fused multiply-adds for each of B·D·L·N states. Four rows of a warp at N = 16 take
// the special-function unit (16 a clock and multiprocessor) 128 cycles and the scheduler 114 on sm_90, about 165 with the
// tile's staging: both are full, so that exponentials by polynomial, which move work from one to the other, gain nothing.
// B and C are read from shared memory once for kChannels channels.
#pragma once

#include "scan_walk.cuh"

namespace mamba_ssm::cuda {

template <typename Shape>
constexpr size_t forward_shared_bytes() {
  return sizeof(float) * (2 * Shape::kTileFloats + 2 * Shape::kProjectionFloats + kTile) + 16 * 3 * Shape::kSlots;
}

// out from y, which the scan left in y_tile.
template <typename Shape>
__device__ inline void write_outputs(const Arguments& p, const Part& part, int tile_row, const float* y_tile,
                                     const ChannelValues<Shape>& skip,
                                     const Pack<typename Shape::T> (&u)[Shape::kPieces],
                                     const Pack<typename Shape::T>* z_slots) {
  using T = typename Shape::T;
#pragma unroll
  for (int i = 0; i < Shape::kPieces; ++i) {
    const Piece<Shape> piece(part, i, tile_row, p.length);
    if (!piece.inside() || piece.count == 0) continue;
    float y[kVector<T>], x[kVector<T>];
    load_shared<kVector<T> >(y_tile + piece.channel * kRowStride + piece.row, y);
    const int row = tile_row + piece.row;
    if (p.D) {
      if constexpr (Shape::kFast) unpack(u[i], x);
      else unpack(load_pack<false>(at<T>(p.u, part, piece.channel, row), piece.count, p.aligned), x);
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) y[k] = fmaf(skip.of[i], x[k], y[k]);
    }
    if (p.z.data) {
      read_piece<Shape>(p, part, p.z, piece, i, tile_row, z_slots, x);
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) y[k] *= x[k] * sigmoid(x[k]);
    }
    store_vector<Shape::kFast>(at<T>(p.out, part, piece.channel, row), piece.count, p.aligned, y);
  }
}

// What a lane reads from shared memory for kStep rows, loaded while the rows before are scanned: with one or two warps
// on a scheduler nothing else hides that latency. B and C of wide lanes would not fit into registers, and are read late.
template <typename Shape>
struct StepInputs {
  using S = typename Shape::S;
  static constexpr int kStates = Shape::kStates, kAhead = Shape::kFast ? kStep : 1;
  float delta[Shape::kChannels][kStep], drive[Shape::kChannels][kStep], offset[kStep];
  S B[kAhead][kStates], C[kAhead][kStates];

  __device__ void load(const LaneView<Shape>& view, int t, bool variable_B, bool variable_C, const float* delta_tile,
                       const float* drive_tile, const float* B_tile, const float* C_tile, const float* offsets) {
    load_shared<kStep>(offsets + t, offset);
#pragma unroll
    for (int c = 0; c < Shape::kChannels; ++c) {
      load_shared<kStep>(delta_tile + view.channel[c] * kRowStride + t, delta[c]);
      load_shared<kStep>(drive_tile + view.channel[c] * kRowStride + t, drive[c]);
    }
    if constexpr (Shape::kFast) {
#pragma unroll
      for (int k = 0; k < kStep; ++k) read(view, t + k, variable_B, variable_C, B_tile, C_tile, B[k], C[k]);
    }
  }
  // B and C of row t + k, where they vary.
  __device__ void projections(const LaneView<Shape>& view, int t, int k, bool variable_B, bool variable_C,
                              const float* B_tile, const float* C_tile, S (&B_row)[kStates], S (&C_row)[kStates]) const {
    if constexpr (Shape::kFast) {
#pragma unroll
      for (int j = 0; j < kStates; ++j) B_row[j] = B[k][j], C_row[j] = C[k][j];
    } else {
      read(view, t + k, variable_B, variable_C, B_tile, C_tile, B_row, C_row);
    }
  }
  __device__ static void read(const LaneView<Shape>& view, int row, bool variable_B, bool variable_C, const float* B_tile,
                              const float* C_tile, S (&B_row)[kStates], S (&C_row)[kStates]) {
    const int place = row * Shape::kStateRow + view.first_state * kReals<S>;
    if (variable_B) load_states<kStates>(B_tile + place, B_row);
    if (variable_C) load_states<kStates>(C_tile + place, C_row);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks) scan_forward_kernel(const __grid_constant__ Arguments p,
                                                                                          const __grid_constant__ Plan plan) {
  using S = typename Shape::S;
  using T = typename Shape::T;
  constexpr int kStates = Shape::kStates, kChannels = Shape::kChannels;
  extern __shared__ float4 shared_memory[];
  float* delta_tile = reinterpret_cast<float*>(shared_memory);
  float* drive_tile = delta_tile + Shape::kTileFloats;          // Δu, then y
  float* B_tile = drive_tile + Shape::kTileFloats;
  float* C_tile = B_tile + Shape::kProjectionFloats;
  float* offsets = C_tile + Shape::kProjectionFloats;
  auto* u_slots = reinterpret_cast<Pack<T>*>(offsets + kTile);
  auto *delta_slots = u_slots + Shape::kSlots, *z_slots = delta_slots + Shape::kSlots;

  const Part part = part_of_block<Shape>(p, plan);
  const LaneView<Shape> view;
  const bool variable_B = Shape::kFast || p.variable_B(), variable_C = Shape::kFast || p.variable_C();
  S A[kChannels][kStates], h[kChannels][kStates], constant_B[kChannels][kStates], constant_C[kChannels][kStates];
  if (!variable_B) view.load(p.B.data, 0, p, part, constant_B);
  if (!variable_C) view.load(p.C.data, 0, p, part, constant_C);
  const ChannelValues<Shape> bias(p.delta_bias, part), skip(p.D, part);
  const T *B_group = group_of<T>(p, part, p.B), *C_group = group_of<T>(p, part, p.C);
  ProjectionAhead<Shape> B_ahead, C_ahead;
  OffsetsAhead offsets_ahead;
  const auto fetch_inputs = [&](int tile_row) {
    fetch_tile<Shape>(p, part, p.u, tile_row, u_slots);
    fetch_tile<Shape>(p, part, p.delta, tile_row, delta_slots);
    B_ahead.load(p, B_group, p.B.state_stride, tile_row);
    C_ahead.load(p, C_group, p.C.state_stride, tile_row);
    offsets_ahead.load(p, part, tile_row);
  };
  if constexpr (Shape::kFast) fetch_inputs(0);      // first, for the loads below wait for what they load
  view.load(p.A, 0, p, part, A);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) A[c][j] = kLog2e * A[c][j];
  }
  if (!p.seq_idx) offsets_ahead.store(p, 0, offsets);
  view.load(p.initial, part.batch, p, part, h);
  if constexpr (Shape::kFast) wait_for_fetches();

  for (int tile_row = 0; tile_row < p.length; tile_row += kTile) {
    if (p.states) view.store(p.states, int64_t(part.batch) * p.chunks() + tile_row / kTile, p, part, h);
    stage_inputs<Shape>(p, part, tile_row, bias, u_slots, delta_slots, delta_tile, drive_tile);
    if (!Shape::kFast) offsets_ahead.load(p, part, tile_row);
    if (p.seq_idx) offsets_ahead.store(p, tile_row, offsets);
    Pack<T> u[Shape::kPieces];                                  // of this tile: the next one takes its slots
    if constexpr (Shape::kFast) {
#pragma unroll
      for (int i = 0; i < Shape::kPieces; ++i) u[i] = u_slots[threadIdx.x + i * Shape::kThreads];
      B_ahead.store(p, tile_row, B_tile);
      C_ahead.store(p, tile_row, C_tile);
    } else {
      if (variable_B) stage_projection<Shape>(p, B_group, p.B.state_stride, tile_row, B_tile);
      if (variable_C) stage_projection<Shape>(p, C_group, p.C.state_stride, tile_row, C_tile);
    }
    __syncthreads();
    if constexpr (Shape::kFast) {
      if (p.z.data) fetch_tile<Shape>(p, part, p.z, tile_row, z_slots);
      if (tile_row + kTile < p.length) fetch_inputs(tile_row + kTile);
    }
    StepInputs<Shape> next;
    next.load(view, 0, variable_B, variable_C, delta_tile, drive_tile, B_tile, C_tile, offsets);
#pragma unroll 2
    for (int t = 0; t < kTile; t += kStep) {
      const StepInputs<Shape> now = next;
      // Before y of this step is stored, for stores bar loads; behind the last step come the first rows again, unused.
      next.load(view, (t + kStep) % kTile, variable_B, variable_C, delta_tile, drive_tile, B_tile, C_tile, offsets);
      float y[kChannels][kStep] = {};
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        S B[kStates], C[kStates];
        now.projections(view, t, k, variable_B, variable_C, B_tile, C_tile, B, C);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int j = 0; j < kStates; ++j) {
            const S a = decay_of(now.delta[c][k], A[c][j], now.offset[k]);
            h[c][j] = a * h[c][j] + now.drive[c][k] * (variable_B ? B[j] : constant_B[c][j]);
            y[c][k] += real_of_product(h[c][j], variable_C ? C[j] : constant_C[c][j]);
          }
        }
      }
      __syncwarp();  // all lanes of a channel have read drive_tile before y replaces it
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int k = 0; k < kStep; ++k) y[c][k] *= kKappa<S>;
        sum_rows<Shape::kLanes>(y[c], drive_tile + view.channel[c] * kRowStride + t);
      }
    }
    if constexpr (Shape::kFast) wait_for_fetches();
    __syncthreads();
    write_outputs<Shape>(p, part, tile_row, drive_tile, skip, u, z_slots);
    // The next tile needs no barrier here: a thread stages into the places of delta_tile and drive_tile that it just read.
  }
  view.store(p.last_state, part.batch, p, part, h);
}

template <typename T>
cudaError_t forward_of(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  if (plan.index == kWalk) return walk_of<T>(p, plan, stream);
  return dispatch<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    return launch<Shape>(scan_forward_kernel<Shape>, p, plan, forward_shared_bytes<Shape>(), stream);
  });
}

}  // namespace mamba_ssm::cuda
