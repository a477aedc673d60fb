#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

template <class Operand>
void softmax_update(const ScoreTile& tile, float scale_log2, const SoftmaxState& state,
                    const float* keep, void* probs, int64_t ldp) {
    using Simd = typename Operand::Simd;
    using Vec = typename Simd::Vec;
    constexpr int kWidth = Simd::kWidth;
    const int keys_padded = static_cast<int>(round_up(tile.keys, kPanel));
    const Vec scale = Simd::broadcast(scale_log2);
    auto* probs_row = static_cast<typename Operand::Type*>(probs);

    for (int r = 0; r < tile.rows; ++r, probs_row += ldp) {
        const float* scores = tile.scores + r * tile.ld;
        Vec max0 = Simd::broadcast(kNegInf);
        Vec max1 = max0;
        for (int c = 0; c < keys_padded; c += 2 * kWidth) {
            max0 = Simd::max(max0, Simd::load(scores + c));
            max1 = Simd::max(max1, Simd::load(scores + c + kWidth));
        }
        const float old_max = state.row_max[r];
        const float tile_max = Simd::reduce_max(Simd::max(max0, max1));
        float new_max = tile_max > old_max ? tile_max : old_max;
        // A row that has seen no key yet, or none but those of the lowest scores, which are -inf as
        // powers of two: any finite maximum gives exp2(-inf) = 0.
        if (new_max * scale_log2 == kNegInf) new_max = kNegInf;
        const float finite_max = new_max == kNegInf ? 0.0f : new_max;

        // Taken off before the scale: exact near the maximum, however large that is.
        const Vec base = Simd::broadcast(finite_max);
        Vec sum0 = Simd::broadcast(0.0f);
        Vec sum1 = sum0;
        for (int c = 0; c < keys_padded; c += 2 * kWidth) {
            const Vec below0 = Simd::sub(Simd::load(scores + c), base);
            const Vec below1 = Simd::sub(Simd::load(scores + c + kWidth), base);
            Vec p0 = Operand::exp2(Simd::mul(below0, scale));
            Vec p1 = Operand::exp2(Simd::mul(below1, scale));
            sum0 = Simd::add(sum0, p0);
            sum1 = Simd::add(sum1, p1);
            if (keep != nullptr) {
                p0 = Simd::mul(p0, Simd::load(keep + r * tile.ld + c));
                p1 = Simd::mul(p1, Simd::load(keep + r * tile.ld + c + kWidth));
            }
            Operand::store(probs_row + c, p0);
            Operand::store(probs_row + c + kWidth, p1);
        }
        alignas(64) float correction[kWidth];
        Simd::store(correction, Simd::exp2(Simd::broadcast((old_max - finite_max) * scale_log2)));
        state.correction[r] = old_max == finite_max ? 1.0f : correction[0];
        state.row_sum[r] =
            state.row_sum[r] * state.correction[r] + Simd::reduce_add(Simd::add(sum0, sum1));
        state.row_max[r] = new_max;
    }
}

/// One row of softmax_gradient.
template <class Operand>
struct GradientRow {
    using Simd = typename Operand::Simd;
    using Vec = typename Simd::Vec;

    const float* scores;
    const float* dprobs;
    const float* keep;
    const float* softcap_factor;
    float* dbias;
    Vec minus_lse;
    Vec delta;

    GradientRow(const ScoreTile& tile, const GradientTile& gradient, int r)
        : scores(tile.scores + r * tile.ld),
          dprobs(gradient.dprobs + r * tile.ld),
          keep(gradient.keep ? gradient.keep + r * tile.ld : nullptr),
          softcap_factor(gradient.softcap_factor ? gradient.softcap_factor + r * tile.ld : nullptr),
          dbias(gradient.dbias ? gradient.dbias + r * gradient.dbias_ld : nullptr),
          minus_lse(Simd::broadcast(-gradient.lse_log2[r])),
          delta(Simd::broadcast(gradient.delta[r])) {}

