#pragma once

#include <cstdint>

#include "attention/decode/kv_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace decode {

/// A set's ring of tiles, filled by cp.async: eight lanes take a row, 128 bytes at a time, and a
/// warp four rows.
template <class Config>
class KvPipeline {
  public:
    __device__ __forceinline__ KvPipeline(SplitSharedStorage<Config>& shared, int set,
                                          const KvCacheAttentionParams& params)
        : first_slot_(ptx::shared_address(shared.ring[set * Config::kSlots])),
          params_(params),
          unit_(static_cast<int>(threadIdx.x) % 8),
          row_(static_cast<int>(threadIdx.x) % 32 / 8) {}

    /// Starts the copy of the tile that `rows` has looked up into the next slot; each call is a
    /// group, without a tile as well.
    __device__ __forceinline__ void load_keys(const KvRows<Config>& rows, bool exists) {
        if (exists) {
            load<Config::kHeadDim>(rows, rows.k, params_.cache.k_strides,
                                   params_.problem.head_dim / 8);
        }
        ptx::cp_async_commit_group();
    }
    __device__ __forceinline__ void load_values(const KvRows<Config>& rows, bool exists) {
        if (exists) {
            load<Config::kHeadDimV>(rows, rows.v, params_.cache.v_strides,
                                    params_.problem.head_dim_v / 8);
        }
        ptx::cp_async_commit_group();
    }

    /// What was committed before all slots but one were under way has arrived.
    __device__ __forceinline__ void wait_before_ring() {
        ptx::cp_async_wait_group<Config::kSlots - 1>();
    }
    /// After it, the slot before the one to read is free, ...
    __device__ __forceinline__ void wait_free() {
        ptx::cp_async_wait_group<Config::kSlots - 2>();
        if constexpr (Config::kSetWarps == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }
    /// ... and after this, the tile to read is there.
    __device__ __forceinline__ void wait_full() {}

    __device__ __forceinline__ uint32_t read_slot() const { return first_slot_ + read_; }
    __device__ __forceinline__ void next_read() { advance(read_); }
    __device__ __forceinline__ void finish() { ptx::cp_async_wait_group<0>(); }

  private:
    static constexpr uint32_t kSlotBytes = Config::kTileKeys * Config::kPitch * 2;

    __device__ __forceinline__ static void advance(uint32_t& slot) {
        slot = slot == (Config::kSlots - 1) * kSlotBytes ? 0 : slot + kSlotBytes;
    }

    template <int kColumns>
    __device__ __forceinline__ void load(const KvRows<Config>& rows, const uint16_t* tensor,
                                         const TensorStrides& strides, int units) {
        const uint32_t tile =
            first_slot_ + write_ +
            static_cast<uint32_t>(((rows.first_row + row_) * Config::kPitch + unit_ * 8) * 2);
        advance(write_);
        const uint16_t* source[Config::kKeysPerWarp / 4];
        if (rows.pages != nullptr) {
            const int64_t offset = rows.checked_entry() * strides.batch +
                                   rows.row * strides.row;  // of this lane's row
#pragma unroll
            for (int i = 0; i < Config::kKeysPerWarp / 4; ++i) {
                source[i] = tensor + __shfl_sync(0xffffffffu, offset, 4 * i + row_) + unit_ * 8;
            }
        } else {
            const int64_t position = rows.first_position + rows.first_key + row_;
            const uint16_t* row = tensor + position * strides.row + unit_ * 8;
#pragma unroll
            for (int i = 0; i < Config::kKeysPerWarp / 4; ++i)
                source[i] = row + 4 * i * strides.row;
        }
        const int own_units = units - unit_;
#pragma unroll
        for (int i = 0; i < Config::kKeysPerWarp / 4; ++i) {
            const int key = rows.first_key + 4 * i + row_;
            const int row_units = key >= rows.key_begin && key < rows.key_end ? own_units : 0;
#pragma unroll
            for (int u = 0; u < kColumns / 64; ++u) {
                ptx::cp_async_16(
                    tile + static_cast<uint32_t>((4 * i * Config::kPitch + u * 64) * 2),
                    source[i] + u * 64, u * 8 < row_units ? 16 : 0);
            }
        }
    }

    uint32_t first_slot_;
    uint32_t read_ = 0, write_ = 0;  // bytes
    const KvCacheAttentionParams& params_;
    int unit_, row_;  // this lane's
};

}  // namespace decode
}  // namespace flash_attn_norm
