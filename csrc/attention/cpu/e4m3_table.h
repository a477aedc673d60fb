#pragma once

#include <cstdint>

#include "attention/cpu/half_types.h"
#include "attention/float8.h"
#include "common/dtype.h"

namespace flash_attn_norm {
namespace cpu {

/// The bits in another dtype of each e4m3 number, which it holds exactly.
struct E4m3Table {
    uint32_t bits[256];

    explicit E4m3Table(DType dtype) {
        for (int code = 0; code < 256; ++code) {
            const float value = e4m3_to_float(static_cast<uint8_t>(code));
            bits[code] = dtype == DType::kBFloat16  ? float_to_bf16(value)
                         : dtype == DType::kFloat16 ? float_to_fp16(value)
                                                    : float_bits(value);
        }
    }

    void convert(const uint8_t* src, int64_t count, DType dtype, char* dst) const {
        if (dtype == DType::kFloat32) {
            auto* words = reinterpret_cast<uint32_t*>(dst);
            for (int64_t i = 0; i < count; ++i) words[i] = bits[src[i]];
        } else {
            auto* words = reinterpret_cast<uint16_t*>(dst);
            for (int64_t i = 0; i < count; ++i) words[i] = static_cast<uint16_t>(bits[src[i]]);
        }
    }
};

}  // namespace cpu
}  // namespace flash_attn_norm
