#pragma once

#include <cstdint>

#include "attention/decode/row_total.cuh"
#include "attention/decode/sm90a/bulk_config.h"
#include "attention/decode/split_output.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace decode {

/// Four columns of a row, summed over the sets.
template <class Config>
__device__ __forceinline__ float4 four_of_sets(BulkSharedStorage<Config>& shared, int sets, int row,
                                               int unit) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int set = 0; set < sets; ++set) {
        const float4 part =
            *reinterpret_cast<const float4*>(shared.out(set) + row * Config::kPitchOut + unit * 4);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    return sum;
}

/// Adds up the shares of all splits of a row tile, which are a cluster, and writes the rows: each
/// CTA does so for an equal part of them, which the others send to its shared memory.
template <class Config>
__device__ __forceinline__ void store_output_of_cluster(BulkSharedStorage<Config>& shared, int sets,
                                                        const SplitParams& params,
                                                        const SplitBlock& block) {
    const int rank = static_cast<int>(ptx::cluster_cta_rank()), size = params.num_splits;
    const int rows = min(block.num_rows, Config::kBlockM), units = params.head_units_v * 2;
    const int items = rows * units, share = (items + size - 1) / size;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);

    ptx::cluster_wait();  // all CTAs have begun
    for (int i = thread; i < size * rows; i += threads) {
        const int owner = i / rows, row = i - owner * rows;
        ptx::st_cluster_v2_f32(ptx::mapa(ptx::shared_address(&shared.part_total[rank][row]),
                                         static_cast<uint32_t>(owner)),
                               shared.total_max[row], shared.total_sum[row]);
    }
    for (int i = thread; i < items; i += threads) {
        const int owner = i / share, row = i / units;
        ptx::st_cluster_v4_f32(
            ptx::mapa(ptx::shared_address(&shared.part[rank * share + i - owner * share]),
                      static_cast<uint32_t>(owner)),
            four_of_sets(shared, sets, row, i - row * units));
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();

    const bool covered = block.batch < params.batch_size;
    for (int i = thread; i < share && rank * share + i < items; i += threads) {
        const int row = (rank * share + i) / units, unit = rank * share + i - row * units;
        RowTotal total;
        total.max = negative_infinity();
        for (int other = 0; other < size; ++other) {
            total.max = fmaxf(total.max, shared.part_total[other][row].x);
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int other = 0; other < size; ++other) {
            const float2 part_total = shared.part_total[other][row];
            if (part_total.y == 0.0f) continue;  // it has seen no key and sent anything
            const float weight = ptx::ex2_approx(part_total.x - total.max);
            const float4 part = shared.part[other * share + i];
            total.sum = fmaf(weight, part_total.y, total.sum);
            sum.x = fmaf(weight, part.x, sum.x), sum.y = fmaf(weight, part.y, sum.y);
            sum.z = fmaf(weight, part.z, sum.z), sum.w = fmaf(weight, part.w, sum.w);
        }
        const PackedRow packed = block.packed_row(params.group_size, row);
        float normalizer;
        const float lse = total.finish(sink_of(params, covered, packed.head), normalizer);
        if (unit == 0) {
            params.softmax_lse[lse_index(params, block.row_q + packed.row, block.batch,
                                         packed.head)] = lse;
        }
        const int64_t place = (block.row_q + packed.row) * params.num_heads_q + packed.head;
        static_cast<uint2*>(params.out)[place * units + unit] =
            make_uint2(pack_output<Config>(params, sum.x * normalizer, sum.y * normalizer),
                       pack_output<Config>(params, sum.z * normalizer, sum.w * normalizer));
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
