// Host-side logic for Python tests: masks, dropout, sequence lengths, and the CPU attention kernels
// with a chosen instruction set. Tensors come as addresses; the tests keep them alive.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/half_types.h"
#include "attention/decode/row_tiles.h"
#include "attention/delta_correction.h"
#include "attention/dropout.h"
#include "attention/float8.h"
#include "attention/kv_cache.h"
#include "attention/mask.h"
#include "attention/params.h"
#include "attention/seqlens.h"
#include "attention/short_queries.h"
#include "attention/tile_scheduler.h"
#include "common/archs.h"
#include "common/cpu_features.h"
#include "common/cpu_runtime.h"
#include "native_fields.h"

namespace py = pybind11;
using namespace flash_attn_norm;

void bind_sm90(py::module_& module);  // sm90_native.cpp

namespace {

/// Real threads, each given its own slice.
void run_threads(int64_t count, int64_t grain, void* context, CpuRuntime::Body body) {
    std::vector<std::thread> threads;
    for (int64_t begin = 0; begin < count; begin += grain) {
        const int64_t end = begin + grain < count ? begin + grain : count;
        threads.emplace_back([=] { body(context, begin, end); });
    }
    for (std::thread& thread : threads) thread.join();
}

CpuRuntime runtime_of(int num_threads) {
    CpuRuntime runtime;
    runtime.num_threads = num_threads;
    runtime.run = run_threads;
    return runtime;
}

/// 64-byte aligned and full of NaN patterns, so that a read before a write shows.
class Workspace {
  public:
    explicit Workspace(int64_t bytes) : bytes_(bytes) {
        const size_t size = static_cast<size_t>((bytes + kGuard + 63) / 64 * 64);
        memory_ = static_cast<unsigned char*>(std::aligned_alloc(64, size));
        std::memset(memory_, 0xff, size);
    }
    ~Workspace() { std::free(memory_); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    void* data() const { return memory_; }
    bool guard_is_intact() const {
        for (int64_t i = bytes_; i < bytes_ + kGuard; ++i) {
            if (memory_[i] != 0xff) return false;
        }
        return true;
    }

  private:
    static constexpr int64_t kGuard = 4096;
    int64_t bytes_;
    unsigned char* memory_;
};

/// Returns whether the kernel stayed inside its workspace.
bool attention_fwd(const py::dict& dict, int num_threads) {
    const Fields fields(dict);
    AttentionFwdParams params;
    read_problem(fields, params.problem);
    fields.pointer("q", params.q);
    fields.pointer("k", params.k);
    fields.pointer("v", params.v);
    fields.strides("q_strides", params.q_strides);
    fields.strides("k_strides", params.k_strides);
    fields.strides("v_strides", params.v_strides);
    fields.pointer("out", params.out);
    fields.pointer("softmax_lse", params.softmax_lse);

    const CpuRuntime runtime = runtime_of(num_threads);
    const Workspace workspace(cpu::attention_fwd_workspace_bytes(params, runtime));
    params.workspace = workspace.data();
    cpu::attention_fwd(params, runtime);
    return workspace.guard_is_intact();
}

bool attention_bwd(const py::dict& dict, int num_threads) {
    const Fields fields(dict);
    AttentionBwdParams params;
    read_problem(fields, params.problem);
    fields.pointer("q", params.q);
    fields.pointer("k", params.k);
    fields.pointer("v", params.v);
    fields.pointer("out", params.out);
    fields.pointer("dout", params.dout);
    fields.strides("q_strides", params.q_strides);
    fields.strides("k_strides", params.k_strides);
    fields.strides("v_strides", params.v_strides);
    fields.strides("dout_strides", params.dout_strides);
    fields.pointer("softmax_lse", params.softmax_lse);
    fields.pointer("dsoftmax_lse", params.dsoftmax_lse);
    fields.pointer("dq", params.dq);
    fields.pointer("dk", params.dk);
    fields.pointer("dv", params.dv);
    fields.pointer("ds_aux", params.ds_aux);
    fields.pointer("dattn_bias", params.dattn_bias);
    fields.strides("dattn_bias_strides", params.dattn_bias_strides);
    fields.number("deterministic", params.deterministic);

    const CpuRuntime runtime = runtime_of(num_threads);
    const Workspace workspace(cpu::attention_bwd_workspace_bytes(params, runtime));
    params.workspace = workspace.data();
    cpu::attention_bwd(params, runtime);
    return workspace.guard_is_intact();
}

void read_cache(const Fields& fields, KvCacheLayout& cache) {
    fields.number("num_entries", cache.num_entries);
    fields.number("entry_rows", cache.entry_rows);
    fields.strides("k_strides", cache.k_strides);
    fields.strides("v_strides", cache.v_strides);
    fields.number("is_paged", cache.is_paged);
    fields.pointer("page_table", cache.page_table);
    fields.number("page_table_stride", cache.page_table_stride);
    fields.number("pages_per_sequence", cache.pages_per_sequence);
    fields.pointer("cache_batch_idx", cache.cache_batch_idx);
    fields.pointer("cache_leftpad", cache.cache_leftpad);
    fields.pointer("cache_seqlens", cache.cache_seqlens);
    fields.pointer("cu_seqlens_k", cache.cu_seqlens_k);
    fields.number("seqlen", cache.seqlen);
}

KvCacheLayout cache_of(const py::dict& dict) {
    KvCacheLayout cache;
    read_cache(Fields(dict), cache);
    return cache;
}

bool attention_kvcache(const py::dict& dict, int num_threads) {
    const Fields fields(dict);
    KvCacheAttentionParams params;
    read_problem(fields, params.problem);
    read_cache(fields, params.cache);
    fields.number("num_splits", params.num_splits);
    fields.pointer("q", params.q);
    fields.strides("q_strides", params.q_strides);
    fields.pointer("k", params.k_cache);
    fields.pointer("v", params.v_cache);
    fields.pointer("out", params.out);
    fields.pointer("softmax_lse", params.softmax_lse);

    const CpuRuntime runtime = runtime_of(num_threads);
    const Workspace workspace(cpu::attention_kvcache_workspace_bytes(params, runtime));
    params.workspace = workspace.data();
    cpu::attention_kvcache(params, runtime);
    return workspace.guard_is_intact();
}

using Range = std::tuple<int64_t, int64_t>;

Range range_of(const IndexRange& range) {
    return Range{range.begin, range.end};
}

std::vector<std::vector<bool>> dropout_mask(int64_t seed, int64_t offset, float dropout_p,
                                            int64_t batch_head, uint32_t rows, uint32_t keys) {
    const int64_t rng_state[2] = {seed, offset};
    const Dropout dropout = Dropout::make(rng_state, dropout_p, batch_head);
    std::vector<std::vector<bool>> mask(rows, std::vector<bool>(keys));
    for (uint32_t row = 0; row < rows; ++row) {
        for (uint32_t key = 0; key < keys; ++key) mask[row][key] = dropout.keeps(row, key);
    }
    return mask;
}

std::tuple<int, int, int, int> block_range_of(const BlockRange& range) {
    return {range.begin, range.end, range.full_begin, range.full_end};
}

/// (sequence, block) of every slot of a packed tensor.
std::vector<std::pair<int64_t, int64_t>> block_slots(const std::vector<int32_t>& cu_seqlens,
                                                     int64_t total, int block) {
    BlockSlots slots;
    slots.cu_seqlens = cu_seqlens.data();
    slots.batch_size = static_cast<int64_t>(cu_seqlens.size()) - 1;
    slots.total = total;
    slots.block = block;
    std::vector<std::pair<int64_t, int64_t>> found;
    for (int64_t slot = 0; slot < slots.count(); ++slot) {
        const int64_t batch = slots.batch_of(slot);
        found.emplace_back(batch, slot - slots.first_slot(batch));
    }
    return found;
}

/// Shapes of a call to a cache; what is left out keeps the struct's default.
KvCacheAttentionParams cache_params_of(const py::dict& dict) {
    const Fields fields(dict);
    KvCacheAttentionParams params;
    read_problem(fields, params.problem);
    fields.number("num_entries", params.cache.num_entries);
    fields.number("entry_rows", params.cache.entry_rows);
    fields.number("pages_per_sequence", params.cache.pages_per_sequence);
    fields.number("is_paged", params.cache.is_paged);
    fields.pointer("cache_seqlens", params.cache.cache_seqlens);
    fields.number("num_splits", params.num_splits);
    fields.number("most_rows", params.most_rows);
    return params;
}

decode::SplitShape split_shape_of(const py::dict& dict) {
    const Fields fields(dict);
    decode::SplitShape shape;
    fields.number("block_m", shape.block_m);
    fields.number("tile_keys", shape.tile_keys);
    fields.number("sets", shape.sets);
    fields.number("more_sets", shape.more_sets);
    fields.number("num_sms", shape.num_sms);
    fields.number("ctas_per_sm", shape.ctas_per_sm);
    fields.number("max_cluster", shape.max_cluster);
    fields.number("key_bytes", shape.key_bytes);
    return shape;
}

/// (row_tiles, num_splits, sets, workspace bytes)
std::tuple<int64_t, int, int, int64_t> plan_splits(const py::dict& call, const py::dict& shape) {
    const KvCacheAttentionParams params = cache_params_of(call);
    const decode::SplitPlan plan = decode::plan_splits(params, split_shape_of(shape));
    return {plan.row_tiles, plan.num_splits, plan.sets,
            plan.workspace_bytes(params.problem.head_dim_v)};
}

/// What each CTA does: (batch, kv_head, first packed row, packed rows, first row of the sequence,
/// keys of the sequence).
std::vector<std::tuple<int, int, int, int, int64_t, int>> split_blocks(const py::dict& call,
                                                                       const py::dict& shape_dict) {
    const KvCacheAttentionParams params = cache_params_of(call);
    const decode::SplitShape shape = split_shape_of(shape_dict);
    const decode::SplitPlan plan = decode::plan_splits(params, shape);
    const auto split_params = decode::SplitParams::of(params, plan);
    std::vector<std::tuple<int, int, int, int, int64_t, int>> blocks;
    for (int64_t i = 0; i < plan.row_tiles * params.problem.num_heads_kv; ++i) {
        decode::SplitBlock block;
        if (!find_block(split_params, static_cast<uint32_t>(i), shape.block_m, block)) continue;
        blocks.emplace_back(block.batch, block.kv_head, block.first_row,
                            std::min(block.num_rows, shape.block_m), block.row_q, block.seqlen_k);
    }
    return blocks;
}

AttentionFwdParams fwd_params_of(const py::dict& dict) {
    const Fields fields(dict);
    AttentionFwdParams params;
    read_problem(fields, params.problem);
    fields.strides("k_strides", params.k_strides);
    fields.strides("v_strides", params.v_strides);
    return params;
}

/// For each sequence of a call of attention_fwd, made as one to a cache: the offset of its first
/// key, in elements, and how many keys it has.
std::vector<Range> cache_call_keys(const py::dict& dict) {
    const KvCacheAttentionParams call = as_cache_call(fwd_params_of(dict));
    std::vector<Range> keys;
    for (int64_t batch = 0; batch < call.problem.batch_size; ++batch) {
        const IndexRange positions = kv_positions(call.cache, batch);
        const KvRow row = kv_row_unchecked(call.cache, batch, positions.begin);
        const TensorStrides& strides = call.cache.k_strides;
        keys.emplace_back(row.entry * strides.batch + row.row * strides.row,
                          positions.end - positions.begin);
    }
    return keys;
}

}  // namespace

PYBIND11_MODULE(flash_attn_norm_native, module) {
    module.def("attention_fwd", &attention_fwd);
    module.def("attention_bwd", &attention_bwd);
    module.def("attention_kvcache", &attention_kvcache);
    module.def("kv_length", [](const py::dict& cache, int64_t batch) {
        return kv_length(cache_of(cache), batch);
    });
    module.def("kv_positions", [](const py::dict& cache, int64_t batch) {
        return range_of(kv_positions(cache_of(cache), batch));
    });
    module.def("kv_row", [](const py::dict& cache, int64_t batch, int64_t position) {
        const KvRow row = kv_row(cache_of(cache), batch, position);
        return Range{row.entry, row.row};
    });

    module.def("may_be_one_key", &may_be_one_key);
    py::class_<DeltaSums>(module, "DeltaSums")
        .def(py::init<>())
        .def_readwrite("own", &DeltaSums::own)
        .def_readwrite("own_size", &DeltaSums::own_size)
        .def_readwrite("stored", &DeltaSums::stored)
        .def_readwrite("stored_size", &DeltaSums::stored_size)
        .def_readwrite("dout_size", &DeltaSums::dout_size)
        .def_readwrite("own_lse", &DeltaSums::own_lse)
        .def_readwrite("stored_lse", &DeltaSums::stored_lse)
        .def("is_own", [](const DeltaSums& sums, bool is_bf16) {
            return sums.is_own(is_bf16 ? DType::kBFloat16 : DType::kFloat16);
        });
    module.def("has_code_from_hopper_on", &has_code_from_hopper_on);
    module.def("isa_names", [] {
        std::vector<std::string> names;
        for (int isa = 0; isa <= static_cast<int>(CpuIsa::kAmxBf16); ++isa) {
            names.emplace_back(name_of(static_cast<CpuIsa>(isa)));
        }
        return names;
    });
    module.def("cpu_isa", [] { return static_cast<int>(cpu_isa()); });
    module.def("limit_cpu_isa", [](int isa) { limit_cpu_isa(static_cast<CpuIsa>(isa)); });

    py::class_<Mask>(module, "Mask")
        .def(py::init([](int64_t seqlen_q, int64_t seqlen_k, int64_t left, int64_t right) {
            return Mask{seqlen_q, seqlen_k, left, right};
        }))
        .def("keys", [](const Mask& mask, int64_t begin,
                        int64_t end) { return range_of(mask.keys(begin, end)); })
        .def("rows", [](const Mask& mask, int64_t begin,
                        int64_t end) { return range_of(mask.rows(begin, end)); })
        .def("covers", &Mask::covers);

    module.def("philox_4x32_10",
               [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
                   const PhiloxOutput bits = philox_4x32_10(c0, c1, c2, c3, k0, k1);
                   return std::vector<uint32_t>(bits.lane, bits.lane + 4);
               });
    module.def("dropout_mask", &dropout_mask);
    module.def("key_blocks", [](const Mask& mask, int64_t begin, int64_t end, int block) {
        return block_range_of(key_blocks(mask, begin, end, block));
    });
    module.def("query_blocks", [](const Mask& mask, int64_t begin, int64_t end, int block) {
        return block_range_of(query_blocks(mask, begin, end, block));
    });
    module.def("block_slots", &block_slots);
    bind_sm90(module);

    module.def("packed_rows",
               [](const std::vector<int32_t>& cu_seqlens, int64_t batch, int64_t total) {
                   const RowRange rows = packed_rows(cu_seqlens.data(), batch, total);
                   return Range{rows.begin, rows.end};
               });

    module.def("divide", [](uint32_t number, int64_t divisor) {
        return decode::Divisor::of(divisor).divide(number);
    });
    module.attr("kAllRows") = kAllRows;
    module.def("rows_of_cache_call", [](const py::dict& call, int num_sms, bool can_share) {
        return rows_of_cache_call(fwd_params_of(call), num_sms, can_share);
    });
    module.def("cache_call_keys", &cache_call_keys);
    module.def("plan_splits", &plan_splits);
    module.def("split_blocks", &split_blocks);
    module.def("split_tiles",
               [](int begin, int end, int tile_keys, int sets, int split, int num_splits) {
                   const decode::KeyRange tiles =
                       decode::split_tiles({begin, end}, tile_keys, sets, split, num_splits);
                   return std::make_pair(tiles.begin, tiles.end);
               });
    module.def("band_keys", [](int seqlen_q, int seqlen_k, int left, int right, int row) {
        const decode::KeyBand band{seqlen_k - seqlen_q, seqlen_k, left, right};
        return std::make_pair(band.begin(row), band.end(row));
    });

    module.def("fp16_to_float", &cpu::fp16_to_float);
    module.def("float_to_fp16", &cpu::float_to_fp16);
    module.def("bf16_to_float", &cpu::bf16_to_float);
    module.def("float_to_bf16", &cpu::float_to_bf16);
    module.def("e4m3_to_float", &e4m3_to_float);
    module.def("float_to_e4m3", &float_to_e4m3);
    module.def("e4m3_to_scaled_float16", [](uint32_t word) {
        uint32_t even, odd;
        e4m3_to_scaled_float16(word, even, odd);
        return std::make_pair(even, odd);
    });
}
