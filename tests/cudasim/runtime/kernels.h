// The interface of the fake CUDA runtime to the library of kernels, such as tests/cudasim.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fake_cuda {

struct Kernel {
  const void* function;
  std::string name;                // without arguments of its template
  std::vector<size_t> parameters;  // their bytes
};

struct Kernels {
  // The kernel of a symbol in nvcc's code, or null.
  const Kernel* (*find)(const char* symbol);
  // Return the error of a launch; empty without one.
  const char* (*launch)(const cudaLaunchConfig_t& config, const Kernel& kernel, void** parameters,
                        uint64_t seed);
  void* encode_tensor_map;
};

const Kernels& kernels();

}  // namespace fake_cuda
