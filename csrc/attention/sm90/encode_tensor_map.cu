#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "attention/sm90/encode_stream_map.h"
#include "attention/sm90/encode_tensor_map.h"
#include "common/check.h"

namespace flash_attn_norm {
namespace sm90 {

namespace {

PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    FAN_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
        throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

/// A thread gets the device's context with its first call of the runtime that needs one, and the
/// driver's functions take what the thread has. cudaSetDevice gives it (CUDA 12.0 and later,
/// "Device Management" of the runtime API) and is allowed while a graph is captured.
void make_context_current() {
    int device = 0;
    FAN_CUDA_CHECK(cudaGetDevice(&device));
    FAN_CUDA_CHECK(cudaSetDevice(device));
}

CUtensorMap encode(const TensorMapShape& shape, const void* data, DType dtype,
                   CUtensorMapL2promotion promotion) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode_tiled = encode_function();
    const cuuint64_t sizes[4] = {shape.sizes[0], shape.sizes[1], shape.sizes[2], shape.sizes[3]};
    const cuuint64_t strides[3] = {shape.stride_bytes[0], shape.stride_bytes[1],
                                   shape.stride_bytes[2]};
    const cuuint32_t box[4] = {shape.box_columns, shape.box_rows, 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    CUtensorMap map;
    const auto try_to_encode = [&] {
        return encode_tiled(&map,
                            dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                            4, const_cast<void*>(data), sizes, strides, box, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE,
                            shape.swizzle == Swizzle::k128Bytes ? CU_TENSOR_MAP_SWIZZLE_128B
                                                                : CU_TENSOR_MAP_SWIZZLE_64B,
                            promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult status = try_to_encode();
    if (status == CUDA_ERROR_INVALID_CONTEXT) {
        make_context_current();
        status = try_to_encode();
    }
    if (status != CUDA_SUCCESS) {
        throw std::runtime_error("cuTensorMapEncodeTiled refused sizes (" +
                                 std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " +
                                 std::to_string(sizes[2]) + ", " + std::to_string(sizes[3]) +
                                 "): CUDA error " + std::to_string(static_cast<int>(status)));
    }
    return map;
}

}  // namespace

CUtensorMap encode_tensor_map(const TensorMapShape& shape, const void* data, DType dtype) {
    return encode(shape, data, dtype, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap encode_stream_map(const TensorMapShape& shape, const void* data, DType dtype) {
    return encode(shape, data, dtype, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace sm90
}  // namespace flash_attn_norm
