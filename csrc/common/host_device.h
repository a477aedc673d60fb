#pragma once

/// Marks a function that both the host compiler and nvcc's device pass use.
#if defined(__CUDACC__)
#define FAN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FAN_HOST_DEVICE inline
#endif
