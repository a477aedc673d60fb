#include <cmath>
#include <cstdint>

#include "attention/attention.h"
#include "attention/cpu/tile_engine.h"
#include "attention/cpu/work_items.h"

namespace flash_attn_norm {
namespace cpu {

namespace {

/// What stays the same for the whole call.
struct FwdPlan {
    const AttentionFwdParams& params;
    const AttentionProblem& problem;
    const TileEngine& engine;
    int block_m, block_n;
    int head_dim, head_dim_v;  // padded to kPanel
    MaxSeqlens longest;
    int64_t num_units;  // (sequence, KV head)
    int64_t num_chunks;
    int64_t chunk_rows;

    FwdPlan(const AttentionFwdParams& fwd_params, const CpuRuntime& runtime)
        : params(fwd_params),
          problem(fwd_params.problem),
          engine(select_engine(problem.dtype)),
          block_m(engine.fwd_block_m),
          block_n(engine.fwd_block_n),
          head_dim(static_cast<int>(round_up(problem.head_dim, kPanel))),
          head_dim_v(static_cast<int>(round_up(problem.head_dim_v, kPanel))),
          longest(max_seqlens(problem)) {
        num_units = problem.batch_size * problem.num_heads_kv;
        // An item is a run of query rows of all query heads of one KV head, whose keys and values
        // it packs. Shorter runs balance better; kMinRows keeps packing cheap next to the products.
        constexpr int64_t kMinRows = 512, kItemsPerThread = 8;
        const int64_t rows = max_of(longest.q, 1);
        const int64_t wanted =
            num_units == 0 ? 1 : kItemsPerThread * runtime.num_threads / num_units;
        const int64_t most = max_of(rows * problem.group_size() / kMinRows, 1);
        const int64_t count = max_of(min_of(wanted, most), 1);
        chunk_rows = round_up((rows + count - 1) / count, block_m);
        num_chunks = (rows + chunk_rows - 1) / chunk_rows;
    }
};

/// One worker's tiles.
struct FwdScratch {
    char* q;        // [block_m, head_dim]
    char* k;        // one block after the other, each the B form of [head_dim, block_n]
    char* v;        // likewise, [block_n, head_dim_v]
    float* scores;  // [block_m, block_n]
    char* probs;    // [block_m, block_n]
    float* keep;    // [block_m, block_n], with dropout
    float* acc_o;   // [block_m, head_dim_v]
    float *row_max, *row_sum, *correction;

    FwdScratch(Arena& arena, const FwdPlan& plan) {
        const int64_t keys = round_up(plan.longest.k, plan.block_n);
        const int64_t tile = int64_t{plan.block_m} * plan.block_n;
        q = arena.take_operands(int64_t{plan.block_m} * plan.head_dim, plan.engine);
        k = arena.take_operands(keys * plan.head_dim, plan.engine);
        v = arena.take_operands(keys * plan.head_dim_v, plan.engine);
        scores = arena.take<float>(tile);
        probs = arena.take_operands(tile, plan.engine);
        keep = plan.problem.dropout_p > 0.0f ? arena.take<float>(tile) : nullptr;
        acc_o = arena.take<float>(int64_t{plan.block_m} * plan.head_dim_v);
        row_max = arena.take<float>(plan.block_m);
        row_sum = arena.take<float>(plan.block_m);
        correction = arena.take<float>(plan.block_m);
    }
};

/// The part of a work item that all of its query tiles share.
struct FwdItem {
    const FwdPlan& plan;
    const FwdScratch& scratch;
    SeqlenInfo info;
    int64_t batch, kv_head;
    Mask mask;
    IndexRange keys;    // seen by any of the item's rows
    bool has_one_tile;  // of query rows: each block is packed when it is used, still in cache

