// Computes products by the Triton kernels.
#include "backends/triton.h"

#include <algorithm>

#include "backends/backends.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// Returns the launch of a product, which products like it share. Its first call compiles the
// kernel.
py::object launch_of(const GemmArgs& g, c10::Device device) {
  const auto matrix = [](const MatrixRef& x) {
    return py::make_tuple(static_cast<int>(x.dtype), x.batch_stride, x.row_stride, x.column_stride,
                          address(x.data) % 16 == 0);
  };
  const auto optional = [](const void* data, auto object) {
    return data ? py::object(std::move(object)) : py::object(py::none());
  };
  const py::tuple sizes = py::make_tuple(g.batch, g.terms, g.m, g.n, g.k);
  return triton_function("gemm.gemm", "gemm")(
      static_cast<int>(device.index()), g.variant, sizes,
      optional(g.bias.data, py::int_(static_cast<int>(g.bias.dtype))), matrix(g.out), matrix(g.a),
      matrix(g.b), optional(g.c.data, matrix(g.c)));
}

}  // namespace

const char* TritonBackend::why_not(const GemmArgs& g, int) const {
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

// The numbers of the plans of triton_kernels/gemm/plan.py.
std::vector<int64_t> TritonBackend::gemm_variants(const GemmArgs&, Services&) const {
  return {0, 1, 2};
}

Status TritonBackend::gemm(const GemmArgs& g, Services& services) const {
  const c10::Device device = device_of(services);
  if (g.batch == 0 || g.m == 0 || g.n == 0) return Status::ok;
  const UntracedPython python;
  const py::object product = launch_of(g, device);
  // The driver loads no module during a capture.
  if (is_capturing(device) && product.attr("compiled").is_none()) return Status::not_compiled;
  const auto scratch_bytes = product.attr("scratch_bytes").cast<size_t>();
  const auto tickets = product.attr("tickets").cast<size_t>();
  product(scratch_bytes ? address(services.scratch(scratch_bytes)) : 0,
          tickets ? address(services.tickets(tickets)) : 0, address(g.out.data), address(g.a.data),
          address(g.b.data), address(g.c.data), address(g.bias.data), g.alpha, g.beta);
  return Status::ok;
}

const Backend& triton_backend() {
  static const TritonBackend backend;
  return backend;
}

}  // namespace amp_ext
