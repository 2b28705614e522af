// Binds products for measurements and verification, and the table of measured ones.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/backends.h"
#include "backends/table.h"
#include "gemm/product.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::unique_ptr<Product> product_of(const at::Tensor& a, const at::Tensor& b, bool trans_a,
                                    bool trans_b, bool sum_batch, const OptionalTensor& c,
                                    double alpha, double beta, const OptionalTensor& bias,
                                    std::optional<at::ScalarType> out_dtype, bool accumulates) {
  HANDLE_TH_ERRORS
  const GemmOptions options{trans_a, trans_b, sum_batch, accumulates ? std::nullopt : c,
                            alpha,   beta,    bias,      out_dtype};
  TORCH_CHECK_TYPE(c || !accumulates, kGemmAccumulate, ": c must be a tensor, got None");
  if (accumulates) check_gemm_accumulate(*c, a, b, options);
  const auto sizes = check_gemm(kGemm, a, b, options);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return std::make_unique<Product>(kGemm, a, b, options, sizes, accumulates ? &*c : nullptr);
  END_HANDLE_TH_ERRORS_PYBIND
}

std::pair<std::string, std::string> choice_of(Product& product) {
  HANDLE_TH_ERRORS
  std::string reason;
  const Backend* const backend = product.choose(&reason);
  return {name_of(backend), reason};
  END_HANDLE_TH_ERRORS_PYBIND
}

// Returns (backend, variant) of all candidates, the choice without measurements first.
std::vector<std::pair<std::string, int64_t>> candidates_of(Product& product, bool triton) {
  std::vector<std::pair<std::string, int64_t>> all;
  for (const Backend* const backend : gemm_candidates(product.device(), product.args(), triton)) {
    if (!backend) {
      all.emplace_back(name_of(backend), 0);
      continue;
    }
    run(kGemm, *backend, product.device(), [&](Services& services) {
      for (const int64_t variant : backend->gemm_variants(product.args(), services))
        all.emplace_back(backend->name(), variant);
      return Status::ok;
    });
  }
  return all;
}

// Returns why a backend cannot compute the product; null if it can.
const char* why_not(const Product& product, const std::string& name) {
  const auto backend = gemm_backend(product.device().type(), name);
  if (!backend) return "no such backend computes products on this device";
  return *backend ? (*backend)->why_not(product.args(), capability_of(product.device())) : nullptr;
}

// Computes the product so many times by a backend, and returns the last result.
at::Tensor compute_by(Product& product, const std::string& name, int64_t variant, int64_t times) {
  HANDLE_TH_ERRORS
  const char* const obstacle = why_not(product, name);
  TORCH_CHECK_VALUE(!obstacle, kGemm, ": the backend ", name, " cannot compute this: ", obstacle);
  const Backend* const backend = *gemm_backend(product.device().type(), name);
  const py::gil_scoped_release released;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  product.set_variant(variant);
  at::Tensor out;
  for (int64_t i = 0; i < times; ++i) out = product.compute(backend, /*strict=*/true);
  return out;
  END_HANDLE_TH_ERRORS_PYBIND
}

int64_t gemm_variant(int tile, int64_t splits, bool sm90) {
  const Backend* const kernels = cuda_backend();
  return kernels ? kernels->variant_of({.sm90 = sm90, .tile = tile, .splits = splits}) : 0;
}

}  // namespace

void bind_gemm(py::module_& m) {
  using namespace py::literals;
  py::class_<Product>(m, "Product",
                      "A product: the arguments of ops.gemm, or with `accumulates` "
                      "of ops.gemm_accumulate_.")
      .def(py::init(&product_of), "a"_a, "b"_a, "trans_a"_a = false, "trans_b"_a = false,
           "sum_batch"_a = false, "c"_a = py::none(), "alpha"_a = 1.0, "beta"_a = 1.0,
           "bias"_a = py::none(), "out_dtype"_a = py::none(), "accumulates"_a = false)
      .def_property_readonly("key", [](const Product& p) { return key_of(p.device(), p.args()); })
      .def("choose", &choice_of,
           "The backend that would compute it, and why. Computes nothing, but "
           "may have the backend's kernels verified first.")
      .def("candidates", &candidates_of, "triton"_a, py::call_guard<py::gil_scoped_release>(),
           "(backend, variant) of all ways to compute it, the one where nothing is measured first.")
      .def("why_not", &why_not, "backend"_a, "Why a backend cannot compute it; None if it can.")
      .def("compute", &compute_by, "backend"_a, "variant"_a, "times"_a = 1,
           "Computes it so many times, and returns the last result.");
  m.attr("GEMM_KEY_SIZE") = std::tuple_size_v<GemmKey>;
  m.def("set_measured", &set_measured, "device"_a, "table"_a,
        "Replaces the table of a device: (backend, variant, reason) by key.");
  m.def("gemm_variant", &gemm_variant, "tile"_a, "splits"_a, "sm90"_a,
        "The variant of the CUDA kernels for a tile of sm_90a, or else of sm_80, and a number of "
        "splits; 0 if there is none.");
}

}  // namespace amp_ext
