#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

inline void no_thread_state() {}

/// The function table of an engine that multiplies with `gemm`.
template <class Operand>
constexpr TileEngine make_engine(const char* name, void (*gemm)(const GemmArgs&), int fwd_block_m,
                                 int fwd_block_n, int bwd_block_m, int bwd_block_n) {
    using Simd = typename Operand::Simd;
    return TileEngine{name,
                      static_cast<int>(sizeof(typename Operand::Type)),
                      fwd_block_m,
                      fwd_block_n,
                      bwd_block_m,
                      bwd_block_n,
                      no_thread_state,
                      no_thread_state,
                      pack_a<Operand>,
                      pack_a_transposed<Operand>,
                      pack_b<Operand>,
                      pack_b_transposed<Operand>,
                      gemm,
                      prepare_scores<Simd>,
                      dropout_factors<Simd>,
                      softmax_update<Operand>,
                      softmax_gradient<Operand>,
                      scale_rows<Simd>,
                      store_rows<Simd>,
                      store_transposed<Simd>,
                      dot_rows<Simd>,
                      dot_keys<Simd>,
                      add_values<Operand>};
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
