#include "attention/cpu/bias_gradient.h"

#include <cmath>
#include <cstring>

#include "attention/lse_log2.h"

namespace flash_attn_norm {
namespace cpu {

QueryRows query_rows(const AttentionBwdParams& params, const SeqlenInfo& info, int64_t head,
                     int64_t row, int64_t rows) {
    const AttentionProblem& problem = params.problem;
    const TensorStrides out_strides =
        contiguous_strides(problem.seqlen_q, problem.num_heads_q, problem.head_dim_v);
    const auto rows_of = [&](const void* data, DType dtype, const TensorStrides& strides,
                             int cols) {
        return tensor_rows(data, dtype, strides, info.batch, info.row_q + row, head, rows, cols);
    };
    return QueryRows{rows_of(params.q, problem.dtype, params.q_strides, problem.head_dim),
                     rows_of(params.dout, problem.dtype, params.dout_strides, problem.head_dim_v),
                     rows_of(params.out, problem.dtype, out_strides, problem.head_dim_v)};
}

void softmax_terms(const AttentionBwdParams& params, const float* exact_delta,
                   const TileEngine& engine, const SeqlenInfo& info, int64_t head,
                   const QueryRows& query, int64_t row, float* lse_log2, float* delta) {
    const int rows = query.q.rows;
    const int64_t offset = lse_offset(params.problem, info, head) + row;
    if (exact_delta != nullptr) {
        std::memcpy(delta, exact_delta + offset, static_cast<size_t>(rows) * sizeof(float));
    } else if (params.dout != nullptr) {
        engine.dot_rows(query.dout, query.out, delta);
    } else {
        std::memset(delta, 0, static_cast<size_t>(rows) * sizeof(float));
    }
    for (int r = 0; r < rows; ++r) {
        const float lse = params.softmax_lse[offset + r];
        if (lse == -INFINITY) {
            lse_log2[r] = INFINITY;
            delta[r] = 0.0f;
            continue;
        }
        lse_log2[r] = lse_log2_of(lse);
        if (params.dsoftmax_lse != nullptr) delta[r] -= params.dsoftmax_lse[offset + r];
    }
}

namespace {

/// How dattn_bias is cut into work items: where the bias is broadcast, one item sums over all.
struct BiasPlan {
    const AttentionBwdParams& params;
    const float* exact_delta = nullptr;
    const AttentionProblem& problem;
    const TileEngine& engine;
    int block_m, block_n, head_dim, head_dim_v;
    bool sums_batches, sums_heads, sums_rows;
    int64_t num_batches, num_heads, num_m_blocks, num_n_blocks;  // of work items

    BiasPlan(const AttentionBwdParams& bwd_params, const TileEngine& tile_engine)
        : params(bwd_params),
          problem(bwd_params.problem),
          engine(tile_engine),
          block_m(tile_engine.bwd_block_m),
          block_n(tile_engine.bwd_block_n),
          head_dim(static_cast<int>(round_up(problem.head_dim, kPanel))),
          head_dim_v(static_cast<int>(round_up(problem.head_dim_v, kPanel))) {
        const BiasStrides& strides = params.dattn_bias_strides;
        const MaxSeqlens longest = max_seqlens(problem);
        sums_rows = strides.row == 0;
        sums_heads = strides.head == 0;
        // A packed bias has rows of each sequence apart, unless it is the same for all rows.
        sums_batches = problem.is_packed() ? sums_rows : strides.batch == 0;
        num_batches = sums_batches ? 1 : problem.batch_size;
        num_heads = sums_heads ? 1 : problem.num_heads_q;
        num_m_blocks = sums_rows ? 1 : (longest.q + block_m - 1) / block_m;
        num_n_blocks = (longest.k + block_n - 1) / block_n;
    }

    int64_t num_items() const { return num_batches * num_heads * num_m_blocks * num_n_blocks; }
    int64_t elements() const {
        const int64_t rows = problem.is_packed() ? problem.total_q : problem.seqlen_q;
        const BiasStrides& strides = params.dattn_bias_strides;
        const int64_t batches = problem.is_packed() || strides.batch == 0 ? 1 : problem.batch_size;
        return batches * num_heads * (sums_rows ? 1 : rows) * problem.bias_columns;
    }
};

struct BiasScratch {
    char *q, *dout;   // [block_m, head_dim], [block_m, head_dim_v]
    char *k_t, *v_t;  // B form of [head_dim, block_n], [head_dim_v, block_n]
    float *scores, *dprobs, *keep, *softcap_factor, *dbias;  // [block_m, block_n]
    float* dbias_of_tile;                                    // [block_n]
    float *lse_log2, *delta;                                 // [block_m]

