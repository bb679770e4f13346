// The CPU kernels of the selective scan behind plain C++ types: no torch header, so that the same source can be compiled
// once for each instruction set (scan_kernels_*.cpp) and chosen at run time.
//
// Letters: B batch, L length, D channels, N state size, G groups, Q chunk: rows between two saved states.
// A part is a range of at most kPartChannels channels that share one group of B and one of C. The unit of parallel work
// is one part of one batch item; the partial sums for dB and dC are kept by part, so results do not depend on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace mamba_ssm::cpu {

constexpr int64_t kChunk = 32;
constexpr int64_t kPartChannels = 64;

enum class Element { kFloat32, kFloat64, kBFloat16, kFloat16 };

// (B, D, L) with any strides, in elements; data == nullptr: not given.
struct Activation {
  const void* data = nullptr;
  int64_t batch_stride = 0, channel_stride = 0, row_stride = 0;
};
struct MutableActivation {
  void* data = nullptr;
  int64_t batch_stride = 0, channel_stride = 0, row_stride = 0;
};

// R below is float, or double where Element is kFloat64; S is R, or pairs of R with complex A. All S and R arrays are
// contiguous. Variable B, C: (B, G, L, N) S; constant ones: (D, N) S with groups == 0.
struct ScanArguments {
  int64_t batch, channels, length, state;
  int64_t groups_B, groups_C;
  int64_t segment_channels;  // channels that share one group of B and of C; a divisor of D
  bool delta_softplus;

  Activation u, delta, z;
  const void* A;            // (D, N) S
  const void* B;
  const void* C;
  const void* D;            // (D) R or nullptr
  const void* delta_bias;   // (D) R or nullptr
  const uint8_t* starts;    // (B, L) 1 where the state is reset before the row, or nullptr
  const void* initial;      // (B, D, N) S or nullptr

  // forward
  MutableActivation out;
  void* last_state;         // (B, D, N) S
  void* states;             // (B, ceil(L / Q), D, N) S: the state entering each chunk; nullptr: not kept

  // backward; the gradients of parameters are sums over L for one batch item, to be added up over B
  Activation dout;
  const void* dlast_state;  // (B, D, N) S or nullptr
  MutableActivation du, ddelta, dz;
  void* dA;                 // (B, D, N) S
  void* dB;                 // variable: (B, parts, L, N) S; constant: (B, D, N) S
  void* dC;
  void* dD;                 // (B, D) R or nullptr
  void* ddelta_bias;        // (B, D) R or nullptr
  void* dinitial;           // (B, D, N) S or nullptr

  int64_t parts_of_segment() const { return (segment_channels + kPartChannels - 1) / kPartChannels; }
  int64_t parts() const { return segment_channels == 0 ? 0 : channels / segment_channels * parts_of_segment(); }
  int64_t chunks() const { return (length + kChunk - 1) / kChunk; }
};

// One step for the H x P channels of each batch item, moved on in place. All R; a stride of 0 repeats a value. The state
// axis is contiguous in h, B and C; in A its stride is 1, or 0 where a head has one decay.
struct Strided {
  const void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, channel_stride = 0;
};
struct StepArguments {
  int64_t batch, heads, head_channels, state;
  int64_t groups_B, groups_C;  // B, C are (B, G, N)
  int64_t A_state_stride;
  bool dt_softplus;
  void* h;                     // (rows, H, P, N)
  int64_t h_row_stride, h_head_stride, h_channel_stride;
  const int64_t* rows;         // (B) which row of h a batch item has, or nullptr: its own number
  Strided x, dt, z, A, B, C, D, dt_bias;
  void* out;                   // (B, H, P) contiguous
};

struct Kernels {
  size_t (*scratch_bytes)(const ScanArguments&);
  // Work items [begin, end) of batch * parts(); scratch is aligned to 64 bytes.
  void (*forward)(const ScanArguments&, int64_t begin, int64_t end, void* scratch);
  void (*backward)(const ScanArguments&, int64_t begin, int64_t end, void* scratch);
};

// Work items [begin, end) of batch * heads.
using StepKernel = void (*)(const StepArguments&, int64_t begin, int64_t end);

namespace generic {
Kernels kernels(Element element, bool complex_state);
StepKernel step_kernel(bool float64);
}
namespace avx2 {
Kernels kernels(Element element, bool complex_state);
StepKernel step_kernel(bool float64);
}
namespace avx512 {
Kernels kernels(Element element, bool complex_state);
StepKernel step_kernel(bool float64);
}

}  // namespace mamba_ssm::cpu
