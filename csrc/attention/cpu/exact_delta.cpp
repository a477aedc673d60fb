#include "attention/cpu/exact_delta.h"

#include <cmath>
#include <initializer_list>

#include "attention/cpu/bias_gradient.h"
#include "attention/cpu/half_types.h"
#include "attention/cpu/work_items.h"
#include "attention/delta_correction.h"

namespace flash_attn_norm {
namespace cpu {

namespace {

/// How the pass is cut: an item is a run of query rows of all query heads of one KV head.
struct DeltaPlan {
    static constexpr int64_t kChunkRows = 512;

    const AttentionBwdParams& params;
    const AttentionProblem& problem;
    const TileEngine& engine;
    const TileEngine& softmax;  // whose probabilities stay float32
    int block_m, block_n;
    int head_dim, head_dim_v;  // padded to kPanel
    MaxSeqlens longest;
    int64_t num_units;  // (sequence, KV head)
    int64_t num_chunks;

    DeltaPlan(const AttentionBwdParams& bwd_params, const TileEngine& tile_engine)
        : params(bwd_params),
          problem(bwd_params.problem),
          engine(tile_engine),
          softmax(select_engine(DType::kFloat32)),
          block_m(engine.bwd_block_m),
          block_n(engine.bwd_block_n),
          head_dim(static_cast<int>(round_up(problem.head_dim, kPanel))),
          head_dim_v(static_cast<int>(round_up(problem.head_dim_v, kPanel))),
          longest(max_seqlens(problem)) {
        num_units = problem.batch_size * problem.num_heads_kv;
        num_chunks = (longest.q + kChunkRows - 1) / kChunkRows;
    }
};

struct DeltaScratch {
    char *k_t, *v_t;                // of all keys, per block: B form of [head_dim(_v), block_n]
    char *q, *dout;                 // [block_m, head_dim], [block_m, head_dim_v]
    float *scores, *dprobs;         // [block_m, block_n]
    float *keep, *probs;            // likewise
    float *sums, *sizes;            // [block_m]: of P dP, and of its size
    float *tile_sums, *tile_sizes;  // of one tile
    float *row_max, *row_sum, *correction, *lse;

    DeltaScratch(Arena& arena, const DeltaPlan& plan) {
        const int64_t keys = round_up(plan.longest.k, plan.block_n);
        const int64_t tile = int64_t{plan.block_m} * plan.block_n;
        k_t = arena.take_operands(keys * plan.head_dim, plan.engine);
        v_t = arena.take_operands(keys * plan.head_dim_v, plan.engine);
        q = arena.take_operands(int64_t{plan.block_m} * plan.head_dim, plan.engine);
        dout = arena.take_operands(int64_t{plan.block_m} * plan.head_dim_v, plan.engine);
        for (float** part : {&scores, &dprobs, &keep, &probs}) *part = arena.take<float>(tile);
        for (float** part :
             {&sums, &sizes, &tile_sums, &tile_sizes, &row_max, &row_sum, &correction, &lse}) {
            *part = arena.take<float>(plan.block_m);
        }
    }
};

struct DeltaItem {
    const DeltaPlan& plan;
    const DeltaScratch& scratch;
    SeqlenInfo info;
    int64_t batch, kv_head;
    Mask mask;

