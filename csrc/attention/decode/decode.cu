#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "attention/attention.h"
#include "attention/decode/launch.h"
#include "common/check.h"

namespace flash_attn_norm {

namespace {

/// Calls fn(head dim of q and k, head dim of v) with the smallest size class that holds both.
/// True dims are run-time numbers: columns past them are not read, so few classes cost no
/// bandwidth.
template <class Fn>
void with_size_class(const AttentionProblem& problem, Fn&& fn) {
    const int head_dim = problem.head_dim, head_dim_v = problem.head_dim_v;
    const int larger = std::max(head_dim, head_dim_v);
    if (head_dim % 8 != 0 || head_dim_v % 8 != 0 || head_dim > 576 || head_dim_v > 512) {
        throw std::invalid_argument(
            "head_dim = " + std::to_string(head_dim) +
            " and head_dim_v = " + std::to_string(head_dim_v) +
            " are not supported here; they must be multiples of 8, at most 576 and 512");
    }
    const auto call = [&](auto class_k, auto class_v) { fn(class_k, class_v); };
    if (larger <= 64) {
        call(std::integral_constant<int, 64>{}, std::integral_constant<int, 64>{});
    } else if (larger <= 128) {
        call(std::integral_constant<int, 128>{}, std::integral_constant<int, 128>{});
    } else if (larger <= 192) {
        call(std::integral_constant<int, 192>{}, std::integral_constant<int, 192>{});
    } else if (larger <= 256) {
        call(std::integral_constant<int, 256>{}, std::integral_constant<int, 256>{});
    } else {
        call(std::integral_constant<int, 576>{}, std::integral_constant<int, 512>{});
    }
}

/// Positions and rows of the packed heads count in 32 bits inside a sequence.
void check_sizes(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    constexpr int64_t kMost = 2147483647 - 4096;
    const int64_t rows = std::max(problem.seqlen_q, problem.total_q) * problem.group_size();
    const int64_t capacity = params.cache.capacity();
    if (rows > kMost || capacity > kMost || params.cache.num_entries > kMost) {
        throw std::invalid_argument(
            "attention to a cache takes at most " + std::to_string(kMost) +
            " positions a sequence, cache entries, and query rows times heads of a group; got " +
            std::to_string(capacity) + ", " + std::to_string(params.cache.num_entries) + " and " +
            std::to_string(rows));
    }
}

decode::SplitPlan plan_of(const KvCacheAttentionParams& params) {
    decode::SplitPlan plan;
    check_sizes(params);
    with_size_class(params.problem, [&](auto head_dim, auto head_dim_v) {
        plan = decode::plan_split<head_dim.value, head_dim_v.value>(params);
    });
    return plan;
}

}  // namespace

namespace cuda {

int64_t attention_kvcache_workspace_bytes(const KvCacheAttentionParams& params) {
    return plan_of(params).workspace_bytes(params.problem.head_dim_v);
}

void attention_kvcache(const KvCacheAttentionParams& params, void* stream) {
    const decode::SplitPlan plan = plan_of(params);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    with_size_class(params.problem, [&](auto head_dim, auto head_dim_v) {
        decode::launch_split<head_dim.value, head_dim_v.value>(params, plan, cuda_stream);
    });
    decode::launch_combine(params, plan, cuda_stream);
}

}  // namespace cuda

}  // namespace flash_attn_norm
