// The executor for C and Python: load PTX, allocate global memory, launch.
#include <cstdlib>
#include <map>

#include "fresh.h"
#include "machine.h"

#define CUDASIM_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace cudasim;

auto& allocations = *new std::map<u64, size_t>;
std::string last_fault;

Range own_allocation(u64 address) {
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return {};
  --found;
  return address < found->first + found->second ? Range{found->first, found->first + found->second}
                                                : Range{};
}

}  // namespace

// Each returns an error's text, empty without one.

CUDASIM_API const char* cudasim_load(const char* path, void** module) {
  try {
    *module = read_module(path).release();
    return "";
  } catch (const Fault& fault) {
    last_fault = fault.text;
    return last_fault.c_str();
  }
}

// The kernel whose symbol or demangled name begins with `name`; null if there is none.
CUDASIM_API void* cudasim_kernel(void* module, const char* name) {
  for (auto& kernel : static_cast<Module*>(module)->kernels)
    if (kernel->symbol == name || kernel->name.find(name) == 0) return kernel.get();
  return nullptr;
}

// sizes: grid, block and cluster along x, y and z, bytes of dynamic shared memory
CUDASIM_API const char* cudasim_launch(void* kernel, const u32 sizes[10], void** parameters,
                                       u64 seed) {
  if (!find_allocation) find_allocation = own_allocation;
  Launch launch;
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = sizes[i];
    launch.block[i] = sizes[3 + i];
    launch.cluster[i] = sizes[6 + i];
  }
  launch.dynamic_shared = sizes[9];
  launch.parameters = parameters;
  launch.seed = seed;
  last_fault = run(*static_cast<Kernel*>(kernel), launch);
  return last_fault.c_str();
}

CUDASIM_API void* cudasim_allocate(size_t bytes) {
  constexpr size_t kAlign = 256;
  void* const memory = aligned_alloc(kAlign, (bytes / kAlign + 1) * kAlign);
  fill_fresh(memory, bytes);
  allocations[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return memory;
}

CUDASIM_API void cudasim_free(void* memory) {
  allocations.erase(reinterpret_cast<uintptr_t>(memory));
  free(memory);
}

// What a kernel may access of global memory, for a library that has its own.
CUDASIM_API void cudasim_allow(FindAllocation find) { find_allocation = find; }

CUDASIM_API const Statistics* cudasim_statistics() { return &statistics; }

CUDASIM_API u64 cudasim_instructions() { return statistics.instructions; }

// From the environment: CUDASIM_ORDER, CUDASIM_ASYNC, CUDASIM_ELECT, CUDASIM_RACES, CUDASIM_FRESH.
CUDASIM_API void cudasim_configure() {
  const auto chosen = [](const char* name, const char* otherwise) -> std::string {
    const char* const value = getenv(name);
    return value ? value : otherwise;
  };
  Options& o = options();
  const std::string order = chosen("CUDASIM_ORDER", "any"), async = chosen("CUDASIM_ASYNC", "any");
  o.any_order = order == "any";
  o.any_async = async == "any";
  o.order = order == "reverse"  ? Order::reverse
            : order == "random" ? Order::random
                                : Order::forward;
  o.async = async == "late" ? Async::late : async == "random" ? Async::random : Async::early;
  o.elected = atoi(chosen("CUDASIM_ELECT", "-1").c_str());
  o.races = chosen("CUDASIM_RACES", "1") == "1";
  o.fresh = chosen("CUDASIM_FRESH", "1") == "1";
}