    TensorRows key_rows(const void* data, const TensorStrides& strides, int64_t key, int64_t count,
                        int cols) const {
        return tensor_rows(data, plan.problem.dtype, strides, info.batch, info.row_k + key, kv_head,
                           count, cols);
    }
    char* k_block(int64_t n_block) const {
        return scratch.k_t + n_block * plan.block_n * plan.head_dim * plan.engine.operand_bytes;
    }
    char* v_block(int64_t n_block) const {
        return scratch.v_t + n_block * plan.block_n * plan.head_dim_v * plan.engine.operand_bytes;
    }
};

void pack_keys_and_values(const DeltaItem& item) {
    const DeltaPlan& plan = item.plan;
    const AttentionBwdParams& params = plan.params;
    for (int64_t key = 0; key < item.info.seqlen_k; key += plan.block_n) {
        const int64_t count = min_of(plan.block_n, item.info.seqlen_k - key);
        const int64_t block = key / plan.block_n;
        plan.engine.pack_b_transposed(
            item.key_rows(params.k, params.k_strides, key, count, plan.problem.head_dim),
            item.k_block(block), int64_t{plan.head_dim} * kPanel);
        plan.engine.pack_b_transposed(
            item.key_rows(params.v, params.v_strides, key, count, plan.problem.head_dim_v),
            item.v_block(block), int64_t{plan.head_dim_v} * kPanel);
    }
}

/// The least sum of squares of a value of the sequence and head.
float least_v_squares(const DeltaItem& item) {
    const DeltaPlan& plan = item.plan;
    float* sums = item.scratch.tile_sums;
    float least = INFINITY;
    for (int64_t key = 0; key < item.info.seqlen_k; key += plan.block_m) {
        const int64_t count = min_of(plan.block_m, item.info.seqlen_k - key);
        const TensorRows v = item.key_rows(plan.params.v, plan.params.v_strides, key, count,
                                           plan.problem.head_dim_v);
        plan.engine.dot_rows(v, v, sums);
        for (int64_t i = 0; i < count; ++i) least = sums[i] < least ? sums[i] : least;
    }
    return least;
}

/// Whether any of the rows may have one key only.
bool may_have_one_key(const DeltaItem& item, const QueryRows& query, float least_v) {
    float* squares = item.scratch.tile_sums;
    item.plan.engine.dot_rows(query.out, query.out, squares);
    for (int r = 0; r < query.out.rows; ++r) {
        if (may_be_one_key(squares[r], least_v, item.plan.problem.dropout_p)) return true;
    }
    return false;
}

/// The scratch's sums and sizes, and the softmax state, of rows [row, row + rows) after all keys
/// that they see.
void attend_to_keys(const DeltaItem& item, const ScoreTerms& terms, int64_t row, int rows) {
    const DeltaPlan& plan = item.plan;
    const DeltaScratch& s = item.scratch;
    const TileEngine& engine = plan.engine;
    for (int r = 0; r < rows; ++r) {
        s.row_max[r] = -INFINITY;
        s.row_sum[r] = s.sums[r] = s.sizes[r] = 0.0f;
    }
    const IndexRange keys = item.mask.keys(row, row + rows);
    for (int64_t block = keys.begin / plan.block_n; block * plan.block_n < keys.end; ++block) {
        const int64_t key = block * plan.block_n;
        const int count = static_cast<int>(min_of(plan.block_n, item.info.seqlen_k - key));
        const int padded = static_cast<int>(round_up(count, kPanel));
        const ScoreTile tile{s.scores, plan.block_n, row, key, rows, count};

        // S = Q K^T, dP = dO V^T
        engine.gemm(GemmArgs{s.q, plan.head_dim, item.k_block(block),
                             int64_t{plan.head_dim} * kPanel, s.scores, plan.block_n, rows, padded,
                             plan.head_dim, /*accumulate=*/false});
        engine.gemm(GemmArgs{s.dout, plan.head_dim_v, item.v_block(block),
                             int64_t{plan.head_dim_v} * kPanel, s.dprobs, plan.block_n, rows,
                             padded, plan.head_dim_v, /*accumulate=*/false});
        engine.prepare_scores(terms, tile, nullptr);
        if (terms.has_dropout) {
            engine.dropout_factors(terms, tile, s.keep);
            for (int r = 0; r < rows; ++r) {
                float* dprobs = s.dprobs + r * plan.block_n;
                const float* keep = s.keep + r * plan.block_n;
                for (int c = 0; c < count; ++c) dprobs[c] *= keep[c];
            }
        }

        // delta += P dP; older sums shrink by the same factor
        plan.softmax.softmax_update(tile, terms.scale_log2(),
                                    SoftmaxState{s.row_max, s.row_sum, s.correction}, nullptr,
                                    s.probs, plan.block_n);
        const TensorRows probs{s.probs, DType::kFloat32, plan.block_n, rows, count};
        const TensorRows dprobs{s.dprobs, DType::kFloat32, plan.block_n, rows, count};
        engine.dot_rows(probs, dprobs, s.tile_sums);
        for (int r = 0; r < rows; ++r) {
            float* row_dprobs = s.dprobs + r * plan.block_n;
            for (int c = 0; c < count; ++c) row_dprobs[c] = std::fabs(row_dprobs[c]);
        }
        engine.dot_rows(probs, dprobs, s.tile_sizes);
        for (int r = 0; r < rows; ++r) {
            s.sums[r] = s.sums[r] * s.correction[r] + s.tile_sums[r];
            s.sizes[r] = s.sizes[r] * s.correction[r] + s.tile_sizes[r];
        }
    }
}

/// The stored output's part of `sums`: those of its row r.
void add_stored(DeltaSums& sums, const QueryRows& query, int r) {
    const bool is_bf16 = query.out.dtype == DType::kBFloat16;
    const auto value = [&](const TensorRows& rows, int c) {
        const uint16_t bits = static_cast<const uint16_t*>(rows.data)[r * rows.row_stride + c];
        return is_bf16 ? bf16_to_float(bits) : fp16_to_float(bits);
    };
    for (int c = 0; c < query.out.cols; ++c) {
        const float dout = value(query.dout, c);
        sums.stored_size += std::fabs(value(query.out, c) * dout);
        sums.dout_size += std::fabs(dout);
    }
}

void run_item(const DeltaPlan& plan, const DeltaScratch& s, int64_t index, float* delta) {
    const AttentionProblem& problem = plan.problem;
    const int64_t chunk = index / plan.num_units;
    const int64_t batch = index % plan.num_units / problem.num_heads_kv;
    const int64_t kv_head = index % problem.num_heads_kv;
    const SeqlenInfo info = seqlen_info(problem, batch);
    const int64_t row_begin = chunk * DeltaPlan::kChunkRows;
    const int64_t row_end = min_of(row_begin + DeltaPlan::kChunkRows, info.seqlen_q);
    if (row_begin >= row_end) return;
    const DeltaItem item{plan, s, info, batch, kv_head, mask_of(problem, info)};
    const bool corrects = corrects_sequence(problem, info.seqlen_k);
    const bool asks = corrects && corrects_single_keys_only(problem, info.seqlen_k);
    const float least_v = asks ? least_v_squares(item) : 0.0f;
    bool is_packed = false;
    for (int g = 0; g < problem.group_size(); ++g) {
        const int64_t head = kv_head * problem.group_size() + g;
        const ScoreTerms terms = score_terms(problem, info, batch, head);
        for (int64_t row = row_begin; row < row_end; row += plan.block_m) {
            const int rows = static_cast<int>(min_of(plan.block_m, row_end - row));
            const QueryRows query = query_rows(plan.params, info, head, row, rows);
            const int64_t lse_row = lse_offset(problem, info, head) + row;
            float* block_delta = delta + lse_row;
            plan.engine.dot_rows(query.dout, query.out, block_delta);
            if (!corrects || (asks && !may_have_one_key(item, query, least_v))) continue;
            if (!is_packed) pack_keys_and_values(item);
            is_packed = true;
            plan.engine.pack_a(query.q, s.q, plan.head_dim);
            plan.engine.pack_a(query.dout, s.dout, plan.head_dim_v);
            attend_to_keys(item, terms, row, rows);
            finish_softmax(problem, head, rows, s.row_max, s.row_sum, s.correction, s.lse);
            for (int r = 0; r < rows; ++r) {
                DeltaSums found;
                found.own = s.sums[r] * s.correction[r];
                found.own_size = s.sizes[r] * s.correction[r];
                found.stored = block_delta[r];
                found.own_lse = s.lse[r];
                found.stored_lse = plan.params.softmax_lse[lse_row + r];
                add_stored(found, query, r);
                if (found.is_own(problem.dtype)) block_delta[r] = found.own;
            }
        }
    }
}

}  // namespace

int64_t exact_delta_scratch_bytes(const AttentionBwdParams& params, const TileEngine& engine) {
    if (!needs_delta_correction(params)) return 0;
    Arena arena(nullptr);
    DeltaScratch scratch(arena, DeltaPlan(params, engine));
    return arena.bytes();
}

void exact_delta(const AttentionBwdParams& params, const TileEngine& engine,
                 const CpuRuntime& runtime, float* delta, char* worker_memory,
                 int64_t worker_bytes) {
    const DeltaPlan plan(params, engine);
    for_each_item(runtime, engine, plan.num_units * plan.num_chunks,
                  [&](int64_t worker, int64_t item) {
                      Arena arena(worker_memory + worker * worker_bytes);
                      run_item(plan, DeltaScratch(arena, plan), item, delta);
                  });
}

}  // namespace cpu
}  // namespace flash_attn_norm
