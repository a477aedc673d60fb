#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/attention.h"
#include "attention/decode/launch.h"
#include "attention/element.cuh"
#include "attention/float8.h"
#include "attention/kv_cache.h"
#include "attention/seqlens.h"
#include "common/check.h"
#include "common/launch.h"
#include "common/vec.cuh"

namespace flash_attn_norm {

namespace {

constexpr int kAppendThreads = 128;
constexpr int kUnit = 8;  // elements of a thread: 16 bytes where rows are aligned

/// True if every row of a tensor begins at a multiple of a unit's bytes and ends at one.
bool is_aligned(const void* tensor, const TensorStrides& strides, int columns,
                int unit_bytes = 2 * kUnit) {
    const bool rows = strides.batch % kUnit == 0 && strides.row % kUnit == 0 &&
                      strides.head % kUnit == 0 && columns % kUnit == 0;
    return rows && reinterpret_cast<uintptr_t>(tensor) % unit_bytes == 0;
}

/// The grid of a call: one row of CTAs for each token of each sequence, the units of all its heads
/// across it, those of new keys first, then new values, then q.
struct AppendGrid {
    int64_t tokens = 0;  // of a sequence
    int k_units = 0, v_units = 0;
    bool k_aligned = false, v_aligned = false, q_aligned = false;
    bool k_cache_aligned = false, v_cache_aligned = false, q_rotated_aligned = false;

    FAN_HOST_DEVICE int keys(const KvCacheAppendParams& p) const {
        return p.seqlen_new > 0 ? p.num_heads_kv * k_units : 0;
    }
    FAN_HOST_DEVICE int values(const KvCacheAppendParams& p) const {
        return p.seqlen_new > 0 ? p.num_heads_kv * v_units : 0;
    }
    FAN_HOST_DEVICE int queries(const KvCacheAppendParams& p) const {
        return p.rotary_dim > 0 && p.seqlen_q > 0 ? p.num_heads_q * k_units : 0;
    }
};

/// The elements of a unit that exist, as floats; a row has `columns`.
template <class Element>
__device__ __forceinline__ void load_unit(const uint16_t* row, int first, int columns, bool aligned,
                                          float (&values)[kUnit]) {
    if (aligned) {
        unpack<Element::kDType>(*reinterpret_cast<const uint4*>(row + first), values);
    } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            values[i] = first + i < columns ? Element::to_float(row[first + i]) : 0.0f;
        }
    }
}

template <class Element>
__device__ __forceinline__ void store_unit(uint16_t* row, int first, int columns, bool aligned,
                                           const float (&values)[kUnit]) {
    if (aligned) {
        *reinterpret_cast<uint4*>(row + first) = pack<Element::kDType>(values);
    } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            if (first + i < columns) {
                row[first + i] = static_cast<uint16_t>(Element::pack(values[i], 0.0f));
            }
        }
    }
}

/// The same into a float8 cache.
__device__ __forceinline__ void store_float8_unit(uint8_t* row, int first, int columns,
                                                  bool aligned, float descale,
                                                  const float (&values)[kUnit]) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
        const uint32_t code = float_to_e4m3(values[i] / descale);
        words[i / 4] |= code << (i % 4 * 8);
        if (!aligned && first + i < columns) row[first + i] = static_cast<uint8_t>(code);
    }
    if (aligned) *reinterpret_cast<uint2*>(row + first) = make_uint2(words[0], words[1]);
}

