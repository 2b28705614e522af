// Binds the choice of a product's backend, and the forcing of a tile.
#include "checks/python.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/backends.h"
#include "gemm/gemm.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

void force(std::optional<int> tile, int64_t splits, bool sm90) {
  if (!tile) return force_gemm_tile(std::nullopt);
  force_gemm_tile({{.sm90 = sm90, .tile = *tile, .splits = splits}});
}

bool has_products(const std::string& backend, const std::string& device_name) {
  const c10::Device device(device_name);
  const Backend* const found = gemm_backend(device.type(), backend).value_or(nullptr);
  GemmArgs product{};
  for (MatrixRef* const matrix : {&product.a, &product.b, &product.out}) {
    matrix->dtype = DType::f16;
    matrix->column_stride = 1;
  }
  return found && !found->why_not(product, capability_of(device));
}

// Returns (backend, reason) of gemm(a, b, ...).
std::pair<std::string, std::string> choice_of(py::handle a, py::handle b, py::handle c,
                                              py::handle bias, bool trans_a, bool trans_b,
                                              bool sum_batch) {
  HANDLE_TH_ERRORS
  GemmOptions options;
  options.trans_a = trans_a;
  options.trans_b = trans_b;
  options.sum_batch = sum_batch;
  if (!c.is_none()) options.c = tensor_of("c", c);
  if (!bias.is_none()) options.bias = tensor_of("bias", bias);
  return gemm_choice(tensor_of("a", a), tensor_of("b", b), options);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def("gemm_choice", &choice_of, py::arg("a"), py::arg("b"), py::arg("c") = py::none(),
        py::arg("bias") = py::none(), py::arg("trans_a") = false, py::arg("trans_b") = false,
        py::arg("sum_batch") = false,
        "Which backend computes gemm(a, b, ...), and why. Computes no product, but may have the "
        "backend's kernels verified first.");
  m.def("has_products", &has_products, py::arg("backend"), py::arg("device"),
        "Whether a backend computes FP16 products on a device.");
  m.def(
      "gemm_tile_count",
      [](bool sm90) {
        const Backend* const kernels = cuda_backend();
        int count = 0;
        while (kernels && kernels->variant_of({.sm90 = sm90, .tile = count})) ++count;
        return count;
      },
      py::kw_only(), py::arg("sm90"),
      "How many tiles the CUDA gemm has for sm_90a, or else for sm_80; 0 without CUDA kernels.");
  m.def("force_gemm_tile", &force, py::arg("tile"), py::arg("splits") = 1, py::arg("sm90") = true,
        "Products of this thread that the CUDA kernels compute, for a test or by "
        "AMP_EXT_GEMM=kernel, and that this tile of gemm_sm90_kernel, or of gemm_kernel, can "
        "compute are computed by it, whatever the planner thinks, until force_gemm_tile(None).");
}

}  // namespace amp_ext
