#pragma once

#include <cuda_runtime_api.h>

#include "attention/bwd_workspace.h"
#include "attention/params.h"

/// What runs before and after the main kernel of the backward pass, whatever its architecture.
namespace flash_attn_norm {

/// What the main kernel expects of the passes around it.
struct BwdPassOptions {
    /// It starts before the pass ahead of it has ended and waits for that one itself, and the pass
    /// after it likewise (capability 9.0).
    bool dependent_launch = false;
    /// Who adds to a query block's dQ first stores instead, and says so in dq_turn: the sums need
    /// no zeros before, and where dq_turn is 0 after it there are none.
    bool first_stores_dq = false;
};

/// Zeroes counters and accumulators, fills lse_log2 and delta, and the sink's partial sums.
void bwd_preprocess(const AttentionBwdParams& params, const BwdPlan& plan,
                    const BwdPassOptions& options, cudaStream_t stream);

/// Turns the sums of the workspace into dq (head split: dk and dv too), ds_aux and the gradient of
/// a bias without rows.
void bwd_postprocess(const AttentionBwdParams& params, const BwdPlan& plan,
                     const BwdPassOptions& options, cudaStream_t stream);

/// The block of rows and the head of a CTA of these passes. The heads of the same rows stand side
/// by side, as they lie in memory, and the last rows come first: the main kernel begins with the
/// first ones and ends with the last ones, which the L2 cache then still has.
struct PassTile {
    int head = 0;
    int64_t slot = 0;
    int64_t index = 0;  // in arrays [heads, slots]

    FAN_HOST_DEVICE static PassTile of(unsigned cta, int num_heads, int64_t num_slots) {
        const unsigned heads = static_cast<unsigned>(num_heads);
        PassTile tile;
        tile.head = static_cast<int>(cta % heads);
        tile.slot = num_slots - 1 - cta / heads;
        tile.index = tile.head * num_slots + tile.slot;
        return tile;
    }
};

/// A set of accumulator tiles and the tensor that they are rounded into.
struct GradientTiles {
    const float* sums = nullptr;  // [heads, slots, layout.entries()]
    const int* parts = nullptr;   // [heads, slots], 0: no sums but zeros; null: all have sums
    uint16_t* gradient = nullptr;
    AccumulatorLayout layout;
    float scale = 1.0f;
    int num_heads = 0;
    int head_dim = 0;
    bool of_queries = false;
};

}  // namespace flash_attn_norm
