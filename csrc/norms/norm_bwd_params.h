#pragma once

#include <cstdint>

#include "norms/params.h"

namespace flash_attn_norm {

/// What the kernels of a backward pass share.
struct NormBwdKernelParams {
    NormBwdParams params;
    int64_t num_partials = 0;          // rows of the arrays below
    float* dweight_partial = nullptr;  // [num_partials, hidden_size], in params.workspace
    float* dbias_partial = nullptr;    // [num_partials, hidden_size]
    int64_t rows_per_partial = 0;      // where each has a run of rows
    int num_steps = 0;                 // of row_slots * kRows rows each; more do not fit in memory
    int num_stages = 1;                // steps in flight
};

}  // namespace flash_attn_norm
