#pragma once

#include "attention/bwd_workspace.h"
#include "attention/params.h"

namespace flash_attn_norm {
namespace cuda {

/// Computes the parts of ds_aux that bwd_preprocess left in the workspace once more, from a delta
/// that was corrected after it. `stream` is a cudaStream_t.
void renew_sink_parts(const AttentionBwdParams& params, const BwdWorkspace& workspace, int block_m,
                      void* stream);

}  // namespace cuda
}  // namespace flash_attn_norm
