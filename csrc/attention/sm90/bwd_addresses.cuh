#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/sm90/bwd_config.h"

namespace flash_attn_norm {
namespace sm90 {

/// Addresses inside a CTA's shared memory, in its own state space: one register and constants.
template <class Config>
struct BwdAddresses {
    using Shared = BwdSharedStorage<Config>;
    static constexpr int kTileBytes = Config::QLayout::kBytes;
    uint32_t base;

    __device__ __forceinline__ uint32_t k() const { return base + offsetof(Shared, k); }
    __device__ __forceinline__ uint32_t v() const { return base + offsetof(Shared, v); }
    __device__ __forceinline__ uint32_t q(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, q) + s * kTileBytes);
    }
    __device__ __forceinline__ uint32_t dout(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, dout) + s * kTileBytes);
    }
    __device__ __forceinline__ uint32_t ds() const { return base + offsetof(Shared, ds); }
    __device__ __forceinline__ uint32_t dq(int warpgroup) const {
        return base +
               static_cast<uint32_t>(offsetof(Shared, dq) + warpgroup * Config::kDqEntries * 4);
    }
    __device__ __forceinline__ uint32_t lse_log2(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, lse_log2) + s * Config::kBlockM * 4);
    }
    __device__ __forceinline__ uint32_t delta(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, delta) + s * Config::kBlockM * 4);
    }
    __device__ __forceinline__ uint32_t tiles_begun() const {
        return base + offsetof(Shared, tiles_begun);
    }
    __device__ __forceinline__ uint32_t tile_full(uint32_t s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, tile_full)) + s * 8;
    }
    __device__ __forceinline__ uint32_t tile_free(uint32_t s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, tile_free)) + s * 8;
    }
    __device__ __forceinline__ uint32_t kv_full() const { return base + offsetof(Shared, kv_full); }
    __device__ __forceinline__ uint32_t kv_free() const { return base + offsetof(Shared, kv_free); }
    __device__ __forceinline__ uint32_t q_full(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, q_full) + s * 8);
    }
    __device__ __forceinline__ uint32_t q_free(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, q_free) + s * 8);
    }
    __device__ __forceinline__ uint32_t dout_full(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, dout_full) + s * 8);
    }
    __device__ __forceinline__ uint32_t dout_free(int s) const {
        return base + static_cast<uint32_t>(offsetof(Shared, dout_free) + s * 8);
    }
};

}  // namespace sm90
}  // namespace flash_attn_norm
