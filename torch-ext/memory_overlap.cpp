#include "memory_overlap.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flash_attn_norm {

namespace {

using torch::stable::Tensor;

/// The multiples of a stride, in bytes, that a sum of addresses may hold.
struct Term {
    int64_t stride;
    int64_t low, high;
};

int64_t ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b > 0 ? 1 : 0);
}

int64_t floor_div(int64_t a, int64_t b) {
    return a / b - (a % b < 0 ? 1 : 0);
}

/// Sums of multiples of strides. Strides of one tensor are nested, each at least as large as all
/// that the smaller ones span, so that each step of the search has one or two numbers to try.
class Sums {
  public:
    explicit Sums(std::vector<Term> terms) : terms_(std::move(terms)) {
        std::sort(terms_.begin(), terms_.end(),
                  [](const Term& a, const Term& b) { return a.stride > b.stride; });
        size_t count = 0;
        for (const Term& term : terms_) {
            if (count > 0 && terms_[count - 1].stride == term.stride) {
                terms_[count - 1].low += term.low;
                terms_[count - 1].high += term.high;
            } else {
                terms_[count++] = term;
            }
        }
        terms_.resize(count);
    }

    /// Whether one of the sums is `target`. A search that takes too long, among strides that are
    /// those of no sensible layout, counts as a yes.
    bool contain(int64_t target) {
        lows_.assign(terms_.size() + 1, 0);
        highs_.assign(terms_.size() + 1, 0);
        for (size_t i = terms_.size(); i-- > 0;) {
            lows_[i] = lows_[i + 1] + terms_[i].low * terms_[i].stride;
            highs_[i] = highs_[i + 1] + terms_[i].high * terms_[i].stride;
        }
        steps_left_ = 10000;
        return search(0, target);
    }

  private:
    bool search(size_t i, int64_t target) {
        if (i == terms_.size()) return target == 0;
        const Term& term = terms_[i];
        const int64_t first = std::max(term.low, ceil_div(target - highs_[i + 1], term.stride));
        const int64_t last = std::min(term.high, floor_div(target - lows_[i + 1], term.stride));
        for (int64_t x = first; x <= last; ++x) {
            if (--steps_left_ < 0 || search(i + 1, target - x * term.stride)) return true;
        }
        return false;
    }

    std::vector<Term> terms_;
    std::vector<int64_t> lows_, highs_;  // of the sums of the terms from one on
    int64_t steps_left_ = 0;
};

/// A tensor's addresses: begin, plus a multiple of each stride, plus the bytes of an element.
struct [[gnu::visibility("hidden")]] Addresses {
    int64_t begin = 0;
    int64_t size = 0;            // from the first byte to behind the last one; 0 without elements
    int64_t element_size = 1;    // bytes
    bool repeats = false;        // a dimension of several entries has stride 0
    std::vector<Term> forwards;  // of dimensions with several entries

    explicit Addresses(const Tensor& tensor)
        : begin(static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.const_data_ptr()))),
          element_size(static_cast<int64_t>(tensor.element_size())) {
        const auto sizes = tensor.sizes(), strides = tensor.strides();
        size = element_size;
        for (size_t dim = 0; dim < sizes.size(); ++dim) {
            if (sizes[dim] == 0) {
                size = 0;
                return;
            }
            if (sizes[dim] == 1) continue;
            repeats |= strides[dim] == 0;
            if (strides[dim] == 0) continue;
            const int64_t stride = strides[dim] * element_size;
            forwards.push_back(Term{stride, 0, sizes[dim] - 1});
            size += (sizes[dim] - 1) * stride;
        }
    }
};

}  // namespace

bool overlaps_itself(const Tensor& tensor) {
    Addresses addresses(tensor);
    if (addresses.size == 0) return false;
    if (addresses.repeats) return true;
    std::vector<Term>& terms = addresses.forwards;
    std::sort(terms.begin(), terms.end(),
              [](const Term& a, const Term& b) { return a.stride < b.stride; });
    int64_t span = addresses.element_size;
    bool nested = true;
    for (const Term& term : terms) {
        nested &= term.stride >= span;
        span += term.high * term.stride;
    }
    if (nested) return false;
    // Two elements share memory if a difference of their indices is no difference of addresses: its
    // first entry that is not zero may be taken as positive.
    const int64_t bytes = addresses.element_size;
    while (!terms.empty()) {
        const Term leading = terms.back();
        terms.pop_back();
        std::vector<Term> differences{Term{leading.stride, 1, leading.high}};
        for (const Term& term : terms) {
            differences.push_back(Term{term.stride, -term.high, term.high});
        }
        differences.push_back(Term{1, 1 - bytes, bytes - 1});
        if (Sums(std::move(differences)).contain(0)) return true;
    }
    return false;
}

bool shares_memory(const Tensor& a, const Tensor& b) {
    const Addresses first(a), second(b);
    if (first.size == 0 || second.size == 0 || first.begin + first.size <= second.begin ||
        second.begin + second.size <= first.begin) {
        return false;
    }
    std::vector<Term> terms = first.forwards;
    for (const Term& term : second.forwards) {
        terms.push_back(Term{term.stride, -term.high, 0});
    }
    terms.push_back(Term{1, 1 - second.element_size, first.element_size - 1});
    return Sums(std::move(terms)).contain(second.begin - first.begin);
}

}  // namespace flash_attn_norm
