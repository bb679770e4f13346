#include "scan_forward.cuh"

namespace mamba_ssm::cuda {

cudaError_t forward_float32(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  return forward_of<float>(p, plan, stream);
}

}  // namespace mamba_ssm::cuda
