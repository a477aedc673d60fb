#pragma once

#include <cstdint>

#include "attention/tile_pitch.h"

namespace flash_attn_norm {
namespace sm80 {

template <class Config>
struct FwdSharedStorage {
    alignas(16) uint16_t q[Config::kBlockM * Config::kPitch];  // the output tile at the end
    alignas(16) uint16_t k[Config::kBlockN * Config::kPitch];
    alignas(16) uint16_t v[Config::kBlockN * Config::kPitchV];
};

/// The backward pass. Behind it lie the Q tiles, then the dO tiles, one or two of each: as many as
/// the card has room for.
template <class Config>
struct BwdSharedStorage {
    alignas(16) uint16_t k[Config::kBlockN * Config::kPitch];   // the dK tile at the end
    alignas(16) uint16_t v[Config::kBlockN * Config::kPitchV];  // the dV tile at the end
    alignas(16) uint16_t p[Config::kBlockM * Config::kPitchS];
    alignas(16) uint16_t ds[Config::kBlockM * Config::kPitchS];
    alignas(16) float lse_log2[2][Config::kBlockM];
    alignas(16) float delta[2][Config::kBlockM];
    float bias_sum[Config::kWarpsSM][Config::kBlockN];  // of a bias without rows
    int64_t tile_index;                                 // drawn by one thread, read by all

    static constexpr int kQBytes = Config::kBlockM * Config::kPitch * 2;
    static constexpr int kDoutBytes = Config::kBlockM * Config::kPitchV * 2;

    FAN_HOST_DEVICE static constexpr int fixed_bytes() {
        return (static_cast<int>(sizeof(BwdSharedStorage)) + 15) / 16 * 16;
    }
    static constexpr int bytes(int q_stages, int dout_stages) {
        return fixed_bytes() + q_stages * kQBytes + dout_stages * kDoutBytes;
    }
};

}  // namespace sm80
}  // namespace flash_attn_norm
