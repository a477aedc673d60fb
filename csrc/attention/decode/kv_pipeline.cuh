#pragma once

#include <cstdint>

#include "attention/decode/kv_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace decode {

/// A set's ring of tiles, filled by cp.async: eight lanes take a row, 128 bytes
/// at a time, and a warp four rows.
template <class Config>
class KvPipeline {
  public:
    __device__ __forceinline__ KvPipeline(const SplitParams& params, const uint16_t* ring)
        : params_(params),
          first_slot_(ptx::shared_address(ring)),
          unit_(static_cast<int>(threadIdx.x) % 8),
          row_(static_cast<int>(threadIdx.x) % 32 / 8) {}

    /// Starts the copy of the tile that `rows` has looked up into the next slot.
    /// Each call closes a group of copies, without a tile as well.
    __device__ __forceinline__ void load_keys(const KvRows<Config>& rows, bool exists) {
        if (exists) {
            load<Config::kHeadDim>(rows, rows.k, params_.cache.k_strides, params_.head_units);
        }
        ptx::cp_async_commit_group();
    }
    __device__ __forceinline__ void load_values(const KvRows<Config>& rows, bool exists) {
        if (exists) {
            load<Config::kHeadDimV>(rows, rows.v, params_.cache.v_strides, params_.head_units_v);
        }
        ptx::cp_async_commit_group();
    }

    /// Waits, with all slots but one on their way, until the tile to read is
    /// there for all warps of the set, and none of them reads the one before it
    /// any more.
    __device__ __forceinline__ void wait() const {
        ptx::cp_async_wait_group<Config::kSlots - 2>();
        if constexpr (Config::kSetWarps == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }

    __device__ __forceinline__ uint32_t read_slot() const { return first_slot_ + read_; }
    __device__ __forceinline__ void next_read() { advance(read_); }

  private:
    static constexpr uint32_t kSlotBytes = Config::kTileKeys * Config::kPitch * 2;
    static constexpr int kRows = Config::kKeysPerWarp / 4;  // of a lane

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
        const uint16_t* source[kRows];
        tensor += unit_ * 8;
        if (rows.pages != nullptr) {
            const int last = static_cast<int>(params_.cache.num_entries) - 1;
            const int entry = max(min(rows.entry, last), 0);
            const int64_t offset = entry * strides.batch + rows.row * strides.row;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                source[i] = tensor + __shfl_sync(0xffffffffu, offset, 4 * i + row_);
            }
        } else {
            const int64_t position = rows.first_position + rows.first_key + row_;
            source[0] = tensor + position * strides.row;
#pragma unroll
            for (int i = 1; i < kRows; ++i) source[i] = source[i - 1] + 4 * strides.row;
        }
        if (rows.is_whole()) {
            copy<kColumns>(tile, source, units, [](int) { return true; });
        } else {
            copy<kColumns>(tile, source, units, [&](int i) {
                const int key = rows.first_key + 4 * i + row_;
                return key >= rows.key_begin && key < rows.key_end;
            });
        }
    }

    /// Rows without exists(i) and units past the true head dim are filled with
    /// zeros and not read.
    template <int kColumns, class Exists>
    __device__ __forceinline__ void copy(uint32_t tile, const uint16_t* const (&source)[kRows],
                                         int units, Exists&& exists) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int own_units = exists(i) ? units - unit_ : 0;
#pragma unroll
            for (int u = 0; u < kColumns / 64; ++u) {
                ptx::cp_async_16(
                    tile + static_cast<uint32_t>((4 * i * Config::kPitch + u * 64) * 2),
                    source[i] + u * 64, u * 8 < own_units ? 16 : 0);
            }
        }
    }

    const SplitParams& params_;
    uint32_t first_slot_;
    uint32_t read_ = 0, write_ = 0;  // bytes
    int unit_, row_;                 // this lane's
};

}  // namespace decode
}  // namespace flash_attn_norm
