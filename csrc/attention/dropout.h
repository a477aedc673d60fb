#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_attn_norm {

struct PhiloxOutput {
    uint32_t lane[4];
};

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
FAN_HOST_DEVICE PhiloxOutput philox_4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                            uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
        const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
        const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(product1);
        c3 = static_cast<uint32_t>(product0);
        c0 = next0;
        c2 = next2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return PhiloxOutput{{c0, c1, c2, c3}};
}

/// The dropout mask: a function of (seed, offset; batch, head, row, key) alone, so that every
/// kernel, whatever its tiles, drops the same entries in both passes.
///
/// One Philox call serves the four entries (row, row + 8) x (key, key + 8) whose bit 3 is clear in
/// row and key: an mma accumulator holds these in one thread, whether it holds S or its transpose.
struct Dropout {
    uint32_t key0 = 0, key1 = 0;  // from the seed and the high half of the offset
    uint32_t offset = 0;
    uint32_t batch_head = 0;  // batch * num_heads_q + head
    uint32_t drop_below = 0;  // an entry is dropped when its 32 random bits are below this

    FAN_HOST_DEVICE static Dropout make(const int64_t* rng_state, float dropout_p,
                                        int64_t batch_head) {
        const uint64_t seed = static_cast<uint64_t>(rng_state[0]);
        const uint64_t offset = static_cast<uint64_t>(rng_state[1]);
        Dropout dropout;
        dropout.key0 = static_cast<uint32_t>(seed);
        dropout.key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32);
        dropout.offset = static_cast<uint32_t>(offset);
        dropout.batch_head = static_cast<uint32_t>(batch_head);
        dropout.drop_below = static_cast<uint32_t>(static_cast<double>(dropout_p) * 4294967296.0);
        return dropout;
    }

    /// Bits of the four entries (row, key), (row + 8, key), (row, key + 8), (row + 8, key + 8), in
    /// this order. Bit 3 of row and of key is ignored.
    FAN_HOST_DEVICE PhiloxOutput bits(uint32_t row, uint32_t key) const {
        const uint32_t row_code = ((row >> 4) << 3) | (row & 7u);
        const uint32_t key_code = ((key >> 4) << 3) | (key & 7u);
        return philox_4x32_10(row_code, key_code, batch_head, offset, key0, key1);
    }

    FAN_HOST_DEVICE bool keeps(uint32_t row, uint32_t key) const {
        const int lane = static_cast<int>(((row >> 3) & 1u) | (((key >> 3) & 1u) << 1));
        return bits(row, key).lane[lane] >= drop_below;
    }
};

}  // namespace flash_attn_norm
