// The Triton kernels as a backend. An op's method, beside its binding, calls the function with its
// name in a module of amp_ext.triton_kernels.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "amp_ext/backend.h"
#include "backends/python.h"

namespace amp_ext {

class TritonBackend final : public Backend {
 public:
  const char* name() const override { return "triton"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&) const override;
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override;
  Status gemm(const GemmArgs&, Services&) const override;
};

// A function in a module of amp_ext.triton_kernels. Its first call imports the module. The first
// such import takes a second.
class TritonFunction {
 public:
  constexpr TritonFunction(const char* module, const char* name)
      : module_name_(module), name_(name) {}

  template <class... Args>
  pybind11::object operator()(Args&&... args) {
    const auto import = [&] {
      const std::string name = std::string("amp_ext.triton_kernels.") + module_name_;
      return pybind11::module_::import(name.c_str());
    };
    const pybind11::module_& module = module_.call_once_and_store_result(import).get_stored();
    return module.attr(name_)(std::forward<Args>(args)...);
  }

 private:
  const char* module_name_;
  const char* name_;
  pybind11::gil_safe_call_once_and_store<pybind11::module_> module_;
};

inline int64_t address(const void* data) { return std::bit_cast<int64_t>(data); }

inline int64_t bits(double x) { return std::bit_cast<int64_t>(x); }

// Calls function(address of the list's table, entries, chunks, arguments...). A list without chunks
// calls it only if it is needed all the same.
template <class Ref, class... Args>
Status launch_list(TritonFunction& function, const ListOf<Ref>& list, Services& services,
                   bool is_needed, const Args&... args) {
  const Ref* table = nullptr;
  uint32_t chunks = 0;
  if (const Status status = send_table(list, services, &table, &chunks); status != Status::ok)
    return status;
  if (chunks == 0 && !is_needed) return Status::ok;
  const UntracedPython python;
  function(address(table), list.size, chunks, args...);
  return Status::ok;
}

}  // namespace amp_ext
