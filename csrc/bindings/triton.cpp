// The Triton backend: each launch is a call of the function in amp_ext.triton_kernels that bears
// the op's name.
#include "triton.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "staging.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// By what serves them: tensors on the CPU, and on CUDA devices.
std::array<std::atomic<bool>, 2> chosen{};

py::object attribute(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

// A function of amp_ext.triton_kernels, which is imported with the first call: that takes a second.
py::object function(const char* name) { return attribute("amp_ext.triton_kernels", name); }

int64_t address(const void* data) { return std::bit_cast<int64_t>(data); }

bool capturing(c10::Device device) {
  if (!device.is_cuda()) return false;
  const py::gil_scoped_acquire gil;
  return attribute("torch.cuda", "is_current_stream_capturing")().cast<bool>();
}

// So many bytes of host memory as `write(void*)` leaves them, on the device. The caching allocators
// keep both ends until the copy and the launch are done.
template <class Write>
at::Tensor sent(size_t bytes, c10::Device device, Write write) {
  const auto options = at::TensorOptions(at::kByte).pinned_memory(device.is_cuda());
  at::Tensor staged = at::empty({static_cast<int64_t>(bytes)}, options);
  write(staged.mutable_data_ptr());
  at::Tensor result = staged.to(device, /*non_blocking=*/true);
  if (capturing(device)) keep_for_graph(std::move(staged));
  return result;
}

// A list's chunk table in device memory, and behind it a ticket that is 0: in one copy.
struct Table {
  at::Tensor memory;
  int64_t size = 0;
  uint32_t chunks = 0;

  template <class Ref>
  Table(const ListOf<Ref>& list, c10::Device device) : size(list.size) {
    using Entry = EntryOf<Ref>;
    const size_t bytes = list.size * sizeof(Entry);
    memory = sent(bytes + sizeof(int64_t), device, [&](void* data) {
      const Status status =
          build_chunk_table(list.refs, list.size, static_cast<Entry*>(data), &chunks);
      TORCH_CHECK(status == Status::ok, "amp_ext: ", text(status));
      std::memset(static_cast<char*>(data) + bytes, 0, sizeof(int64_t));
    });
  }

  int64_t at() const { return address(memory.const_data_ptr()); }
  int64_t ticket() const { return at() + memory.numel() - int64_t{sizeof(int64_t)}; }
};

py::tuple as_tuple(const ScaleUpdate& u) {
  return py::make_tuple(address(u.scale), address(u.growth_tracker), address(u.hysteresis_tracker),
                        address(u.skipped_steps), u.growth_factor, u.backoff_factor,
                        u.growth_interval, u.hysteresis, u.min_scale, u.max_scale);
}

class TritonBackend final : public Backend {
 public:
  void unscale(UnscaleArgs a, c10::Device device) const override {
    const c10::DeviceGuard guard(device);
    const Table grads(a.grads, device);
    const py::gil_scoped_acquire gil;
    function("unscale_")(grads.at(), grads.size, grads.chunks, address(a.inv_scale),
                         address(a.found_inf), address(a.norm), a.max_norm);
  }
  void check_finite(CheckFiniteArgs a, c10::Device device) const override {
    const c10::DeviceGuard guard(device);
    const Table grads(a.grads, device);
    const py::gil_scoped_acquire gil;
    function("check_finite")(grads.at(), grads.size, grads.chunks, address(a.found_inf));
  }
  void grad_norm(GradNormArgs a, c10::Device device) const override {
    const c10::DeviceGuard guard(device);
    const Table grads(a.grads, device);
    const int64_t sums = kGradNormMaxBlocks + (a.norms ? grads.size : 0);
    const at::Tensor partial_sums = at::empty({sums}, bytes_on(device).dtype(at::kDouble));
    const py::gil_scoped_acquire gil;
    function("grad_norm")(grads.at(), grads.size, grads.chunks, address(a.inv_scale),
                          address(a.found_inf), address(a.norm), address(a.norms),
                          address(partial_sums.const_data_ptr()), grads.ticket());
  }
  void cast(CastArgs a, c10::Device device) const override {
    const c10::DeviceGuard guard(device);
    const Table casts(a.casts, device);
    const py::gil_scoped_acquire gil;
    function("cast_")(casts.at(), casts.size, casts.chunks);
  }
  void update_scale(UpdateScaleArgs a, c10::Device device) const override {
    const c10::DeviceGuard guard(device);
    // The only one itself, or else a list of addresses.
    int64_t found_infs = address(a.found_infs[0]);
    at::Tensor list;
    if (a.found_inf_count > 1) {
      const size_t bytes = a.found_inf_count * sizeof(void*);
      list = sent(bytes, device, [&](void* data) { std::memcpy(data, a.found_infs, bytes); });
      found_infs = address(list.const_data_ptr());
    }
    const py::gil_scoped_acquire gil;
    function("update_scale_")(found_infs, a.found_inf_count, as_tuple(a.update));
  }
  void gemm(const char* op, const GemmArgs&, c10::Device) const override {
    TORCH_INTERNAL_ASSERT(false, op, ": Triton's products are formed by triton_gemm");
  }
  bool is_capturing(c10::Device device) const override {
    const c10::DeviceGuard guard(device);
    return capturing(device);
  }
};

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

py::object object_of(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::object object_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? object_of(*tensor) : py::none();
}

// What a product writes, and what else it reads.
struct Outputs {
  at::Tensor out;
  std::optional<at::Tensor> aux = std::nullopt;
  bool derivative = false;
  std::optional<at::Tensor> column_sums = std::nullopt;
  Reports reports = {};
};

void run(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o, const Outputs& to) {
  const c10::DeviceGuard guard(a.device());
  const auto c = o.beta == 0 ? std::nullopt : o.c;
  const py::gil_scoped_acquire gil;
  function("gemm")(object_of(to.out), object_of(a), object_of(b),
                   c ? object_of(c->expand(to.out.sizes())) : py::none(), object_of(o.bias),
                   object_of(to.aux), object_of(to.column_sums), object_of(to.reports.found_inf),
                   object_of(to.reports.square_sum), o.trans_a, o.trans_b, o.sum_batch, o.alpha,
                   o.beta, py::str(o.activation.data(), o.activation.size()), to.derivative);
}

at::Tensor new_out(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o,
                   at::IntArrayRef sizes) {
  return at::empty(sizes, a.options().requires_grad(false).dtype(out_dtype_of(a, b, o.out_dtype)));
}

}  // namespace

