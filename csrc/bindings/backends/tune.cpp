// Serves amp_ext/tune.py: notes products, and computes one of them in each way, on random operands.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <sstream>

#include "backends/backends.h"
#include "backends/python.h"
#include "backends/table.h"
#include "checks/python.h"
#include "checks/tensors.h"
#include "gemm/gemm.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

constexpr auto kTune = "amp_ext.tune";

std::string in_words(const GemmArgs& g) {
  std::ostringstream text;
  const auto name = [](DType type) { return c10::toString(scalar_type_of(type)); };
  if (g.batch > 1) text << g.batch << " x ";
  text << '[' << g.m << ", " << g.k << "] @ [" << g.k << ", " << g.n << ']';
  if (g.terms > 1) text << ", sum of " << g.terms;
  text << ", " << name(g.a.dtype);
  if (g.b.dtype != g.a.dtype) text << " and " << name(g.b.dtype);
  if (g.out.dtype != g.a.dtype) text << " into " << name(g.out.dtype);
  if (g.c.data) text << (adds_to_out(g) ? ", added to it" : ", + c");
  if (g.bias.data) text << ", + bias";
  return text.str();
}

// A noted product with memory for its arguments.
class Trial {
 public:
  explicit Trial(const NotedProduct& product) : device_(product.device), args_(product.args) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    GemmArgs& g = args_;
    const bool adds = adds_to_out(g);
    // A clone leaves the user's random numbers as they are.
    at::Generator generator = at::globalContext().defaultGenerator(device_).clone();
    const auto fill = [&](void*& data, DType type, int64_t size) {
      const int64_t shift = reinterpret_cast<uintptr_t>(data) % 16 / size_of(type);
      at::Tensor memory = at::empty({shift + size}, bytes_on(device_).dtype(scalar_type_of(type)));
      memory.normal_(0, 1, generator);
      memory = memory.narrow(0, shift, size);
      data = memory.mutable_data_ptr();
      return memory;
    };
    const auto matrices = [&](MatrixRef& x, int64_t count, int64_t rows, int64_t columns) {
      if (!x.data) return at::Tensor();
      return fill(x.data, x.dtype,
                  1 + (count - 1) * x.batch_stride + (rows - 1) * x.row_stride +
                      (columns - 1) * x.column_stride);
    };
    tensors_.a = matrices(g.a, g.batch * g.terms, g.m, g.k);
    tensors_.b = matrices(g.b, g.batch * g.terms, g.k, g.n);
    out_ = matrices(g.out, g.batch, g.m, g.n);
    if (adds) g.c.data = g.out.data;
    tensors_.c = adds ? out_ : matrices(g.c, g.batch, g.m, g.n);
    if (g.bias.data)
      tensors_.bias = fill(g.bias.data, g.bias.dtype, 1 + (g.n - 1) * g.bias.stride)
                          .as_strided({g.n}, {g.bias.stride});
  }

  // Computes the product so many times, and returns the host's seconds.
  double run(const std::string& name, int64_t variant, int64_t times) {
    const auto backend = gemm_backend(device_.type(), name);
    TORCH_CHECK_VALUE(backend, kTune, ": no backend ", name, " computes products on ", device_);
    args_.variant = variant;
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < times; ++i) compute(*backend);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // Returns the result of one call, in one row.
  at::Tensor result(const std::string& name, int64_t variant) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool adds = adds_to_out(args_);
    out_.fill_(adds ? 0 : NAN);
    run(name, variant, 1);
    // The library adds in the memory of the other backends' result, and has its own otherwise.
    const at::Tensor& out = name == name_of(nullptr) && !adds ? library_out_ : out_;
    return out.reshape({1, -1}).clone();
  }

 private:
  void compute(const Backend* backend) {
    if (!backend) {
      library_out_ = library_gemm(args_, tensors_);
      return;
    }
    amp_ext::run(kTune, *backend, device_,
                 [&](Services& services) { return backend->gemm(args_, services); });
  }

  c10::Device device_;
  GemmArgs args_;
  GemmTensors tensors_;
  at::Tensor out_, library_out_;
};

// Returns (backend, variant) of all candidates, the choice without measurements first.
std::vector<std::pair<std::string, int64_t>> candidates(NotedProduct& product, bool triton) {
  std::vector<std::pair<std::string, int64_t>> all;
  for (const Backend* const backend : gemm_candidates(product.device, product.args, triton)) {
    if (!backend) {
      all.emplace_back(name_of(backend), 0);
      continue;
    }
    run(kTune, *backend, product.device, [&](Services& services) {
      for (const int64_t variant : backend->gemm_variants(product.args, services))
        all.emplace_back(backend->name(), variant);
      return Status::ok;
    });
  }
  return all;
}

}  // namespace

void bind_tune(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> released;
  py::class_<NotedProduct>(m, "NotedProduct")
      .def("__str__", [](const NotedProduct& p) { return in_words(p.args); })
      .def_property_readonly("device", [](const NotedProduct& p) { return p.device.str(); })
      .def_property_readonly("key", [](const NotedProduct& p) { return key_of(p.device, p.args); })
      .def_property_readonly(
          "factor",
          [](const NotedProduct& p) {
            return std::max({1.0, std::abs(p.args.alpha), std::abs(p.args.beta)});
          })
      .def_readonly("calls", &NotedProduct::calls)
      .def(
          "candidates", &candidates, py::arg("triton"), released,
          "(backend, variant) of all ways to compute it, the one where nothing is measured first.");
  py::class_<Trial>(m, "Trial", "A noted product, on random operands of its own.")
      .def(py::init<const NotedProduct&>(), released)
      .def("run", &Trial::run, py::arg("backend"), py::arg("variant"), py::arg("times") = 1,
           released, "Computes it so many times; returns the host's seconds.")
      .def(
          "result",
          [](Trial& trial, const std::string& backend, int64_t variant) {
            at::Tensor tensor;
            {
              const py::gil_scoped_release no_gil;
              tensor = trial.result(backend, variant);
            }
            return object_of(tensor);
          },
          py::arg("backend"), py::arg("variant"), "Returns the result of one call, in one row.");
  m.attr("GEMM_KEY_SIZE") = std::tuple_size_v<GemmKey>;
  m.def("start_noting", &start_noting,
        "Notes all products from now on; False if that is so already.");
  m.def("stop_noting", &stop_noting, "The products that were noted.");
  m.def("set_measured", &set_measured, py::arg("device"), py::arg("entries"),
        "Replaces what is known of the products of a device: (key, backend, variant, reason).");
}

}  // namespace amp_ext