    BiasScratch(Arena& arena, const BiasPlan& plan) {
        const int64_t tile = int64_t{plan.block_m} * plan.block_n;
        q = arena.take_operands(int64_t{plan.block_m} * plan.head_dim, plan.engine);
        dout = arena.take_operands(int64_t{plan.block_m} * plan.head_dim_v, plan.engine);
        k_t = arena.take_operands(int64_t{plan.block_n} * plan.head_dim, plan.engine);
        v_t = arena.take_operands(int64_t{plan.block_n} * plan.head_dim_v, plan.engine);
        scores = arena.take<float>(tile);
        dprobs = arena.take<float>(tile);
        keep = plan.problem.dropout_p > 0.0f ? arena.take<float>(tile) : nullptr;
        softcap_factor = nullptr;  // the bias is added after the softcap
        dbias = arena.take<float>(tile);
        dbias_of_tile = arena.take<float>(plan.block_n);
        lse_log2 = arena.take<float>(plan.block_m);
        delta = arena.take<float>(plan.block_m);
    }
};

void pack_keys_and_values(const BiasPlan& plan, const BiasScratch& s, const SeqlenInfo& info,
                          int64_t kv_head, int64_t key, int64_t keys) {
    const AttentionBwdParams& params = plan.params;
    const DType dtype = plan.problem.dtype;
    plan.engine.pack_b_transposed(
        tensor_rows(params.k, dtype, params.k_strides, info.batch, info.row_k + key, kv_head, keys,
                    plan.problem.head_dim),
        s.k_t, int64_t{plan.head_dim} * kPanel);
    plan.engine.pack_b_transposed(
        tensor_rows(params.v, dtype, params.v_strides, info.batch, info.row_k + key, kv_head, keys,
                    plan.problem.head_dim_v),
        s.v_t, int64_t{plan.head_dim_v} * kPanel);
}

/// Adds dS of one tile to the scratch's dbias.
void add_tile(const BiasPlan& plan, const BiasScratch& s, const SeqlenInfo& info,
              const ScoreTerms& terms, int64_t head, int64_t row, int rows, int64_t key, int keys) {
    const TileEngine& engine = plan.engine;
    const int keys_padded = static_cast<int>(round_up(keys, kPanel));
    const QueryRows query = query_rows(plan.params, info, head, row, rows);
    engine.pack_a(query.q, s.q, plan.head_dim);
    engine.pack_a(query.dout, s.dout, plan.head_dim_v);
    softmax_terms(plan.params, plan.exact_delta, engine, info, head, query, row, s.lse_log2,
                  s.delta);

    // S = Q K^T, dP = dO V^T
    engine.gemm(GemmArgs{s.q, plan.head_dim, s.k_t, int64_t{plan.head_dim} * kPanel, s.scores,
                         plan.block_n, rows, keys_padded, plan.head_dim, /*accumulate=*/false});
    engine.gemm(GemmArgs{s.dout, plan.head_dim_v, s.v_t, int64_t{plan.head_dim_v} * kPanel,
                         s.dprobs, plan.block_n, rows, keys_padded, plan.head_dim_v,
                         /*accumulate=*/false});

    // dbias += P * (dP - delta)
    const ScoreTile tile{s.scores, plan.block_n, row, key, rows, keys};
    engine.prepare_scores(terms, tile, s.softcap_factor);
    if (terms.has_dropout) engine.dropout_factors(terms, tile, s.keep);
    GradientTile gradient;
    gradient.lse_log2 = s.lse_log2;
    gradient.delta = s.delta;
    gradient.keep = s.keep;
    gradient.dprobs = s.dprobs;
    gradient.dbias = s.dbias;
    gradient.dbias_ld = plan.block_n;
    if (plan.sums_rows) {
        // The tile's rows first, then the tiles: shorter sums, smaller rounding errors.
        gradient.dbias = s.dbias_of_tile;
        gradient.dbias_ld = 0;
        std::memset(s.dbias_of_tile, 0, static_cast<size_t>(keys_padded) * sizeof(float));
    }
    engine.softmax_gradient(tile, terms.scale_log2(), gradient);
    if (plan.sums_rows) {
        for (int c = 0; c < keys; ++c) s.dbias[c] += s.dbias_of_tile[c];
    }
}

void run_item(const BiasPlan& plan, const BiasScratch& s, int64_t index) {
    const AttentionProblem& problem = plan.problem;
    const int64_t n_block = index % plan.num_n_blocks;
    const int64_t m_block = index / plan.num_n_blocks % plan.num_m_blocks;
    const int64_t owned_head = index / (plan.num_n_blocks * plan.num_m_blocks) % plan.num_heads;
    const int64_t owned_batch = index / (plan.num_n_blocks * plan.num_m_blocks * plan.num_heads);
    const int64_t key = n_block * plan.block_n;
    const int64_t num_rows = plan.sums_rows ? 1 : plan.block_m;
    std::memset(s.dbias, 0, static_cast<size_t>(num_rows * plan.block_n) * sizeof(float));

    // Everything that shares this tile of the bias.
    int64_t rows_in_tile = plan.sums_rows ? 1 : 0, keys_in_tile = 0;
    const int64_t last_batch = plan.sums_batches ? problem.batch_size : owned_batch + 1;
    const int64_t last_head = plan.sums_heads ? problem.num_heads_q : owned_head + 1;
    for (int64_t batch = owned_batch; batch < last_batch; ++batch) {
        const SeqlenInfo info = seqlen_info(problem, batch);
        const Mask mask = mask_of(problem, info);
        const int64_t keys = min_of(plan.block_n, info.seqlen_k - key);
        const int64_t row_begin = m_block * plan.block_m;
        const int64_t row_end =
            plan.sums_rows ? info.seqlen_q : min_of(row_begin + plan.block_m, info.seqlen_q);
        if (keys <= 0 || row_begin >= row_end) continue;
        keys_in_tile = max_of(keys_in_tile, keys);
        if (!plan.sums_rows) rows_in_tile = max_of(rows_in_tile, row_end - row_begin);
        const IndexRange seeing = mask.rows(key, key + keys);
        for (int64_t head = owned_head; head < last_head; ++head) {
            const ScoreTerms terms = score_terms(problem, info, batch, head);
            pack_keys_and_values(plan, s, info, head / problem.group_size(), key, keys);
            for (int64_t row = row_begin; row < row_end; row += plan.block_m) {
                const int64_t rows = min_of(plan.block_m, row_end - row);
                if (row + rows <= seeing.begin || row >= seeing.end) continue;
                add_tile(plan, s, info, terms, head, row, static_cast<int>(rows), key,
                         static_cast<int>(keys));
            }
        }
    }

    const SeqlenInfo info = seqlen_info(problem, owned_batch);
    const BiasStrides& strides = plan.params.dattn_bias_strides;
    const int64_t row = info.row_q + m_block * plan.block_m;
    float* dst = static_cast<float*>(plan.params.dattn_bias) + info.batch * strides.batch +
                 owned_head * strides.head + (plan.sums_rows ? 0 : row * strides.row) + key;
    for (int64_t r = 0; r < rows_in_tile; ++r) {
        std::memcpy(dst + r * strides.row, s.dbias + r * plan.block_n,
                    static_cast<size_t>(keys_in_tile) * sizeof(float));
    }
}

}  // namespace

int64_t bias_gradient_scratch_bytes(const AttentionBwdParams& params, const TileEngine& engine) {
    if (params.dattn_bias == nullptr) return 0;
    Arena arena(nullptr);
    BiasScratch scratch(arena, BiasPlan(params, engine));
    return arena.bytes();
}

void bias_gradient(const AttentionBwdParams& params, const float* exact_delta,
                   const TileEngine& engine, const CpuRuntime& runtime, char* worker_memory,
                   int64_t worker_bytes) {
    BiasPlan plan(params, engine);
    plan.exact_delta = exact_delta;
    // Columns behind a sequence's last key and rows of no sequence belong to no item.
    std::memset(params.dattn_bias, 0, static_cast<size_t>(plan.elements()) * sizeof(float));
    for_each_item(runtime, engine, plan.num_items(), [&](int64_t worker, int64_t item) {
        Arena arena(worker_memory + worker * worker_bytes);
        run_item(plan, BiasScratch(arena, plan), item);
    });
}

}  // namespace cpu
}  // namespace flash_attn_norm
