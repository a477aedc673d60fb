#pragma once

#include <cstdint>

#include "norms/params.h"
#include "norms/row_sums.cuh"
#include "ptx/opaque.cuh"

// Which part of the tensors a thread has.

namespace flash_attn_norm {

/// Which columns a thread has: kVecs packs, those of neighbouring threads side by side.
template <class Config>
struct RowColumns {
    int first;  // of its first pack; the next ones are `step` packs apart
    int end;
    int step;
    bool is_even;  // every thread of the row has kVecs packs; always, if Config::kIsEven

    __device__ RowColumns(const NormProblem& problem,
                          const RowReducer<typename Config::Arch>& reducer) {
        const int packs = static_cast<int>(problem.hidden_size) / Config::kPack;
        const int packs_per_cta = reducer.part_of_cta(packs);
        step = static_cast<int>(blockDim.x);
        set_part(packs, packs_per_cta, reducer.cluster_rank(), threadIdx.x);
        is_even = Config::kIsEven || Config::kVecs * step * reducer.cluster_size() == packs;
    }

    /// The same columns for the threads of one CTA that do what a cluster of num_parts CTAs does, 1
    /// or 2: one run of threads after the other.
    __device__ RowColumns(const NormProblem& problem, int num_parts) {
        const int packs = static_cast<int>(problem.hidden_size) / Config::kPack;
        const int threads = static_cast<int>(blockDim.x);
        step = num_parts == 1 ? threads : threads / 2;
        const int thread = static_cast<int>(threadIdx.x);
        const int part = thread < step ? 0 : 1;
        set_part(packs, num_parts == 1 ? packs : (packs + 1) / 2, part, thread - part * step);
        is_even = Config::kVecs * threads == packs;
    }

    __device__ int column(int v) const { return first + v * step * Config::kPack; }
    __device__ bool is_inside(int v) const { return Config::kIsEven || column(v) < end; }
    /// A column that exists, whatever it is where column(v) does not: what is loaded there needs no
    /// branch, and is not used.
    __device__ int column_inside(int v) const { return is_inside(v) ? column(v) : 0; }

  private:
    __device__ void set_part(int packs, int packs_per_part, int part, int thread) {
        const int first_pack = part * packs_per_part;
        first = (first_pack + thread) * Config::kPack;
        end = min(first_pack + packs_per_part, packs) * Config::kPack;
    }
};

/// Where a row starts. Found before the kernel waits for those before it, and kept in a register:
/// the compiler would find it afterwards.
__device__ __forceinline__ const char* row_start(const void* tensor, DType dtype,
                                                 const RowShape& rows, const RowStrides& strides,
                                                 int64_t row) {
    const char* start =
        static_cast<const char*>(tensor) + row_offset(rows, strides, row) * size_of(dtype);
    ptx::make_opaque(start);
    return start;
}

/// A thread's row: one of the blockDim.y rows of a step of its CTA. The last ones may lie outside.
struct Row {
    int64_t index;
    bool is_inside;

    __device__ Row(const NormProblem& problem, int64_t step)
        : index(step * blockDim.y + threadIdx.y), is_inside(index < problem.rows.num_rows) {}
    /// Where the row starts in a contiguous tensor.
    __device__ int64_t start(const NormProblem& problem) const {
        return index * problem.hidden_size;
    }
};

/// The same for kernels that walk over at most kMaxWalkedRows rows: 32 bits take fewer
/// instructions.
struct WalkedRow {
    int index;
    bool is_inside;

    __device__ WalkedRow(const NormProblem& problem, int step)
        : index(step * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y)),
          is_inside(index < static_cast<int>(problem.rows.num_rows)) {}
    __device__ int64_t start(const NormProblem& problem) const {
        return int64_t{index} * static_cast<int>(problem.hidden_size);
    }
};

constexpr int64_t kMaxWalkedRows = int64_t{1} << 30;

}  // namespace flash_attn_norm
