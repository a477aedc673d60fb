#pragma once

#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/wgmma_type.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// What the consumers of both backward kernels know of themselves.
template <class Config>
struct BwdConsumerThread {
    using Element = typename Config::Element;
    static constexpr ptx::WgmmaType kType = wgmma_type<Element>();
    static constexpr ptx::Major kInner = ptx::Major::kContraction;
    static constexpr ptx::Major kOuter = ptx::Major::kOuter;

    int warpgroup;  // of the consumers
    int thread;     // inside the warpgroup

    /// `index`: threadIdx.x; the first warpgroup loads.
    __device__ __forceinline__ void find_place(int index) {
        warpgroup = __shfl_sync(0xffffffffu, index / 128, 0) - 1;
        thread = index - 128 * (warpgroup + 1);
    }
    __device__ __forceinline__ int lane() const { return thread % 32; }
    __device__ __forceinline__ int warp() const { return thread / 32; }
    __device__ __forceinline__ void meet() const {
        ptx::bar_sync(kConsumersMeet, Config::kConsumers);
    }
};

}  // namespace sm90
}  // namespace flash_attn_norm
