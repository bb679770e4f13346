#include "scan_forward.cuh"

namespace mamba_ssm::cuda {

cudaError_t forward_float16(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  return forward_of<__half>(p, plan, stream);
}

}  // namespace mamba_ssm::cuda
