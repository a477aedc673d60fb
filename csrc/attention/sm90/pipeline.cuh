#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// A barrier in shared memory that counts arrivals and bytes copied; see PTX ISA, "mbarrier".
struct Mbarrier {
    uint64_t word;

    __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(&word); }
    __device__ __forceinline__ void init(uint32_t count) { ptx::mbarrier_init(address(), count); }
    __device__ __forceinline__ void arrive() { ptx::mbarrier_arrive(address()); }
    __device__ __forceinline__ void arrive_expect_bytes(uint32_t bytes) {
        ptx::mbarrier_arrive_expect_tx(address(), bytes);
    }
    /// Returns once the phase of this parity has completed.
    __device__ __forceinline__ void wait(uint32_t parity) const {
        ptx::mbarrier_wait(address(), parity);
    }
};

/// Where a producer or a consumer stands in a ring of kStages buffers, each with a barrier `full`
/// and a barrier `empty`. A producer starts with parity 1, which a fresh barrier lets pass.
template <int kStages>
struct PipelineState {
    int index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (kStages == 1 || ++index == kStages) {
            index = 0;
            parity ^= 1;
        }
    }
};

}  // namespace sm90
}  // namespace flash_attn_norm
