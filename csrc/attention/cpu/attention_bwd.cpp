#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/cpu/bias_gradient.h"
#include "attention/cpu/bwd_plan.h"
#include "attention/cpu/exact_delta.h"
#include "attention/cpu/tile_engine.h"
#include "attention/cpu/work_items.h"

namespace flash_attn_norm {
namespace cpu {

namespace {

/// One work item: the keys of one split of one KV head, with all query heads of its group.
struct BwdItem {
    const BwdPlan& plan;
    const BwdShared& shared;
    const BwdScratch& scratch;
    SeqlenInfo info;
    int64_t batch, kv_head, unit, split;
    int64_t key_begin, key_end;

    /// Block `index` of `elements` operands each.
    char* operands(char* base, int64_t index, int64_t elements) const {
        return base + index * elements * plan.engine.operand_bytes;
    }
    float* dq_of_head(int g) const {
        if (plan.num_splits == 1) return scratch.dq;
        const int64_t index = (unit * plan.problem.group_size() + g) * plan.num_splits + split;
        return shared.partial_dq + index * plan.partial_dq_elements();
    }
};

void pack_keys_and_values(const BwdItem& item) {
    const BwdPlan& plan = item.plan;
    const AttentionBwdParams& params = plan.params;
    const AttentionProblem& problem = plan.problem;
    const TileEngine& engine = plan.engine;
    const int64_t k_elements = int64_t{plan.block_n} * plan.head_dim;
    const int64_t v_elements = int64_t{plan.block_n} * plan.head_dim_v;
    int64_t block = 0;
    for (int64_t key = item.key_begin; key < item.key_end; key += plan.block_n, ++block) {
        const int64_t count = min_of(plan.block_n, item.key_end - key);
        const TensorRows k =
            tensor_rows(params.k, problem.dtype, params.k_strides, item.info.batch,
                        item.info.row_k + key, item.kv_head, count, problem.head_dim);
        const TensorRows v =
            tensor_rows(params.v, problem.dtype, params.v_strides, item.info.batch,
                        item.info.row_k + key, item.kv_head, count, problem.head_dim_v);
        engine.pack_b(k, item.operands(item.scratch.k, block, k_elements),
                      int64_t{plan.block_n} * kPanel);
        engine.pack_b_transposed(k, item.operands(item.scratch.k_t, block, k_elements),
                                 int64_t{plan.head_dim} * kPanel);
        engine.pack_b_transposed(v, item.operands(item.scratch.v_t, block, v_elements),
                                 int64_t{plan.head_dim_v} * kPanel);
    }
    std::memset(item.scratch.dk_t, 0, static_cast<size_t>(block * k_elements) * sizeof(float));
    std::memset(item.scratch.dv_t, 0, static_cast<size_t>(block * v_elements) * sizeof(float));
}

/// Queries and dout of one head for `rows`, and its softmax's terms per row.
void pack_queries(const BwdItem& item, int64_t head, const IndexRange& rows) {
    const BwdPlan& plan = item.plan;
    const BwdScratch& s = item.scratch;
    const int64_t q_elements = int64_t{plan.block_m} * plan.head_dim;
    const int64_t dout_elements = int64_t{plan.block_m} * plan.head_dim_v;
    for (int64_t row = rows.begin; row < rows.end; row += plan.block_m) {
        const int64_t block = row / plan.block_m;
        const int64_t count = min_of(plan.block_m, rows.end - row);
        const QueryRows query = query_rows(plan.params, item.info, head, row, count);
        plan.engine.pack_a(query.q, item.operands(s.q, block, q_elements), plan.head_dim);
        plan.engine.pack_a_transposed(query.q, item.operands(s.q_t, block, q_elements),
                                      plan.block_m);
        plan.engine.pack_a(query.dout, item.operands(s.dout, block, dout_elements),
                           plan.head_dim_v);
        plan.engine.pack_a_transposed(query.dout, item.operands(s.dout_t, block, dout_elements),
                                      plan.block_m);
        softmax_terms(plan.params, item.shared.exact_delta, plan.engine, item.info, head, query,
                      row, s.lse_log2 + row, s.delta + row);
    }
}

/// One tile's share of dk, dv and dq.
void attend_tile(const BwdItem& item, const ScoreTerms& terms, int64_t row, int rows, int64_t key,
                 int keys, float* dq) {
    const BwdPlan& plan = item.plan;
    const BwdScratch& s = item.scratch;
    const TileEngine& engine = plan.engine;
    const int64_t m_block = row / plan.block_m;
    const int64_t n_block = (key - item.key_begin) / plan.block_n;
    const int rows_padded = static_cast<int>(round_up(rows, kPanel));
    const int keys_padded = static_cast<int>(round_up(keys, kPanel));
    const int64_t q_elements = int64_t{plan.block_m} * plan.head_dim;
    const int64_t dout_elements = int64_t{plan.block_m} * plan.head_dim_v;
    const int64_t k_elements = int64_t{plan.block_n} * plan.head_dim;
    const int64_t v_elements = int64_t{plan.block_n} * plan.head_dim_v;
    const int64_t tile_panel = int64_t{plan.block_m} * kPanel;

    // S = Q K^T, dP = dO V^T
    engine.gemm(GemmArgs{item.operands(s.q, m_block, q_elements), plan.head_dim,
                         item.operands(s.k_t, n_block, k_elements), int64_t{plan.head_dim} * kPanel,
                         s.scores, plan.block_n, rows, keys_padded, plan.head_dim,
                         /*accumulate=*/false});
    engine.gemm(GemmArgs{item.operands(s.dout, m_block, dout_elements), plan.head_dim_v,
                         item.operands(s.v_t, n_block, v_elements),
                         int64_t{plan.head_dim_v} * kPanel, s.dprobs, plan.block_n, rows,
                         keys_padded, plan.head_dim_v, /*accumulate=*/false});

    // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta)
    const ScoreTile tile{s.scores, plan.block_n, row, key, rows, keys};
    engine.prepare_scores(terms, tile, s.softcap_factor);
    if (terms.has_dropout) engine.dropout_factors(terms, tile, s.keep);
    GradientTile gradient;
    gradient.lse_log2 = s.lse_log2 + row;
    gradient.delta = s.delta + row;
    gradient.keep = s.keep;
    gradient.softcap_factor = s.softcap_factor;
    gradient.dprobs = s.dprobs;
    gradient.probs_b = s.probs_b;
    gradient.dscores_a = s.dscores_a;
    gradient.dscores_b = s.dscores_b;
    gradient.dscores_lda = plan.block_n;
    gradient.b_panel_stride = tile_panel;
    const auto add_products = [&](OperandPart part) {
        gradient.part = part;
        engine.softmax_gradient(tile, terms.scale_log2(), gradient);

        // dV^T += dO^T P, dK^T += Q^T dS
        engine.gemm(GemmArgs{item.operands(s.dout_t, m_block, dout_elements), plan.block_m,
                             s.probs_b, tile_panel, s.dv_t + n_block * v_elements, plan.block_n,
                             plan.head_dim_v, keys_padded, rows_padded, /*accumulate=*/true});
        engine.gemm(GemmArgs{item.operands(s.q_t, m_block, q_elements), plan.block_m, s.dscores_b,
                             tile_panel, s.dk_t + n_block * k_elements, plan.block_n, plan.head_dim,
                             keys_padded, rows_padded, /*accumulate=*/true});

        // dQ += dS K
        engine.gemm(GemmArgs{s.dscores_a, plan.block_n, item.operands(s.k, n_block, k_elements),
                             int64_t{plan.block_n} * kPanel, dq + row * plan.head_dim,
                             plan.head_dim, rows, plan.head_dim, keys_padded,
                             /*accumulate=*/true});
    };
    if (plan.in_two_parts) {
        add_products(OperandPart::kUpper);
        add_products(OperandPart::kRest);
    } else {
        add_products(OperandPart::kRounded);
    }
}

void store_dq(const BwdPlan& plan, const SeqlenInfo& info, int64_t head, const float* dq,
              int64_t row, int64_t rows) {
    const AttentionProblem& problem = plan.problem;
    const TensorStrides strides =
        contiguous_strides(problem.seqlen_q, problem.num_heads_q, problem.head_dim);
    const int64_t offset = tensor_offset(strides, info.batch, info.row_q + row, head);
    plan.engine.store_rows(dq, plan.head_dim, static_cast<int>(rows), problem.head_dim,
                           problem.softmax_scale, nullptr,
                           static_cast<char*>(plan.params.dq) + offset * size_of(problem.dtype),
                           problem.dtype, strides.row);
}

void store_dk_dv(const BwdItem& item) {
    const BwdPlan& plan = item.plan;
    const AttentionProblem& problem = plan.problem;
    const auto store = [&](const float* gradient, int cols_padded, int cols, float scale,
                           void* dst) {
        const TensorStrides strides =
            contiguous_strides(problem.seqlen_k, problem.num_heads_kv, cols);
        for (int64_t key = item.key_begin; key < item.key_end; key += plan.block_n) {
            const int count = static_cast<int>(min_of(plan.block_n, item.key_end - key));
            const int64_t offset =
                tensor_offset(strides, item.info.batch, item.info.row_k + key, item.kv_head);
            plan.engine.store_transposed(gradient, plan.block_n, cols, count, scale,
                                         static_cast<char*>(dst) + offset * size_of(problem.dtype),
                                         problem.dtype, strides.row);
            gradient += int64_t{plan.block_n} * cols_padded;
        }
    };
    store(item.scratch.dk_t, plan.head_dim, problem.head_dim, problem.softmax_scale,
          plan.params.dk);
    store(item.scratch.dv_t, plan.head_dim_v, problem.head_dim_v, 1.0f, plan.params.dv);
}

/// dS of the sink's column: it has no value vector, so dP = 0 and dS = -P * delta.
double sink_gradient(const BwdPlan& plan, const BwdScratch& scratch, int64_t head, int64_t rows) {
    const double sink_log2 = static_cast<double>(sink_of(plan.problem, head)) * kLog2e;
    double sum = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
        sum -= power_of_two(sink_log2 - scratch.lse_log2[row]) * scratch.delta[row];
    }
    return sum;
}

void run_item(const BwdPlan& plan, const BwdShared& shared, const BwdScratch& scratch,
              int64_t index) {
    const AttentionProblem& problem = plan.problem;
    const int64_t split = index / plan.num_units;
    const int64_t unit = index % plan.num_units;
    const int64_t batch = unit / problem.num_heads_kv;
    const int64_t kv_head = unit % problem.num_heads_kv;
    const SeqlenInfo info = seqlen_info(problem, batch);
    const int64_t key_begin = min_of(split * plan.split_keys, info.seqlen_k);
    const int64_t key_end = min_of(key_begin + plan.split_keys, info.seqlen_k);
    const BwdItem item{plan,    shared, scratch, info,      batch,
                       kv_head, unit,   split,   key_begin, key_end};
    const Mask mask = mask_of(problem, info);
    const bool wants_sink = plan.params.ds_aux != nullptr && split == 0;
    pack_keys_and_values(item);

    for (int g = 0; g < problem.group_size(); ++g) {
        const int64_t head = kv_head * problem.group_size() + g;
        const ScoreTerms terms = score_terms(problem, info, batch, head);
        float* dq = item.dq_of_head(g);
        std::memset(dq, 0, static_cast<size_t>(info.seqlen_q * plan.head_dim) * sizeof(float));
        pack_queries(item, head, IndexRange{0, info.seqlen_q});
        if (wants_sink) {
            shared.ds_aux[batch * problem.num_heads_q + head] =
                sink_gradient(plan, scratch, head, info.seqlen_q);
        }

        for (int64_t key = key_begin; key < key_end; key += plan.block_n) {
            const int keys = static_cast<int>(min_of(plan.block_n, key_end - key));
            const IndexRange seeing = mask.rows(key, key + keys);
            for (int64_t row = seeing.begin / plan.block_m * plan.block_m; row < seeing.end;
                 row += plan.block_m) {
                const int rows = static_cast<int>(min_of(plan.block_m, info.seqlen_q - row));
                attend_tile(item, terms, row, rows, key, keys, dq);
            }
        }
        if (plan.num_splits == 1) store_dq(plan, info, head, dq, 0, info.seqlen_q);
    }
    store_dk_dv(item);
}

/// dq = the sum of its splits' shares, in their order; one item is one block of rows of one head.
void sum_dq_splits(const BwdPlan& plan, const BwdShared& shared, int64_t index) {
    const AttentionProblem& problem = plan.problem;
    const int64_t num_m_blocks = plan.rows / plan.block_m;
    const int64_t row = index % num_m_blocks * plan.block_m;
    const int64_t batch_head = index / num_m_blocks;
    const int64_t head = batch_head % problem.num_heads_q;
    const SeqlenInfo info = seqlen_info(problem, batch_head / problem.num_heads_q);
    const int64_t rows = min_of(plan.block_m, info.seqlen_q - row);
    if (rows <= 0) return;
    // (sequence, query head) counts like (unit, g).
    float* sum = shared.partial_dq + batch_head * plan.num_splits * plan.partial_dq_elements() +
                 row * plan.head_dim;
    for (int64_t split = 1; split < plan.num_splits; ++split) {
        const float* share = sum + split * plan.partial_dq_elements();
        for (int64_t i = 0; i < rows * plan.head_dim; ++i) sum[i] += share[i];
    }
    store_dq(plan, info, head, sum, row, rows);
}

void sum_sink_gradients(const BwdPlan& plan, const BwdShared& shared) {
    const AttentionProblem& problem = plan.problem;
    for (int64_t head = 0; head < problem.num_heads_q; ++head) {
        double sum = 0.0;
        for (int64_t batch = 0; batch < problem.batch_size; ++batch) {
            sum += shared.ds_aux[batch * problem.num_heads_q + head];
        }
        plan.params.ds_aux[head] = static_cast<float>(sum);
    }
}

void write_uncovered_rows(const BwdPlan& plan) {
    const AttentionProblem& problem = plan.problem;
    if (!problem.is_packed()) return;
    const int64_t bytes = size_of(problem.dtype);
    clear_uncovered_rows(problem.cu_seqlens_q, problem.batch_size, problem.total_q,
                         int64_t{problem.num_heads_q} * problem.head_dim * bytes, plan.params.dq);
    clear_uncovered_rows(problem.cu_seqlens_k, problem.batch_size, problem.total_k,
                         int64_t{problem.num_heads_kv} * problem.head_dim * bytes, plan.params.dk);
    clear_uncovered_rows(problem.cu_seqlens_k, problem.batch_size, problem.total_k,
                         int64_t{problem.num_heads_kv} * problem.head_dim_v * bytes,
                         plan.params.dv);
}

struct WorkspaceSizes {
    int64_t shared, worker;

