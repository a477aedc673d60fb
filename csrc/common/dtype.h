#pragma once

namespace flash_attn_norm {

/// Element types that tensors may have. Index tensors are always int32 and need no entry here.
enum class DType { kFloat32, kBFloat16, kFloat16 };

constexpr int size_of(DType dtype) {
    return dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace flash_attn_norm
