// The Triton kernels as a backend: each launch is a call of the function with the op's name in a
// module of amp_ext.triton_kernels.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <string>

#include "backends/backends.h"
#include "backends/python.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// Triton is imported with the first call: that takes a second.
py::object function(const std::string& module, const char* name) {
  return py::module_::import(("amp_ext.triton_kernels." + module).c_str()).attr(name);
}

int64_t address(const void* data) { return std::bit_cast<int64_t>(data); }

py::tuple as_tuple(const ScaleUpdate& u) {
  return py::make_tuple(address(u.scale), address(u.growth_tracker), address(u.hysteresis_tracker),
                        address(u.skipped_steps), address(u.next_step), address(u.history),
                        address(u.norm), u.history_records, u.growth_factor, u.backoff_factor,
                        u.growth_interval, u.hysteresis, u.restarts_hysteresis, u.min_scale,
                        u.max_scale);
}

py::tuple as_tuple(const AdamOptions& o) {
  return py::make_tuple(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.decoupled, o.maximize,
                        o.stochastic_rounding);
}

py::tuple as_tuple(const SgdOptions& o) {
  return py::make_tuple(o.lr, o.momentum, o.dampening, o.weight_decay, o.nesterov, o.maximize,
                        o.stochastic_rounding);
}

py::object object_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

class TritonBackend final : public Backend {
 public:
  const char* name() const override { return "triton"; }

  Status unscale(const UnscaleArgs& a, Services& services) const override {
    return with_table(a.grads, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      function("lists.unscale", "unscale_")(table, size, chunks, address(a.inv_scale),
                                            address(a.found_inf), address(a.norm), a.max_norm);
    });
  }
  Status check_finite(const CheckFiniteArgs& a, Services& services) const override {
    return with_table(a.grads, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      function("lists.check_finite", "check_finite")(table, size, chunks, address(a.found_inf));
    });
  }
  Status grad_norm(const GradNormArgs& a, Services& services) const override {
    const int64_t partial_sums = address(services.scratch(partial_sum_count(a) * sizeof(double)));
    const int64_t ticket = address(services.tickets(1));
    return with_table(a.grads, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      function("lists.grad_norm", "grad_norm")(table, size, chunks, address(a.inv_scale),
                                               address(a.found_inf), address(a.norm),
                                               address(a.norms), partial_sums, ticket);
    });
  }
  Status cast(const CastArgs& a, Services& services) const override {
    return with_table(a.casts, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      function("lists.cast", "cast_")(table, size, chunks);
    });
  }
  Status update_scale(const UpdateScaleArgs& a, Services& services) const override {
    // The only one itself, or else a list of addresses.
    const void* found_infs = a.found_infs[0];
    if (a.found_inf_count > 1)
      found_infs = services.table(a.found_infs, a.found_inf_count, sizeof(void*));
    const UntracedPython python;
    function("lists.update_scale", "update_scale_")(address(found_infs), a.found_inf_count,
                                                    as_tuple(a.update));
    return Status::ok;
  }

  Status adam(const AdamArgs& a, Services& services) const override {
    return update("optim.adam", "adam_", a, services);
  }
  Status sgd(const SgdArgs& a, Services& services) const override {
    return update("optim.sgd", "sgd_", a, services);
  }

  const char* why_not(const GemmArgs& g) const override {
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
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override {
    return {0, 1, 2, 3};
  }

  Status gemm(const GemmArgs& g, Services& services) const override {
    const c10::Device device = device_of(services);
    const auto matrices = [&](const MatrixRef& x, int64_t count, int64_t rows, int64_t columns) {
      return x.data ? tensor_of(x, count, rows, columns, device) : at::Tensor();
    };
    const auto vector = [&](const VectorRef& x) {
      return x.data ? tensor_of(x, g.n, device) : at::Tensor();
    };
    const int64_t products = g.batch * g.terms;
    const at::Tensor out = tensor_of(g.out, g.batch, g.m, g.n, device);
    const at::Tensor a = tensor_of(g.a, products, g.m, g.k, device);
    const at::Tensor b = tensor_of(g.b, products, g.k, g.n, device);
    const at::Tensor c = matrices(g.c, g.batch, g.m, g.n), aux = matrices(g.aux, g.batch, g.m, g.n);
    const at::Tensor bias = vector(g.bias);
    const at::Tensor column_sums = vector({g.column_sums, DType::f32, 1});
    if (out.numel() == 0) {
      if (column_sums.defined()) column_sums.zero_();
      return Status::ok;
    }
    const UntracedPython python;
    function("gemm.gemm", "gemm")(key(g, device), object_of(out), object_of(a), object_of(b),
                                  object_of(c), object_of(bias), object_of(aux),
                                  object_of(column_sums), g.terms, g.alpha, g.beta,
                                  activation_name(g.activation), g.derivative, g.variant);
    return Status::ok;
  }

 private:
  // All that a product's launches depend on: addresses count by their alignment.
  static py::bytes key(const GemmArgs& g, c10::Device device) {
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

  // Calls launch(address of the table, entries, chunks) with the GIL.
  template <class Ref, class Launch>
  static Status with_table(const ListOf<Ref>& list, Services& services, Launch launch) {
    const EntryOf<Ref>* table = nullptr;
    uint32_t chunks = 0;
    if (const Status status = send_table(list, services, &table, &chunks); status != Status::ok)
      return status;
    const UntracedPython python;
    launch(address(table), list.size, chunks);
    return Status::ok;
  }

  template <class Args>
  static Status update(const char* module, const char* name, const Args& args, Services& services) {
    const int64_t ticket = has_steps(args.list) ? address(services.tickets(1)) : 0;
    const StepScalars& s = args.scalars;
    return with_table(args.list, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      function(module, name)(table, size, chunks, as_tuple(args.options),
                             py::make_tuple(address(s.lr), address(s.found_inf),
                                            address(s.inv_scale), address(s.norm), s.max_norm),
                             ticket);
    });
  }
};

}  // namespace

const Backend& triton_backend() {
  static const TritonBackend backend;
  return backend;
}

}  // namespace amp_ext
