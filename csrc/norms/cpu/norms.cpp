#include "norms/norms.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "common/cpu_features.h"
#include "norms/cpu/elements.h"
#include "norms/cpu/row_kernels.h"

namespace flash_attn_norm {
namespace cpu {

namespace {

/// Elements that are worth waking a thread for.
constexpr int64_t kGrainElements = 16384;

const RowKernels& row_kernels() {
#if defined(__x86_64__)
    if (cpu_isa() >= CpuIsa::kAvx512) return avx512::kRowKernels;
    if (cpu_isa() >= CpuIsa::kAvx2) return avx2::kRowKernels;
#endif
    return plain::kRowKernels;
}

int64_t grain_rows(const NormProblem& problem) {
    return std::max<int64_t>(1, kGrainElements / problem.hidden_size);
}

int64_t aligned_bytes(int64_t num_floats) {
    return (num_floats * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
}

float* floats_at(void* workspace, int64_t byte_offset) {
    return reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + byte_offset);
}

/// Calls fn(pointer to elements of the right type).
template <typename Fn>
void visit_elements(const void* data, DType dtype, Fn&& fn) {
    switch (dtype) {
        case DType::kFloat32:
            return fn(static_cast<const float*>(data));
        case DType::kBFloat16:
            return fn(static_cast<const BFloat16*>(data));
        case DType::kFloat16:
            return fn(static_cast<const Float16*>(data));
    }
}

/// The factor of each column in float32: weight + weight_offset, with the sum rounded to the
/// weight's dtype where the casting mode keeps everything in the tensors' own.
void fill_weight(const NormProblem& problem, float* target) {
    if (problem.weight == nullptr) {
        std::fill_n(target, problem.hidden_size, 1.0f);
        return;
    }
    const float offset = problem.weight_offset;
    const bool rounds = problem.casting_mode != CastingMode::kGemma;
    visit_elements(problem.weight, problem.weight_dtype, [&](const auto* weight) {
        using Element = std::remove_cv_t<std::remove_reference_t<decltype(*weight)>>;
        for (int64_t column = 0; column < problem.hidden_size; ++column) {
            const float value = to_float(weight[column]);
            // Adding 0 would turn a weight of -0 into +0.
            const float factor = offset == 0.0f ? value : value + offset;
            target[column] = rounds ? rounded_to<Element>(factor) : factor;
        }
    });
}

/// The bias in float32; -0 where there is none, because x + -0 is x, also for x = -0.
void fill_bias(const NormFwdParams& params, float* target) {
    const int64_t hidden_size = params.problem.hidden_size;
    if (params.bias == nullptr) {
        std::fill_n(target, hidden_size, -0.0f);
        return;
    }
    visit_elements(params.bias, params.bias_dtype, [&](const auto* bias) {
        for (int64_t column = 0; column < hidden_size; ++column) {
            target[column] = to_float(bias[column]);
        }
    });
}

/// Into how many runs of rows the weight gradients are split. A function of the shape alone, so
/// that the number of threads changes no sum.
int64_t num_row_blocks(const NormProblem& problem) {
    constexpr int64_t kRowsPerBlock = 8;
    constexpr int64_t kMaxBlocks = 128;
    const int64_t blocks = (problem.rows.num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
    return std::min(blocks, kMaxBlocks);
}

/// Second stage of a weight gradient: the blocks' sums in fixed order, rounded once.
void sum_blocks(const float* partial, int64_t num_blocks, int64_t hidden_size, void* target,
                DType dtype, const CpuRuntime& runtime) {
    const int64_t grain = std::max<int64_t>(64, kGrainElements / std::max<int64_t>(1, num_blocks));
    runtime.parallel_for(hidden_size, grain, [&](int64_t begin, int64_t end) {
        visit_elements(target, dtype, [&](const auto* elements) {
            using Element = std::remove_cv_t<std::remove_reference_t<decltype(*elements)>>;
            Element* result = static_cast<Element*>(target);
            constexpr int64_t kColumns = 64;
            for (int64_t first = begin; first < end; first += kColumns) {
                const int64_t columns = std::min(kColumns, end - first);
                float sums[kColumns] = {};
                for (int64_t block = 0; block < num_blocks; ++block) {
                    const float* row = partial + block * hidden_size + first;
                    for (int64_t i = 0; i < columns; ++i) sums[i] += row[i];
                }
                for (int64_t i = 0; i < columns; ++i) from_float(sums[i], result[first + i]);
            }
        });
    });
}

}  // namespace

int64_t norm_fwd_workspace_bytes(const NormFwdParams& params) {
    return 2 * aligned_bytes(params.problem.hidden_size);
}

void norm_fwd(const NormFwdParams& params, const CpuRuntime& runtime) {
    const NormProblem& problem = params.problem;
    float* weight = floats_at(params.workspace, 0);
    float* bias = floats_at(params.workspace, aligned_bytes(problem.hidden_size));
    fill_weight(problem, weight);
    fill_bias(params, bias);
    const RowKernels& kernels = row_kernels();
    runtime.parallel_for(
        problem.rows.num_rows, grain_rows(problem),
        [&](int64_t begin, int64_t end) { kernels.norm_fwd(params, weight, bias, begin, end); });
}

int64_t norm_bwd_workspace_bytes(const NormBwdParams& params) {
    const NormProblem& problem = params.problem;
    const int64_t sums = num_row_blocks(problem) * problem.hidden_size;
    const int num_sums = (params.dweight != nullptr) + (params.dbias != nullptr);
    return aligned_bytes(problem.hidden_size) + num_sums * aligned_bytes(sums);
}

void norm_bwd(const NormBwdParams& params, const CpuRuntime& runtime) {
    const NormProblem& problem = params.problem;
    const int64_t hidden_size = problem.hidden_size;
    const int64_t num_rows = problem.rows.num_rows;
    const RowKernels& kernels = row_kernels();
    float* weight = floats_at(params.workspace, 0);
    fill_weight(problem, weight);

    if (params.dweight == nullptr && params.dbias == nullptr) {
        runtime.parallel_for(num_rows, grain_rows(problem), [&](int64_t begin, int64_t end) {
            kernels.norm_bwd(params, weight, begin, end, nullptr, nullptr);
        });
        return;
    }

    const int64_t num_blocks = num_row_blocks(problem);
    int64_t offset = aligned_bytes(hidden_size);
    float* dweight = params.dweight == nullptr ? nullptr : floats_at(params.workspace, offset);
    if (dweight != nullptr) offset += aligned_bytes(num_blocks * hidden_size);
    float* dbias = params.dbias == nullptr ? nullptr : floats_at(params.workspace, offset);
    runtime.parallel_for(num_blocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            float* block_dweight = dweight == nullptr ? nullptr : dweight + block * hidden_size;
            float* block_dbias = dbias == nullptr ? nullptr : dbias + block * hidden_size;
            if (dweight != nullptr) std::fill_n(block_dweight, hidden_size, 0.0f);
            if (dbias != nullptr) std::fill_n(block_dbias, hidden_size, 0.0f);
            kernels.norm_bwd(params, weight, block * num_rows / num_blocks,
                             (block + 1) * num_rows / num_blocks, block_dweight, block_dbias);
        }
    });
    if (dweight != nullptr) {
        sum_blocks(dweight, num_blocks, hidden_size, params.dweight, problem.weight_dtype, runtime);
    }
    if (dbias != nullptr) {
        sum_blocks(dbias, num_blocks, hidden_size, params.dbias, params.dbias_dtype, runtime);
    }
}

}  // namespace cpu
}  // namespace flash_attn_norm
