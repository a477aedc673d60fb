#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace flash_attn_norm {

/// True if the torch that runs this may lose the type of an exception, so that Python gets a
/// RuntimeError with its text: torch 2.15 does, 2.13 does not.
inline bool torch_may_lose_types() {
    constexpr int kMajorBits = 56, kMinorBits = 48;  // where a version lies in its number
    static_assert(TORCH_ABI_VERSION >> kMajorBits == TORCH_VERSION_MAJOR, "");
    return aoti_torch_abi_version() >= (uint64_t{2} << kMajorBits | uint64_t{14} << kMinorBits);
}

/// An op whose refusals are recognised whatever torch makes of them: where their type may be lost
/// their text begins with it, and calls.py, which makes a ValueError of them, takes that off again.
template <auto* kOp>
struct Announced;

template <class Result, class... Arguments, Result (*kOp)(Arguments...)>
struct Announced<kOp> {
    static Result call(Arguments... arguments) {
        try {
            return kOp(std::forward<Arguments>(arguments)...);
        } catch (const std::invalid_argument& refusal) {
            if (!torch_may_lose_types()) throw;
            throw std::invalid_argument(std::string("ValueError: ") + refusal.what());
        }
    }
};

}  // namespace flash_attn_norm
