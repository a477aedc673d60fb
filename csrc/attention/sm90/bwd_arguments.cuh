#pragma once

#include <cuda_runtime_api.h>

#include "attention/element.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_launch.h"
#include "attention/sm90/encode_tensor_map.h"
#include "attention/sm90/tensor_map.h"
#include "common/dispatch.h"

/// Host code that the launchers of the backward kernels share.
namespace flash_attn_norm {
namespace sm90 {

/// Calls fn(element, general) with the kernel's element type and whether it needs the code for
/// softcap and ALiBi.
template <class Fn>
void with_bwd_body(const AttentionProblem& problem, Fn&& fn) {
    dispatch_bool(has_score_terms(problem), [&](auto is_general) {
        if (problem.dtype == DType::kBFloat16) {
            fn(BFloat16{}, is_general);
        } else {
            fn(Float16{}, is_general);
        }
    });
}

/// The maps of the operands and gradients: copies of tiles of QLayout, DoutLayout, KLayout and
/// VLayout.
template <class QLayout, class DoutLayout, class KLayout, class VLayout>
void map_operands(const AttentionBwdParams& params, BwdArgs& args) {
    const AttentionProblem& problem = params.problem;
    const TensorShape q = query_shape(problem, problem.head_dim);
    const TensorShape out = query_shape(problem, problem.head_dim_v);
    const TensorShape k = key_shape(problem, problem.head_dim);
    const TensorShape v = key_shape(problem, problem.head_dim_v);
    const auto map = [&](auto layout, const TensorShape& shape, const TensorStrides& strides,
                         const void* data) {
        using Layout = decltype(layout);
        return encode_tensor_map(tensor_map_shape<Layout::kColumns>(shape, strides, Layout::kRows),
                                 data, problem.dtype);
    };
    args.q = map(QLayout{}, q, params.q_strides, params.q);
    args.dout = map(DoutLayout{}, out, params.dout_strides, params.dout);
    args.k = map(KLayout{}, k, params.k_strides, params.k);
    args.v = map(VLayout{}, v, params.v_strides, params.v);
    args.dk = map(KLayout{}, k, contiguous_strides(k), params.dk);
    args.dv = map(VLayout{}, v, contiguous_strides(v), params.dv);
}

/// All but the maps. Returns the number of tiles, which can_run_bwd() bounds.
inline int fill_bwd_args(const AttentionBwdParams& params, const BwdPlan& plan, int tile_keys,
                         int tiles_at_once, BwdArgs& args) {
    args.order = bwd_tile_order(params.problem, plan.head_splits, tile_keys, tiles_at_once);
    args.params = params;
    args.workspace = plan.carve(params);
    args.first_stores_dq = bwd_pass_options(params).first_stores_dq;
    args.rotates_queries =
        args.first_stores_dq && !params.deterministic && !has_score_terms(params.problem);
    args.dq_units = plan.dq_units;
    args.units_ahead = plan.units_ahead;
    args.head_splits = plan.head_splits;
    args.heads_per_split = params.problem.group_size() / plan.head_splits;
    args.by_heads = Divisor::of(params.problem.num_heads_kv * plan.head_splits);
    const BlockSlots queries = BlockSlots::queries(params.problem, plan.block_m);
    const BlockSlots keys = BlockSlots::keys(params.problem, plan.block_n);
    args.query_tiles_per_head = static_cast<int>(queries.count());
    args.query_tiles_per_sequence = static_cast<int>(queries.blocks_per_entry());
    args.key_tiles_per_head = static_cast<int>(keys.count());
    args.key_tiles_per_sequence = static_cast<int>(keys.blocks_per_entry());
    args.tiles = static_cast<int>(int64_t{args.order.units} * args.order.blocks);
    return args.tiles;
}

/// CTAs (or clusters) that share a K/V head's group, so that `tiles_at_once` of them have work. A
/// split adds in any order, so deterministic sums have none.
inline int bwd_head_splits(const AttentionBwdParams& params, int tile_keys, int tiles_at_once) {
    if (params.deterministic) return 1;
    const AttentionProblem& problem = params.problem;
    const int64_t tiles = BlockSlots::keys(problem, tile_keys).count() * problem.num_heads_kv;
    const bool masked = problem.window_left >= 0 || problem.window_right >= 0;
    return head_splits(problem.group_size(), tiles, masked ? 2 * tiles_at_once : tiles_at_once);
}

/// BwdPlan::dq_units: not 0 where it is measured to pay that the main kernel rounds dQ. One tile's
/// CTAs round a unit while the others go on, and in the end all wait for the last one: not where
/// units are few, or large by their groups. Under a mask the first part is stored, which saves the
/// zeros too; in packed problems a unit is a head of all sequences.
inline int bwd_dq_units(const AttentionBwdParams& params, int head_splits, int tile_keys,
                        int tiles_at_once) {
    const AttentionProblem& problem = params.problem;
    const bool masked = problem.window_left >= 0 || problem.window_right >= 0;
    if (masked || problem.is_packed() || params.deterministic) return 0;
    if (problem.group_size() > head_splits || bwd_pass_options(params).first_stores_dq) return 0;
    const BwdTileOrder order = bwd_tile_order(problem, head_splits, tile_keys, tiles_at_once);
    return order.units < tiles_at_once / 3 ? 0 : order.places(tiles_at_once);
}

/// BwdPlan::units_ahead: not 0 where sums start from zeros and enough units come after the first
/// ones.
inline int bwd_units_ahead(const AttentionBwdParams& params, const BwdPlan& plan, int tile_keys,
                           int tiles_at_once) {
    const AttentionProblem& problem = params.problem;
    if (problem.is_packed() || params.deterministic || plan.dq_units > 0) return 0;
    if (bwd_pass_options(params).first_stores_dq) return 0;
    const BwdTileOrder order = bwd_tile_order(problem, plan.head_splits, tile_keys, tiles_at_once);
    const int ahead = order.at_work(tiles_at_once);
    return ahead < order.units ? ahead : 0;
}

}  // namespace sm90
}  // namespace flash_attn_norm
