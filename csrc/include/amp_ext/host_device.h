// Marks a function that runs on the host and in kernels.
#pragma once

#ifdef __CUDACC__
#define AMP_EXT_HOST_DEVICE __host__ __device__
#else
#define AMP_EXT_HOST_DEVICE
#endif
