#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// wgmma.fence (sm_90a): orders this warpgroup's register accesses before its next products; needed
/// before the first one and whenever registers that they use were written since.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

/// wgmma.commit_group (sm_90a): closes the group of the products issued since the last one.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

/// wgmma.wait_group (sm_90a): returns when at most kPending of the newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

/// The element types of A and B.
enum class WgmmaType { kBf16, kF16 };

/// Which index of an operand in shared memory is contiguous: the contraction, or the other one
/// (tnspA, tnspB).
enum class Major { kContraction, kOuter };

/// As an immediate operand. No bool, of which clang makes -1.
constexpr int transposed(Major major) {
    return major == Major::kOuter ? 1 : 0;
}

/// wgmma.mma_async.m64n<kN>k16 with fp32 sums (sm_90a): d = a b, plus d if `accumulate`.
///
/// Thread t of the warpgroup holds d[4 j + 2 r + e] = row 16 (t / 32) + (t % 32) / 4 + 8 r, column
/// 8 j + 2 (t % 4) + e. `ss` takes both operands by matrix descriptor; `rs` takes A from registers:
/// for columns 16 k..16 k + 15 of A, the pairs a[0..3] = (d[8 k], d[8 k + 1]), ... in the layout of
/// d, rounded. B's descriptor covers kN outer indices and 16 of the contraction.
template <WgmmaType kType, int kN>
struct Wgmma;

// Every width is an instruction of its own, whose text counts its registers: the macros write the
// lists "%0, ..., %7" and "+f"(d[0]), ..., "+f"(d[7]).
#define FAN_T2(a, b) "%" #a ", %" #b
#define FAN_T8(a, b, c, d, e, f, g, h) \
    FAN_T2(a, b) ", " FAN_T2(c, d) ", " FAN_T2(e, f) ", " FAN_T2(g, h)
#define FAN_D8(i)                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FAN_TEXT_8 FAN_T8(0, 1, 2, 3, 4, 5, 6, 7)
#define FAN_REGS_8 FAN_D8(0)
#define FAN_TEXT_16 FAN_TEXT_8 ", " FAN_T8(8, 9, 10, 11, 12, 13, 14, 15)
#define FAN_REGS_16 FAN_REGS_8, FAN_D8(8)
#define FAN_TEXT_24 FAN_TEXT_16 ", " FAN_T8(16, 17, 18, 19, 20, 21, 22, 23)
#define FAN_REGS_24 FAN_REGS_16, FAN_D8(16)
#define FAN_TEXT_32 FAN_TEXT_24 ", " FAN_T8(24, 25, 26, 27, 28, 29, 30, 31)
#define FAN_REGS_32 FAN_REGS_24, FAN_D8(24)
#define FAN_TEXT_40 FAN_TEXT_32 ", " FAN_T8(32, 33, 34, 35, 36, 37, 38, 39)
#define FAN_REGS_40 FAN_REGS_32, FAN_D8(32)
#define FAN_TEXT_48 FAN_TEXT_40 ", " FAN_T8(40, 41, 42, 43, 44, 45, 46, 47)
#define FAN_REGS_48 FAN_REGS_40, FAN_D8(40)
#define FAN_TEXT_56 FAN_TEXT_48 ", " FAN_T8(48, 49, 50, 51, 52, 53, 54, 55)
#define FAN_REGS_56 FAN_REGS_48, FAN_D8(48)
#define FAN_TEXT_64 FAN_TEXT_56 ", " FAN_T8(56, 57, 58, 59, 60, 61, 62, 63)
#define FAN_REGS_64 FAN_REGS_56, FAN_D8(56)
#define FAN_TEXT_72 FAN_TEXT_64 ", " FAN_T8(64, 65, 66, 67, 68, 69, 70, 71)
#define FAN_REGS_72 FAN_REGS_64, FAN_D8(64)
#define FAN_TEXT_80 FAN_TEXT_72 ", " FAN_T8(72, 73, 74, 75, 76, 77, 78, 79)
#define FAN_REGS_80 FAN_REGS_72, FAN_D8(72)
#define FAN_TEXT_88 FAN_TEXT_80 ", " FAN_T8(80, 81, 82, 83, 84, 85, 86, 87)
#define FAN_REGS_88 FAN_REGS_80, FAN_D8(80)
#define FAN_TEXT_96 FAN_TEXT_88 ", " FAN_T8(88, 89, 90, 91, 92, 93, 94, 95)
#define FAN_REGS_96 FAN_REGS_88, FAN_D8(88)
#define FAN_TEXT_104 FAN_TEXT_96 ", " FAN_T8(96, 97, 98, 99, 100, 101, 102, 103)
#define FAN_REGS_104 FAN_REGS_96, FAN_D8(96)
#define FAN_TEXT_112 FAN_TEXT_104 ", " FAN_T8(104, 105, 106, 107, 108, 109, 110, 111)
#define FAN_REGS_112 FAN_REGS_104, FAN_D8(104)
#define FAN_TEXT_120 FAN_TEXT_112 ", " FAN_T8(112, 113, 114, 115, 116, 117, 118, 119)
#define FAN_REGS_120 FAN_REGS_112, FAN_D8(112)
#define FAN_TEXT_128 FAN_TEXT_120 ", " FAN_T8(120, 121, 122, 123, 124, 125, 126, 127)
#define FAN_REGS_128 FAN_REGS_120, FAN_D8(120)

