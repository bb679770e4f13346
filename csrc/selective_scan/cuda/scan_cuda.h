// The CUDA kernels of the selective scan behind plain types: no torch header, so that they compile (and can be
// inspected) with nvcc alone.
//
// Letters: B batch, L length, D channels, N state size, G groups, Q = 32 rows of a tile, which is also the distance
// between two saved states. A part is the range of channels that one thread block scans: it shares one group of B and
// one of C. T is the storage type of activations, S the type of a state: float, or float pairs with complex A.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mamba_ssm::cuda {

constexpr int kTile = 32;
constexpr int kMaxState = 256;
constexpr int kWalk = 11;             // Plan::index of the kernel in scan_walk.cuh; below are those of dispatch()
constexpr int kWalkChannels = 48;     // of one of its blocks

// How a scan is spread over threads: `lanes` lanes of a warp share a channel, each holding `states` of its N states for
// `channels` channels; the block has `warps` warps.
struct Plan {
  int index = 0;            // which instantiation
  int states = 0, lanes = 0, channels = 0, warps = 0;
  int padded_state = 0;     // states * lanes >= N
  int block_channels = 0;   // 32 / lanes * channels * warps
  int parts = 0;            // of one batch item
};

// (B, D, L), rows contiguous.
struct Activation {
  const void* data = nullptr;
  int64_t batch_stride = 0, channel_stride = 0;
};
struct MutableActivation {
  void* data = nullptr;
  int64_t batch_stride = 0, channel_stride = 0;
};
// Variable: (B, G, N, L) T, rows contiguous (pairs with complex A). Constant: (D, N) S, groups == 0.
struct Projection {
  const void* data = nullptr;
  int groups = 0;
  int64_t batch_stride = 0, group_stride = 0, state_stride = 0;
};

struct Arguments {
  int batch, channels, length, state;
  int segment_channels;        // channels that share one group of B and of C
  bool complex_state, delta_softplus;
  bool aligned;                // all activations allow 16-byte accesses at multiples of 16 bytes along a row
  int multiprocessors;

  Activation u, delta, z, dout;
  Projection B, C;
  const void* A;               // (D, N) S
  const float* D;              // (D) or nullptr
  const float* delta_bias;     // (D) or nullptr
  const int32_t* seq_idx;      // (B, L) or nullptr
  const void* initial;         // (B, D, N) S or nullptr

  // forward
  MutableActivation out;
  void* last_state;            // (B, D, N) S
  void* states;                // (B, ceil(L / Q), D, N) S, the state entering each tile; nullptr: not kept

  // backward
  const void* dlast_state;     // (B, D, N) S or nullptr
  MutableActivation du, ddelta, dz;
  float* partial_BC;           // (B, parts, L, 2, padded_state) S, where B or C is variable
  void* partial_A;             // (B, D, N) S
  void* partial_B;             // (B, D, N) S where B is constant, else nullptr
  void* partial_C;
  float* partial_D;            // (B, D) or nullptr
  float* partial_bias;         // (B, D) or nullptr
  void* dA;                    // (D, N) S
  void* dB;                    // variable: (B, G, N, L) T contiguous; constant: (D, N) S
  void* dC;
  float* dD;
  float* ddelta_bias;
  void* dinitial;              // (B, D, N) S or nullptr

  constexpr int chunks() const { return (length + kTile - 1) / kTile; }
  constexpr bool variable_B() const { return B.groups > 0; }
  constexpr bool variable_C() const { return C.groups > 0; }
};

// Needs batch, channels, state, segment_channels, complex_state, aligned, B.groups, C.groups and multiprocessors;
// N <= kMaxState.
Plan make_plan(const Arguments& arguments);
// The same for the forward pass, which has a kernel of its own for long rows of many channels.
Plan make_forward_plan(const Arguments& arguments);

enum class Element { kFloat32, kFloat16, kBFloat16 };

cudaError_t forward_float32(const Arguments&, const Plan&, cudaStream_t);
cudaError_t forward_float16(const Arguments&, const Plan&, cudaStream_t);
cudaError_t forward_bfloat16(const Arguments&, const Plan&, cudaStream_t);
cudaError_t backward_float32(const Arguments&, const Plan&, cudaStream_t);
cudaError_t backward_float16(const Arguments&, const Plan&, cudaStream_t);
cudaError_t backward_bfloat16(const Arguments&, const Plan&, cudaStream_t);

}  // namespace mamba_ssm::cuda
