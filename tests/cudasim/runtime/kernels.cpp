// The library of kernels that the fake CUDA runtime loads: compiled PTX, in CUDASIM_PTX.
#include "kernels.h"

#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "copies/async.h"

extern "C" void cudasim_configure();

namespace {

using namespace cudasim;

// "a::sum_kernel" of "void a::sum_kernel<float>(float*)".
std::string without_arguments(std::string name) {
  if (name.starts_with("void ")) name = name.substr(strlen("void "));
  return name.substr(0, std::min(name.find('<'), name.rfind('(')));
}

std::map<std::string, fake_cuda::Kernel> read_folder() {
  cudasim_configure();
  if (void* const finder = dlsym(RTLD_DEFAULT, "fake_cuda_allocation"))
    find_allocation = reinterpret_cast<FindAllocation>(finder);
  std::map<std::string, fake_cuda::Kernel> found;
  const char* const folder = getenv("CUDASIM_PTX");
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(folder ? folder : "", error)) {
    if (file.path().extension() != ".ptx") continue;
    Module* const module = read_module(file.path()).release();
    for (auto& kernel : module->kernels) {
      fake_cuda::Kernel& seam = found[kernel->name];
      seam = {kernel.get(), without_arguments(kernel->name), {}};
      for (const Parameter& parameter : kernel->parameters)
        seam.parameters.push_back(parameter.bytes);
    }
  }
  if (!error) return found;
  fprintf(stderr, "cudasim: CUDASIM_PTX names no folder of PTX\n");
  abort();
}

const fake_cuda::Kernel* find(const char* symbol) {
  static const auto& kernels = *new auto(read_folder());
  const auto found = kernels.find(demangled(symbol));
  if (found != kernels.end()) return &found->second;
  fprintf(stderr, "cudasim: no PTX of kernel %s\n", demangled(symbol).c_str());
  return nullptr;
}

const char* launch(const cudaLaunchConfig_t& config, const fake_cuda::Kernel& seam,
                   void** parameters, uint64_t seed) {
  static std::string fault;
  auto& kernel = *const_cast<Kernel*>(static_cast<const Kernel*>(seam.function));
  Launch launch;
  const auto set = [](u32 to[3], auto from) { to[0] = from.x, to[1] = from.y, to[2] = from.z; };
  set(launch.grid, config.gridDim);
  set(launch.block, config.blockDim);
  launch.dynamic_shared = static_cast<u32>(config.dynamicSmemBytes);
  launch.parameters = parameters;
  launch.seed = seed;
  fault = run(kernel, launch);
  if (fault.empty() && config.numAttrs > 0 && !kernel.waits_for_grid)
    fault = kernel.name + ": begins early, and has no griddepcontrol.wait";
  if (!fault.empty()) fprintf(stderr, "cudasim: %s\n", fault.c_str());
  return fault.c_str();
}

// cuTensorMapEncodeTiled(): the arguments, after the checks that its documentation names.
CUresult encode(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank, void* base,
                const cuuint64_t* size, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  static const u8 bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  const auto refuse = [](const char* why) {
    fprintf(stderr, "cudasim: cuTensorMapEncodeTiled: %s\n", why);
    return CUDA_ERROR_INVALID_VALUE;
  };
  if (reinterpret_cast<uintptr_t>(result) % 64) return refuse("a map is aligned to 64 bytes");
  if (rank < 1 || rank > 5) return refuse("ranks are 1 to 5");
  if (type < 0 || type > 12) return refuse("the data type");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
    return refuse("the executor lacks this interleave, swizzle or fill");
  if (!base || reinterpret_cast<uintptr_t>(base) % 16)
    return refuse("the address is aligned to 16 bytes");
  TensorMap map{};
  map.magic = kTensorMap;
  map.base = static_cast<u8*>(base);
  map.rank = static_cast<u8>(rank);
  map.type = static_cast<u8>(type);
  map.swizzle = static_cast<u8>(swizzle);
  map.element = bytes[type];
  for (unsigned i = 0; i < rank; ++i) {
    if (size[i] == 0 || size[i] > (1ull << 32)) return refuse("sizes are 1 to 2^32");
    if (box[i] == 0 || box[i] > 256) return refuse("a box has 1 to 256 elements a dimension");
    if (steps[i] != 1) return refuse("the executor has element strides of 1");
    map.size[i] = size[i];
    map.box[i] = static_cast<u16>(box[i]);
    if (i + 1 == rank) break;
    if (strides[i] % 16 || strides[i] >= (1ull << 40))
      return refuse("strides are multiples of 16 below 2^40");
    map.stride[i] = strides[i];
  }
  const size_t inner = size_t{box[0]} * map.element;
  if (inner % 16) return refuse("a box's row is a multiple of 16 bytes");
  if (swizzle && inner > (size_t{16} << swizzle))
    return refuse("a box's row is within the swizzle");
  memset(result, 0, sizeof *result);
  static_assert(sizeof map <= sizeof *result);
  memcpy(result, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const fake_cuda::Kernels* fake_cuda_kernels() {
  static const fake_cuda::Kernels instance = {find, launch, reinterpret_cast<void*>(&encode)};
  return &instance;
}
