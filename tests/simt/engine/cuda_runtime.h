// Found before NVIDIA's header of this name, and includes it: types and declarations are the real
// ones. What they declare for nvcc alone follows, as the executor has it.
#pragma once

#define cudaLaunchKernelEx cudaLaunchKernelEx_of_the_toolkit
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "simt.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__ &  // a kernel's table is one copy for all of its threads
#undef __shared__            // kernels have shared memory from ptx::shared alone

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int64_t __double_as_longlong(double x) { return std::bit_cast<int64_t>(x); }

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  using Copies = std::tuple<std::decay_t<Params>...>;
  static_assert((sizeof(std::decay_t<Params>) + ... + 0) <= 32764, "bytes of parameters");
  Copies copies(std::forward<Args>(args)...);
  return simt::launch(*config, reinterpret_cast<const void*>(kernel),
                      [&] { std::apply(kernel, copies); });
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
