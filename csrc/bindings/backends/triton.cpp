// The Triton kernels as a backend: an op calls the function with its name in a module of
// amp_ext.triton_kernels; a product that is like an earlier one, what that call has returned.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "backends/backends.h"
#include "backends/python.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// A function in a module of amp_ext.triton_kernels, which is imported with the first call: if it is
// the first of them, that takes a second.
class Function {
 public:
  constexpr Function(const char* module, const char* name) : module_name_(module), name_(name) {}

  template <class... Args>
  py::object operator()(Args&&... args) {
    const auto import = [&] {
      return py::module_::import((std::string("amp_ext.triton_kernels.") + module_name_).c_str());
    };
    const py::module_& module = module_.call_once_and_store_result(import).get_stored();
    return module.attr(name_)(std::forward<Args>(args)...);
  }

 private:
  const char* module_name_;
  const char* name_;
  py::gil_safe_call_once_and_store<py::module_> module_;
};

int64_t address(const void* data) { return std::bit_cast<int64_t>(data); }

py::tuple as_tuple(const ScaleUpdate& u) {
  return py::make_tuple(address(u.scale), address(u.growth_tracker), address(u.hysteresis_tracker),
                        address(u.skipped_steps), address(u.next_step), u.growth_factor,
                        u.backoff_factor, u.growth_interval, u.hysteresis, u.min_scale,
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
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

class TritonBackend final : public Backend {
 public:
  const char* name() const override { return "triton"; }

  Status unscale(const UnscaleArgs& a, Services& services) const override {
    static Function launch("lists.unscale", "unscale_");
    return with_table(a.grads, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      launch(table, size, chunks, address(a.inv_scale), address(a.found_inf), address(a.norm),
             a.max_norm);
    });
  }
  Status check_finite(const CheckFiniteArgs& a, Services& services) const override {
    static Function launch("lists.check_finite", "check_finite");
    return with_table(a.grads, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      launch(table, size, chunks, address(a.found_inf));
    });
  }
  Status grad_norm(const GradNormArgs& a, Services& services) const override {
    static Function launch("lists.grad_norm", "grad_norm");
    const int64_t partial_sums = address(services.scratch(partial_sum_count(a) * sizeof(double)));
    const int64_t ticket = address(services.tickets(1));
    return with_table(a.grads, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      launch(table, size, chunks, address(a.inv_scale), address(a.found_inf), address(a.norm),
             address(a.norms), partial_sums, ticket);
    });
  }
  Status cast(const CastArgs& a, Services& services) const override {
    static Function launch("lists.cast", "cast_");
    return with_table(a.casts, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      launch(table, size, chunks);
    });
  }
  Status update_scale(const UpdateScaleArgs& a, Services& services) const override {
    static Function launch("lists.update_scale", "update_scale_");
    // The only one itself, or else a list of addresses.
    const void* found_infs = a.found_infs[0];
    if (a.found_inf_count > 1)
      found_infs = services.table(a.found_infs, a.found_inf_count, sizeof(void*));
    const UntracedPython python;
    launch(address(found_infs), a.found_inf_count, as_tuple(a.update));
    return Status::ok;
  }

  Status adam(const AdamArgs& a, Services& services) const override {
    static Function launch("optim.adam", "adam_");
    return update(launch, a, services);
  }
  Status sgd(const SgdArgs& a, Services& services) const override {
    static Function launch("optim.sgd", "sgd_");
    return update(launch, a, services);
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

  Status gemm(const GemmArgs& args, Services& services) const override {
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
    if (is_capturing(device)) return torch_library().gemm(args, services);
    const py::object launches = launch_first(g, device);
    constexpr size_t kMostKnown = 4096;
    if (known.size() == kMostKnown) known.clear();
    if (device.is_cuda()) known[key] = launches;
    return Status::ok;
  }

 private:
  // Launches of products on GPUs by their keys: they take addresses, with no tensors around them.
  static py::dict& known_launches() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::dict> known;
    return known.call_once_and_store_result([] { return py::dict(); }).get_stored();
  }

  // Computes a product by kernels that may have to be compiled, and returns its launches.
  static py::object launch_first(const GemmArgs& g, c10::Device device) {
    static Function gemm("gemm.gemm", "gemm");
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
  static py::bytes key_of(const GemmArgs& g, c10::Device device) {
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
  static Status update(Function& launch, const Args& args, Services& services) {
    const int64_t ticket = has_steps(args.list) ? address(services.tickets(1)) : 0;
    const StepScalars& s = args.scalars;
    return with_table(args.list, services, [&](int64_t table, int64_t size, uint32_t chunks) {
      launch(table, size, chunks, as_tuple(args.options),
             py::make_tuple(address(s.lr), address(s.found_inf), address(s.inv_scale),
                            address(s.norm), s.max_norm),
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
