#pragma once

#include <cstdint>

#include "attention/decode/float8_products.cuh"
#include "attention/decode/packed_scores.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/sm90a/float8_tile.cuh"
#include "attention/decode/sm90a/kv_tiles.cuh"
#include "attention/decode/sm90a/tall_config.h"
#include "attention/decode/sm90a/warpgroup_rows.cuh"
#include "attention/decode/warp_products.cuh"
#include "attention/sm90/warpgroup_mma.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace flash_attn_norm {
namespace decode {

/// The tiles of keys and values that are multiplied: a stage's own, or what is made of a float8
/// one by the threads of all consumers. `stage` and `parity` are those of the tile in use; keys of
/// a float8 cache are converted a tile ahead.
template <class Config>
class TallTiles {
  public:
    using Storage = TallSharedStorage<Config>;

    __device__ __forceinline__ explicit TallTiles(Storage& shared) : shared_(shared) {}

    __device__ __forceinline__ unsigned char* keys() const {
        return Config::kFloat8 ? shared_.operands() : shared_.tiles() + stage_ * kStageBytes;
    }
    __device__ __forceinline__ unsigned char* values() const {
        return Config::kFloat8 ? shared_.operands() + Config::KvTile::kBytes
                               : shared_.tiles() + stage_ * kStageBytes + Config::Tile::kBytes;
    }

    __device__ __forceinline__ void wait_keys() const {
        ptx::mbarrier_wait(ptx::shared_address(&shared_.k_full[stage_]), parity_);
    }
    __device__ __forceinline__ void wait_values() const {
        ptx::mbarrier_wait(ptx::shared_address(&shared_.v_full[stage_]), parity_);
    }
    __device__ __forceinline__ void release_keys() const { release(shared_.k_empty); }
    __device__ __forceinline__ void release_values() const { release(shared_.v_empty); }

    /// float8 alone: waits for a tile, writes it as float16 and frees its stage. Of values only
    /// those of rows [begin, end). sync() comes before the products.
    __device__ __forceinline__ void convert_keys() const {
        wait_keys();
        convert(shared_.tiles() + stage_ * kStageBytes, keys(), 0, Config::kTileKeys);
        release_keys();
    }
    __device__ __forceinline__ void convert_values(int begin, int end) const {
        wait_values();
        convert(shared_.tiles() + stage_ * kStageBytes + Config::Tile::kBytes, values(), begin,
                end);
        release_values();
    }
    /// All consumers have converted their parts, and read what is to be overwritten next.
    __device__ __forceinline__ static void sync() {
        ptx::fence_proxy_async_shared();
        ptx::bar_sync(1, Config::kConsumerThreads);
    }

    __device__ __forceinline__ void next() {
        if (++stage_ == Config::kStages) stage_ = 0, parity_ ^= 1;
    }

  private:
    static constexpr int kStageBytes = Config::kStageBytes;

    __device__ __forceinline__ void release(uint64_t* empty) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[stage_]));
    }
    __device__ __forceinline__ static void convert(const unsigned char* source,
                                                   unsigned char* destination, int begin, int end) {
        convert_float8_tile<typename Config::Tile, typename Config::KvTile,
                            Config::kConsumerThreads>(source, destination, begin, end,
                                                      static_cast<int>(threadIdx.x));
    }

    Storage& shared_;
    int stage_ = 0;
    uint32_t parity_ = 0;
};

