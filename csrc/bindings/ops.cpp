#include "ops.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

#include "backends/backends.h"
#include "cast_args.h"

namespace amp_ext {
namespace {

const at::Tensor& tensor_of(const at::Tensor& tensor) { return tensor; }
const at::Tensor& tensor_of(const c10::IValue& value) { return value.toTensor(); }

template <class Item>
GradList checked(const char* op, Access access, c10::ArrayRef<Item> grads, at::Device device) {
  GradList list(op, access, device);
  const size_t n = grads.size();
  list.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) prefetch_tensor(tensor_of(grads[i + 2 * kAhead]).unsafeGetTensorImpl());
    if (i + kAhead < n) prefetch_links(tensor_of(grads[i + kAhead]).unsafeGetTensorImpl());
    list.add(tensor_of(grads[i]));
  }
  list.close();
  return list;
}

}  // namespace

void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm,
              Others others) {
  const at::Device device = grads.device();
  check_max_norm(grads.op(), max_norm, norm.has_value());
  Arguments arguments(grads.op(), device);
  UnscaleArgs args{};
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.norm = arguments.read<float>("norm", norm);
  if (others == Others::given) arguments.check_apart_from(grads);
  args.max_norm = static_cast<float>(max_norm.value_or(INFINITY));
  args.grads = grads.args();
  run(grads.op(), device, &Backend::unscale, args);
  grads.finish_writes();
  arguments.mark_written();
}

void check_finite(GradList& grads, const at::Tensor& found_inf, Others others) {
  const at::Device device = grads.device();
  Arguments arguments(grads.op(), device);
  CheckFiniteArgs args{};
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  if (others == Others::given) arguments.check_apart_from(grads);
  args.grads = grads.args();
  run(grads.op(), device, &Backend::check_finite, args);
  arguments.mark_written();
}

at::Tensor grad_norm(const GradList& grads, const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms, Others others) {
  const at::Device device = grads.device();
  Arguments arguments(grads.op(), device);
  GradNormArgs args{};
  args.grads = grads.args();
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  args.norms = arguments.write_all<float>("norms", norms, args.grads.size);
  if (others == Others::given) arguments.check_apart_from(grads);
  const at::Tensor norm = at::empty({}, found_inf.options());
  args.norm = norm.mutable_data_ptr<float>();
  run(grads.op(), device, &Backend::grad_norm, args);
  arguments.mark_written();
  return norm;
}

namespace {

// Checks all that an update of the scale needs but the found_infs.
ScaleUpdate checked_update(Arguments& arguments, const at::Tensor& scale,
                           const at::Tensor& growth_tracker, const ScaleOptions& options) {
  const char* const op = arguments.op();
  const int64_t hysteresis = options.hysteresis;
  const std::optional<double> min_scale = options.min_scale, max_scale = options.max_scale;
  TORCH_CHECK(hysteresis >= 1 && hysteresis <= INT32_MAX, op,
              ": hysteresis must be from 1 to 2147483647, got ", hysteresis);
  TORCH_CHECK(!min_scale || (*min_scale >= 0 && *min_scale <= FLT_MAX), op,
              ": min_scale must be a finite float32 that is not negative, got ", *min_scale);
  TORCH_CHECK(!max_scale || *max_scale > 0, op, ": max_scale must be positive, got ", *max_scale);
  TORCH_CHECK(hysteresis == 1 || options.hysteresis_tracker, op,
              ": hysteresis_tracker must be given with hysteresis ", hysteresis, ", got None");
  ScaleUpdate update{};
  update.scale = arguments.write<float>("current_scale", scale);
  update.growth_tracker = arguments.write<int32_t>("growth_tracker", growth_tracker);
  update.hysteresis_tracker =
      arguments.write<int32_t>("hysteresis_tracker", options.hysteresis_tracker);
  update.skipped_steps = arguments.write<int64_t>("skipped_steps", options.skipped_steps);
  update.growth_factor = options.growth_factor;
  update.backoff_factor = options.backoff_factor;
  update.growth_interval = options.growth_interval;
  update.hysteresis = static_cast<int32_t>(hysteresis);
  update.min_scale = static_cast<float>(min_scale.value_or(FLT_MIN));
  update.max_scale = static_cast<float>(std::min<double>(max_scale.value_or(FLT_MAX), FLT_MAX));
  return update;
}

}  // namespace

