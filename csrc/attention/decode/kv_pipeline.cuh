#pragma once

#include <cstdint>

#include "attention/decode/kv_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace decode {

/// The copies that bring a tile of kColumns columns to shared memory, as one warp makes them:
/// kLanesPerRow lanes take a row, 64 columns at a time, and the warp kRowsPerCopy rows.
template <class Config, int kColumns>
struct TileCopy {
    using CacheElement = typename Config::CacheElement;
    static constexpr int kRows = Config::kKeysPerWarp / Config::kRowsPerCopy;  // of a lane
    static constexpr int kUnits = kColumns / 64;                               // of a row
    static constexpr int kSteps = kRows * kUnits;

    const CacheElement* source[kRows];
    uint32_t destination = 0;
    int own_units = 0;   // of the true head dim, from this lane's first one on
    bool waits = false;  // for its steps

    /// Steps may come in any order and place, best spread among other work: a burst of copies would
    /// block the queue that they share with ldmatrix, and registers with their addresses.
    __device__ __forceinline__ void step(int i) const {
        if (waits) copy(i, true);
    }
    /// Without `exists`, and past the true head dim, zeros are filled in and nothing is read.
    __device__ __forceinline__ void copy(int i, bool exists) const {
        const int row = i / kUnits, unit = i % kUnits;
        ptx::cp_async_16(
            destination + static_cast<uint32_t>(Config::kRowsPerCopy * row * Config::kKvPitch * 2 +
                                                unit * Config::kLanesPerRow * 16),
            source[row] + unit * 64, exists && unit * Config::kLanesPerRow < own_units ? 16 : 0);
    }
};

/// A set's ring of tiles, filled by cp.async.
template <class Config>
class KvPipeline {
  public:
    using KeyCopy = TileCopy<Config, Config::kHeadDim>;
    using ValueCopy = TileCopy<Config, Config::kHeadDimV>;

    __device__ __forceinline__ KvPipeline(const SplitParams& params, const uint16_t* ring)
        : params_(params),
          first_slot_(ptx::shared_address(ring)),
          unit_(static_cast<int>(threadIdx.x) % Config::kLanesPerRow),
          row_(static_cast<int>(threadIdx.x) % 32 / Config::kLanesPerRow) {}

    /// The copy, into the next slot, of the tile that `rows` has looked up. The caller makes its
    /// steps and commits; each tile is a group of copies, one that does not exist as well.
    __device__ __forceinline__ KeyCopy begin_keys(const KvRows<Config>& rows, bool exists) {
        return begin<Config::kHeadDim>(rows, rows.k, params_.cache.k_strides, params_.cache_units,
                                       exists);
    }
    __device__ __forceinline__ ValueCopy begin_values(const KvRows<Config>& rows, bool exists) {
        return begin<Config::kHeadDimV>(rows, rows.v, params_.cache.v_strides,
                                        params_.cache_units_v, exists);
    }

    /// Waits, with all slots but one on their way, until the tile to read is there for all warps of
    /// the set, and none of them reads the one before it any more.
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
    static constexpr uint32_t kSlotBytes = Config::kTileKeys * Config::kKvPitch * 2;

    __device__ __forceinline__ static void advance(uint32_t& slot) {
        slot = slot == (Config::kSlots - 1) * kSlotBytes ? 0 : slot + kSlotBytes;
    }

    template <int kColumns>
    __device__ __forceinline__ TileCopy<Config, kColumns> begin(
        const KvRows<Config>& rows, const typename Config::CacheElement* tensor,
        const TensorStrides& strides, int units, bool exists) {
        TileCopy<Config, kColumns> copy;
        if (!exists) return copy;
        copy.destination =
            first_slot_ + write_ +
            static_cast<uint32_t>((rows.first_row + row_) * Config::kKvPitch * 2 + unit_ * 16);
        copy.own_units = units - unit_;
        advance(write_);
        tensor += unit_ * Config::kUnitColumns;
        if (rows.pages != nullptr) {
            const int last = static_cast<int>(params_.cache.num_entries) - 1;
            const int entry = max(min(rows.entry, last), 0);
            const int64_t offset = entry * strides.batch + rows.row * strides.row;
#pragma unroll
            for (int i = 0; i < copy.kRows; ++i) {
                copy.source[i] =
                    tensor + __shfl_sync(0xffffffffu, offset, Config::kRowsPerCopy * i + row_);
            }
        } else {
            const int64_t position = rows.first_position + rows.first_key + row_;
            copy.source[0] = tensor + position * strides.row;
#pragma unroll
            for (int i = 1; i < copy.kRows; ++i) {
                copy.source[i] = copy.source[i - 1] + Config::kRowsPerCopy * strides.row;
            }
        }
        copy.waits = rows.is_whole();
        if (!copy.waits) {
#pragma unroll
            for (int i = 0; i < copy.kSteps; ++i) {
                const int key = rows.first_key + i / copy.kUnits * Config::kRowsPerCopy + row_;
                copy.copy(i, key >= rows.key_begin && key < rows.key_end);
            }
        }
        return copy;
    }

    const SplitParams& params_;
    uint32_t first_slot_;
    uint32_t read_ = 0, write_ = 0;  // bytes
    int unit_, row_;                 // this lane's
};

/// All steps of a copy.
template <class Copy>
__device__ __forceinline__ void copy_tile(const Copy& copy) {
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) copy.step(i);
    ptx::cp_async_commit_group();
}

}  // namespace decode
}  // namespace flash_attn_norm
