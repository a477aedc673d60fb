#include <stdexcept>
#include <string>

#include "common/check.h"

namespace flash_attn_norm {

namespace {

std::string device_description() {
    int device = 0;
    int major = 0;
    int minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        return "the current device";
    }
    return "device " + std::to_string(device) + " (compute capability " + std::to_string(major) +
           "." + std::to_string(minor) + ")";
}

#define FAN_STRINGIFY(...) #__VA_ARGS__
#define FAN_STRINGIFY_VALUE(...) FAN_STRINGIFY(__VA_ARGS__)

/// "13.0" of CUDA's number 13000.
std::string cuda_version(int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

/// "8.0, 9.0" of nvcc's own list "800,900".
std::string built_capabilities() {
    std::string text;
    int number = 0;
    for (const char* c = FAN_STRINGIFY_VALUE(__CUDA_ARCH_LIST__);; ++c) {
        if (*c >= '0' && *c <= '9') {
            number = number * 10 + (*c - '0');
        } else if (number > 0) {
            text += (text.empty() ? "" : ", ") + std::to_string(number / 100) + "." +
                    std::to_string(number % 100 / 10);
            number = 0;
        }
        if (*c == '\0') return text;
    }
}

/// Errors that mean "this binary has nothing that this device or driver can run".
bool is_missing_image(cudaError_t status) {
    return status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
           status == cudaErrorUnsupportedPtxVersion || status == cudaErrorInvalidPtx;
}

}  // namespace

void check_cuda(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    std::string message = std::string(call) + ": " + cudaGetErrorString(status) + " (" +
                          cudaGetErrorName(status) + ")";
    if (is_missing_image(status)) {
        int driver_version = 0;
        cudaDriverGetVersion(&driver_version);
        message += "; this build holds no code for " + device_description() +
                   " under a driver for CUDA " + cuda_version(driver_version) +
                   ", it was built for " + built_capabilities() + " by CUDA " +
                   cuda_version(CUDART_VERSION);
    }
    throw std::runtime_error(message);
}

void check_launch(const char* kernel) {
    check_cuda(cudaGetLastError(), kernel);
}

}  // namespace flash_attn_norm
