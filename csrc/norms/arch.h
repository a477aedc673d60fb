#pragma once

namespace flash_attn_norm {

/// What the kernels of sm80/ may use: they run on every capability from 8.0 on.
struct Sm80 {
    static constexpr bool kHasClusters = false;
    static constexpr int kMaxClusterSize = 1;
    static constexpr bool kHasGridDependency = false;
};

/// What the kernels of sm90/ may use: thread block clusters, distributed shared memory and
/// programmatic dependent launch.
struct Sm90 {
    static constexpr bool kHasClusters = true;
    static constexpr int kMaxClusterSize = 8;
    static constexpr bool kHasGridDependency = true;
};

/// Arch without clusters: a CTA that has whole rows need not ask for its place in one.
template <class Arch>
struct WithoutClusters {
    static constexpr bool kHasClusters = false;
    static constexpr int kMaxClusterSize = 1;
    static constexpr bool kHasGridDependency = Arch::kHasGridDependency;
};

}  // namespace flash_attn_norm
