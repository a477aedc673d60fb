#pragma once

#include <cstdint>

#include "attention/mask.h"
#include "attention/params.h"
#include "common/host_device.h"

namespace flash_attn_norm {

/// The length of a sequence as KvCacheLayout defines it, not cut to the capacity; -1 for one of
/// padding and for one whose cache_batch_idx lies outside the cache.
FAN_HOST_DEVICE int64_t kv_length(const KvCacheLayout& cache, int64_t batch) {
    if (cache.cache_batch_idx != nullptr) {
        const int64_t entry = cache.cache_batch_idx[batch];
        if (entry < 0 || entry >= cache.num_entries) return -1;
    }
    if (cache.cache_seqlens != nullptr) {
        const int64_t stored = cache.cache_seqlens[batch];
        return stored < 0 ? -1 : stored + cache.seqlen;
    }
    if (cache.cu_seqlens_k != nullptr) {
        const int64_t stored =
            int64_t{cache.cu_seqlens_k[batch + 1]} - int64_t{cache.cu_seqlens_k[batch]};
        return stored < 0 ? -1 : stored + cache.seqlen;
    }
    return cache.seqlen;
}

/// The positions of a sequence's keys, inside the capacity. Its seqlen_k, as masks and ALiBi count,
/// is end - begin, and key j stands at position begin + j.
FAN_HOST_DEVICE IndexRange kv_positions(const KvCacheLayout& cache, int64_t batch) {
    const int64_t length = kv_length(cache, batch), capacity = cache.capacity();
    IndexRange positions;
    positions.end = length < 0 ? 0 : (length > capacity ? capacity : length);
    const int64_t leftpad = cache.cache_leftpad != nullptr ? cache.cache_leftpad[batch] : 0;
    positions.begin = leftpad < 0 ? 0 : (leftpad > positions.end ? positions.end : leftpad);
    return positions;
}

/// A row of a cache.
struct KvRow {
    int64_t entry = 0;
    int64_t row = 0;
};

/// Where a position in [0, capacity) of a sequence lies. The entry comes from an index tensor: it
/// may lie outside the cache.
FAN_HOST_DEVICE KvRow kv_row_unchecked(const KvCacheLayout& cache, int64_t batch,
                                       int64_t position) {
    if (cache.is_paged) {
        const int64_t page = position / cache.entry_rows;
        return KvRow{cache.page_table[batch * cache.page_table_stride + page],
                     position - page * cache.entry_rows};
    }
    return KvRow{cache.cache_batch_idx != nullptr ? cache.cache_batch_idx[batch] : batch, position};
}

FAN_HOST_DEVICE bool kv_row_exists(const KvCacheLayout& cache, KvRow row) {
    return row.entry >= 0 && row.entry < cache.num_entries;
}

/// The same for reading: an entry outside the cache becomes the closest inside.
FAN_HOST_DEVICE KvRow kv_row(const KvCacheLayout& cache, int64_t batch, int64_t position) {
    KvRow row = kv_row_unchecked(cache, batch, position);
    if (row.entry >= cache.num_entries) row.entry = cache.num_entries - 1;
    if (row.entry < 0) row.entry = 0;
    return row;
}

}  // namespace flash_attn_norm
