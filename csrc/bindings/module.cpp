// Defines amp_ext._C: the switches of the package and the scaler's paths. Everything else is an op.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "autocast/regions.h"
#include "backends/backends.h"

namespace amp_ext {

// Each adds the functions and classes of one part to the module.
void bind_gemm(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_scaler(pybind11::module_& m);

}  // namespace amp_ext

PYBIND11_MODULE(_C, m) {
  m.def(
      "cuda_built", [] { return amp_ext::cuda_backend() != nullptr; },
      "Whether there are CUDA kernels.");
  m.def("set_gemm_mode", &amp_ext::set_gemm_mode);
  m.def("gemm_mode", &amp_ext::gemm_mode);
  m.def("use_backend", [](const std::string& device_type, const std::string& name) {
    amp_ext::use_backend(c10::Device(device_type).type(), name);
  });
  m.def("choose", [](const std::string& op, const std::string& device_type) {
    return amp_ext::choose(op.c_str(), c10::Device(device_type)).name();
  });
  m.def("load_backend", &amp_ext::load_backend,
        "Loads the backend of a shared library at a path, and returns the architectures of its GPU "
        "code. Raises ImportError, whose text ends with a remedy.");
  m.def("put_under_test", &amp_ext::put_under_test);

  m.attr("REGION_MARK") = c10::DeviceTypeName(amp_ext::kRegionMark, /*lower_case=*/true);
  m.def("enter_region", &amp_ext::enter_region);
  m.def("exit_region", &amp_ext::exit_region);
  m.def("install", &amp_ext::install);
  m.def("uninstall", &amp_ext::uninstall);
  m.def("is_installed", &amp_ext::is_installed);

  amp_ext::bind_gemm(m);
  amp_ext::bind_optim(m);
  amp_ext::bind_scaler(m);
}
