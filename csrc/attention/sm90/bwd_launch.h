#pragma once

#include <cuda_runtime_api.h>

#include "attention/bwd_passes.h"
#include "attention/bwd_workspace.h"
#include "attention/params.h"

namespace flash_attn_norm {
namespace sm90 {

/// False for what the backward kernels of Hopper leave to the portable path: dropout, bias, head
/// dims above 256, scales that are not positive, no gradient of
/// the output, more than 2^30 rows, keys or tiles, and tensors that no tensor map describes.
bool can_run_bwd(const AttentionBwdParams& params);

/// The plan of the kernel that this problem takes. num_sms: of the device.
BwdPlan plan_bwd(const AttentionBwdParams& params, int num_sms);

/// Whether scores take the code for softcap and ALiBi.
inline bool has_score_terms(const AttentionProblem& problem) {
    return problem.softcap > 0.0f || problem.alibi_slopes != nullptr;
}

/// Whether a block of keys meets so few rows that what comes before and after them counts.
bool bwd_tiles_are_short(const AttentionProblem& problem);

/// Whether, at head dims above 64, steps of 80 queries pay.
bool bwd_steps_are_wide(const AttentionProblem& problem);

/// What that kernel expects of the passes around it.
BwdPassOptions bwd_pass_options(const AttentionBwdParams& params);

/// The kernels of bwd_preprocess() and bwd_postprocess() with dependent launches, `ctas` of them.
void launch_bwd_preprocess(const AttentionBwdParams& params, const BwdWorkspace& workspace,
                           int block_m, int64_t zeroed_entries, int64_t ctas, cudaStream_t stream);
void launch_bwd_round(const AttentionProblem& problem, const GradientTiles& tiles, int64_t ctas,
                      cudaStream_t stream);

/// The main kernel, between bwd_preprocess() and bwd_postprocess().
void launch_bwd(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                cudaStream_t stream);

/// One definition per size class, in bwd_hdim*.cu.
template <int kHeadDim>
BwdPlan plan_bwd_class(const AttentionBwdParams& params, int num_sms);
template <int kHeadDim>
void launch_bwd_class(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                      cudaStream_t stream);

/// Likewise for head dims above 128 and up to 256, by the head dim of values.
template <int kHeadDimV>
BwdPlan plan_bwd_cluster(const AttentionBwdParams& params, int num_sms);
template <int kHeadDimV>
void launch_bwd_cluster(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                        cudaStream_t stream);

}  // namespace sm90
}  // namespace flash_attn_norm
