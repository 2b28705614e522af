// update_scale_.
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cfloat>
#include <vector>

#include "lists/lists.h"
#include "lists/run.h"
#include "op.h"

namespace amp_ext {

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
  update.next_step = arguments.write_all("next_step", options.next_step, NextStep::kSize);
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
    const float* found = one_element<float>(op, "found_inf", found_inf, device);
    float* const next_step = args.update.next_step;
    if (!next_step || found != next_step + NextStep::kFoundInf)
      found = arguments.read<float>("found_inf", found_inf);
    pointers.push_back(found);
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

namespace {

void update_scale_op(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                     double growth_factor, double backoff_factor, int64_t growth_interval,
                     std::optional<double> min_scale, std::optional<double> max_scale,
                     int64_t hysteresis, const std::optional<at::Tensor>& hysteresis_tracker,
                     const std::optional<at::Tensor>& skipped_steps,
                     const std::optional<at::Tensor>& next_step) {
  update_scale_(scale, growth_tracker, found_infs,
                {growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis,
                 hysteresis_tracker, skipped_steps, next_step});
}

void update_scale_fake(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                       double, double, int64_t, std::optional<double>, std::optional<double>,
                       int64_t, const std::optional<at::Tensor>& hysteresis_tracker,
                       const std::optional<at::Tensor>& skipped_steps,
                       const std::optional<at::Tensor>& next_step) {
  check_devices("amp_ext::update_scale_", scale.device(), "growth_tracker", growth_tracker,
                "found_infs", found_infs, "hysteresis_tracker", hysteresis_tracker, "skipped_steps",
                skipped_steps, "next_step", next_step);
}

}  // namespace

Status TorchLists::update_scale(const UpdateScaleArgs& args, Services& services) const {
  const TorchCall call(services);
  const ScaleUpdate& u = args.update;
  std::vector<at::Tensor> found_infs;
  for (int64_t i = 0; i < args.found_inf_count; ++i)
    found_infs.push_back(call.scalar(args.found_infs[i]));
  const at::Tensor overflow = at::stack(found_infs).ne(0).any();

  at::Tensor scale = call.scalar(u.scale), tracker = call.scalar(u.growth_tracker);
  const at::Tensor before = scale.clone();
  const int64_t interval = std::min<int64_t>(u.growth_interval, INT32_MAX);
  tracker.clamp_max_(interval - 1);  // torch's scale grows at the interval, not beyond it
  at::_amp_update_scale_(scale, tracker, overflow.to(at::kFloat), u.growth_factor, u.backoff_factor,
                         interval);
  const at::Tensor floor = at::clamp(before, std::nullopt, u.min_scale);
  const at::Tensor ceiling = at::clamp(before, u.max_scale);
  scale.copy_(at::where(overflow, at::maximum(scale, floor), at::minimum(scale, ceiling)));
  if (u.hysteresis_tracker) {
    at::Tensor left = call.scalar(u.hysteresis_tracker);
    if (u.hysteresis > 1) {
      left.sub_(overflow.to(at::kInt));
      scale.copy_(at::where(overflow.logical_and(left > 0), before, scale));
    }
    left.masked_fill_(overflow.logical_not(), u.hysteresis);
  }
  if (u.skipped_steps) call.scalar(u.skipped_steps).add_(overflow.to(at::kLong));
  if (u.next_step) {
    const at::Tensor next = call.flat(u.next_step, DType::f32, NextStep::kSize);
    next[NextStep::kInvScale].copy_(scale.reciprocal());
    next[NextStep::kLastFoundInf].copy_(next[NextStep::kFoundInf]);
    next[NextStep::kFoundInf].zero_();
  }
  return Status::ok;
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  define(m, "lists",
         "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor[] found_infs, "
         "float growth_factor, float backoff_factor, int growth_interval, *, "
         "float? min_scale=None, float? max_scale=None, int hysteresis=1, "
         "Tensor(c!)? hysteresis_tracker=None, Tensor(d!)? skipped_steps=None, "
         "Tensor(e!)? next_step=None) -> ()",
         TORCH_FN(update_scale_op), TORCH_FN(update_scale_fake));
}

}  // namespace amp_ext
