#pragma once

namespace flash_attn_norm {

/// Instruction sets that CPU kernels are compiled for, each one containing those before it.
enum class CpuIsa { kPlain, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

const char* name_of(CpuIsa isa);

/// The highest instruction set that this machine and its operating system offer and that pays on
/// it, or the limit if that is lower.
CpuIsa cpu_isa();

/// Keeps cpu_isa() at or below `highest`, so that tests reach every code path on one machine.
void limit_cpu_isa(CpuIsa highest);

}  // namespace flash_attn_norm
