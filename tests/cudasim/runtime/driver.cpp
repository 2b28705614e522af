// The functions of the driver with which Triton loads and launches compiled kernels. A launch is
// recorded and computes nothing: the runtime does not execute machine code.
#include <cuda.h>

#include <string>

#include "kernels.h"
#include "runtime.h"

using namespace fake_cuda;

struct CUfunc_st {
  std::string name;
};

FAKE_CUDA_API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                            CUdevice device) {
  const auto same = static_cast<cudaDeviceAttr>(attribute);  // their numbers are equal
  return cudaDeviceGetAttribute(value, same, device) == cudaSuccess ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_VALUE;
}

FAKE_CUDA_API CUresult cuCtxGetCurrent(CUcontext* context) {
  static char only;
  *context = reinterpret_cast<CUcontext>(&only);
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                             CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
      device_of(reinterpret_cast<const void*>(pointer)) < 0)
    return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(value) = pointer;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  FAKE_CUDA_LOCK;
  if (check_captures("cuModuleLoadData") != cudaSuccess)
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  *module = nullptr;  // a function is known by its name alone
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = new CUfunc_st{name};
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}

FAKE_CUDA_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

FAKE_CUDA_API CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
    const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(kernels().encode_tensor_map);
  return encode(map, type, rank, base, sizes, strides, box, steps, interleave, swizzle, promotion,
                fill);
}

FAKE_CUDA_API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**,
                                        void**) {
  FAKE_CUDA_LOCK;
  Stream* const stream = find_stream(config->hStream);
  if (!stream || stream->device != current_device) return CUDA_ERROR_INVALID_HANDLE;
  enqueue(*stream, "launch", function->name, [] {});
  return CUDA_SUCCESS;
}