void update_scale_(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                   const ScaleOptions& options) {
  constexpr auto op = "amp_ext::update_scale_";
  const at::Device device = scale.device();
  TORCH_CHECK(!found_infs.empty(), op, ": found_infs must hold at least one tensor, got none");
  Arguments arguments(op, device);
  UpdateScaleArgs args{};
  args.update = checked_update(arguments, scale, growth_tracker, options);
  std::vector<const float*> pointers;
  pointers.reserve(found_infs.size());
  for (const at::Tensor& found_inf : found_infs) {
    pointers.push_back(arguments.read<float>("found_inf", found_inf));
  }
  if (found_infs.size() > kMaxFoundInfs) {  // more than fit the kernel's parameters
    std::vector<at::Tensor> flat;
    for (const at::Tensor& found_inf : found_infs) flat.push_back(found_inf.reshape(-1));
    const at::Tensor any = at::cat(flat).ne(0).any().to(at::kFloat);
    return update_scale_(scale, growth_tracker, any, options);
  }
  args.found_infs = pointers.data();
  args.found_inf_count = static_cast<int64_t>(pointers.size());
  run(op, device, &Backend::update_scale, args);
  arguments.mark_written();
}

void cast_(TensorPointers outputs, TensorPointers inputs) {
  const size_t n = outputs.size();
  check_cast_lengths(n, inputs.size());
  if (n == 0) return;
  const at::Device device = outputs[0]->device();
  CastPairs pairs(device);
  pairs.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    for (const TensorPointers list : {outputs, inputs}) {
      if (i + 2 * kAhead < n) prefetch_tensor(list[i + 2 * kAhead]->unsafeGetTensorImpl());
      if (i + kAhead < n) prefetch_links(list[i + kAhead]->unsafeGetTensorImpl());
    }
    pairs.add(*outputs[i], *inputs[i]);
  }
  pairs.close();
  run(kCast, device, &Backend::cast, CastArgs{pairs.args()});
  pairs.finish_writes();
}

namespace {

// unscale_ on the list as Python's call left it: to unbox it would cost two atomic operations a
// tensor.
void unscale_op(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  {
    const auto arguments = torch::jit::last(*stack, 5);
    const at::Tensor& found_inf = arguments[1].toTensor();
    GradList grads =
        checked("amp_ext::unscale_", Access::write, arguments[0].toListRef(), found_inf.device());
    unscale_(grads, found_inf, arguments[2].toTensor(), arguments[3].toOptional<at::Tensor>(),
             arguments[4].toOptional<double>(), Others::given);
  }
  torch::jit::drop(*stack, 5);
}

void check_finite_op(at::TensorList grads, at::Tensor& found_inf) {
  GradList list = checked("amp_ext::check_finite", Access::read, grads, found_inf.device());
  check_finite(list, found_inf, Others::given);
}

at::Tensor grad_norm_op(at::TensorList grads, at::Tensor& found_inf,
                        const std::optional<at::Tensor>& inv_scale,
                        const std::optional<at::Tensor>& norms) {
  const GradList list = checked("amp_ext::grad_norm", Access::read, grads, found_inf.device());
  return grad_norm(list, found_inf, inv_scale, norms, Others::given);
}

void update_scale_op(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                     double growth_factor, double backoff_factor, int64_t growth_interval,
                     std::optional<double> min_scale, std::optional<double> max_scale,
                     int64_t hysteresis, const std::optional<at::Tensor>& hysteresis_tracker,
                     const std::optional<at::Tensor>& skipped_steps) {
  update_scale_(scale, growth_tracker, found_infs,
                {growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis,
                 hysteresis_tracker, skipped_steps});
}

void cast_op(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto pointers = [](c10::ArrayRef<c10::IValue> list) {
    std::vector<const at::Tensor*> result;
    result.reserve(list.size());
    for (const c10::IValue& value : list) result.push_back(&value.toTensor());
    return result;
  };
  const auto arguments = torch::jit::last(*stack, 2);
  cast_(pointers(arguments[0].toListRef()), pointers(arguments[1].toListRef()));
  torch::jit::drop(*stack, 2);
}

}  // namespace

void register_ops(torch::Library& m) {
  m.impl("unscale_", torch::CppFunction::makeFromBoxedFunction<unscale_op>());
  m.impl("check_finite", TORCH_FN(check_finite_op));
  m.impl("grad_norm", TORCH_FN(grad_norm_op));
  m.impl("update_scale_", TORCH_FN(update_scale_op));
  m.impl("cast_", torch::CppFunction::makeFromBoxedFunction<cast_op>());
}

// Empty lists name no device: they come here.
TORCH_LIBRARY_IMPL(amp_ext, CompositeExplicitAutograd, m) {
  m.impl("cast_", torch::CppFunction::makeFromBoxedFunction<cast_op>());
}

}  // namespace amp_ext
