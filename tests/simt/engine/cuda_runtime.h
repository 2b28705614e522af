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
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

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

namespace simt {

// How a kernel is called of which the address and the bytes of each parameter are known.
struct Signature {
  std::vector<size_t> parameters;
  void (*call)(const void* kernel, void** parameters);
};

// Of all kernels that can be launched, by the name of their type.
inline std::map<std::string, Signature>& signatures() {
  static std::map<std::string, Signature> all;
  return all;
}

template <class... Params, size_t... I>
void call_kernel(const void* kernel, void** parameters, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Params...)>(const_cast<void*>(kernel))(
      *static_cast<std::decay_t<Params>*>(parameters[I])...);
}

template <class... Params>
const bool has_signature =
    signatures()
        .try_emplace(typeid(void(Params...)).name(),
                     Signature{{sizeof(std::decay_t<Params>)...},
                               [](const void* kernel, void** parameters) {
                                 call_kernel<Params...>(kernel, parameters,
                                                        std::index_sequence_for<Params...>());
                               }})
        .second;

}  // namespace simt

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  (void)simt::has_signature<Params...>;
  using Copies = std::tuple<std::decay_t<Params>...>;
  constexpr size_t kBytes = (sizeof(std::decay_t<Params>) + ... + 0);
  static_assert(kBytes <= 32764, "bytes of parameters");
  simt::counters.parameter_bytes += kBytes;
  Copies copies(std::forward<Args>(args)...);
  return simt::launch(*config, reinterpret_cast<const void*>(kernel),
                      [&] { std::apply(kernel, copies); });
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
