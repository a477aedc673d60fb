#include <cuda_runtime.h>

#include "attention/bwd_preprocess_kernel.cuh"
#include "attention/bwd_round_kernel.cuh"
#include "attention/sm90/bwd_launch.h"
#include "attention/sm90/dependent_launch.h"

namespace flash_attn_norm {
namespace sm90 {

void launch_bwd_preprocess(const AttentionBwdParams& params, const BwdWorkspace& workspace,
                           int block_m, int64_t zeroed_entries, int64_t ctas, cudaStream_t stream) {
    const auto kernel = params.problem.dtype == DType::kBFloat16 ? preprocess_kernel<BFloat16, true>
                                                                 : preprocess_kernel<Float16, true>;
    kernel<<<grid_size("attention backward", ctas), kPreprocessThreads, 0, stream>>>(
        params, workspace, block_m, zeroed_entries);
    check_launch("attention backward, preprocess");
}

void launch_bwd_round(const AttentionProblem& problem, const GradientTiles& tiles, int64_t ctas,
                      cudaStream_t stream) {
    const auto kernel = problem.dtype == DType::kBFloat16 ? round_kernel<BFloat16, true>
                                                          : round_kernel<Float16, true>;
    launch_dependent(kernel, ctas, tiles.layout.threads, rounded_tile_bytes(tiles.layout), stream,
                     "attention backward, postprocess", problem, tiles);
}

}  // namespace sm90
}  // namespace flash_attn_norm