    explicit WorkspaceSizes(const BwdPlan& plan) {
        Arena shared_arena(nullptr), worker_arena(nullptr);
        BwdShared shared_tiles(shared_arena, plan);
        BwdScratch worker_tiles(worker_arena, plan);
        shared = shared_arena.bytes();
        worker =
            max_of(worker_arena.bytes(), bias_gradient_scratch_bytes(plan.params, plan.engine));
        worker = max_of(worker, exact_delta_scratch_bytes(plan.params, plan.engine));
    }
};

}  // namespace

int64_t attention_bwd_workspace_bytes(const AttentionBwdParams& params, const CpuRuntime& runtime) {
    const WorkspaceSizes sizes{BwdPlan(params, runtime)};
    return sizes.shared + sizes.worker * runtime.num_threads;
}

void attention_bwd(const AttentionBwdParams& params, const CpuRuntime& runtime) {
    const BwdPlan plan(params, runtime);
    const WorkspaceSizes sizes(plan);
    Arena shared_arena(params.workspace);
    const BwdShared shared(shared_arena, plan);
    char* worker_memory = static_cast<char*>(params.workspace) + sizes.shared;

    write_uncovered_rows(plan);
    if (shared.exact_delta != nullptr) {
        exact_delta(params, plan.engine, runtime, shared.exact_delta, worker_memory, sizes.worker);
    }
    for_each_item(runtime, plan.engine, plan.num_units * plan.num_splits,
                  [&](int64_t worker, int64_t item) {
                      Arena arena(worker_memory + worker * sizes.worker);
                      run_item(plan, shared, BwdScratch(arena, plan), item);
                  });
    if (plan.num_splits > 1) {
        for_each_item(runtime, plan.engine,
                      plan.num_units * plan.problem.group_size() * (plan.rows / plan.block_m),
                      [&](int64_t, int64_t item) { sum_dq_splits(plan, shared, item); });
    }
    if (params.ds_aux != nullptr) sum_sink_gradients(plan, shared);
    if (params.dattn_bias != nullptr) {
        bias_gradient(params, shared.exact_delta, plan.engine, runtime, worker_memory,
                      sizes.worker);
    }
}

}  // namespace cpu
}  // namespace flash_attn_norm
