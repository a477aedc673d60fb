#pragma once

#include <cstdint>

#include "common/vec.cuh"
#include "norms/params.h"
#include "norms/row_columns.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/shared_words.cuh"

// How the persistent kernels of both passes read rows: each thread copies its own packs to its own
// part of shared memory, several steps ahead. As only it reads them, no barrier is needed.

namespace flash_attn_norm {

/// A thread's 16-byte words of dynamic shared memory. Those of one index lie side by side for the
/// lanes of a warp, because a copy of 16 bytes a lane is fast only where neighbours copy to
/// neighbouring places. An address in a register, which the compiler cannot derive again each time.
class ThreadSmem {
  public:
    static constexpr int kWordStep = 32 * 16;  // bytes from a word to the next one

    __device__ ThreadSmem(uint4* smem, int words_per_thread) {
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        address_ = static_cast<int>(ptx::shared_address(smem)) +
                   thread / 32 * words_per_thread * kWordStep + thread % 32 * 16;
        ptx::make_opaque(address_);
    }
    __device__ __forceinline__ uint32_t word(int index) const {
        return address_ + index * kWordStep;
    }

  private:
    int address_;
};

/// A thread's packs of the steps in flight. A stage holds several tensors, one after the other,
/// each kVecs packs of one or two words.
template <class Config>
class RowStages {
  public:
    __device__ RowStages(const ThreadSmem& smem, int first_word, int stage_words)
        : smem_(smem), first_word_(first_word), stage_words_(stage_words) {}

    /// Requests the packs of a tensor whose words in a stage start at `offset`; zeros outside it.
    template <DType kDType, class AnyRow>
    __device__ __forceinline__ void copy(const void* tensor, const RowShape& shape,
                                         const RowStrides& strides, const AnyRow& row,
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
                ptx::cp_async_16(slot(stage, offset + v * kWords + word),
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
            pack.words[word] = ptx::ld_shared_v4(slot(stage, offset + v * Pack::kWords + word));
        }
        return pack;
    }

  private:
    __device__ __forceinline__ uint32_t slot(int stage, int word) const {
        return smem_.word(stage * stage_words_) + (first_word_ + word) * ThreadSmem::kWordStep;
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

/// How a CTA, or a cluster of them, walks over the rows: every num_blocks'th step is its own, and
/// the stages take turns.
struct RowWalk {
    int first_step;
    int num_blocks;
    int num_steps;
    int num_stages;

    template <class Reducer>
    __device__ RowWalk(const Reducer& reducer, int num_steps, int num_stages)
        : first_step(reducer.block()),
          num_blocks(reducer.num_blocks()),
          num_steps(num_steps),
          num_stages(num_stages) {}

    __device__ __forceinline__ int next_stage(int stage) const {
        return stage + 1 == num_stages ? 0 : stage + 1;
    }
    /// copy(step, stage) for the first steps, one group of copies each.
    template <class Copy>
    __device__ __forceinline__ void copy_first_steps(const Copy& copy) const {
        for (int stage = 0; stage < num_stages; ++stage) {
            const int step = first_step + stage * num_blocks;
            if (step < num_steps) copy(step, stage);
            ptx::cp_async_commit_group();
        }
    }
    /// The same for the step that takes this one's stage next.
    template <class Copy>
    __device__ __forceinline__ void copy_later_step(int step, int stage, const Copy& copy) const {
        const int later_step = step + num_stages * num_blocks;
        if (later_step < num_steps) copy(later_step, stage);
        ptx::cp_async_commit_group();
    }
};

}  // namespace flash_attn_norm
