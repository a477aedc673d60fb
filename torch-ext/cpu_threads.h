#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "common/cpu_runtime.h"

namespace flash_attn_norm {

/// Torch's own thread pool, in the form that csrc/ takes it.
inline CpuRuntime torch_cpu_runtime() {
    CpuRuntime runtime;
    runtime.num_threads = static_cast<int>(torch::stable::get_num_threads());
    runtime.run = [](int64_t count, int64_t grain, void* context, CpuRuntime::Body body) {
        if (count <= 0) return;
        torch::stable::parallel_for(0, count, grain,
                                    [&](int64_t begin, int64_t end) { body(context, begin, end); });
    };
    return runtime;
}

}  // namespace flash_attn_norm
