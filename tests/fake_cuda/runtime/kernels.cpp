// The library of kernels: those of csrc/kernels, run by tests/simt, under the names that nvcc gives
// them.
#include "kernels.h"

#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "engine.h"

namespace fake_cuda {
namespace {

std::string demangled(const char* symbol) {
  char* const text = abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr);
  const std::string result = text ? text : "";
  free(text);
  return result;
}

// "void f<...>(int, float)" as "f<...>", which nvcc and the host's compiler agree on, and
// "(int, float)".
std::pair<std::string, std::string> split(const std::string& text) {
  const size_t start = text.starts_with("void ") ? strlen("void ") : 0;
  int depth = 0;
  for (size_t i = text.size(); i-- > 0;) {
    if (text[i] == ')') ++depth;
    if (text[i] == '(' && --depth == 0) return {text.substr(start, i - start), text.substr(i)};
  }
  return {text, ""};
}

// Most kernels are in unnamed namespaces, so that only this library's own file has their symbols.
std::map<std::string, Kernel> read_kernels() {
  std::map<std::string, simt::Signature> signatures;
  for (const auto& [type, signature] : simt::signatures())
    signatures[split(demangled(type.c_str())).second] = signature;
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&simt::launch), &info);
  std::ifstream file(info.dli_fname, std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(bytes.data());
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(bytes.data() + header.e_shoff);

  std::map<std::string, Kernel> found;
  for (int i = 0; i < header.e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* const names = bytes.data() + sections[sections[i].sh_link].sh_offset;
    const auto* symbol = reinterpret_cast<const Elf64_Sym*>(bytes.data() + sections[i].sh_offset);
    const auto* const end = symbol + sections[i].sh_size / sizeof(Elf64_Sym);
    for (; symbol != end; ++symbol) {
      const char* const name = names + symbol->st_name;
      const bool is_clone = strchr(name, '.');  // of a function, made by the optimizer
      if (ELF64_ST_TYPE(symbol->st_info) != STT_FUNC || is_clone || !strstr(name, "_kernel"))
        continue;
      const auto [kernel, parameters] = split(demangled(name));
      const auto signature = signatures.find(parameters);
      if (signature == signatures.end()) continue;
      const void* const function = static_cast<char*>(info.dli_fbase) + symbol->st_value;
      const auto& [parameter_bytes, call] = signature->second;
      const auto [other, is_new] = found.insert({kernel, {function, parameter_bytes, call}});
      if (is_new || other->second.function == function) continue;
      fprintf(stderr, "fake cuda: there are two kernels %s\n", kernel.c_str());
      abort();
    }
  }
  return found;
}

const Kernel* find(const char* symbol) {
  static const std::map<std::string, Kernel> all = read_kernels();
  const auto kernel = all.find(split(demangled(symbol)).first);
  return kernel == all.end() ? nullptr : &kernel->second;
}

const char* launch(const cudaLaunchConfig_t& config, const Kernel& kernel, void** parameters,
                   uint64_t seed) {
  simt::options.seed = seed;
  simt::options.resident_blocks = 1 + static_cast<int>(seed % 4);
  cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(config.dynamicSmemBytes));  // checked by the caller
  simt::launch(config, kernel.function, [&] { kernel.call(kernel.function, parameters); });
  return simt::fault.c_str();
}

}  // namespace
}  // namespace fake_cuda

// Launchers are here beside their kernels, and not called.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaDriverGetVersion(int*) { return cudaErrorNotSupported; }
cudaError_t cudaOccupancyMaxActiveClusters(int*, const void*, const cudaLaunchConfig_t*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) {
  return cudaErrorNotSupported;
}

extern "C" const fake_cuda::Kernels* fake_cuda_kernels() {
  static const fake_cuda::Kernels instance = {fake_cuda::find, fake_cuda::launch,
                                              reinterpret_cast<void*>(&cuTensorMapEncodeTiled)};
  return &instance;
}
