// update_scale_.
#include <algorithm>
#include <cfloat>
#include <vector>

#include "backends/backends.h"
#include "backends/triton.h"
#include "checks/tensors.h"
#include "op.h"

namespace amp_ext {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

void update_scale_op(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                     double growth_factor, double backoff_factor, int64_t growth_interval,
                     std::optional<double> min_scale, std::optional<double> max_scale,
                     int64_t hysteresis, const OptionalTensor& hysteresis_tracker,
                     const OptionalTensor& skipped_steps, const OptionalTensor& next_step) {
  constexpr auto op = "amp_ext::update_scale_";
  const at::Device device = scale.device();
  TORCH_CHECK(!found_infs.empty() && found_infs.size() <= kMaxFoundInfs, op,
              ": found_infs must hold from 1 to ", kMaxFoundInfs, " tensors, got ",
              found_infs.size());
  TORCH_CHECK(hysteresis >= 1 && hysteresis <= INT32_MAX, op,
              ": hysteresis must be from 1 to 2147483647, got ", hysteresis);
  TORCH_CHECK(!min_scale || (*min_scale >= 0 && *min_scale <= FLT_MAX), op,
              ": min_scale must be a finite float32 that is not negative, got ", *min_scale);
  TORCH_CHECK(!max_scale || *max_scale > 0, op, ": max_scale must be positive, got ", *max_scale);
  TORCH_CHECK(hysteresis == 1 || hysteresis_tracker, op,
              ": hysteresis_tracker must be given with hysteresis ", hysteresis, ", got None");
  Arguments arguments(op, device);
  UpdateScaleArgs args{};
  ScaleUpdate& update = args.update;
  update.scale = arguments.write<float>("current_scale", scale);
  update.growth_tracker = arguments.write<int32_t>("growth_tracker", growth_tracker);
  update.hysteresis_tracker = arguments.write<int32_t>("hysteresis_tracker", hysteresis_tracker);
  update.skipped_steps = arguments.write<int64_t>("skipped_steps", skipped_steps);
  update.next_step = arguments.write<float>("next_step", next_step, NextStep::kSize);
  update.growth_factor = growth_factor;
  update.backoff_factor = backoff_factor;
  update.growth_interval = growth_interval;
  update.hysteresis = static_cast<int32_t>(hysteresis);
  update.min_scale = static_cast<float>(min_scale.value_or(FLT_MIN));
  update.max_scale = static_cast<float>(std::min<double>(max_scale.value_or(FLT_MAX), FLT_MAX));
  std::vector<const float*> pointers;
  pointers.reserve(found_infs.size());
  for (const at::Tensor& found_inf : found_infs) {
    const void* const data = elements(op, "found_inf", found_inf, at::kFloat, device);
    const bool is_own = update.next_step && data == update.next_step + NextStep::kFoundInf;
    if (!is_own) arguments.read<float>("found_inf", found_inf);
    pointers.push_back(static_cast<const float*>(data));
  }
  arguments.check_apart();
  args.found_infs = pointers.data();
  args.found_inf_count = static_cast<int64_t>(pointers.size());
  run(op, device, &Backend::update_scale, args);
  arguments.mark_written();
}

}  // namespace

Status TritonBackend::update_scale(const UpdateScaleArgs& a, Services& services) const {
  // The address of the only flag, or else of a list of addresses.
  const void* found_infs = a.found_infs[0];
  if (a.found_inf_count > 1)
    found_infs = services.table(a.found_infs, a.found_inf_count, sizeof(void*));
  const ScaleUpdate& u = a.update;
  constexpr int kPrograms = 1;
  const UntracedPython python;
  triton_function("lists.update_scale", "update_scale_")(
      kPrograms, address(found_infs), a.found_inf_count, address(u.scale),
      address(u.growth_tracker), address(u.hysteresis_tracker), address(u.skipped_steps),
      address(u.next_step), bits(u.growth_factor), bits(u.backoff_factor), u.growth_interval,
      u.hysteresis, u.min_scale, u.max_scale);
  return Status::ok;
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "update_scale_", TORCH_FN(update_scale_op)); }

}  // namespace amp_ext
