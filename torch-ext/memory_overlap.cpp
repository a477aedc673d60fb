#include "memory_overlap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

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

constexpr size_t kMaxDims = MemoryOf::kMaxDims;

/// Room for the terms of two tensors, of an element and of a step.
struct Terms {
    std::array<Term, 2 * kMaxDims + 2> data;
    size_t count = 0;

    void add(int64_t stride, int64_t low, int64_t high) { data[count++] = Term{stride, low, high}; }
    Term* begin() { return data.data(); }
    Term* end() { return data.data() + count; }
};

/// Sums of multiples of strides. Strides of one tensor are nested, each at least as large as all
/// that the smaller ones span, so that each step of the search has one or two numbers to try.
class Sums {
  public:
    explicit Sums(const Terms& terms) : terms_(terms) {
        std::sort(terms_.begin(), terms_.end(),
                  [](const Term& a, const Term& b) { return a.stride > b.stride; });
        size_t count = 0;
        for (const Term& term : terms_) {
            if (count > 0 && terms_.data[count - 1].stride == term.stride) {
                terms_.data[count - 1].low += term.low;
                terms_.data[count - 1].high += term.high;
            } else {
                terms_.data[count++] = term;
            }
        }
        terms_.count = count;
    }

    /// Whether one of the sums is `target`. A search that takes too long, among strides that are
    /// those of no sensible layout, counts as a yes.
    bool contain(int64_t target) {
        lows_[terms_.count] = highs_[terms_.count] = 0;
        for (size_t i = terms_.count; i-- > 0;) {
            const Term& term = terms_.data[i];
            lows_[i] = lows_[i + 1] + term.low * term.stride;
            highs_[i] = highs_[i + 1] + term.high * term.stride;
        }
        steps_left_ = 10000;
        return search(0, target);
    }

  private:
    bool search(size_t i, int64_t target) {
        if (i == terms_.count) return target == 0;
        const Term& term = terms_.data[i];
        const int64_t first = std::max(term.low, ceil_div(target - highs_[i + 1], term.stride));
        const int64_t last = std::min(term.high, floor_div(target - lows_[i + 1], term.stride));
        for (int64_t x = first; x <= last; ++x) {
            if (--steps_left_ < 0 || search(i + 1, target - x * term.stride)) return true;
        }
        return false;
    }

    Terms terms_;
    std::array<int64_t, 2 * kMaxDims + 3> lows_, highs_;  // of the sums of the terms from one on
    int64_t steps_left_ = 0;
};

}  // namespace

MemoryOf::MemoryOf(const Tensor& tensor, size_t first_dim)
    : begin_(static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.const_data_ptr()))),
      element_size_(static_cast<int64_t>(tensor.element_size())) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    if (sizes.size() > kMaxDims) throw std::invalid_argument("a tensor has too many dimensions");
    size_ = element_size_;
    for (size_t dim = first_dim; dim < sizes.size(); ++dim) {
        if (sizes[dim] == 0) {
            size_ = 0;
            return;
        }
        if (sizes[dim] == 1) continue;
        repeats_ |= strides[dim] == 0;
        if (strides[dim] == 0) continue;
        const Dim added{strides[dim] * element_size_, sizes[dim] - 1};
        size_t place = num_dims_++;
        for (; place > 0 && dims_[place - 1].stride > added.stride; --place) {
            dims_[place] = dims_[place - 1];
        }
        dims_[place] = added;
        size_ += added.last * added.stride;
    }
}

bool MemoryOf::overlaps_itself() const {
    if (size_ == 0) return false;
    if (repeats_) return true;
    int64_t span = element_size_;
    bool nested = true;
    for (size_t i = 0; i < num_dims_; ++i) {
        nested &= dims_[i].stride >= span;
        span += dims_[i].last * dims_[i].stride;
    }
    if (nested) return false;
    // Two elements share memory if a difference of their indices is no difference of addresses: its
    // first entry that is not zero, of the largest stride, may be taken as positive.
    for (size_t leading = num_dims_; leading-- > 0;) {
        Terms terms;
        terms.add(dims_[leading].stride, 1, dims_[leading].last);
        for (size_t i = 0; i < leading; ++i) {
            terms.add(dims_[i].stride, -dims_[i].last, dims_[i].last);
        }
        terms.add(1, 1 - element_size_, element_size_ - 1);
        if (Sums(terms).contain(0)) return true;
    }
    return false;
}

bool MemoryOf::shares(const MemoryOf& other, int64_t step, int64_t count) const {
    if (size_ == 0 || other.size_ == 0 || count == 0) return false;
    const int64_t moved = step * (count - 1);  // at most
    if (begin_ + std::max<int64_t>(moved, 0) + size_ <= other.begin_ ||
        other.begin_ + other.size_ <= begin_ + std::min<int64_t>(moved, 0)) {
        return false;
    }
    Terms terms;
    for (size_t i = 0; i < num_dims_; ++i) terms.add(dims_[i].stride, 0, dims_[i].last);
    for (size_t i = 0; i < other.num_dims_; ++i) {
        terms.add(other.dims_[i].stride, -other.dims_[i].last, 0);
    }
    if (step > 0) terms.add(step, 0, count - 1);
    if (step < 0) terms.add(-step, 1 - count, 0);
    terms.add(1, 1 - other.element_size_, element_size_ - 1);
    return Sums(terms).contain(other.begin_ - begin_);
}

}  // namespace flash_attn_norm
