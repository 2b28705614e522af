// Overrides torch's autocast kernels of matrix products. The overrides run on gemm, or do exactly
// the same as torch's kernels.
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "autocast/regions.h"
#include "autocast/weight_copies.h"
#include "checks/dtensor.h"
#include "checks/python.h"
#include "gemm/gemm.h"

namespace amp_ext {
namespace {

using at::autocast::CastPolicy;
using OptionalTensor = std::optional<at::Tensor>;

// The kind of a tensor to gemm. gemm multiplies the shards of DTensors (amp_ext/ops/_sharding.py).
// Tensors of torch.compile's traces count as plain.
enum class Kind { plain, dtensor, foreign };

// Returns whether torch.export traces a program. The program has to run without amp_ext.
bool is_exporting() {
  return pybind11::module_::import("torch.compiler").attr("_is_exporting_flag").cast<bool>();
}

Kind kind_of(const at::Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_python_dispatch()) return Kind::plain;
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object object = object_of(tensor);
  if (is_dtensor(object.ptr())) return Kind::dtensor;
  const std::string_view name = Py_TYPE(object.ptr())->tp_name;
  const bool is_traced = name == "FakeTensor" || name == "FunctionalTensor";
  return is_traced && !is_exporting() ? Kind::plain : Kind::foreign;
}

// Returns whether torch.jit.trace records the program.
bool is_recorded() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer); }

// Returns whether gemm accepts a tensor of a kind: on the region's device, of a type that autocast
// casts.
bool is_accepted(const OptionalTensor& optional, c10::DeviceType device, Kind kind) {
  constexpr c10::DispatchKeySet functorch({c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper,
                                           c10::DispatchKey::BatchedNestedTensor});
  if (!optional) return true;
  const at::Tensor& tensor = *optional;
  const at::ScalarType type = tensor.scalar_type();
  return (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) &&
         tensor.device().type() == device && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.key_set().has_any(functorch) &&
         !torch::autograd::isFwGradDefined(tensor) && kind_of(tensor) == kind;
}

// Returns whether gemm accepts all tensors: all plain, or all DTensors. A program that
// torch.jit.trace records is torch's alone.
template <class... Tensors>
bool is_routed(c10::DeviceType device, const at::Tensor& first, const Tensors&... others) {
  if (!in_our_region() || is_recorded()) return false;
  const Kind kind = kind_of(first);
  return kind != Kind::foreign && is_accepted(first, device, kind) &&
         (is_accepted(others, device, kind) && ...);
}

// Returns view(result) as a tensor of its own to autograd. It may be changed in place as torch's
// results may, and a selective checkpoint that has saved `result` notices.
template <class View>
at::Tensor own(const at::Tensor& result, const View& view) {
  const c10::impl::ExcludeDispatchKeyGuard no_views(c10::DispatchKey::ADInplaceOrView);
  const at::Tensor own = view(result);
  torch::autograd::impl::set_version_counter(own, torch::autograd::impl::version_counter(result));
  return own;
}

at::Tensor squeezed(const at::Tensor& result, int64_t dim) {
  return own(result, [&](const at::Tensor& tensor) { return tensor.squeeze(dim); });
}

bool is_channels_last(const at::Tensor& tensor) {
  return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

bool all_are(c10::SymIntArrayRef values, int64_t value) {
  return (values.size() == 1 || values.size() == 2) &&
         std::all_of(values.begin(), values.end(), [&](const auto& v) { return v == value; });
}

struct NoAutocast : c10::impl::ExcludeDispatchKeyGuard {
  NoAutocast() : ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset) {}
};

// The overridden ops of one device type. A call that gemm would not accept, bad arguments included,
// goes to torch.
template <c10::DeviceType kDevice>
struct Routes {
  template <class Op, class Signature = decltype(Op::call)>
  struct Torchs;
  template <class Op, class... Args>
  struct Torchs<Op, at::Tensor(Args...)> {
    static at::Tensor call(Args... args) {
      return at::autocast::WrapFunction<CastPolicy::lower_precision_fp, kDevice,
                                        at::Tensor(Args...), at::Tensor(Args...),
                                        &Op::call>::type::call(std::forward<Args>(args)...);
    }
  };

  static at::Tensor low(const at::Tensor& tensor) {
    return lowered(tensor, at::autocast::get_autocast_dtype(kDevice));
  }

  static at::Tensor low_gemm(const at::Tensor& a, const at::Tensor& b,
                             const GemmOptions& options = {}) {
    return gemm(low(a), low(b), options);
  }

