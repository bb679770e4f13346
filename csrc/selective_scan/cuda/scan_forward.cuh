// Forward:  h_t = a_t h_{t-1} + Δ_t u_t B_t,  a_t = exp(Δ_t A),  y_t = κ Re Σ_n C_t h_t + D u_t,  out = y silu(z),
// κ = 2 for complex A.
//
// Work: one exp, two multiplies and two fused multiply-adds for each of B·D·L·N states, so the special-function unit
// (16 a clock and multiprocessor) is the floor at N = 16; B and C are read from shared memory once for kChannels states.
#pragma once

#include "scan_common.cuh"

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
      else load_vector<T>(at<T>(p.u, part, piece.channel, row), piece.count, p.aligned, x);
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

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) scan_forward_kernel(const __grid_constant__ Arguments p,
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
  view.load(p.A, 0, p, part, A);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) A[c][j] = kLog2e * A[c][j];
  }
  if (!variable_B) view.load(p.B.data, 0, p, part, constant_B);
  if (!variable_C) view.load(p.C.data, 0, p, part, constant_C);
  const ChannelValues<Shape> bias(p.delta_bias, part), skip(p.D, part);
  ProjectionAhead<Shape> B_ahead, C_ahead;
  const auto fetch_inputs = [&](int tile_row) {
    fetch_tile<Shape>(p, part, p.u, tile_row, u_slots);
    fetch_tile<Shape>(p, part, p.delta, tile_row, delta_slots);
    B_ahead.load(p, part, p.B, tile_row);
    C_ahead.load(p, part, p.C, tile_row);
  };
  if constexpr (Shape::kFast) fetch_inputs(0);
  view.load(p.initial, part.batch, p, part, h);
  if constexpr (Shape::kFast) wait_for_fetches();

  for (int tile_row = 0; tile_row < p.length; tile_row += kTile) {
    if (p.states) view.store(p.states, int64_t(part.batch) * p.chunks() + tile_row / kTile, p, part, h);
    stage_inputs<Shape>(p, part, tile_row, bias, u_slots, delta_slots, delta_tile, drive_tile);
    stage_offsets<Shape>(p, part, tile_row, offsets);
    Pack<T> u[Shape::kPieces];                                  // of this tile: the next one takes its slots
    if constexpr (Shape::kFast) {
#pragma unroll
      for (int i = 0; i < Shape::kPieces; ++i) u[i] = u_slots[threadIdx.x + i * Shape::kThreads];
      B_ahead.store(p, tile_row, B_tile);
      C_ahead.store(p, tile_row, C_tile);
    } else {
      if (variable_B) stage_projection<Shape>(p, part, p.B, tile_row, B_tile);
      if (variable_C) stage_projection<Shape>(p, part, p.C, tile_row, C_tile);
    }
    __syncthreads();
    if constexpr (Shape::kFast) {
      if (p.z.data) fetch_tile<Shape>(p, part, p.z, tile_row, z_slots);
      if (tile_row + kTile < p.length) fetch_inputs(tile_row + kTile);
    }
    float next_delta[kChannels][kStep], next_drive[kChannels][kStep], next_offset[kStep];
    const auto load_step = [&](int t) {                         // before y of the step before is stored: stores bar loads
      load_shared<kStep>(offsets + t, next_offset);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        load_shared<kStep>(delta_tile + view.channel[c] * kRowStride + t, next_delta[c]);
        load_shared<kStep>(drive_tile + view.channel[c] * kRowStride + t, next_drive[c]);
      }
    };
    load_step(0);
#pragma unroll 2
    for (int t = 0; t < kTile; t += kStep) {
      float delta[kChannels][kStep], drive[kChannels][kStep], y[kChannels][kStep] = {}, offset[kStep];
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        offset[k] = next_offset[k];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) delta[c][k] = next_delta[c][k], drive[c][k] = next_drive[c][k];
      }
      if (t + kStep < kTile) load_step(t + kStep);
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        S B[kStates], C[kStates];
        if (variable_B) load_states<kStates>(B_tile + (t + k) * Shape::kStateRow + view.first_state * kReals<S>, B);
        if (variable_C) load_states<kStates>(C_tile + (t + k) * Shape::kStateRow + view.first_state * kReals<S>, C);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
#pragma unroll
          for (int j = 0; j < kStates; ++j) {
            const S a = decay_of(delta[c][k], A[c][j], offset[k]);
            h[c][j] = a * h[c][j] + drive[c][k] * (variable_B ? B[j] : constant_B[c][j]);
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
  return dispatch<T>(plan, [&](auto shape) {
    using Shape = decltype(shape);
    return launch<Shape>(scan_forward_kernel<Shape>, p, plan, forward_shared_bytes<Shape>(), stream);
  });
}

}  // namespace mamba_ssm::cuda
