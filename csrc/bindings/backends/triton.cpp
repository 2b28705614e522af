// The products of the Triton kernels: a product that is like an earlier one calls the launches that
// the first call has returned.
#include "backends/triton.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "backends/backends.h"
#include "checks/python.h"
#include "checks/tensors.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// Arguments of a product without a copy.
at::Tensor tensor_of(const MatrixRef& x, int64_t count, int64_t rows, int64_t columns,
                     c10::Device device) {
  return at::for_blob(x.data, {count, rows, columns})
      .strides({x.batch_stride, x.row_stride, x.column_stride})
      .options(at::TensorOptions(scalar_type_of(x.dtype)).device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor tensor_of(const VectorRef& x, int64_t size, c10::Device device) {
  return tensor_of(MatrixRef{x.data, x.dtype, 0, 0, x.stride}, 1, 1, size, device).view({size});
}

// Launches of products on GPUs by their keys: they take addresses, with no tensors around them.
py::dict& known_launches() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::dict> known;
  return known.call_once_and_store_result([] { return py::dict(); }).get_stored();
}

// Computes a product by kernels that may have to be compiled, and returns its launches.
py::object launch_first(const GemmArgs& g, c10::Device device) {
  static TritonFunction gemm("gemm.gemm", "gemm");
  const auto matrices = [&](const MatrixRef& x, int64_t count, int64_t rows, int64_t columns) {
    return object_of(tensor_of(x, count, rows, columns, device));
  };
  const auto optional_matrices = [&](const MatrixRef& x) -> py::object {
    return x.data ? matrices(x, g.batch, g.m, g.n) : py::none();
  };
  const auto optional_vector = [&](const VectorRef& x) -> py::object {
    return x.data ? object_of(tensor_of(x, g.n, device)) : py::none();
  };
  const int64_t products = g.batch * g.terms;
  return gemm(matrices(g.out, g.batch, g.m, g.n), matrices(g.a, products, g.m, g.k),
              matrices(g.b, products, g.k, g.n), optional_matrices(g.c), optional_vector(g.bias),
              optional_matrices(g.aux), optional_vector({g.column_sums, DType::f32, 1}), g.terms,
              g.alpha, g.beta, activation_name(g.activation), g.derivative, g.variant);
}

// All that a product's launches depend on: addresses count by their alignment.
py::bytes key_of(const GemmArgs& g, c10::Device device) {
  std::vector<int64_t> numbers{device.index(),
                               g.batch,
                               g.terms,
                               g.m,
                               g.n,
                               g.k,
                               g.derivative,
                               g.variant,
                               static_cast<int64_t>(g.activation),
                               g.column_sums != nullptr};
  const auto add = [&](const void* data, DType dtype, std::initializer_list<int64_t> strides) {
    numbers.push_back(data ? 1 + (address(data) % 16 == 0) : 0);
    numbers.push_back(static_cast<int64_t>(dtype));
    numbers.insert(numbers.end(), strides);
  };
  for (const MatrixRef& x : {g.a, g.b, g.c, g.aux, g.out})
    add(x.data, x.dtype, {x.batch_stride, x.row_stride, x.column_stride});
  add(g.bias.data, g.bias.dtype, {});
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

}  // namespace

const char* TritonBackend::why_not(const GemmArgs& g) const {
  const auto is_16_bit = [](DType type) { return type == DType::f16 || type == DType::bf16; };
  if (!is_16_bit(g.a.dtype) || g.a.dtype != g.b.dtype)
    return "the Triton kernels multiply FP16 by FP16 and BF16 by BF16";
  if (g.out.dtype == DType::f64) return "the Triton kernels write no FP64";
  // The most tiles of a result, of 16 x 64 elements at least, and steps along k, of 32 or more.
  const int64_t tiles = g.batch * ((g.m + 15) / 16) * ((g.n + 63) / 64);
  const int64_t steps = (g.k + 31) / 32 * g.terms;
  constexpr int64_t kLimit = (int64_t{1} << 31) - (1 << 16);
  if (std::max({g.m, g.n, g.k, g.terms, tiles, steps}) > kLimit)
    return "the Triton kernels count rows, columns, tiles and steps in 32 bits";
  return nullptr;
}

// The plans that triton_kernels/gemm/plan.py predicts to be the fastest, by their number.
std::vector<int64_t> TritonBackend::gemm_variants(const GemmArgs&, Services&) const {
  return {0, 1, 2, 3};
}

Status TritonBackend::gemm(const GemmArgs& args, Services& services) const {
  const c10::Device device = device_of(services);
  GemmArgs g = args;
  if (g.batch == 0 || g.m == 0 || g.n == 0) {
    if (g.column_sums) tensor_of({g.column_sums, DType::f32, 1}, g.n, device).zero_();
    return Status::ok;
  }
  at::Tensor bias;
  if (g.bias.data && g.bias.stride != 1) {
    bias = tensor_of(g.bias, g.n, device).contiguous();
    g.bias = {bias.mutable_data_ptr(), g.bias.dtype, 1};
  }

  const UntracedPython python;
  const py::bytes key = key_of(g, device);
  py::dict& known = known_launches();
  if (known.contains(key)) {
    const py::object launches = known[key];
    const auto scratch_bytes = launches.attr("scratch_bytes").cast<size_t>();
    launches.attr("run")(scratch_bytes ? address(services.scratch(scratch_bytes)) : 0,
                         address(g.out.data), address(g.a.data), address(g.b.data),
                         address(g.c.data), address(g.bias.data), address(g.aux.data),
                         address(g.column_sums), g.alpha, g.beta);
    return Status::ok;
  }
  // The driver loads no module during a capture.
  if (is_capturing(device)) return Status::not_compiled;
  const py::object launches = launch_first(g, device);
  constexpr size_t kMostKnown = 4096;
  if (known.size() == kMostKnown) known.clear();
  if (device.is_cuda()) known[key] = launches;
  return Status::ok;
}

const Backend& triton_backend() {
  static const TritonBackend backend;
  return backend;
}

}  // namespace amp_ext
