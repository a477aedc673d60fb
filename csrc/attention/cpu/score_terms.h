#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

constexpr float kNegInf = -__builtin_inff();

/// tanh to about 2 ulp: a polynomial near 0, where the formula with exp would cancel.
template <class Simd>
typename Simd::Vec tanh_of(typename Simd::Vec x) {
    using Vec = typename Simd::Vec;
    const Vec one = Simd::broadcast(1.0f);
    const Vec magnitude = Simd::abs(x);

    const Vec z = Simd::mul(x, x);
    Vec near = Simd::broadcast(-4.76942910e-3f);
    near = Simd::fma(near, z, Simd::broadcast(1.96648389e-2f));
    near = Simd::fma(near, z, Simd::broadcast(-5.33902273e-2f));
    near = Simd::fma(near, z, Simd::broadcast(0.133265212f));
    near = Simd::fma(near, z, Simd::broadcast(-0.333330691f));
    near = Simd::fma(Simd::mul(near, z), x, x);

    // 1 - 2 / (e^(2|x|) + 1), with x's sign; 1 in fp32 from 10 on.
    const Vec limit = Simd::broadcast(10.0f);
    const Vec clamped = Simd::select_less(limit, magnitude, limit, magnitude);
    const Vec e = Simd::exp2(Simd::mul(clamped, Simd::broadcast(2.0f * kLog2e)));
    Vec far = Simd::sub(one, Simd::div(Simd::broadcast(2.0f), Simd::add(e, one)));
    far = Simd::select_less(x, Simd::broadcast(0.0f), Simd::sub(Simd::broadcast(0.0f), far), far);
    return Simd::select_less(magnitude, Simd::broadcast(0.75f), near, far);
}

/// scores -> softcap * tanh(scale * scores / softcap) - alibi + bias, one row.
template <class Simd>
void apply_extra_terms(const ScoreTerms& terms, const ScoreTile& tile, int r, float* scores,
                       float* softcap_factor) {
    using Vec = typename Simd::Vec;
    alignas(64) float bias[kMaxBlockN];
    alignas(64) float column[Simd::kWidth];
    const int keys_padded = static_cast<int>(round_up(tile.keys, kPanel));
    const int64_t row = tile.row_begin + r;
    if (terms.bias != nullptr) {
        const char* bias_row =
            static_cast<const char*>(terms.bias) +
            (row * terms.bias_row_stride + tile.key_begin) * size_of(terms.bias_dtype);
        load_row_as_float<Simd>(bias_row, terms.bias_dtype, tile.keys, keys_padded, bias);
    }
    for (int i = 0; i < Simd::kWidth; ++i) column[i] = static_cast<float>(i);
    const Vec columns = Simd::load(column);
    const int64_t diagonal = row + terms.mask.shift() - tile.key_begin;  // of the first key

    for (int c = 0; c < keys_padded; c += Simd::kWidth) {
        Vec x = Simd::mul(Simd::load(scores + c), Simd::broadcast(terms.softmax_scale));
        if (terms.softcap > 0.0f) {
            const Vec t = tanh_of<Simd>(Simd::div(x, Simd::broadcast(terms.softcap)));
            x = Simd::mul(t, Simd::broadcast(terms.softcap));
            if (softcap_factor != nullptr) {
                const Vec square = Simd::mul(t, t);
                Simd::store(softcap_factor + c, Simd::sub(Simd::broadcast(1.0f), square));
            }
        }
        if (terms.has_alibi) {
            const Vec offset = Simd::broadcast(static_cast<float>(diagonal - c));
            const Vec distance = Simd::abs(Simd::sub(offset, columns));
            x = Simd::fma(distance, Simd::broadcast(-terms.alibi_slope), x);
        }
        if (terms.bias != nullptr) x = Simd::add(x, Simd::load(bias + c));
        Simd::store(scores + c, x);
    }
}