void use_triton(c10::DeviceType type, bool on) {
  TORCH_CHECK(type == at::kCPU || type == at::kCUDA, "amp_ext: Triton serves CUDA devices, not ",
              type);
  chosen[type == at::kCUDA] = on;
}

bool uses_triton(c10::Device device) {
  return (device.is_cpu() || device.is_cuda()) && chosen[device.is_cuda()];
}

const Backend& triton_backend() {
  static const TritonBackend backend;
  return backend;
}

bool triton_serves(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  return uses_triton(a.device()) && uses_gemm_kernels && is_16_bit(a.scalar_type()) &&
         a.scalar_type() == b.scalar_type() && out_dtype_of(a, b, o.out_dtype) != at::kDouble;
}

at::Tensor triton_gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o,
                       at::IntArrayRef sizes) {
  const at::Tensor out = new_out(a, b, o, sizes);
  run(a, b, o, {out});
  return out;
}

TensorPair triton_gemm_with_aux(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o,
                                at::IntArrayRef sizes) {
  const at::Tensor out = new_out(a, b, o, sizes), aux = at::empty(sizes, out.options());
  run(a, b, o, {out, aux});
  return {out, aux};
}

TensorPair triton_gemm_times_derivative(const at::Tensor& a, const at::Tensor& b,
                                        const at::Tensor& aux, const GemmOptions& o,
                                        at::IntArrayRef sizes) {
  const at::Tensor out = new_out(a, b, o, sizes);
  const at::Tensor sums = at::empty({sizes.back()}, out.options().dtype(at::kFloat));
  run(a, b, o, {out, aux, /*derivative=*/true, sums});
  return {out, sums};
}

void triton_gemm_accumulate_(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                             const GemmOptions& options, const Reports& reports) {
  GemmOptions o = options;
  o.c = c;
  run(a, b, o, {.out = c, .reports = reports});
}

}  // namespace amp_ext
