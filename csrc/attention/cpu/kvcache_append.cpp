#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/cpu/half_types.h"
#include "attention/cpu/work_items.h"
#include "attention/float8.h"
#include "attention/kv_cache.h"

namespace flash_attn_norm {
namespace cpu {

namespace {

float load_element(const void* row, DType dtype, int64_t index) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(row)[index];
    const uint16_t bits = static_cast<const uint16_t*>(row)[index];
    return dtype == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

void store_element(void* row, DType dtype, int64_t index, float value) {
    if (dtype == DType::kFloat32) {
        static_cast<float*>(row)[index] = value;
    } else {
        static_cast<uint16_t*>(row)[index] =
            dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
    }
}

/// Row `position` of the rotary tables as floats.
struct Angles {
    float cos[kMaxHeadDim / 2];
    float sin[kMaxHeadDim / 2];

    Angles(const KvCacheAppendParams& params, int64_t position) {
        const int count = params.rotary_dim / 2;
        const int64_t row = min_of(max_of(position, 0), params.rotary_rows - 1);
        for (int i = 0; i < count; ++i) {
            cos[i] = load_element(params.rotary_cos, params.rotary_dtype, row * count + i);
            sin[i] = load_element(params.rotary_sin, params.rotary_dtype, row * count + i);
        }
    }
};

/// Calls store(column, value) for the elements below rotary_dim of a row, rotated.
template <class Store>
void rotate_row(const KvCacheAppendParams& params, const Angles& angles, const void* row,
                Store&& store) {
    const int pairs = params.rotary_dim / 2;
    for (int i = 0; i < pairs; ++i) {
        const int first = params.rotary_interleaved ? 2 * i : i;
        const int second = params.rotary_interleaved ? 2 * i + 1 : i + pairs;
        const float x = load_element(row, params.dtype, first);
        const float y = load_element(row, params.dtype, second);
        store(first, x * angles.cos[i] - y * angles.sin[i]);
        store(second, y * angles.cos[i] + x * angles.sin[i]);
    }
}

/// dst = src, its first rotary_dim elements rotated.
void write_row(const KvCacheAppendParams& params, const Angles* angles, const void* src,
               int head_dim, void* dst) {
    std::memcpy(dst, src, static_cast<size_t>(head_dim) * size_of(params.dtype));
    if (angles == nullptr) return;
    rotate_row(params, *angles, src,
               [&](int column, float value) { store_element(dst, params.dtype, column, value); });
}

/// The same into a float8 cache.
void write_float8_row(const KvCacheAppendParams& params, const Angles* angles, const void* src,
                      int head_dim, float descale, uint8_t* dst) {
    const auto store = [&](int column, float value) {
        dst[column] = float_to_e4m3(value / descale);
    };
    for (int i = angles == nullptr ? 0 : params.rotary_dim; i < head_dim; ++i) {
        store(i, load_element(src, params.dtype, i));
    }
    if (angles != nullptr) rotate_row(params, *angles, src, store);
}

/// Bytes from the start of q, k or v to one of its rows.
int64_t bytes_to(const KvCacheAppendParams& params, const TensorStrides& strides, int64_t batch,
                 int64_t row, int64_t head) {
    return tensor_offset(strides, batch, row, head) * size_of(params.dtype);
}

void append_row(const KvCacheAppendParams& params, int64_t batch, int64_t row) {
    const KvCacheLayout& cache = params.cache;
    const int64_t length = kv_length(cache, batch), position = length + row;
    if (length < 0 || position >= cache.capacity()) return;
    const KvRow at = kv_row_unchecked(cache, batch, position);
    if (!kv_row_exists(cache, at)) return;

    const Angles angles(params, position);
    const Angles* const rotation = params.rotary_dim > 0 ? &angles : nullptr;
    const int element_bytes = cache.is_float8 ? 1 : size_of(params.dtype);
    const auto write = [&](const Angles* angles, const void* rows, const TensorStrides& strides,
                           int head_dim, void* data, const TensorStrides& cache_strides,
                           const Descale& descale, int head) {
        const char* const src =
            static_cast<const char*>(rows) + bytes_to(params, strides, batch, row, head);
        char* const dst = static_cast<char*>(data) +
                          tensor_offset(cache_strides, at.entry, at.row, head) * element_bytes;
        if (!cache.is_float8) return write_row(params, angles, src, head_dim, dst);
        write_float8_row(params, angles, src, head_dim, descale.of(batch, head),
                         reinterpret_cast<uint8_t*>(dst));
    };
    for (int head = 0; head < params.num_heads_kv; ++head) {
        write(rotation, params.k, params.k_strides, params.head_dim, params.k_cache,
              cache.k_strides, cache.k_descale, head);
        write(nullptr, params.v, params.v_strides, params.head_dim_v, params.v_cache,
              cache.v_strides, cache.v_descale, head);
    }
}

void rotate_query_row(const KvCacheAppendParams& params, int64_t batch, int64_t row) {
    const int64_t position = kv_length(params.cache, batch) + (params.rotary_advances ? row : 0);
    const Angles angles(params, position);
    const TensorStrides strides =
        contiguous_strides(params.seqlen_q, params.num_heads_q, params.head_dim);
    const char* const q = static_cast<const char*>(params.q);
    char* const q_rotated = static_cast<char*>(params.q_rotated);
    for (int head = 0; head < params.num_heads_q; ++head) {
        write_row(params, &angles, q + bytes_to(params, params.q_strides, batch, row, head),
                  params.head_dim, q_rotated + bytes_to(params, strides, batch, row, head));
    }
}

}  // namespace

void kvcache_append(const KvCacheAppendParams& params, const CpuRuntime& runtime) {
    constexpr int64_t kGrain = 16;  // rows
    runtime.parallel_for(params.batch_size * params.seqlen_new, kGrain,
                         [&](int64_t begin, int64_t end) {
                             for (int64_t i = begin; i < end; ++i) {
                                 append_row(params, i / params.seqlen_new, i % params.seqlen_new);
                             }
                         });
    if (params.rotary_dim == 0) return;
    runtime.parallel_for(params.batch_size * params.seqlen_q, kGrain,
                         [&](int64_t begin, int64_t end) {
                             for (int64_t i = begin; i < end; ++i) {
                                 rotate_query_row(params, i / params.seqlen_q, i % params.seqlen_q);
                             }
                         });
}

}  // namespace cpu
}  // namespace flash_attn_norm