/// Q in shared memory, for all consumers.
template <class Config>
__device__ __forceinline__ void load_tall_queries(TallSharedStorage<Config>& shared,
                                                  const SplitParams& params,
                                                  const SplitBlock& block) {
    const int thread = static_cast<int>(threadIdx.x);
    const auto place = [&](int row, int unit) {
        return reinterpret_cast<uint16_t*>(shared.q + Config::QTile::unit_offset(row, unit));
    };
    if constexpr (Config::kFloat8) {
        load_float8_queries<Config::kHeadDim, ColumnOrder::kPlain>(
            params, block, Config::kBlockM, thread / 32, Config::kConsumerThreads / 32,
            key_factor<Config>(params, block), shared.score_factor, place);
    } else {
        load_queries<Config::kHeadDim>(params, block, Config::kBlockM, thread,
                                       Config::kConsumerThreads, place);
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(1, Config::kConsumerThreads);
}

/// O += softmax(Q K^T) V over `tiles`.
template <class Config>
__device__ __forceinline__ void consume_tall_tiles(TallSharedStorage<Config>& shared,
                                                   WarpgroupRows<Config::kTilesD>& warp,
                                                   const PackedRows& rows, int first_position,
                                                   const BlockKeys& block_keys,
                                                   const KeyRange& tiles, float scale_log2) {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KvTile = typename Config::KvTile;
    const uint64_t q = QTile::column_descriptor(
        ptx::shared_address(shared.q + warp.warpgroup * 64 * QTile::kRowBytes));
    TallTiles<Config> kv(shared);
    if constexpr (Config::kFloat8) {
        kv.convert_keys();
        kv.sync();
    }
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const int position = tile * Config::kTileKeys, first_key = position - first_position;

        // S = Q K^T, and beside its products the conversion of V
        float acc_s[1][Config::kTilesN][4];
        if constexpr (!Config::kFloat8) kv.wait_keys();
        ptx::wgmma_fence();
        sm90::gemm_columns<Element, QTile, KvTile>(
            acc_s, q, KvTile::column_descriptor(ptx::shared_address(kv.keys())));
        ptx::wgmma_commit_group();
        if constexpr (Config::kFloat8) {
            kv.convert_values(block_keys.positions.begin - position,
                              block_keys.positions.end - position);
        }
        ptx::wgmma_wait_group<0>();
        if constexpr (Config::kFloat8) {
            scale_scores(acc_s, {shared.score_factor[warp.row], shared.score_factor[warp.row + 8]});
        } else {
            kv.release_keys();
        }

        // P = exp2(S * scale_log2 - row_max); older output shrinks by the same factor
        const bool is_whole = first_key >= block_keys.full.begin &&
                              first_key + Config::kTileKeys <= block_keys.full.end;
        uint32_t p[Config::kTileKeys / 4];
        weigh<Element>(p, acc_s, warp, rows, first_key, is_whole, scale_log2);

        // O += P V, and beside its products the conversion of the next K
        if constexpr (Config::kFloat8) {
            kv.sync();  // V is there, and K read by all
        } else {
            kv.wait_values();
            if (!is_whole) {
                clear_unseen_rows<KvTile>(kv.values(), position, block_keys.positions,
                                          warp.warpgroup);
            }
        }
        ptx::wgmma_fence();
        sm90::gemm_rows<Element, KvTile>(warp.acc_o, p,
                                         KvTile::row_descriptor(ptx::shared_address(kv.values())));
        ptx::wgmma_commit_group();
        if constexpr (Config::kFloat8) {
            kv.next();
            if (tile + 1 < tiles.end) kv.convert_keys();
            ptx::wgmma_wait_group<0>();
            kv.sync();  // the next K is there, and V read by all
        } else {
            ptx::wgmma_wait_group<0>();
            kv.release_values();
            kv.next();
        }
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    tall_split_kernel(const __grid_constant__ BulkParams bulk) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<TallSharedStorage<Config>*>(shared_bytes);
    const SplitParams& params = bulk.split;
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) {
        if (ptx::shared_address(shared_bytes) % 1024 != 0) __trap();  // swizzling needs it
        init_kv_stages(bulk, shared, Config::kStages, 4 * Config::kConsumers);
    }
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    SplitBlock block;
    if (!find_block(params, blockIdx.x, Config::kBlockM, block)) return;
    const BlockKeys keys(params, block, Config::kBlockM);
    const KeyRange tiles = split_tiles(keys.positions, Config::kTileKeys, 1,
                                       static_cast<int>(blockIdx.y), params.num_splits);
    __syncthreads();  // the barriers are there

    if (warpgroup == Config::kConsumers) {
        if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_dec<40>();
        if (threadIdx.x < Config::kConsumerThreads + 32 && !tiles.empty()) {
            load_kv_tiles<typename Config::Tile>(bulk, shared, block, keys.positions, tiles,
                                                 Config::kStages);
        }
    } else {
        if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_inc<232>();
        load_tall_queries(shared, params, block);
        WarpgroupRows<Config::kTilesD> warp(warpgroup, 64 * warpgroup, 0);
        const PackedRows rows(params, block, keys.band, warp.row);
        const float scale_log2 = rows.scale_log2();
        if (!tiles.empty()) {
            consume_tall_tiles(shared, warp, rows, block.first_position, keys, tiles, scale_log2);
        }
        store_warpgroup_rows<Config>(warp, params, block, scale_log2,
                                     Config::kFloat8 ? value_factor<Config>(params, block) : 1.0f);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
