// The Triton kernels as a backend. An op's method, beside its binding, calls the function with its
// name in a module of amp_ext.triton_kernels.
#pragma once

#include <pybind11/pybind11.h>

#include <bit>
#include <string>
#include <vector>

#include "amp_ext/backend.h"
#include "backends/python.h"

namespace amp_ext {

class TritonBackend final : public Backend {
 public:
  const char* name() const override { return "triton"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&, int capability) const override;
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override;
  Status gemm(const GemmArgs&, Services&) const override;
};

// Returns a function in a module of amp_ext.triton_kernels. The first import takes a second.
inline pybind11::object triton_function(const char* module, const char* name) {
  const std::string path = std::string("amp_ext.triton_kernels.") + module;
  return pybind11::module_::import(path.c_str()).attr(name);
}

inline int64_t address(const void* data) { return std::bit_cast<int64_t>(data); }

inline int64_t bits(double x) { return std::bit_cast<int64_t>(x); }

// Calls the function with the address of the list's table, the numbers of entries and chunks, and
// the arguments. For a list without chunks, calls it only if `is_needed`.
template <class Ref, class... Args>
Status launch_list(const char* module, const char* function, const ListOf<Ref>& list,
                   Services& services, bool is_needed, const Args&... args) {
  const Ref* table = nullptr;
  uint32_t chunks = 0;
  if (const Status status = send_table(list, services, &table, &chunks); status != Status::ok)
    return status;
  if (chunks == 0 && !is_needed) return Status::ok;
  const UntracedPython python;
  triton_function(module, function)(address(table), list.size, chunks, args...);
  return Status::ok;
}

}  // namespace amp_ext
