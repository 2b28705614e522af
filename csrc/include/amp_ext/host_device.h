// Marks a function that both the host and kernels call.
#pragma once

#ifdef __CUDACC__
#define AMP_EXT_HOST_DEVICE __host__ __device__
#else
#define AMP_EXT_HOST_DEVICE
#endif
