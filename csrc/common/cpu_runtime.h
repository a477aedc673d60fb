#pragma once

#include <cstdint>
#include <type_traits>

namespace flash_attn_norm {

/// The caller's thread pool. torch-ext/ fills it with torch's own, so that csrc/ needs no torch
/// header and torch.set_num_threads() governs our kernels as it governs torch's.
struct CpuRuntime {
    using Body = void (*)(void* context, int64_t begin, int64_t end);

    int num_threads = 1;
    /// Calls body(context, begin, end) on slices that cover [0, count); a slice has at least
    /// `grain` items (but for the last). At most num_threads slices run at once. body must not
    /// throw.
    void (*run)(int64_t count, int64_t grain, void* context, Body body) = nullptr;

    /// fn(begin, end) on slices of [0, count); see `run`.
    template <typename Fn>
    void parallel_for(int64_t count, int64_t grain, Fn&& fn) const {
        using Plain = std::remove_reference_t<Fn>;
        run(count, grain, const_cast<void*>(static_cast<const void*>(&fn)),
            [](void* context, int64_t begin, int64_t end) {
                (*static_cast<Plain*>(context))(begin, end);
            });
    }
};

}  // namespace flash_attn_norm
