#pragma once

namespace flash_attn_norm {
namespace ptx {

/// griddepcontrol.wait (sm_90): returns when the kernels before this one in the stream have
/// completed and their writes are visible. At once, unless launched programmatically dependent.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

/// griddepcontrol.launch_dependents (sm_90): once every CTA has executed it, a programmatically
/// dependent next kernel may start, as far as there is room for it.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
