#include "scan_backward.cuh"

namespace mamba_ssm::cuda {

cudaError_t backward_bfloat16(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  return backward_of<__nv_bfloat16>(p, plan, stream);
}

}  // namespace mamba_ssm::cuda
