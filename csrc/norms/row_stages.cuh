#pragma once

#include <cstdint>

#include "common/vec.cuh"
#include "norms/params.h"
#include "norms/row_columns.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_address.cuh"

// How the persistent kernels of both passes read rows: each thread copies its own packs to its own
// part of shared memory, several steps ahead. As only it reads them, no barrier is needed.

namespace flash_attn_norm {

/// Where a thread's words of shared memory lie: those of one index side by side, because a copy of
/// 16 bytes a thread is fast only where neighbours copy to neighbouring places.
struct ThreadSmem {
    uint4* first;
    int num_threads;

    __device__ explicit ThreadSmem(uint4* smem)
        : first(smem + threadIdx.y * blockDim.x + threadIdx.x),
          num_threads(blockDim.x * blockDim.y) {}
    __device__ uint4* word(int index) const { return first + index * num_threads; }
};

/// A thread's packs of the steps in flight. A stage holds several tensors, one after the other,
/// each kVecs packs of one or two words.
template <class Config>
class RowStages {
  public:
    __device__ RowStages(const ThreadSmem& smem, int first_word, int stage_words)
        : smem_(smem), first_word_(first_word), stage_words_(stage_words) {}

    /// Requests the packs of a tensor whose words in a stage start at `offset`; zeros outside it.
    template <DType kDType>
    __device__ __forceinline__ void copy(const void* tensor, const RowShape& shape,
                                         const RowStrides& strides, const Row& row,
                                         const RowColumns<Config>& columns, int stage,
                                         int offset) const {
        constexpr int kWords = PackWords<Config::kPack, kDType>::kWords;
        const char* source =
            static_cast<const char*>(tensor) +
            (row_offset(shape, strides, row.index) + columns.first) * size_of(kDType);
        const int source_step = static_cast<int>(blockDim.x) * 16 * kWords;
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            const int bytes = row.is_inside && columns.is_inside(v) ? 16 : 0;
#pragma unroll
            for (int word = 0; word < kWords; ++word) {
                ptx::cp_async_16(ptx::shared_address(slot(stage, offset + v * kWords + word)),
                                 source + v * source_step + 16 * word, bytes);
            }
        }
    }

    template <DType kDType>
    __device__ __forceinline__ PackWords<Config::kPack, kDType> get(int stage, int offset,
                                                                    int v) const {
        using Pack = PackWords<Config::kPack, kDType>;
        Pack pack;
#pragma unroll
        for (int word = 0; word < Pack::kWords; ++word) {
            pack.words[word] = *slot(stage, offset + v * Pack::kWords + word);
        }
        return pack;
    }

  private:
    __device__ __forceinline__ uint4* slot(int stage, int word) const {
        return smem_.word(first_word_ + stage * stage_words_ + word);
    }

    ThreadSmem smem_;
    int first_word_;
    int stage_words_;
};

/// Waits for this thread's copies, but for the newest num_stages - 1 steps.
__device__ __forceinline__ void wait_for_stage(int num_stages) {
    // The instruction takes the number as a constant.
    if (num_stages == 1) {
        ptx::cp_async_wait_group<0>();
    } else if (num_stages == 2) {
        ptx::cp_async_wait_group<1>();
    } else {
        ptx::cp_async_wait_group<2>();
    }
}

constexpr int kMaxStages = 3;

}  // namespace flash_attn_norm
