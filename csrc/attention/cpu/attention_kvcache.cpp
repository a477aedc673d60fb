#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/cpu/kvcache_plan.h"
#include "attention/cpu/tile_engine.h"
#include "attention/cpu/work_items.h"
#include "attention/kv_cache.h"

namespace flash_attn_norm {
namespace cpu {

namespace {

/// `count` rows of the cache from `key` on, in q's dtype; of several pages: copied together. Those
/// of a float8 cache are copied without their descale.
TensorRows cache_rows(const KvItem& item, const void* data, const TensorStrides& strides,
                      int64_t key, int64_t count, int cols, char* gathered) {
    const KvCacheLayout& cache = item.plan.params.cache;
    const DType dtype = item.plan.problem.dtype;
    const int64_t position = item.first_position + key;
    const KvRow first = kv_row(cache, item.batch, position);
    if (!cache.is_float8 && first.row + count <= cache.entry_rows) {
        return tensor_rows(data, dtype, strides, first.entry, first.row, item.kv_head, count, cols);
    }

    const int64_t element_bytes = cache.is_float8 ? 1 : size_of(dtype);
    const int64_t row_bytes = int64_t{cols} * size_of(dtype);
    char* dst = gathered;
    for (int64_t done = 0; done < count;) {
        const KvRow at = kv_row(cache, item.batch, position + done);
        const int64_t run = min_of(cache.entry_rows - at.row, count - done);
        const char* src = static_cast<const char*>(data) +
                          tensor_offset(strides, at.entry, at.row, item.kv_head) * element_bytes;
        for (int64_t r = 0; r < run; ++r, dst += row_bytes, src += strides.row * element_bytes) {
            if (cache.is_float8) {
                item.plan.float8.convert(reinterpret_cast<const uint8_t*>(src), cols, dtype, dst);
            } else {
                std::memcpy(dst, src, static_cast<size_t>(row_bytes));
            }
        }
        done += run;
    }
    return TensorRows{gathered, dtype, cols, static_cast<int>(count), cols};
}

void pack_queries(const KvItem& item, const KvScratch& s) {
    const KvPlan& plan = item.plan;
    const AttentionProblem& problem = plan.problem;
    for (int g = 0; g < problem.group_size(); ++g) {
        const int64_t head = item.kv_head * problem.group_size() + g;
        const int64_t first = g * item.rows_of_head();
        plan.engine.pack_a(tensor_rows(plan.params.q, problem.dtype, plan.params.q_strides,
                                       item.info.batch, item.info.row_q + item.row_begin, head,
                                       item.rows_of_head(), problem.head_dim),
                           s.q + first * plan.head_dim * plan.engine.operand_bytes, plan.head_dim);
    }
}

/// All terms of the scores of rows [begin, end) and a block of keys. Rows of several heads may
/// share a tile, each run of one head with its own terms.
void prepare_scores(const KvItem& item, const KvScratch& s, int64_t begin, int64_t end, int64_t key,
                    int num_keys) {
    const KvPlan& plan = item.plan;
    const int64_t rows_of_head = item.rows_of_head();
    for (int64_t row = begin; row < end;) {
        const int64_t in_head = row % rows_of_head;
        const int64_t run = min_of(rows_of_head - in_head, end - row);
        const ScoreTerms terms = score_terms(item.problem, item.info, item.batch, item.head(row));
        plan.engine.prepare_scores(
            terms,
            ScoreTile{s.scores + (row - begin) * plan.block_n, plan.block_n,
                      item.row_begin + in_head, key, static_cast<int>(run), num_keys},
            nullptr);
        row += run;
    }
}

/// P = exp2((S - row_max) * scale_log2), of rows from `begin` on; older output shrinks by the same
/// factor.
void update_softmax(const KvItem& item, const KvScratch& s, const Partial& partial, int64_t begin,
                    int rows, int num_keys) {
    const KvPlan& plan = item.plan;
    const SoftmaxState state{partial.row_max + begin, partial.row_sum + begin, s.factors};
    const ScoreTile tile{s.scores, plan.block_n, 0, 0, rows, num_keys};
    plan.engine.softmax_update(tile, scale_log2_of(item.problem), state, nullptr, s.probs,
                               plan.block_n);
    plan.engine.scale_rows(partial.acc_o + begin * plan.head_dim_v, plan.head_dim_v, rows,
                           plan.head_dim_v, s.factors);
}

/// A block of keys that one or two rows see: packing it would cost more than their products.
void attend_few_rows(const KvItem& item, const KvScratch& s, const Partial& partial, int64_t key,
                     int num_keys) {
    const KvPlan& plan = item.plan;
    const AttentionProblem& problem = plan.problem;
    const KvCacheLayout& cache = plan.params.cache;
    const int rows = static_cast<int>(item.rows());

    // S = Q K^T and all terms
    const TensorRows keys = cache_rows(item, plan.params.k_cache, cache.k_strides, key, num_keys,
                                       problem.head_dim, s.gathered);
    for (int r = 0; r < rows; ++r) {
        const TensorRows query =
            tensor_rows(plan.params.q, problem.dtype, plan.params.q_strides, item.info.batch,
                        item.info.row_q + item.row_begin + r % item.rows_of_head(), item.head(r), 1,
                        problem.head_dim);
        plan.engine.dot_keys(query, keys, s.scores + r * plan.block_n);
    }
    prepare_scores(item, s, 0, rows, key, num_keys);
    update_softmax(item, s, partial, 0, rows, num_keys);

    // O += P V
    const TensorRows values = cache_rows(item, plan.params.v_cache, cache.v_strides, key, num_keys,
                                         problem.head_dim_v, s.gathered);
    for (int r = 0; r < rows; ++r) {
        plan.engine.add_values(values, s.probs + r * plan.block_n * plan.engine.operand_bytes,
                               partial.acc_o + r * plan.head_dim_v);
    }
}

/// A block of keys, packed once for all tiles of the item's rows.
void attend_tiles(const KvItem& item, const KvScratch& s, const Partial& partial, int64_t key,
                  int num_keys) {
    const KvPlan& plan = item.plan;
    const TileEngine& engine = plan.engine;
    const KvCacheLayout& cache = plan.params.cache;
    const int num_keys_padded = static_cast<int>(round_up(num_keys, kPanel));
    engine.pack_b_transposed(cache_rows(item, plan.params.k_cache, cache.k_strides, key, num_keys,
                                        plan.problem.head_dim, s.gathered),
                             s.k, int64_t{plan.head_dim} * kPanel);
    engine.pack_b(cache_rows(item, plan.params.v_cache, cache.v_strides, key, num_keys,
                             plan.problem.head_dim_v, s.gathered),
                  s.v, int64_t{plan.block_n} * kPanel);

    for (int64_t begin = 0; begin < item.rows(); begin += plan.block_m) {
        const int64_t end = min_of(begin + plan.block_m, item.rows());
        const int rows = static_cast<int>(end - begin);

        // S = Q K^T and all terms
        engine.gemm(GemmArgs{s.q + begin * plan.head_dim * engine.operand_bytes, plan.head_dim, s.k,
                             int64_t{plan.head_dim} * kPanel, s.scores, plan.block_n, rows,
                             num_keys_padded, plan.head_dim, /*accumulate=*/false});
        prepare_scores(item, s, begin, end, key, num_keys);
        update_softmax(item, s, partial, begin, rows, num_keys);

        // O += P V
        engine.gemm(GemmArgs{s.probs, plan.block_n, s.v, int64_t{plan.block_n} * kPanel,
                             partial.acc_o + begin * plan.head_dim_v, plan.head_dim_v, rows,
                             plan.head_dim_v, num_keys_padded, /*accumulate=*/true});
    }
}

/// The partial state of the item's rows after the keys of one split.
void attend_to_keys(const KvItem& item, const KvScratch& s, const Partial& partial, int64_t split) {
    constexpr int64_t kFewRows = 2;
    const KvPlan& plan = item.plan;
    const IndexRange keys = item.keys(split);
    partial.clear(plan, item.rows());
    if (item.rows() > kFewRows) pack_queries(item, s);
    for (int64_t key = keys.begin; key < keys.end; key += plan.block_n) {
        const int num_keys = static_cast<int>(min_of(plan.block_n, keys.end - key));
        if (item.rows() <= kFewRows) {
            attend_few_rows(item, s, partial, key, num_keys);
        } else {
            attend_tiles(item, s, partial, key, num_keys);
        }
    }
}

/// out = acc_o / row_sum, with the sink as one more term of the sum.
void store_output(const KvItem& item, const KvScratch& s, const Partial& partial) {
    const KvPlan& plan = item.plan;
    const AttentionProblem& problem = item.problem;
    const int rows = static_cast<int>(item.rows_of_head());
    const float v_descale = plan.params.cache.v_descale.of(item.batch, item.kv_head);
    const TensorStrides strides =
        contiguous_strides(problem.seqlen_q, problem.num_heads_q, problem.head_dim_v);
    for (int g = 0; g < problem.group_size(); ++g) {
        const int64_t first = int64_t{g} * rows, head = item.head(first);
        float* lse =
            plan.params.softmax_lse + lse_offset(problem, item.info, head) + item.row_begin;
        finish_softmax(problem, head, rows, partial.row_max + first, partial.row_sum + first,
                       s.factors, lse);
        const int64_t offset =
            tensor_offset(strides, item.info.batch, item.info.row_q + item.row_begin, head);
        plan.engine.store_rows(
            partial.acc_o + first * plan.head_dim_v, plan.head_dim_v, rows, problem.head_dim_v,
            v_descale, s.factors,
            static_cast<char*>(plan.params.out) + offset * size_of(problem.dtype), problem.dtype,
            strides.row);
    }
}

/// One more split's state into `sum`.
void merge(const KvItem& item, const Partial& part, const Partial& sum) {
    const KvPlan& plan = item.plan;
    const float scale_log2 = scale_log2_of(item.problem);
    for (int64_t r = 0; r < item.rows(); ++r) {
        if (part.row_sum[r] == 0.0f) continue;  // sees no key
        const float new_max = part.row_max[r] > sum.row_max[r] ? part.row_max[r] : sum.row_max[r];
        const float finite_max = new_max == -INFINITY ? 0.0f : new_max;  // a NaN stays
        const float of_part = std::exp2((part.row_max[r] - finite_max) * scale_log2);
        const float of_sum = std::exp2((sum.row_max[r] - finite_max) * scale_log2);
        const float* src = part.acc_o + r * plan.head_dim_v;
        float* dst = sum.acc_o + r * plan.head_dim_v;
        for (int c = 0; c < plan.head_dim_v; ++c) dst[c] = dst[c] * of_sum + src[c] * of_part;
        sum.row_sum[r] = sum.row_sum[r] * of_sum + part.row_sum[r] * of_part;
        sum.row_max[r] = new_max;
    }
}

int64_t scratch_bytes(const KvPlan& plan) {
    Arena arena(nullptr);
    KvScratch scratch(arena, plan);
    return arena.bytes();
}

int64_t partial_bytes(const KvPlan& plan) {
    Arena arena(nullptr);
    Partial partial(arena, plan);
    return arena.bytes();
}

}  // namespace

int64_t attention_kvcache_workspace_bytes(const KvCacheAttentionParams& params,
                                          const CpuRuntime& runtime) {
    const KvPlan plan(params, runtime);
    const int64_t partials = plan.num_splits > 1 ? plan.num_items() * partial_bytes(plan) : 0;
    return scratch_bytes(plan) * runtime.num_threads + partials;
}

void attention_kvcache(const KvCacheAttentionParams& params, const CpuRuntime& runtime) {
    const KvPlan plan(params, runtime);
    const int64_t bytes_per_worker = scratch_bytes(plan), bytes_per_part = partial_bytes(plan);
    char* const workspace = static_cast<char*>(params.workspace);
    char* const parts = workspace + bytes_per_worker * runtime.num_threads;
    const auto scratch_of = [&](int64_t worker) {
        Arena arena(workspace + worker * bytes_per_worker);
        return KvScratch(arena, plan);
    };
    const auto part_of = [&](int64_t index) {
        Arena arena(parts + index * bytes_per_part);
        return Partial(arena, plan);
    };
    const auto item_of = [&](int64_t index) {
        // Under a causal mask the last rows have most to do, so they come first.
        return KvItem(plan, plan.num_chunks - 1 - index / plan.num_units, index % plan.num_units);
    };

    write_uncovered_results(plan.problem, params.out, params.softmax_lse);
    for_each_item(runtime, plan.engine, plan.num_items(), [&](int64_t worker, int64_t index) {
        const KvItem item = item_of(index / plan.num_splits);
        if (item.empty()) return;
        const KvScratch scratch = scratch_of(worker);
        const bool is_whole = plan.num_splits == 1;
        const Partial partial = is_whole ? scratch.partial : part_of(index);
        attend_to_keys(item, scratch, partial, index % plan.num_splits);
        if (is_whole) store_output(item, scratch, partial);
    });
    if (plan.num_splits == 1) return;
    for_each_item(runtime, plan.engine, plan.num_units * plan.num_chunks,
                  [&](int64_t worker, int64_t index) {
                      const KvItem item = item_of(index);
                      if (item.empty()) return;
                      const KvScratch scratch = scratch_of(worker);
                      scratch.partial.clear(plan, item.rows());
                      for (int64_t split = 0; split < plan.num_splits; ++split) {
                          merge(item, part_of(index * plan.num_splits + split), scratch.partial);
                      }
                      store_output(item, scratch, scratch.partial);
                  });
}

}  // namespace cpu
}  // namespace flash_attn_norm
