#pragma once

#include <cstdint>

#include "norms/norm_math.cuh"

// The arithmetic of a row's gradient, which the kernels of few and of many rows share: a row's bits
// do not depend on how many there are. No product is left to the compiler to contract with a sum,
// which it does in one kernel and not in another.

namespace flash_attn_norm {

/// mean and rstd of a row, as the forward pass wrote them.
template <class Config>
struct BwdStats {
    float mean = 0.0f;  // LayerNorm only
    float rstd = 0.0f;

    /// (sum - mean) * rstd of a pack, in place. The product is rounded once, with the sum: what
    /// that changes is no more than the rounding of the mean itself.
    __device__ __forceinline__ void normalize(float* values) const {
        const float shift = -mean * rstd;
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) {
            values[i] = Config::kLayerNorm ? fmaf(values[i], rstd, shift) : values[i] * rstd;
        }
    }
};

/// A pack's part of the row's sums: of dxhat * xhat and, for LayerNorm, of dxhat.
template <class Config>
__device__ __forceinline__ void add_pack_sums(const float* dxhat, const float* xhat,
                                              float (&sums)[Config::kSums]) {
    float products = 0.0f;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) {
        products = fmaf(dxhat[i], xhat[i], products);
        total += dxhat[i];
    }
    sums[0] += products;
    if (Config::kLayerNorm) sums[Config::kSums - 1] += total;
}

/// From a row's sums to its gradient:
///     dx = rstd * (dxhat - xhat * mean(dxhat * xhat) - mean(dxhat))
/// with the mean of dxhat for LayerNorm alone.
template <class Config>
struct BwdFormula {
    float rstd;
    float projection;
    float shift;

    __device__ __forceinline__ BwdFormula(const NormProblem& problem, float rstd,
                                          const float (&sums)[Config::kSums])
        : rstd(rstd) {
        const float scale = rstd * problem.inv_hidden_size;
        projection = sums[0] * scale;
        shift = -sums[Config::kSums - 1] * scale;
    }
    __device__ __forceinline__ float dx(float dxhat, float xhat) const {
        const float scaled = Config::kLayerNorm ? fmaf(dxhat, rstd, shift) : dxhat * rstd;
        return fmaf(-xhat, projection, scaled);
    }
};

}  // namespace flash_attn_norm