template <class Simd>
void prepare_scores(const ScoreTerms& terms, const ScoreTile& tile, float* softcap_factor) {
    const int64_t key_end = tile.key_begin + tile.keys;
    const int keys_padded = static_cast<int>(round_up(tile.keys, kPanel));
    const bool has_extra_terms = terms.has_extra_terms();
    const bool is_masked =
        keys_padded != tile.keys ||
        !terms.mask.covers(tile.row_begin, tile.row_begin + tile.rows, tile.key_begin, key_end);
    if (!has_extra_terms && !is_masked) return;
    for (int r = 0; r < tile.rows; ++r) {
        float* scores = tile.scores + r * tile.ld;
        if (has_extra_terms) {
            float* factor = softcap_factor ? softcap_factor + r * tile.ld : nullptr;
            apply_extra_terms<Simd>(terms, tile, r, scores, factor);
        }
        if (is_masked) {
            const IndexRange seen = terms.mask.keys_of_row(tile.row_begin + r);
            const int64_t first = min_of(max_of(seen.begin - tile.key_begin, 0), keys_padded);
            const int64_t last = min_of(max_of(seen.end - tile.key_begin, first), tile.keys);
            for (int64_t c = 0; c < first; ++c) scores[c] = kNegInf;
            for (int64_t c = max_of(first, last); c < keys_padded; ++c) scores[c] = kNegInf;
        }
    }
}

/// Dropout::bits of one row for kPanel keys from `key` on: 16 calls, one per pair of keys 8 apart,
/// side by side so that the compiler vectorizes them.
struct DropoutBits {
    static constexpr int kCalls = kPanel / 2;
    uint32_t lane[4][kCalls];

    DropoutBits(const Dropout& dropout, uint32_t row, uint32_t key) {
        uint32_t* c0 = lane[0];
        uint32_t* c1 = lane[1];
        uint32_t* c2 = lane[2];
        uint32_t* c3 = lane[3];
        for (uint32_t i = 0; i < kCalls; ++i) {
            c0[i] = ((row >> 4) << 3) | (row & 7u);
            c1[i] = (key >> 1) + i;  // key is a multiple of kPanel
            c2[i] = dropout.batch_head;
            c3[i] = dropout.offset;
        }
        uint32_t k0 = dropout.key0, k1 = dropout.key1;
        for (int round = 0; round < 10; ++round) {  // see philox_4x32_10
            for (int i = 0; i < kCalls; ++i) {
                const uint64_t product0 = uint64_t{0xD2511F53u} * c0[i];
                const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2[i];
                c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ k0;
                c1[i] = static_cast<uint32_t>(product1);
                c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ k1;
                c3[i] = static_cast<uint32_t>(product0);
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
    }
};

/// Tiles begin at multiples of kPanel in both directions.
inline void dropout_factors(const ScoreTerms& terms, const ScoreTile& tile, float* keep) {
    const int keys_padded = static_cast<int>(round_up(tile.keys, kPanel));
    const uint32_t drop_below = terms.dropout.drop_below;
    for (int r = 0; r < tile.rows; ++r) {
        if (r & 8) continue;
        for (int c = 0; c < keys_padded; c += kPanel) {
            const DropoutBits bits(terms.dropout, static_cast<uint32_t>(tile.row_begin + r),
                                   static_cast<uint32_t>(tile.key_begin + c));
            // Lanes: (row, key), (row + 8, key), (row, key + 8), (row + 8, key + 8).
            for (int lane = 0; lane < 4; ++lane) {
                float* factors = keep + (r + (lane & 1) * 8) * tile.ld + c + (lane >> 1) * 8;
                const uint32_t* lane_bits = bits.lane[lane];
                for (int i = 0; i < 8; ++i) {
                    factors[i] = lane_bits[i] >= drop_below ? terms.keep_scale : 0.0f;
                    factors[i + 16] = lane_bits[i + 8] >= drop_below ? terms.keep_scale : 0.0f;
                }
            }
        }
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
