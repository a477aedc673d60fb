#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "common/dtype.h"

/// Readable refusals. A refusal is a std::invalid_argument, which Python sees as a ValueError with
/// exactly its text; STD_TORCH_CHECK would put function, file and line before it.
namespace flash_attn_norm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string text(const char* part) {
    return part;
}
inline std::string text(const std::string& part) {
    return part;
}
inline std::string text(int64_t part) {
    return std::to_string(part);
}
inline std::string text(int part) {
    return std::to_string(part);
}
inline std::string text(double part) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", part);
    return digits;
}

/// A dtype as Python prints it.
inline std::string text(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return "torch.float32";
        case ScalarType::Double:
            return "torch.float64";
        case ScalarType::Half:
            return "torch.float16";
        case ScalarType::BFloat16:
            return "torch.bfloat16";
        case ScalarType::Float8_e4m3fn:
            return "torch.float8_e4m3fn";
        case ScalarType::Float8_e5m2:
            return "torch.float8_e5m2";
        case ScalarType::Float8_e4m3fnuz:
            return "torch.float8_e4m3fnuz";
        case ScalarType::Float8_e5m2fnuz:
            return "torch.float8_e5m2fnuz";
        case ScalarType::Int:
            return "torch.int32";
        case ScalarType::Long:
            return "torch.int64";
        case ScalarType::Byte:
            return "torch.uint8";
        case ScalarType::Char:
            return "torch.int8";
        case ScalarType::Short:
            return "torch.int16";
        case ScalarType::ComplexHalf:
            return "torch.complex32";
        case ScalarType::ComplexFloat:
            return "torch.complex64";
        case ScalarType::ComplexDouble:
            return "torch.complex128";
        default: {  // Bool, UInt16, Float8_e5m2, ...: the same name in lower case
            std::string name = torch::headeronly::toString(dtype);
            for (char& letter : name) letter = static_cast<char>(std::tolower(letter));
            return "torch." + name;
        }
    }
}

/// "1 row" or "3 rows".
inline std::string counted(int64_t count, const char* noun) {
    return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

/// Numbers as Python prints a tuple of them.
template <class Numbers>
std::string tuple_text(const Numbers& numbers) {
    std::string tuple = "(";
    for (size_t i = 0; i < numbers.size(); ++i) {
        if (i > 0) tuple += ", ";
        tuple += std::to_string(numbers[i]);
    }
    return tuple + (numbers.size() == 1 ? ",)" : ")");
}

inline std::string shape_text(const Tensor& tensor) {
    return tuple_text(tensor.sizes());
}

inline std::string strides_text(const Tensor& tensor) {
    return tuple_text(tensor.strides());
}

/// "cpu" or "cuda:1".
inline std::string device_text(const Tensor& tensor) {
    if (tensor.is_cpu()) return "cpu";
    const std::string index = std::to_string(tensor.get_device_index());
    return (tensor.is_cuda() ? "cuda:" : "device:") + index;
}

/// What a refusal adds where rows and heads seem to have changed places.
inline std::string transposed_text(const char* name, const Tensor& tensor, const char* shape) {
    return std::string("; ") + name + " has shape " + shape_text(tensor) + ", expected " + shape +
           ": it looks transposed, pass " + name + ".transpose(1, 2)";
}

/// Throws std::invalid_argument with the parts one after the other.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::string message;
    ((message += text(parts)), ...);
    throw std::invalid_argument(message);
}

inline bool is_float_dtype(ScalarType dtype) {
    return dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

/// The kernels' name for a tensor's dtype; refuses all but the three float dtypes.
inline DType to_dtype(const char* name, const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float:
            return DType::kFloat32;
        case ScalarType::Half:
            return DType::kFloat16;
        case ScalarType::BFloat16:
            return DType::kBFloat16;
        default:
            refuse(name, " has dtype ", tensor.scalar_type(),
                   "; allowed are torch.float32, torch.float16 and torch.bfloat16");
    }
}

/// Refuses a tensor of another rank; `shape` says what is meant, e.g. "(rows, hidden_size)".
inline void check_rank(const char* name, const Tensor& tensor, int64_t rank, const char* shape) {
    if (tensor.dim() == rank) return;
    refuse(name, " has shape ", shape_text(tensor), ", ", counted(tensor.dim(), "dimension"),
           "; expected ", rank, ": ", shape);
}

/// Refuses a tensor that is not on the device of `reference`.
inline void check_device(const char* name, const Tensor& tensor, const char* reference_name,
                         const Tensor& reference) {
    if (tensor.is_cpu() == reference.is_cpu() && tensor.is_cuda() == reference.is_cuda() &&
        tensor.get_device_index() == reference.get_device_index()) {
        return;
    }
    refuse(name, " is on ", device_text(tensor), " but ", reference_name, " is on ",
           device_text(reference), "; all tensors of a call must be on one device");
}

inline bool has_unit_last_stride(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    return tensor.size(last) <= 1 || tensor.stride(last) == 1;
}

/// The tensor itself if its last dimension has unit stride, else one contiguous copy.
inline Tensor with_unit_last_stride(const Tensor& tensor) {
    return has_unit_last_stride(tensor) ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace flash_attn_norm