  static at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                           const OptionalTensor& bias) {
    const bool fits = is_routed(kDevice, x, weight, bias) && weight.dim() == 2 && x.dim() >= 1 &&
                      x.sym_size(-1) == weight.sym_size(1) &&
                      (!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)));
    if (!fits) return Torchs<at::_ops::linear>::call(x, weight, bias);
    const NoAutocast guard;
    GemmOptions options{.trans_b = true};
    if (bias) options.bias = low(*bias);
    if (x.dim() > 1) return low_gemm(x, weight, options);
    return squeezed(low_gemm(x.unsqueeze(0), weight, options), -2);
  }

  // Returns whether gemm computes the product of an op on matrices of kDims dimensions, or of any
  // number for 0, and accepts the other tensors.
  template <int64_t kDims, class... Tensors>
  static bool is_product(const at::Tensor& a, const at::Tensor& b, const Tensors&... others) {
    const bool has_dims = kDims ? a.dim() == kDims && b.dim() == kDims
                                : a.dim() >= 1 && b.dim() >= 1 && a.dim() + b.dim() > 2;
    return has_dims && is_routed(kDevice, a, b, others...) &&
           a.sym_size(-1) == b.sym_size(b.dim() == 1 ? 0 : -2) &&
           (kDims == 3 ? a.sym_size(0) == b.sym_size(0) : batches_expand(a, b));
  }

  // Overrides mm, bmm and matmul.
  template <class Op, int64_t kDims>
  static at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) {
    return is_product<kDims>(a, b) ? product(a, b) : Torchs<Op>::call(a, b);
  }

  static at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
    const NoAutocast guard;
    if (a.dim() == 1) return squeezed(batched(a.unsqueeze(0), b), -2);
    if (b.dim() == 1) return squeezed(batched(a, b.unsqueeze(1)), -1);
    return batched(a, b);
  }

  // Overrides addmm and baddbmm.
  template <class Op, int64_t kDims>
  static at::Tensor multiply_add(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                                 const at::Scalar& beta, const at::Scalar& alpha) {
    if (!is_product<kDims>(a, b, c) || beta.isComplex() || alpha.isComplex() ||
        !expands(c, a, b.sym_size(-1)))
      return Torchs<Op>::call(c, a, b, beta, alpha);
    const NoAutocast guard;
    return low_gemm(a, b, {.c = low(c), .alpha = alpha.toDouble(), .beta = beta.toDouble()});
  }

  // Returns whether c expands to the shape of a product with `a`.
  static bool expands(const at::Tensor& c, const at::Tensor& a, const c10::SymInt& columns) {
    c10::SymDimVector sizes(a.sym_sizes());
    sizes.back() = columns;
    return at::is_expandable_to(c.sym_sizes(), sizes);
  }

  static bool batches_expand(const at::Tensor& a, const at::Tensor& b) {
    for (int64_t d = 3; d <= std::min(a.dim(), b.dim()); ++d) {
      const auto &left = a.sym_size(-d), &right = b.sym_size(-d);
      if (left != right && left != 1 && right != 1) return false;
    }
    return true;
  }

  // Computes gemm with matmul's broadcasting of leading dimensions.
  static at::Tensor batched(const at::Tensor& a, const at::Tensor& b) {
    const auto a_sizes = a.sym_sizes(), b_sizes = b.sym_sizes();
    if (a.dim() == 2 || b.dim() == 2 ||
        a_sizes.slice(0, a.dim() - 2).equals(b_sizes.slice(0, b.dim() - 2))) {
      return low_gemm(a, b);
    }
    const auto batch =
        at::infer_size_symdimvector(a_sizes.slice(0, a.dim() - 2), b_sizes.slice(0, b.dim() - 2));
    const auto expanded = [&](const at::Tensor& tensor) {
      c10::SymDimVector sizes(batch);
      sizes.append({tensor.sym_size(-2), tensor.sym_size(-1)});
      return lowered_view(tensor, at::autocast::get_autocast_dtype(kDevice),
                          [&](const at::Tensor& each) { return each.expand_symint(sizes); });
    };
    return gemm(expanded(a), expanded(b), {});
  }

  // Computes a convolution with 1 x 1 filters. Result and gradients have torch's memory formats.
  // Gradients reach the arguments through views. The nodes of the views run in the order of torch's
  // hooks: the last node made runs first.
  static at::Tensor pointwise(const at::Tensor& x, const at::Tensor& weight,
                              const OptionalTensor& bias) {
    const NoAutocast guard;
    const bool unbatched = x.dim() == 3;
    const bool weight_is_last = is_channels_last(weight);
    const bool last = weight_is_last ||
                      (unbatched ? is_channels_last(x.detach().unsqueeze(0)) : is_channels_last(x));
    const auto type = at::autocast::get_autocast_dtype(kDevice);
    GemmOptions options;
    if (bias) {
      at::Tensor addends = lowered_view(*bias, type, [&](const at::Tensor& tensor) {
        return last ? tensor.view_symint(tensor.sym_sizes()) : tensor.unsqueeze(1);
      });
      (last ? options.bias : options.c) = std::move(addends);
    }
    const at::Tensor matrix = lowered_view(weight, type, [&](const at::Tensor& tensor) {
      return (weight_is_last ? tensor.movedim(1, -1) : tensor)
          .view_symint({weight.sym_size(0), weight.sym_size(1)});
    });
    const at::Tensor images = unbatched ? x.unsqueeze(0) : x;
    at::Tensor result;
    if (last) {
      options.trans_b = true;
      result = own(low_gemm(images.movedim(1, -1).contiguous(), matrix, options),
                   [](const at::Tensor& tensor) { return tensor.movedim(-1, 1); });
    } else {
      c10::SymDimVector sizes(images.sym_sizes());
      const at::Tensor pixels = images.reshape_symint({sizes[0], sizes[1], sizes[2] * sizes[3]});
      sizes[1] = weight.sym_size(0);
      result = own(low_gemm(matrix, pixels, options),
                   [&](const at::Tensor& tensor) { return tensor.view_symint(sizes); });
    }
    return unbatched ? result.squeeze(0) : result;
  }

  static bool adds_nothing(c10::SymIntArrayRef padding) { return all_are(padding, 0); }
  static bool adds_nothing(std::string_view padding) {
    return padding == "valid" || padding == "same";  // of a filter of one pixel
  }

  // Overrides conv2d and conv2d.padding.
  template <class Op, class Padding>
  static at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight,
                           const OptionalTensor& bias, c10::SymIntArrayRef stride, Padding padding,
                           c10::SymIntArrayRef dilation, c10::SymInt groups) {
    const bool fits =
        is_routed(kDevice, x, weight, bias) && kind_of(x) == Kind::plain &&
        (x.dim() == 4 || x.dim() == 3) && weight.dim() == 4 && weight.sym_size(2) == 1 &&
        weight.sym_size(3) == 1 && x.sym_size(-3) == weight.sym_size(1) && groups == 1 &&
        all_are(stride, 1) && adds_nothing(padding) &&
        (dilation.size() == 1 || dilation.size() == 2) &&
        std::all_of(dilation.begin(), dilation.end(), [](const auto& d) { return d > 0; }) &&
        (!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)));
    if (fits) return pointwise(x, weight, bias);
    return Torchs<Op>::call(x, weight, bias, stride, padding, dilation, groups);
  }

  static std::unique_ptr<torch::Library> override_torchs(c10::DispatchKey key) {
    auto library =
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("linear", &linear);
    library->impl("mm", &multiply<at::_ops::mm, 2>);
    library->impl("bmm", &multiply<at::_ops::bmm, 3>);
    library->impl("matmul", &multiply<at::_ops::matmul, 0>);
    library->impl("addmm", &multiply_add<at::_ops::addmm, 2>);
    library->impl("baddbmm", &multiply_add<at::_ops::baddbmm, 3>);
    library->impl("conv2d", &conv2d<at::_ops::conv2d, c10::SymIntArrayRef>);
    library->impl("conv2d.padding", &conv2d<at::_ops::conv2d_padding, std::string_view>);
    return library;
  }
};

std::mutex overrides_mutex;
std::vector<std::unique_ptr<torch::Library>>& overrides() {
  // Never destroyed: the dispatcher may be destroyed first.
  static auto* const libraries = new std::vector<std::unique_ptr<torch::Library>>;
  return *libraries;
}

}  // namespace

void override_torchs() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const std::lock_guard<std::mutex> lock(overrides_mutex);
  if (!overrides().empty()) return;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  overrides().push_back(
      Routes<c10::DeviceType::CPU>::override_torchs(c10::DispatchKey::AutocastCPU));
  overrides().push_back(
      Routes<c10::DeviceType::CUDA>::override_torchs(c10::DispatchKey::AutocastCUDA));
}

void restore_torchs() {
  const std::lock_guard<std::mutex> lock(overrides_mutex);
  overrides().clear();
}

// Serves regions inside a program that torch.compile traces.
TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("_override_autocast() -> ()", tags);
  m.impl("_override_autocast",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(override_torchs)));
}

}  // namespace amp_ext
