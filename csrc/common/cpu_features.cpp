#include "common/cpu_features.h"

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace flash_attn_norm {

namespace {

std::atomic<int> isa_limit{static_cast<int>(CpuIsa::kAmxBf16)};

#if defined(__x86_64__)

struct CpuidRegisters {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidRegisters cpuid(unsigned leaf, unsigned subleaf) {
    CpuidRegisters registers;
    __get_cpuid_count(leaf, subleaf, &registers.eax, &registers.ebx, &registers.ecx,
                      &registers.edx);
    return registers;
}

/// XCR0: the register state that the operating system saves on a context switch.
uint64_t saved_state() {
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
}

constexpr bool has_bits(uint64_t value, uint64_t bits) {
    return (value & bits) == bits;
}

constexpr uint64_t bit(int index) {
    return uint64_t{1} << index;
}

/// Linux hands out the 8 KiB of tile registers on request only, once per process.
bool request_tile_registers() {
#if defined(__linux__)
    constexpr long kArchReqXcompPerm = 0x1023;
    constexpr long kXfeatureXtiledata = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
    return false;
#endif
}

bool is_intel() {
    const CpuidRegisters vendor = cpuid(0, 0);  // "GenuineIntel", four letters a register
    return vendor.ebx == 0x756e6547u && vendor.edx == 0x49656e69u && vendor.ecx == 0x6c65746eu;
}

CpuIsa detect() {
    // Bit positions: Intel SDM volume 2A, CPUID; XCR0 bits: volume 1, section 13.3.
    const CpuidRegisters basic = cpuid(1, 0);
    constexpr uint64_t kFma = bit(12), kOsxsave = bit(27), kAvx = bit(28), kF16c = bit(29);
    if (!has_bits(basic.ecx, kFma | kOsxsave | kAvx | kF16c)) return CpuIsa::kPlain;
    const uint64_t state = saved_state();
    constexpr uint64_t kYmmState = bit(1) | bit(2);
    const CpuidRegisters extended = cpuid(7, 0);
    constexpr uint64_t kAvx2Bit = bit(5);
    if (!has_bits(state, kYmmState) || !has_bits(extended.ebx, kAvx2Bit)) return CpuIsa::kPlain;

    constexpr uint64_t kZmmState = bit(5) | bit(6) | bit(7);
    constexpr uint64_t kAvx512FDqBwVl = bit(16) | bit(17) | bit(30) | bit(31);
    if (!has_bits(state, kZmmState) || !has_bits(extended.ebx, kAvx512FDqBwVl)) {
        return CpuIsa::kAvx2;
    }
    constexpr uint64_t kAvx512Bf16Bit = bit(5);
    if (!has_bits(cpuid(7, 1).eax, kAvx512Bf16Bit)) return CpuIsa::kAvx512;

    constexpr uint64_t kTileState = bit(17) | bit(18);
    constexpr uint64_t kAmxBf16AndTile = bit(22) | bit(24);
    const bool has_tiles = has_bits(state, kTileState) && has_bits(extended.edx, kAmxBf16AndTile);
    if (has_tiles && request_tile_registers()) return CpuIsa::kAmxBf16;
    // Intel's cores multiply bf16 pairs at a quarter of the rate of fp32 multiply-adds (measured:
    // 84 against 160 GFLOP/s on Emerald Rapids), so without tiles fp32 is faster there.
    return is_intel() ? CpuIsa::kAvx512 : CpuIsa::kAvx512Bf16;
}

#else

CpuIsa detect() {
    return CpuIsa::kPlain;
}

#endif

}  // namespace

const char* name_of(CpuIsa isa) {
    switch (isa) {
        case CpuIsa::kPlain:
            return "plain";
        case CpuIsa::kAvx2:
            return "avx2";
        case CpuIsa::kAvx512:
            return "avx512";
        case CpuIsa::kAvx512Bf16:
            return "avx512_bf16";
        case CpuIsa::kAmxBf16:
            return "amx_bf16";
    }
    return "unknown";
}

CpuIsa cpu_isa() {
    static const CpuIsa detected = detect();
    const int limit = isa_limit.load(std::memory_order_relaxed);
    return static_cast<int>(detected) < limit ? detected : static_cast<CpuIsa>(limit);
}

void limit_cpu_isa(CpuIsa highest) {
    isa_limit.store(static_cast<int>(highest), std::memory_order_relaxed);
}

}  // namespace flash_attn_norm
