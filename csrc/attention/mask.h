#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_attn_norm {

/// [begin, end); empty when begin >= end.
struct IndexRange {
    int64_t begin = 0;
    int64_t end = 0;

    FAN_HOST_DEVICE bool empty() const { return begin >= end; }
};

/// Which keys a query row sees: a band around a diagonal that is aligned bottom-right, i.e. the
/// last query row meets the last key. Row i sees keys j with  i + shift - window_left <= j <= i +
/// shift + window_right, shift = seqlen_k - seqlen_q; a bound of -1 is no bound. A causal mask is
/// window_right = 0.
struct Mask {
    int64_t seqlen_q = 0;
    int64_t seqlen_k = 0;
    int64_t window_left = -1;
    int64_t window_right = -1;

    FAN_HOST_DEVICE int64_t shift() const { return seqlen_k - seqlen_q; }

    /// Keys seen by at least one of the rows [row_begin, row_end).
    FAN_HOST_DEVICE IndexRange keys(int64_t row_begin, int64_t row_end) const {
        IndexRange range{0, seqlen_k};
        if (window_left >= 0) {
            const int64_t first = row_begin + shift() - window_left;
            range.begin = first > 0 ? first : 0;
        }
        if (window_right >= 0) {
            const int64_t last =
                row_end + shift() + window_right;  // one past the last row's last key
            range.end = last < seqlen_k ? last : seqlen_k;
        }
        if (range.end < range.begin) range.end = range.begin;
        return range;
    }

    FAN_HOST_DEVICE IndexRange keys_of_row(int64_t row) const { return keys(row, row + 1); }

    /// Rows that see at least one of the keys [key_begin, key_end): the same band, read by columns.
    FAN_HOST_DEVICE IndexRange rows(int64_t key_begin, int64_t key_end) const {
        IndexRange range{0, seqlen_q};
        if (window_right >= 0) {
            const int64_t first = key_begin - shift() - window_right;
            range.begin = first > 0 ? first : 0;
        }
        if (window_left >= 0) {
            const int64_t last = key_end - shift() + window_left;
            range.end = last < seqlen_q ? last : seqlen_q;
        }
        if (range.end < range.begin) range.end = range.begin;
        return range;
    }

    /// True when every row of [row_begin, row_end) sees every key of [key_begin, key_end): no test
    /// per score.
    FAN_HOST_DEVICE bool covers(int64_t row_begin, int64_t row_end, int64_t key_begin,
                                int64_t key_end) const {
        const bool inside = row_end <= seqlen_q && key_end <= seqlen_k;
        const bool left = window_left < 0 || key_begin >= row_end - 1 + shift() - window_left;
        const bool right = window_right < 0 || key_end - 1 <= row_begin + shift() + window_right;
        return inside && left && right;
    }
};

/// A Mask in 32 bits, for the tests per score: row i sees keys j with i + left <= j < min(i +
/// right, seqlen_k). Bounds beyond the sequence are cut to its ends, which changes no row's keys.
struct RowBounds {
    int left = 0;
    int right = 0;
    int seqlen_k = 0;

    FAN_HOST_DEVICE static RowBounds make(const Mask& mask) {
        RowBounds bounds;
        const int64_t left = mask.shift() - mask.window_left;
        const int64_t right = mask.shift() + mask.window_right + 1;
        const int64_t far_left = -mask.seqlen_q;
        bounds.seqlen_k = static_cast<int>(mask.seqlen_k);
        bounds.left = static_cast<int>(mask.window_left < 0 || left < far_left ? far_left
                                       : left > mask.seqlen_k                  ? mask.seqlen_k
                                                                               : left);
        bounds.right =
            static_cast<int>(mask.window_right < 0 || right > mask.seqlen_k ? mask.seqlen_k
                             : right < far_left                             ? far_left
                                                                            : right);
        return bounds;
    }
};

}  // namespace flash_attn_norm
