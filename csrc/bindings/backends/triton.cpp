// The Triton kernels as a backend: an op calls the launcher with its name in a module of
// amp_ext.triton_kernels.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

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

// A function in a module of amp_ext.triton_kernels. Its first call imports the module; the first
// such import takes a second.
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
bool is_aligned(const void* data) { return address(data) % 16 == 0; }

int64_t bits(double x) { return std::bit_cast<int64_t>(x); }

class TritonBackend final : public Backend {
 public:
  const char* name() const override { return "triton"; }

  Status unscale(const UnscaleArgs& a, Services& services) const override {
    static Function launch("lists.unscale", "unscale_");
    return with_table(a.grads, services, a.norm, [&](auto... table) {
      launch(table..., address(a.inv_scale), address(a.found_inf), address(a.norm), a.max_norm);
    });
  }
  Status check_finite(const CheckFiniteArgs& a, Services& services) const override {
    static Function launch("lists.check_finite", "check_finite");
    return with_table(a.grads, services, false,
                      [&](auto... table) { launch(table..., address(a.found_inf)); });
  }
  Status grad_norm(const GradNormArgs& a, Services& services) const override {
    static Function launch("lists.grad_norm", "grad_norm");
    const int64_t partial_sums = address(services.scratch(partial_sum_count(a) * sizeof(double)));
    const int64_t ticket = address(services.tickets(1));
    return with_table(a.grads, services, true, [&](auto... table) {
      launch(table..., address(a.inv_scale), address(a.found_inf), address(a.norm),
             address(a.norms), partial_sums, ticket, a.norms != nullptr);
    });
  }
  Status cast(const CastArgs& a, Services& services) const override {
    static Function launch("lists.cast", "cast_");
    return with_table(a.casts, services, false, [&](auto... table) { launch(table...); });
  }
  Status update_scale(const UpdateScaleArgs& a, Services& services) const override {
    static Function launch("lists.update_scale", "update_scale_");
    // The only one itself, or else a list of addresses.
    const void* found_infs = a.found_infs[0];
    if (a.found_inf_count > 1)
      found_infs = services.table(a.found_infs, a.found_inf_count, sizeof(void*));
    const ScaleUpdate& u = a.update;
    constexpr int kPrograms = 1;
    const UntracedPython python;
    launch(kPrograms, address(found_infs), a.found_inf_count, address(u.scale),
           address(u.growth_tracker), address(u.hysteresis_tracker), address(u.skipped_steps),
           address(u.next_step), bits(u.growth_factor), bits(u.backoff_factor), u.growth_interval,
           u.hysteresis, u.min_scale, u.max_scale);
    return Status::ok;
  }

  Status adam(const AdamArgs& a, Services& services) const override {
    static Function launch("optim.adam", "adam_");
    const AdamOptions& o = a.options;
    return update(launch, a, services, bits(o.lr), bits(o.beta1), bits(o.beta2), bits(o.eps),
                  bits(o.weight_decay), int{o.decoupled}, int{o.maximize},
                  int{o.stochastic_rounding});
  }
  Status sgd(const SgdArgs& a, Services& services) const override {
    static Function launch("optim.sgd", "sgd_");
    const SgdOptions& o = a.options;
    return update(launch, a, services, bits(o.lr), bits(o.momentum), bits(o.dampening),
                  bits(o.weight_decay), int{o.nesterov}, int{o.maximize},
                  int{o.stochastic_rounding});
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

  // The numbers of the plans of triton_kernels/gemm/plan.py.
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override {
    return {0, 1, 2};
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
    py::dict& launched = launched_products();
    const bool is_new = !launched.contains(key);
    // The driver loads no module during a capture.
    if (is_new && is_capturing(device)) return torch_library().gemm(args, services);
    const py::object product = is_new ? planned(g, device) : py::object(launched[key]);
    const auto scratch_bytes = product.attr("scratch_bytes").cast<size_t>();
    const auto tickets = product.attr("tickets").cast<size_t>();
    product(scratch_bytes ? address(services.scratch(scratch_bytes)) : 0,
            tickets ? address(services.tickets(tickets)) : 0, address(g.out.data),
            address(g.a.data), address(g.b.data), address(g.c.data), address(g.bias.data),
            address(g.aux.data), address(g.column_sums), g.alpha, g.beta);
    if (is_new && device.is_cuda()) {
      constexpr size_t kMostKept = 4096;
      if (launched.size() == kMostKept) launched.clear();
      launched[key] = product;
    }
    return Status::ok;
  }

 private:
  // Products with a kernel that has been compiled for a GPU, by their keys.
  static py::dict& launched_products() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::dict> launched;
    return launched.call_once_and_store_result([] { return py::dict(); }).get_stored();
  }

  // Returns the launch of a product. Its first call compiles the kernel.
  static py::object planned(const GemmArgs& g, c10::Device device) {
    static Function gemm("gemm.gemm", "gemm");
    const auto matrix = [](const MatrixRef& x) {
      return py::make_tuple(static_cast<int>(x.dtype), x.batch_stride, x.row_stride,
                            x.column_stride, is_aligned(x.data));
    };
    const auto optional = [](const void* data, auto object) {
      return data ? py::object(std::move(object)) : py::object(py::none());
    };
    const py::tuple sizes = py::make_tuple(g.batch, g.terms, g.m, g.n, g.k);
    const py::tuple options =
        py::make_tuple(activation_name(g.activation), g.derivative, g.column_sums != nullptr);
    return gemm(static_cast<int>(device.index()), g.variant, sizes, options,
                optional(g.bias.data, py::int_(static_cast<int>(g.bias.dtype))), matrix(g.out),
                matrix(g.a), matrix(g.b), optional(g.c.data, matrix(g.c)),
                optional(g.aux.data, matrix(g.aux)));
  }

  // All that a product's launch depends on: addresses count by their alignment.
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
      numbers.push_back(data ? 1 + is_aligned(data) : 0);
      numbers.push_back(static_cast<int64_t>(dtype));
      numbers.insert(numbers.end(), strides);
    };
    for (const MatrixRef& x : {g.a, g.b, g.c, g.aux, g.out})
      add(x.data, x.dtype, {x.batch_stride, x.row_stride, x.column_stride});
    add(g.bias.data, g.bias.dtype, {});
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
  }

  // Calls launch(address of the table, entries, chunks) with the GIL. A list without chunks calls
  // it only if it is needed all the same.
  template <class Ref, class Launch>
  static Status with_table(const ListOf<Ref>& list, Services& services, bool is_needed,
                           Launch launch) {
    const EntryOf<Ref>* table = nullptr;
    uint32_t chunks = 0;
    if (const Status status = send_table(list, services, &table, &chunks); status != Status::ok)
      return status;
    if (chunks == 0 && !is_needed) return Status::ok;
    const UntracedPython python;
    launch(address(table), list.size, chunks);
    return Status::ok;
  }

  template <class Args, class... Options>
  static Status update(Function& launch, const Args& args, Services& services, Options... options) {
    const int64_t ticket = has_steps(args.list) ? address(services.tickets(1)) : 0;
    const StepScalars& s = args.scalars;
    return with_table(args.list, services, ticket || s.norm, [&](auto... table) {
      launch(table..., options..., address(s.lr), address(s.found_inf), address(s.inv_scale),
             address(s.norm), s.max_norm, ticket);
    });
  }
};

}  // namespace

const Backend& triton_backend() {
  static const TritonBackend backend;
  return backend;
}

}  // namespace amp_ext