    /// P and dS = P * (dP - delta) of the columns from c on.
    void compute(int c, Vec scale, Vec* prob, Vec* dscore) const {
        // At most 1: of huge scores the LSE is so coarse that the power might be inf.
        const Vec exponent = Simd::fma(Simd::load(scores + c), scale, minus_lse);
        Vec p = Operand::exp2(Simd::min(Simd::broadcast(0.0f), exponent));
        Vec dp = Simd::load(dprobs + c);
        Vec dropped = p;
        if (keep != nullptr) {
            const Vec factor = Simd::load(keep + c);
            dropped = Simd::mul(p, factor);
            dp = Simd::mul(dp, factor);
        }
        Vec ds = Simd::mul(p, Simd::sub(dp, delta));
        if (dbias != nullptr) Simd::store(dbias + c, Simd::add(Simd::load(dbias + c), ds));
        if (softcap_factor != nullptr) ds = Simd::mul(ds, Simd::load(softcap_factor + c));
        *prob = dropped;
        *dscore = ds;
    }
};

template <class Operand>
typename Operand::Vec part_of(typename Operand::Vec x, OperandPart part) {
    if constexpr (Operand::kRounds) {
        if (part == OperandPart::kUpper) return Operand::upper(x);
        if (part == OperandPart::kRest) return Operand::Simd::sub(x, Operand::upper(x));
    }
    (void)part;
    return x;
}

/// Rows r and r + 1 of the B forms lie behind the tile's end.
template <class Operand>
void clear_pair(const GradientTile& gradient, int r, int keys_padded) {
    using Type = typename Operand::Type;
    for (int c = 0; c < keys_padded; c += kPanel) {
        const int64_t pair = c / kPanel * gradient.b_panel_stride + int64_t{r} * kPanel;
        Type* probs = static_cast<Type*>(gradient.probs_b);
        Type* dscores = static_cast<Type*>(gradient.dscores_b);
        if (probs != nullptr) std::memset(probs + pair, 0, 2 * kPanel * sizeof(Type));
        if (dscores != nullptr) std::memset(dscores + pair, 0, 2 * kPanel * sizeof(Type));
    }
}

template <class Operand>
void softmax_gradient(const ScoreTile& tile, float scale_log2, const GradientTile& gradient) {
    using Simd = typename Operand::Simd;
    using Vec = typename Simd::Vec;
    using Type = typename Operand::Type;
    const int keys_padded = static_cast<int>(round_up(tile.keys, kPanel));
    const Vec scale = Simd::broadcast(scale_log2);
    Type* dscores_a = static_cast<Type*>(gradient.dscores_a);

    const int rows_padded = static_cast<int>(round_up(tile.rows, kPanel));

    for (int r = 0; r < rows_padded; r += 2) {
        if (r >= tile.rows) {
            clear_pair<Operand>(gradient, r, keys_padded);
            continue;
        }
        const bool has_second = r + 1 < tile.rows;
        const GradientRow<Operand> row0(tile, gradient, r);
        const GradientRow<Operand> row1(tile, gradient, has_second ? r + 1 : r);
        for (int c = 0; c < keys_padded; c += Simd::kWidth) {
            Vec p0, p1, ds0, ds1;
            row0.compute(c, scale, &p0, &ds0);
            if (has_second) {
                row1.compute(c, scale, &p1, &ds1);
            } else {
                p1 = ds1 = Simd::broadcast(0.0f);
            }
            p0 = part_of<Operand>(p0, gradient.part);
            p1 = part_of<Operand>(p1, gradient.part);
            ds0 = part_of<Operand>(ds0, gradient.part);
            ds1 = part_of<Operand>(ds1, gradient.part);
            const int64_t pair = c / kPanel * gradient.b_panel_stride + int64_t{r} * kPanel;
            if (gradient.probs_b != nullptr) {
                Operand::store_pair(static_cast<Type*>(gradient.probs_b) + pair, c % kPanel, p0,
                                    p1);
            }
            if (gradient.dscores_b != nullptr) {
                Operand::store_pair(static_cast<Type*>(gradient.dscores_b) + pair, c % kPanel, ds0,
                                    ds1);
            }
            if (dscores_a != nullptr) {
                Operand::store(dscores_a + r * gradient.dscores_lda + c, ds0);
                Operand::store(dscores_a + (r + 1) * gradient.dscores_lda + c, ds1);
            }
        }
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
