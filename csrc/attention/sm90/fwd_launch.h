#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_norm {
namespace sm90 {

/// True when the Hopper kernels take the call; the portable ones take all others.
bool can_run_fwd(const AttentionFwdParams& params);

/// Bytes of workspace that launch_fwd wants.
int64_t fwd_workspace_bytes(const AttentionFwdParams& params);

struct FwdTileLists;

/// Sets a counter of claimed tiles to 0, by a kernel: it starts beside the end of the one before,
/// and beside it the one that claims. A memset allows neither.
void reset_tile_counter(int* counter, cudaStream_t stream);

/// Sets the counter to 0 and fills the lists, sequence after sequence.
void list_packed_tiles(const AttentionProblem& problem, const FwdTileLists& lists,
                       cudaStream_t stream);

/// One definition per size class, in fwd_hdim*.cu.
template <int kHeadDim, int kHeadDimV>
void launch_fwd(const AttentionFwdParams& params, int num_sms, cudaStream_t stream);

}  // namespace sm90
}  // namespace flash_attn_norm
