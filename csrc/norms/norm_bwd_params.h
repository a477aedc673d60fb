#pragma once

#include <cstdint>

#include "norms/params.h"

namespace flash_attn_norm {

/// What the kernels of a backward pass share.
struct NormBwdKernelParams {
    NormBwdParams params;
    int64_t num_partials = 0;          // rows of the arrays below
    float* dweight_partial = nullptr;  // [num_partials, hidden_size], in the workspace
    float* dbias_partial = nullptr;    // [num_partials, hidden_size]
    // The persistent kernel.
    int num_steps = 0;   // of row_slots rows each; more do not fit in memory
    int num_stages = 1;  // steps in flight
    // The kernel of few rows and the loop kernel.
    int64_t num_dx_ctas = 0;       // the others compute column sums
    bool is_only_row = false;      // of few rows: those that compute dx store its products too
    int num_row_parts = 1;         // of few rows: CTAs that a row takes where there are more
    int column_lanes = 32;         // of few rows: threads side by side on the columns' sums
    int64_t rows_per_partial = 0;  // where each has a run of rows
};

}  // namespace flash_attn_norm