// kN, its kN / 2 accumulators, and the numbers of the operands after them
#define FAN_WGMMA(N, R, TYPE, NAME, O0, O1, O2, O3, O4, O5, O6)                                 \
    template <>                                                                                 \
    struct Wgmma<TYPE, N> {                                                                     \
        template <Major kMajorA, Major kMajorB>                                                 \
        static __device__ __forceinline__ void ss(float* d, uint64_t a, uint64_t b,             \
                                                  int accumulate) {                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2                               \
                         ", 0;\n"                                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME        \
                         " {" FAN_TEXT_##R "}, %" #O0 ", %" #O1 ", p, 1, 1, %" #O3 ", %" #O4    \
                                           ";\n}\n"                                             \
                         : FAN_REGS_##R                                                         \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(transposed(kMajorA)),           \
                           "n"(transposed(kMajorB)));                                           \
        }                                                                                       \
        template <Major kMajorB>                                                                \
        static __device__ __forceinline__ void rs(float* d, const uint32_t* a, uint64_t b,      \
                                                  int accumulate) {                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5                               \
                         ", 0;\n"                                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME        \
                         " {" FAN_TEXT_##R "}, {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 \
                                           ", p, 1, 1, %" #O6 ";\n}\n"                          \
                         : FAN_REGS_##R                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), \
                           "n"(transposed(kMajorB)));                                           \
        }                                                                                       \
    };
#define FAN_WGMMA_TYPES(N, R, ...)                         \
    FAN_WGMMA(N, R, WgmmaType::kBf16, "bf16", __VA_ARGS__) \
    FAN_WGMMA(N, R, WgmmaType::kF16, "f16", __VA_ARGS__)

FAN_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21, 22)
FAN_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38)
FAN_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44, 45, 46)
FAN_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52, 53, 54)
FAN_WGMMA_TYPES(112, 56, 56, 57, 58, 59, 60, 61, 62)
FAN_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70)
FAN_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92, 93, 94)
FAN_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102)
FAN_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FAN_WGMMA_TYPES
#undef FAN_WGMMA
#undef FAN_TEXT_8
#undef FAN_REGS_8
#undef FAN_TEXT_16
#undef FAN_REGS_16
#undef FAN_TEXT_24
#undef FAN_REGS_24
#undef FAN_TEXT_32
#undef FAN_REGS_32
#undef FAN_TEXT_40
#undef FAN_REGS_40
#undef FAN_TEXT_48
#undef FAN_REGS_48
#undef FAN_TEXT_56
#undef FAN_REGS_56
#undef FAN_TEXT_64
#undef FAN_REGS_64
#undef FAN_TEXT_72
#undef FAN_REGS_72
#undef FAN_TEXT_80
#undef FAN_REGS_80
#undef FAN_TEXT_88
#undef FAN_REGS_88
#undef FAN_TEXT_96
#undef FAN_REGS_96
#undef FAN_TEXT_104
#undef FAN_REGS_104
#undef FAN_TEXT_112
#undef FAN_REGS_112
#undef FAN_TEXT_120
#undef FAN_REGS_120
#undef FAN_TEXT_128
#undef FAN_REGS_128
#undef FAN_D8
#undef FAN_T8
#undef FAN_T2

}  // namespace ptx
}  // namespace flash_attn_norm