    char* k_block(int64_t n_block) const {
        const int64_t elements = int64_t{plan.block_n} * plan.head_dim;
        return scratch.k + slot(n_block) * elements * plan.engine.operand_bytes;
    }
    char* v_block(int64_t n_block) const {
        const int64_t elements = int64_t{plan.block_n} * plan.head_dim_v;
        return scratch.v + slot(n_block) * elements * plan.engine.operand_bytes;
    }
    int64_t slot(int64_t n_block) const {
        return has_one_tile ? 0 : n_block - keys.begin / plan.block_n;
    }
};

void pack_keys_and_values(const FwdItem& item, int64_t n_block) {
    const FwdPlan& plan = item.plan;
    const AttentionFwdParams& params = plan.params;
    const AttentionProblem& problem = plan.problem;
    const int64_t key = n_block * plan.block_n;
    const int64_t count = min_of(plan.block_n, item.keys.end - key);
    const auto rows_of = [&](const void* data, const TensorStrides& strides, int cols) {
        return tensor_rows(data, problem.dtype, strides, item.info.batch, item.info.row_k + key,
                           item.kv_head, count, cols);
    };
    plan.engine.pack_b_transposed(rows_of(params.k, params.k_strides, problem.head_dim),
                                  item.k_block(n_block), int64_t{plan.head_dim} * kPanel);
    plan.engine.pack_b(rows_of(params.v, params.v_strides, problem.head_dim_v),
                       item.v_block(n_block), int64_t{plan.block_n} * kPanel);
}

void pack_all_keys_and_values(const FwdItem& item) {
    const IndexRange& keys = item.keys;
    const int64_t block_n = item.plan.block_n;
    for (int64_t n_block = keys.begin / block_n; n_block * block_n < keys.end; ++n_block) {
        pack_keys_and_values(item, n_block);
    }
}

/// acc_o and the softmax state of rows [row, row + rows) after all keys that they see.
void attend_to_keys(const FwdItem& item, const ScoreTerms& terms, int64_t row, int rows) {
    const FwdPlan& plan = item.plan;
    const FwdScratch& s = item.scratch;
    const TileEngine& engine = plan.engine;
    const SoftmaxState state{s.row_max, s.row_sum, s.correction};
    for (int r = 0; r < rows; ++r) {
        s.row_max[r] = -INFINITY;
        s.row_sum[r] = 0.0f;
    }

    const IndexRange keys = item.mask.keys(row, row + rows);
    const int64_t first_n_block = keys.begin / plan.block_n;
    for (int64_t n_block = first_n_block; n_block * plan.block_n < keys.end; ++n_block) {
        const int64_t key = n_block * plan.block_n;
        const int num_keys = static_cast<int>(min_of(plan.block_n, keys.end - key));
        const int num_keys_padded = static_cast<int>(round_up(num_keys, kPanel));
        const ScoreTile tile{s.scores, plan.block_n, row, key, rows, num_keys};
        if (item.has_one_tile) pack_keys_and_values(item, n_block);

        // S = Q K^T
        engine.gemm(GemmArgs{s.q, plan.head_dim, item.k_block(n_block),
                             int64_t{plan.head_dim} * kPanel, s.scores, plan.block_n, rows,
                             num_keys_padded, plan.head_dim, /*accumulate=*/false});

        // P = exp2((S - row_max) * scale_log2); older output shrinks by the same factor
        engine.prepare_scores(terms, tile, nullptr);
        if (terms.has_dropout) engine.dropout_factors(terms, tile, s.keep);
        engine.softmax_update(tile, terms.scale_log2(), state, s.keep, s.probs, plan.block_n);

        // O += P V
        const bool is_first = n_block == first_n_block;
        if (!is_first)
            engine.scale_rows(s.acc_o, plan.head_dim_v, rows, plan.head_dim_v, s.correction);
        engine.gemm(GemmArgs{s.probs, plan.block_n, item.v_block(n_block),
                             int64_t{plan.block_n} * kPanel, s.acc_o, plan.head_dim_v, rows,
                             plan.head_dim_v, num_keys_padded, /*accumulate=*/!is_first});
    }
    if (keys.empty()) {
        for (int64_t i = 0; i < int64_t{rows} * plan.head_dim_v; ++i) s.acc_o[i] = 0.0f;
    }
}

/// out = acc_o / row_sum, with the sink as one more term of the sum.
void store_output(const FwdItem& item, int64_t head, int64_t row, int rows) {
    const FwdPlan& plan = item.plan;
    const FwdScratch& s = item.scratch;
    const AttentionProblem& problem = plan.problem;
    float* lse = plan.params.softmax_lse + lse_offset(problem, item.info, head) + row;
    finish_softmax(problem, head, rows, s.row_max, s.row_sum, s.correction, lse);
    const TensorStrides strides =
        contiguous_strides(problem.seqlen_q, problem.num_heads_q, problem.head_dim_v);
    const int64_t offset = tensor_offset(strides, item.info.batch, item.info.row_q + row, head);
    char* out = static_cast<char*>(plan.params.out) + offset * size_of(problem.dtype);
    const float keep_scale = 1.0f / (1.0f - problem.dropout_p);
    plan.engine.store_rows(s.acc_o, plan.head_dim_v, rows, problem.head_dim_v, keep_scale,
                           s.correction, out, problem.dtype, strides.row);
}

void run_item(const FwdPlan& plan, const FwdScratch& scratch, int64_t index) {
    const AttentionProblem& problem = plan.problem;
    // Under a causal mask the last rows have most to do, so they come first.
    const int64_t chunk = plan.num_chunks - 1 - index / plan.num_units;
    const int64_t unit = index % plan.num_units;
    const int64_t batch = unit / problem.num_heads_kv;
    const int64_t kv_head = unit % problem.num_heads_kv;
    const SeqlenInfo info = seqlen_info(problem, batch);
    const int64_t row_begin = chunk * plan.chunk_rows;
    const int64_t row_end = min_of(row_begin + plan.chunk_rows, info.seqlen_q);
    if (row_begin >= row_end) return;

    const Mask mask = mask_of(problem, info);
    const IndexRange keys = mask.keys(row_begin, row_end);
    const bool has_one_tile = problem.group_size() == 1 && row_end - row_begin <= plan.block_m;
    const FwdItem item{plan, scratch, info, batch, kv_head, mask, keys, has_one_tile};
    if (!has_one_tile) pack_all_keys_and_values(item);
    for (int g = 0; g < problem.group_size(); ++g) {
        const int64_t head = kv_head * problem.group_size() + g;
        ScoreTerms terms = score_terms(problem, info, batch, head);
        terms.keep_scale = 1.0f;  // the output gets it, since probabilities are rounded before
        for (int64_t row = row_begin; row < row_end; row += plan.block_m) {
            const int rows = static_cast<int>(min_of(plan.block_m, row_end - row));
            plan.engine.pack_a(
                tensor_rows(plan.params.q, problem.dtype, plan.params.q_strides, info.batch,
                            info.row_q + row, head, rows, problem.head_dim),
                scratch.q, plan.head_dim);
            attend_to_keys(item, terms, row, rows);
            store_output(item, head, row, rows);
        }
    }
}

int64_t scratch_bytes(const FwdPlan& plan) {
    Arena arena(nullptr);
    FwdScratch scratch(arena, plan);
    return arena.bytes();
}

void run_items(const FwdPlan& plan, const CpuRuntime& runtime, char* worker_memory,
               int64_t worker_bytes) {
    for_each_item(runtime, plan.engine, plan.num_units * plan.num_chunks,
                  [&](int64_t worker, int64_t item) {
                      Arena arena(worker_memory + worker * worker_bytes);
                      run_item(plan, FwdScratch(arena, plan), item);
                  });
}

}  // namespace

int64_t attention_fwd_workspace_bytes(const AttentionFwdParams& params, const CpuRuntime& runtime) {
    return scratch_bytes(FwdPlan(params, runtime)) * runtime.num_threads;
}

void attention_fwd(const AttentionFwdParams& params, const CpuRuntime& runtime) {
    const FwdPlan plan(params, runtime);
    write_uncovered_results(plan.problem, params.out, params.softmax_lse);
    run_items(plan, runtime, static_cast<char*>(params.workspace), scratch_bytes(plan));
}

}  // namespace cpu
}  // namespace flash_attn_norm