/// Rotates the unit's elements below rotary_dim: see KvCacheAppendParams.
template <class Element>
__device__ __forceinline__ void rotate_unit(const KvCacheAppendParams& params, const uint16_t* row,
                                            int first, int64_t position, float (&values)[kUnit]) {
    const int half = params.rotary_dim / 2;
    const int64_t last = params.rotary_rows - 1;
    const int64_t table = (position > last ? last : position < 0 ? 0 : position) * half;
    float rotated[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
        const int column = first + i;
        rotated[i] = values[i];
        if (column >= params.rotary_dim) continue;
        const bool is_x = params.rotary_interleaved ? i % 2 == 0 : column < half;
        const int pair = params.rotary_interleaved ? column / 2 : is_x ? column : column - half;
        const float partner = params.rotary_interleaved
                                  ? values[i ^ 1]
                                  : Element::to_float(row[is_x ? column + half : column - half]);
        const float cos = load_as_float(params.rotary_cos, params.rotary_dtype, table + pair);
        const float sin = load_as_float(params.rotary_sin, params.rotary_dtype, table + pair);
        rotated[i] = is_x ? values[i] * cos - partner * sin : values[i] * cos + partner * sin;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = rotated[i];
}

/// Each thread moves one unit: eight elements of a new key, value or query.
template <class Element>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const __grid_constant__ KvCacheAppendParams params,
                  const __grid_constant__ AppendGrid grid) {
    const int64_t batch = blockIdx.x / grid.tokens, token = blockIdx.x % grid.tokens;
    int item = static_cast<int>(blockIdx.y * kAppendThreads + threadIdx.x);
    const int num_keys = grid.keys(params), num_values = grid.values(params);
    const int64_t length = kv_length(params.cache, batch);
    float values[kUnit];

    if (item < num_keys + num_values) {
        const bool is_key = item < num_keys;
        const int64_t position = length + token;
        if (token >= params.seqlen_new || length < 0 || position >= params.cache.capacity()) return;
        const KvRow place = kv_row_unchecked(params.cache, batch, position);
        if (!kv_row_exists(params.cache, place)) return;

        item -= is_key ? 0 : num_keys;
        const int units = is_key ? grid.k_units : grid.v_units;
        const int columns = is_key ? params.head_dim : params.head_dim_v;
        const int64_t head = item / units;
        const int first = item % units * kUnit;
        const uint16_t* source =
            static_cast<const uint16_t*>(is_key ? params.k : params.v) +
            tensor_offset(is_key ? params.k_strides : params.v_strides, batch, token, head);
        void* const cache = is_key ? params.k_cache : params.v_cache;
        const bool cache_aligned = is_key ? grid.k_cache_aligned : grid.v_cache_aligned;
        const int64_t offset = tensor_offset(
            is_key ? params.cache.k_strides : params.cache.v_strides, place.entry, place.row, head);
        load_unit<Element>(source, first, columns, is_key ? grid.k_aligned : grid.v_aligned,
                           values);
        if (is_key && first < params.rotary_dim) {
            rotate_unit<Element>(params, source, first, position, values);
        }
        if (params.cache.is_float8) {
            const Descale& descale = is_key ? params.cache.k_descale : params.cache.v_descale;
            store_float8_unit(static_cast<uint8_t*>(cache) + offset, first, columns, cache_aligned,
                              descale.of(batch, head), values);
        } else {
            store_unit<Element>(static_cast<uint16_t*>(cache) + offset, first, columns,
                                cache_aligned, values);
        }
        return;
    }

    item -= num_keys + num_values;
    if (item >= grid.queries(params) || token >= params.seqlen_q) return;
    const int64_t head = item / grid.k_units;
    const int first = item % grid.k_units * kUnit;
    const int64_t start = length < 0 ? 0 : length;
    const uint16_t* source = static_cast<const uint16_t*>(params.q) +
                             tensor_offset(params.q_strides, batch, token, head);
    load_unit<Element>(source, first, params.head_dim, grid.q_aligned, values);
    if (first < params.rotary_dim) {
        rotate_unit<Element>(params, source, first, start + (params.rotary_advances ? token : 0),
                             values);
    }
    uint16_t* destination =
        static_cast<uint16_t*>(params.q_rotated) +
        ((batch * params.seqlen_q + token) * params.num_heads_q + head) * params.head_dim;
    store_unit<Element>(destination, first, params.head_dim, grid.q_rotated_aligned, values);
}

}  // namespace

namespace cuda {

void kvcache_append(const KvCacheAppendParams& params, void* stream) {
    AppendGrid grid;
    grid.k_units = (params.head_dim + kUnit - 1) / kUnit;
    grid.v_units = (params.head_dim_v + kUnit - 1) / kUnit;
    grid.k_aligned = is_aligned(params.k, params.k_strides, params.head_dim);
    grid.v_aligned = is_aligned(params.v, params.v_strides, params.head_dim_v);
    grid.q_aligned = is_aligned(params.q, params.q_strides, params.head_dim);
    const int unit_bytes = params.cache.is_float8 ? kUnit : 2 * kUnit;
    grid.k_cache_aligned =
        is_aligned(params.k_cache, params.cache.k_strides, params.head_dim, unit_bytes);
    grid.v_cache_aligned =
        is_aligned(params.v_cache, params.cache.v_strides, params.head_dim_v, unit_bytes);
    grid.q_rotated_aligned = is_aligned(params.q_rotated, TensorStrides{}, params.head_dim);
    const int64_t items = int64_t{grid.keys(params)} + grid.values(params) + grid.queries(params);
    grid.tokens = std::max(params.seqlen_new, grid.queries(params) > 0 ? params.seqlen_q : 0);
    const int64_t blocks = (items + kAppendThreads - 1) / kAppendThreads;
    if (params.batch_size == 0 || grid.tokens == 0 || blocks == 0) return;
    if (blocks > 65535) {
        throw std::invalid_argument(
            "appending takes at most 65535 * 1024 elements of all heads of "
            "a token; got " +
            std::to_string(items * kUnit));
    }
    const dim3 ctas(grid_size("appending to a cache", params.batch_size * grid.tokens),
                    static_cast<unsigned>(blocks));
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (params.dtype == DType::kBFloat16) {
        append_kernel<BFloat16><<<ctas, kAppendThreads, 0, cuda_stream>>>(params, grid);
    } else {
        append_kernel<Float16><<<ctas, kAppendThreads, 0, cuda_stream>>>(params, grid);
    }
    check_launch("appending to a cache");
}

}  // namespace cuda

}  // namespace flash_attn_norm
