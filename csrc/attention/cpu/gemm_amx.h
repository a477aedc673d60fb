#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// Palette 1 (Intel SDM volume 1, chapter 18): eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// In memory, not on the stack: GCC 12's _tile_loadconfig tells the optimizer of the first eight
/// bytes that it reads only.
const TileConfig kTileConfig;

inline void enter_amx() {
    _tile_loadconfig(&kTileConfig);
}

inline void leave_amx() {
    _tile_release();
}

constexpr int kTileRows = 16;
constexpr int kTileK = 32;

/// c[32, 32] (+)= a[32, k] * b[k, 32]. Tiles 0 to 3 hold c, 4 and 5 rows of a, 6 and 7 columns of
/// b. If is_half, only the first 16 rows.
template <bool is_half>
void gemm_amx_block(const uint16_t* a, int64_t lda, const uint16_t* b, float* c, int64_t ldc, int k,
                    bool accumulate) {
    const int64_t c_stride = ldc * static_cast<int64_t>(sizeof(float));
    const int64_t a_stride = lda * static_cast<int64_t>(sizeof(uint16_t));
    constexpr int64_t kBStride = 2 * kPanel * sizeof(uint16_t);
    float* c_below = c + kTileRows * ldc;
    const uint16_t* a_below = a + kTileRows * lda;
    if (accumulate) {
        _tile_loadd(0, c, c_stride);
        _tile_loadd(1, c + 16, c_stride);
        if (!is_half) {
            _tile_loadd(2, c_below, c_stride);
            _tile_loadd(3, c_below + 16, c_stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (!is_half) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int i = 0; i < k; i += kTileK, b += kTileK * kPanel) {
        _tile_loadd(4, a + i, a_stride);
        _tile_loadd(6, b, kBStride);
        _tile_loadd(7, b + kPanel, kBStride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!is_half) {
            _tile_loadd(5, a_below + i, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + 16, c_stride);
    if (!is_half) {
        _tile_stored(2, c_below, c_stride);
        _tile_stored(3, c_below + 16, c_stride);
    }
}

inline void gemm_amx(const GemmArgs& args) {
    const uint16_t* a = static_cast<const uint16_t*>(args.a);
    const uint16_t* b = static_cast<const uint16_t*>(args.b);
    for (int n = 0; n < args.n; n += kPanel, b += args.b_panel_stride) {
        for (int m = 0; m < args.m; m += 2 * kTileRows) {
            float* c = args.c + m * args.ldc + n;
            if (args.m - m > kTileRows) {
                gemm_amx_block<false>(a + m * args.lda, args.lda, b, c, args.ldc, args.k,
                                      args.accumulate);
            } else {
                gemm_amx_block<true>(a + m * args.lda, args.lda, b, c, args.ldc, args.k,
                                     args.accumulate);
            }
        }
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
