// The executor for C and Python: load PTX, allocate global memory, launch.
#include <cstdlib>
#include <map>

#include "memory/fresh.h"
#include "memory/memory.h"

#define CUDASIM_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace cudasim;

auto& allocations = *new std::map<u64, size_t>;
std::string last_fault;

Range own_allocation(u64 address) {
  const auto behind = allocations.upper_bound(address);
  if (behind == allocations.begin()) return {};
  const auto& [begin, bytes] = *std::prev(behind);
  return address < begin + bytes ? Range{begin, begin + bytes} : Range{};
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

// Returns the kernel of a symbol, or of the beginning of a name without its namespaces; or null.
CUDASIM_API void* cudasim_kernel(void* module, const char* name) {
  for (auto& kernel : static_cast<Module*>(module)->kernels)
    if (kernel->symbol == name || kernel->name.find(name) == 0 ||
        kernel->name.find(std::string("::") + name) != std::string::npos)
      return kernel.get();
  return nullptr;
}

// sizes: grid and block along x, y and z, bytes of dynamic shared memory
CUDASIM_API const char* cudasim_launch(void* kernel, const u32 sizes[7], void** parameters,
                                       u64 seed) {
  if (!find_allocation) find_allocation = own_allocation;
  Launch launch;
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = sizes[i];
    launch.block[i] = sizes[3 + i];
  }
  launch.dynamic_shared = sizes[6];
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

CUDASIM_API const Statistics* cudasim_statistics() { return &statistics; }

CUDASIM_API u64 cudasim_instructions() { return statistics.instructions; }

// ---- mutants ------------------------------------------------------------------------------------

// Executed statements of each kernel since cudasim_forget(), a line each. A kernel's line is
// "kernel " and its name; a statement's line is number, line of the PTX, source and text behind
// tabs.
CUDASIM_API const char* cudasim_executed() {
  static std::string result;
  result.clear();
  for (const Kernel* const kernel : all_kernels()) {
    bool is_first = true;
    for (const Instruction& it : kernel->code) {
      if (!it.ran) continue;
      if (is_first) result += "kernel " + kernel->name + "\n";
      is_first = false;
      const Statement& statement = kernel->statements[it.statement];
      result += text("%u\t%u\t", it.statement, statement.line) + source_of(*kernel, it.statement) +
                "\t" + statement.text + "\n";
    }
  }
  return result.c_str();
}

CUDASIM_API void cudasim_forget() {
  for (const Kernel* const kernel : all_kernels())
    for (const Instruction& it : kernel->code) it.ran = false;
}

// Replaces a statement in the executed kernels of a name.
CUDASIM_API void cudasim_edit(const char* name, u32 statement, const char* text) {
  for (Kernel* const kernel : all_kernels())
    if (kernel->decoded && kernel->name == name) edit(*kernel, statement, text);
}

// A launch ends in a fault once the process has executed so many instructions more.
CUDASIM_API void cudasim_limit(u64 instructions) {
  options().most_instructions = statistics.instructions + instructions;
}

// The report of the last launch that had a fault.
CUDASIM_API const char* cudasim_fault() { return statistics.fault.c_str(); }

// From the environment: CUDASIM_ORDER, CUDASIM_ASYNC, CUDASIM_RACES, CUDASIM_FRESH.
CUDASIM_API void cudasim_configure() {
  const auto chosen = [](const char* name) -> std::string {
    const char* const value = getenv(name);
    return value ? value : "";
  };
  Options& o = options();
  const std::string order = chosen("CUDASIM_ORDER"), async = chosen("CUDASIM_ASYNC");
  o.any_order = order.empty() || order == "any";
  o.any_async = async.empty() || async == "any";
  o.order = order == "reverse"  ? Order::reverse
            : order == "random" ? Order::random
                                : Order::forward;
  o.async = async == "late" ? Async::late : async == "random" ? Async::random : Async::early;
  o.races = chosen("CUDASIM_RACES") != "0";
  o.fresh = chosen("CUDASIM_FRESH") != "0";
}
