#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "attention/attention.h"
#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/sm90a/launch.h"
#include "common/archs.h"

namespace flash_attn_norm {

namespace {

/// Calls fn(arch, head dim of q and k, head dim of v) with the smallest size class that holds both.
/// True dims are run-time numbers: columns past them are not read, so few classes cost no
/// bandwidth.
template <class Arch, class Fn>
void with_size_class(const AttentionProblem& problem, Fn&& fn) {
    const int head_dim = problem.head_dim, head_dim_v = problem.head_dim_v;
    const int larger = std::max(head_dim, head_dim_v);
    if (head_dim % 8 != 0 || head_dim_v % 8 != 0 || head_dim > 576 || head_dim_v > 512) {
        throw std::invalid_argument(
            "head_dim = " + std::to_string(head_dim) +
            " and head_dim_v = " + std::to_string(head_dim_v) +
            " are not supported here; they must be multiples of 8, at most 576 and 512");
    }
    if (larger <= 64) {
        fn(Arch{}, std::integral_constant<int, 64>{}, std::integral_constant<int, 64>{});
    } else if (larger <= 128) {
        fn(Arch{}, std::integral_constant<int, 128>{}, std::integral_constant<int, 128>{});
    } else if (larger <= 192) {
        fn(Arch{}, std::integral_constant<int, 192>{}, std::integral_constant<int, 192>{});
    } else if (larger <= 256) {
        fn(Arch{}, std::integral_constant<int, 256>{}, std::integral_constant<int, 256>{});
    } else {
        fn(Arch{}, std::integral_constant<int, 576>{}, std::integral_constant<int, 512>{});
    }
}

/// The same with the kernels that this build holds native code of for the current device; the
/// others have PTX.
template <class Fn>
void with_kernels(const AttentionProblem& problem, Fn&& fn) {
    const int major = attention_device_limits().capability_major;
    if (has_code_from_hopper_on(major, CUDART_VERSION)) {
        with_size_class<decode::Sm90>(problem, fn);
    } else {
        with_size_class<decode::Sm80>(problem, fn);
    }
}

/// The kernels count positions, entries and rows in 32 bits: see SplitParams.
void check_sizes(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    const auto check = [](const char* what, int64_t value, int64_t most) {
        if (value > most) {
            throw std::invalid_argument("attention to a cache takes at most " +
                                        std::to_string(most) + " " + what + "; got " +
                                        std::to_string(value));
        }
    };
    const int64_t rows =
        problem.is_packed() ? problem.total_q : problem.batch_size * problem.seqlen_q;
    // One less than the largest window counts, so that a sum of both fits.
    check("positions for each sequence", params.cache.capacity(), (int64_t{1} << 30) - 1);
    check("cache entries", params.cache.num_entries, int64_t{1} << 30);
    check("sequences", problem.batch_size, int64_t{1} << 30);
    check("query rows times query heads", rows * problem.num_heads_q, int64_t{1} << 30);
    if (params.cache.is_float8 && std::max(problem.head_dim, problem.head_dim_v) > 256) {
        throw std::invalid_argument(
            "head_dim = " + std::to_string(problem.head_dim) +
            " and head_dim_v = " + std::to_string(problem.head_dim_v) +
            " are not supported with a float8 cache on a GPU; they must be at most 256");
    }
}

/// Who attends: the kernels of every card, or on capability 9.0 one of those that the copy engine
/// feeds.
enum class Kernels { kGeneral, kBulk, kTall, kLatent };

/// Whether they take calls of such shapes.
bool take_shapes(Kernels kernels, const KvCacheAttentionParams& params) {
    switch (kernels) {
        case Kernels::kBulk:
            return decode::bulk_takes_shapes(params);
        case Kernels::kTall:
            return decode::tall_takes_shapes(params);
        case Kernels::kLatent:
            return decode::latent_takes_shapes(params);
        default:
            return true;
    }
}

Kernels kernels_of(const KvCacheAttentionParams& params) {
    for (const Kernels kernels : {Kernels::kLatent, Kernels::kBulk, Kernels::kTall}) {
        if (!take_shapes(kernels, params) || !decode::can_map_cache(params)) continue;
        if (kernels != Kernels::kLatent || decode::values_in_keys(params)) return kernels;
    }
    return Kernels::kGeneral;
}

/// Calls fn(head dim) with the size class of Kernels::kBulk and kTall.
template <class Fn>
void with_bulk_class(const AttentionProblem& problem, Fn&& fn) {
    const int larger = std::max(problem.head_dim, problem.head_dim_v);
    if (larger <= 64) {
        fn(std::integral_constant<int, 64>{});
    } else if (larger <= 128) {
        fn(std::integral_constant<int, 128>{});
    } else if (larger <= 192) {
        fn(std::integral_constant<int, 192>{});
    } else {
        fn(std::integral_constant<int, 256>{});
    }
}

decode::SplitPlan plan_of(const KvCacheAttentionParams& params, Kernels kernels) {
    decode::SplitPlan plan;
    check_sizes(params);
    if (kernels == Kernels::kLatent) {
        plan = decode::plan_latent(params);
    } else if (kernels == Kernels::kBulk) {
        with_bulk_class(params.problem,
                        [&](auto head_dim) { plan = decode::plan_bulk<head_dim.value>(params); });
    } else if (kernels == Kernels::kTall) {
        with_bulk_class(params.problem,
                        [&](auto head_dim) { plan = decode::plan_tall<head_dim.value>(params); });
    } else {
        with_kernels(params.problem, [&](auto arch, auto head_dim, auto head_dim_v) {
            plan = decode::plan_split<decltype(arch), head_dim.value, head_dim_v.value>(params);
        });
    }
    // Refuses what is too large.
    grid_size("attention to a cache", plan.row_tiles * params.problem.num_heads_kv);
    return plan;
}

}  // namespace

namespace cuda {

int64_t attention_kvcache_workspace_bytes(const KvCacheAttentionParams& params) {
    // Enough for all that may serve the call: where its cache lies may not be known yet.
    int64_t bytes = 0;
    for (const Kernels kernels :
         {Kernels::kGeneral, Kernels::kBulk, Kernels::kTall, Kernels::kLatent}) {
        if (!take_shapes(kernels, params)) continue;
        bytes =
            std::max(bytes, plan_of(params, kernels).workspace_bytes(params.problem.head_dim_v));
    }
    return bytes;
}

int attention_kvcache_num_splits(const KvCacheAttentionParams& params) {
    return plan_of(params, kernels_of(params)).num_splits;
}

void attention_kvcache(const KvCacheAttentionParams& params, void* stream) {
    const Kernels kernels = kernels_of(params);
    const decode::SplitPlan plan = plan_of(params, kernels);
    if (plan.total_rows == 0) return;
    const auto split_params = decode::SplitParams::of(params, plan);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (kernels == Kernels::kLatent) {
        decode::launch_latent(params, plan, split_params, cuda_stream);
    } else if (kernels == Kernels::kBulk) {
        with_bulk_class(params.problem, [&](auto head_dim) {
            decode::launch_bulk<head_dim.value>(params, plan, split_params, cuda_stream);
        });
    } else if (kernels == Kernels::kTall) {
        with_bulk_class(params.problem, [&](auto head_dim) {
            decode::launch_tall<head_dim.value>(params, plan, split_params, cuda_stream);
        });
    }
    with_kernels(params.problem, [&](auto arch, auto head_dim, auto head_dim_v) {
        using Arch = decltype(arch);
        if (kernels == Kernels::kGeneral) {
            decode::launch_split<Arch, head_dim.value, head_dim_v.value>(params, plan, split_params,
                                                                         cuda_stream);
        }
        if (plan.num_splits > 1 && !plan.in_cluster) {
            decode::launch_combine<Arch>(split_params, params.problem.dtype, cuda_stream);
        }
    });
}

}  // namespace cuda

}  // namespace flash_attn_norm
