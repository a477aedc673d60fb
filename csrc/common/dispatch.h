#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace flash_attn_norm {

/// Calls fn(std::integral_constant<int, v>{}) for the choice v that equals `value`. Throws
/// std::invalid_argument, naming the argument and the choices, if it is none of them.
template <int... kChoices, typename Fn>
void dispatch_int(const char* name, int value, Fn&& fn) {
    const bool found =
        ((value == kChoices && (fn(std::integral_constant<int, kChoices>{}), true)) || ...);
    if (found) return;
    std::string choices;
    ((choices += (choices.empty() ? "" : ", ") + std::to_string(kChoices)), ...);
    throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) +
                                " is not supported; choose one of " + choices);
}

/// Calls fn(std::true_type{}) or fn(std::false_type{}).
template <typename Fn>
void dispatch_bool(bool value, Fn&& fn) {
    if (value) {
        fn(std::true_type{});
    } else {
        fn(std::false_type{});
    }
}

}  // namespace flash_attn_norm
