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

/// Dropout::bits(row_code, key_code + i) for i < kWidth, side by side; see philox_4x32_10.
template <class Simd>
void dropout_bits(const Dropout& dropout, uint32_t row_code, uint32_t key_code,
                  typename Simd::Bits* lanes) {
    using Bits = typename Simd::Bits;
    Bits c0 = Simd::broadcast_bits(row_code);
    Bits c1 = Simd::count_from(key_code);
    Bits c2 = Simd::broadcast_bits(dropout.batch_head);
    Bits c3 = Simd::broadcast_bits(dropout.offset);
    const Bits factor0 = Simd::broadcast_bits(0xD2511F53u);
    const Bits factor1 = Simd::broadcast_bits(0xCD9E8D57u);
    uint32_t k0 = dropout.key0, k1 = dropout.key1;
    for (int round = 0; round < 10; ++round) {
        Bits high0, low0, high1, low1;
        Simd::multiply_wide(c0, factor0, &high0, &low0);
        Simd::multiply_wide(c2, factor1, &high1, &low1);
        c0 = Simd::exclusive_or(high1, c1, Simd::broadcast_bits(k0));
        c1 = low1;
        c2 = Simd::exclusive_or(high0, c3, Simd::broadcast_bits(k1));
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    lanes[0] = c0;
    lanes[1] = c1;
    lanes[2] = c2;
    lanes[3] = c3;
}

/// Tiles begin at multiples of kPanel in both directions, so that a call of Philox serves four
/// entries of the tile: (row, key), (row + 8, key), (row, key + 8), (row + 8, key + 8).
template <class Simd>
void dropout_factors(const ScoreTerms& terms, const ScoreTile& tile, float* keep) {
    using Vec = typename Simd::Vec;
    constexpr int kCalls = kPanel / 2;  // of a row and its panel of keys
    const int keys_padded = static_cast<int>(round_up(tile.keys, kPanel));
    const auto bound = Simd::broadcast_bits(terms.dropout.drop_below);
    const Vec keep_scale = Simd::broadcast(terms.keep_scale);
    for (int r = 0; r < tile.rows; ++r) {
        if (r & 8) continue;
        const uint32_t row = static_cast<uint32_t>(tile.row_begin + r);
        const uint32_t row_code = ((row >> 4) << 3) | (row & 7u);
        for (int c = 0; c < keys_padded; c += kPanel) {
            // Codes of keys are as dense as their calls: two keys for each.
            const uint32_t key_code = static_cast<uint32_t>(tile.key_begin + c) / 2;
            alignas(64) float factors[4][kCalls];
            for (int call = 0; call < kCalls; call += Simd::kWidth) {
                typename Simd::Bits lanes[4];
                dropout_bits<Simd>(terms.dropout, row_code, key_code + call, lanes);
                for (int lane = 0; lane < 4; ++lane) {
                    Simd::store(factors[lane] + call,
                                Simd::value_where_at_least(lanes[lane], bound, keep_scale));
                }
            }
            for (int lane = 0; lane < 4; ++lane) {
                float* dst = keep + (r + (lane & 1) * 8) * tile.ld + c + (lane >> 1) * 8;
                std::memcpy(dst, factors[lane], 8 * sizeof(float));
                std::memcpy(dst + 16, factors[lane] + 8, 8 * sizeof(float));
            }
        }
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
