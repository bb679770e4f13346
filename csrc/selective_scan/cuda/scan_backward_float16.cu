#include "scan_backward.cuh"

namespace mamba_ssm::cuda {

cudaError_t backward_float16(const Arguments& p, const Plan& plan, cudaStream_t stream) {
  return backward_of<__half>(p, plan, stream);
}

}  // namespace mamba_ssm::cuda
