#pragma once

#include <cstdint>

#include "attention/cpu/e4m3_table.h"
#include "attention/cpu/tile_engine.h"
#include "attention/cpu/work_items.h"
#include "attention/kv_cache.h"
#include "attention/params.h"
#include "common/cpu_runtime.h"

/// How attention to a key-value cache is cut up, and the memory it works in.
namespace flash_attn_norm {
namespace cpu {

/// A sequence's own lengths: seqlen_k is what the cache holds of it, without its left padding.
inline SeqlenInfo kv_seqlen_info(const KvCacheAttentionParams& params, int64_t batch) {
    const AttentionProblem& problem = params.problem;
    SeqlenInfo info;
    if (problem.is_packed()) {
        const RowRange rows = packed_rows(problem.cu_seqlens_q, batch, problem.total_q);
        info.row_q = rows.begin;
        info.seqlen_q = rows.end - rows.begin;
    } else {
        info.batch = batch;
        info.seqlen_q = problem.seqlen_q;
    }
    const IndexRange positions = kv_positions(params.cache, batch);
    info.seqlen_k = positions.end - positions.begin;
    return info;
}

/// What stays the same for the whole call. A unit is a KV head of a sequence; a chunk is a run of
/// its query rows, of all heads of the group: they share one pass over the keys. Keys are cut into
/// splits where there are too few units and chunks for the threads.
struct KvPlan {
    const KvCacheAttentionParams& params;
    const AttentionProblem& problem;
    const TileEngine& engine;
    const E4m3Table float8;
    int block_m, block_n;
    int head_dim, head_dim_v;  // padded to kPanel
    int64_t num_units, num_chunks, num_splits;
    int64_t chunk_rows;  // query rows of one head
    int64_t tile_rows;   // chunk_rows of all heads of a group, padded to block_m
    int64_t split_keys;  // keys of a split

    KvPlan(const KvCacheAttentionParams& kv_params, const CpuRuntime& runtime)
        : params(kv_params),
          problem(kv_params.problem),
          engine(select_engine(problem.dtype)),
          float8(problem.dtype),
          block_m(engine.fwd_block_m),
          block_n(engine.fwd_block_n),
          head_dim(static_cast<int>(round_up(problem.head_dim, kPanel))),
          head_dim_v(static_cast<int>(round_up(problem.head_dim_v, kPanel))) {
        // Enough rows to make packing a block cheap next to its products; few enough for the
        // caches.
        constexpr int64_t kRows = 512;
        num_units = problem.batch_size * problem.num_heads_kv;
        int64_t longest_q = 1;
        for (int64_t batch = 0; batch < problem.batch_size; ++batch) {
            longest_q = max_of(longest_q, kv_seqlen_info(params, batch).seqlen_q);
        }
        chunk_rows = min_of(longest_q, max_of(kRows / problem.group_size(), 1));
        num_chunks = (longest_q + chunk_rows - 1) / chunk_rows;
        tile_rows = round_up(chunk_rows * problem.group_size(), block_m);
        choose_splits(runtime.num_threads);
    }

    Mask mask(int64_t batch) const { return mask_of(problem, kv_seqlen_info(params, batch)); }

    void choose_splits(int num_threads) {
        // More splits than the GPU's limit would only cost workspace.
        constexpr int64_t kItemsPerThread = 2, kMinKeys = 256, kMaxSplits = 128;
        int64_t longest = 1;
        for (int64_t batch = 0; batch < problem.batch_size; ++batch) {
            const Mask seen = mask(batch);
            for (int64_t row = 0; row < seen.seqlen_q; row += chunk_rows) {
                const IndexRange keys = seen.keys(row, min_of(row + chunk_rows, seen.seqlen_q));
                longest = max_of(longest, keys.end - keys.begin);
            }
        }
        const int64_t items = max_of(num_units * num_chunks, 1);
        const int64_t wanted = params.num_splits > 0
                                   ? min_of(min_of(params.num_splits, kMaxSplits), longest)
                                   : min_of((kItemsPerThread * num_threads + items - 1) / items,
                                            (longest + kMinKeys - 1) / kMinKeys);
        split_keys = round_up((longest + wanted - 1) / wanted, kPanel);
        num_splits = (longest + split_keys - 1) / split_keys;
    }

