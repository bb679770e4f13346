// Which instantiation of the kernels runs a scan, and how many blocks it takes.
#include "scan_cuda.h"

namespace mamba_ssm::cuda {
namespace {

struct Shape {
  int states, lanes, channels, warps;
};
// The order is that of dispatch() in scan_common.cuh.
constexpr Shape kShapes[] = {
    {4, 4, 2, 2}, {4, 4, 1, 2},                                                             // real, kFast
    {4, 4, 1, 2}, {4, 1, 1, 2}, {4, 16, 1, 4}, {4, 32, 1, 2}, {8, 32, 1, 1},                // real
    {2, 8, 1, 2}, {2, 32, 1, 2}, {4, 32, 1, 1}, {8, 32, 1, 1},                              // complex
};
constexpr int kFirstGeneral = 2, kFirstComplex = 7;
// Two channels for each lane halve the shared-memory reads of B and C, and the sums over blocks, but also the warps. They
// gain where that leaves three blocks for each multiprocessor (H200, forward + backward in ms, one against two a lane,
// 16 states: B16 L128 D1024 bf16 0.096, 0.085, fp32 0.108, 0.102; B8 L2048 D1536 bf16 1.08, 1.17, fp32 1.23, 1.39).
constexpr int kBlocksForTwo = 3;

// Walks pay for long rows (H200: as fast as the others at 128 rows) where nearly each multiprocessor has a block.
constexpr int kWalkRows = 256;
constexpr double kWalkBlocks = 0.9;

int parts_of(const Arguments& p, int block_channels) {
  if (p.segment_channels == 0) return 0;
  return p.channels / p.segment_channels * ((p.segment_channels + block_channels - 1) / block_channels);
}

Plan plan_for(const Arguments& p, int index) {
  const Shape& shape = kShapes[index];
  Plan plan;
  plan.index = index;
  plan.states = shape.states;
  plan.lanes = shape.lanes;
  plan.channels = shape.channels;
  plan.warps = shape.warps;
  plan.padded_state = shape.states * shape.lanes;
  plan.block_channels = 32 / shape.lanes * shape.channels * shape.warps;
  plan.parts = parts_of(p, plan.block_channels);
  return plan;
}

// What the kernels that fetch ahead need.
bool in_vectors(const Arguments& p) {
  return !p.complex_state && p.state > 4 && p.state <= 16 && p.variable_B() && p.variable_C() && p.aligned;
}

}  // namespace

Plan make_forward_plan(const Arguments& p) {
  const int parts = parts_of(p, kWalkChannels);
  if (!in_vectors(p) || p.length < kWalkRows || parts * int64_t(p.batch) < kWalkBlocks * p.multiprocessors) return make_plan(p);
  Plan plan;
  plan.index = kWalk;
  plan.block_channels = kWalkChannels;
  plan.parts = parts;
  return plan;
}

Plan make_plan(const Arguments& p) {
  if (p.complex_state) {
    const int index = p.state <= 16 ? 0 : p.state <= 64 ? 1 : p.state <= 128 ? 2 : 3;
    return plan_for(p, kFirstComplex + index);
  }
  if (in_vectors(p)) {
    const Plan two = plan_for(p, 0);
    return int64_t(two.parts) * p.batch >= kBlocksForTwo * int64_t(p.multiprocessors) ? two : plan_for(p, 1);
  }
  const int index = p.state <= 4 ? 1 : p.state <= 16 ? 0 : p.state <= 64 ? 2 : p.state <= 128 ? 3 : 4;
  return plan_for(p, kFirstGeneral + index);
}

}  // namespace mamba_ssm::cuda
