#pragma once

#include "attention/element.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

template <class Element>
constexpr ptx::WgmmaType wgmma_type() {
    return Element::kDType == DType::kBFloat16 ? ptx::WgmmaType::kBf16 : ptx::WgmmaType::kF16;
}

}  // namespace sm90
}  // namespace flash_attn_norm