    int64_t num_items() const { return num_units * num_chunks * num_splits; }
};

/// The softmax state and the sums of weighted values of a chunk's rows, over the keys seen so far.
struct Partial {
    float* acc_o;  // [tile_rows, head_dim_v]
    float *row_max, *row_sum;

    Partial(Arena& arena, const KvPlan& plan) {
        acc_o = arena.take<float>(plan.tile_rows * plan.head_dim_v);
        row_max = arena.take<float>(plan.tile_rows);
        row_sum = arena.take<float>(plan.tile_rows);
    }

    void clear(const KvPlan& plan, int64_t rows) const {
        std::memset(acc_o, 0, static_cast<size_t>(rows * plan.head_dim_v) * sizeof(float));
        for (int64_t r = 0; r < rows; ++r) {
            row_max[r] = -INFINITY;
            row_sum[r] = 0.0f;
        }
    }
};

/// One worker's tiles.
struct KvScratch {
    Partial partial;
    char* q;  // [tile_rows, head_dim]: the chunk's rows of the first head, of the second, ...
    char* k;  // the B form of [head_dim, block_n]
    char* v;  // likewise, [block_n, head_dim_v]
    char* gathered;  // [block_n, head_dim or head_dim_v], rows of several pages, or of a float8
                     // cache in q's dtype
    float* scores;   // [block_m, block_n]
    char* probs;     // [block_m, block_n]
    float* factors;  // [tile_rows]

    KvScratch(Arena& arena, const KvPlan& plan) : partial(arena, plan) {
        const int64_t tile = int64_t{plan.block_m} * plan.block_n;
        const AttentionProblem& problem = plan.problem;
        // Packing writes whole panels of rows: one more behind the last head.
        q = arena.take_operands((plan.tile_rows + kPanel) * plan.head_dim, plan.engine);
        k = arena.take_operands(int64_t{plan.block_n} * plan.head_dim, plan.engine);
        v = arena.take_operands(int64_t{plan.block_n} * plan.head_dim_v, plan.engine);
        gathered = arena.take<char>(int64_t{plan.block_n} * size_of(problem.dtype) *
                                    max_of(problem.head_dim, problem.head_dim_v));
        scores = arena.take<float>(tile);
        probs = arena.take_operands(tile, plan.engine);
        factors = arena.take<float>(plan.tile_rows);
    }
};

/// A chunk of a unit.
struct KvItem {
    const KvPlan& plan;
    int64_t batch, kv_head;
    AttentionProblem problem;  // whose softmax_scale has k_descale in it
    SeqlenInfo info;
    Mask mask;
    int64_t first_position;      // of key 0 in the cache
    int64_t row_begin, row_end;  // query rows of each head

    KvItem(const KvPlan& kv_plan, int64_t chunk, int64_t unit)
        : plan(kv_plan),
          batch(unit / plan.problem.num_heads_kv),
          kv_head(unit % plan.problem.num_heads_kv),
          problem(plan.problem),
          info(kv_seqlen_info(plan.params, batch)),
          mask(mask_of(plan.problem, info)),
          first_position(kv_positions(plan.params.cache, batch).begin),
          row_begin(chunk * plan.chunk_rows),
          row_end(min_of(row_begin + plan.chunk_rows, info.seqlen_q)) {
        problem.softmax_scale *= plan.params.cache.k_descale.of(batch, kv_head);
    }

    bool empty() const { return row_begin >= row_end; }
    int64_t rows_of_head() const { return row_end - row_begin; }
    int64_t rows() const { return rows_of_head() * plan.problem.group_size(); }
    int64_t head(int64_t row) const {
        return kv_head * plan.problem.group_size() + row / rows_of_head();
    }
    /// Keys of one split that any row sees.
    IndexRange keys(int64_t split) const {
        IndexRange seen = mask.keys(row_begin, row_end);
        const int64_t begin = seen.begin + split * plan.split_keys;
        return IndexRange{begin, min_of(begin + plan.split_keys, seen.end)};
    }
};

}  // namespace cpu
}  // namespace flash_attn_norm
