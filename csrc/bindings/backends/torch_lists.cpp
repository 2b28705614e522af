// The ops on lists by torch's own ops, where the kernels have not been verified (verified.h).
// Nothing waits for the device, so that calls can be captured.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <vector>

#include "backends/backends.h"

namespace amp_ext {
namespace {

// What is in one place, of shape ().
template <class T>
at::Tensor scalar_at(const T* data, c10::Device device) {
  return at::for_blob(const_cast<T*>(data), {})
      .options(at::TensorOptions(c10::CppTypeToScalarType<T>::value).device(device))
      .target_device(device)
      .make_tensor();
}

std::vector<at::Tensor> tensors_of(const TensorList& list, c10::Device device) {
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < list.size; ++i) {
    const TensorRef& t = list.refs[i];
    if (t.numel > 0) tensors.push_back(tensor_of(VectorRef{t.data, t.dtype, 1}, t.numel, device));
  }
  return tensors;
}

// In the type in which factors are applied.
at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

at::Tensor are_finite(const std::vector<at::Tensor>& tensors, c10::Device device) {
  if (tensors.empty()) return at::ones({}, at::TensorOptions(at::kBool).device(device));
  return at::isfinite(at::stack(at::_foreach_norm(tensors, INFINITY))).all();
}

void set_unless(const at::Tensor& finite, float* found_inf, c10::Device device) {
  scalar_at(found_inf, device).masked_fill_(finite.logical_not(), 1);
}

// Neither autograd nor an active autocast takes part.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

class TorchLists final : public Backend {
 public:
  const char* name() const override { return "torch"; }

  Status unscale(const UnscaleArgs& a, Services& services) const override {
    const BelowAutograd guard;
    const c10::Device device = device_of(services);
    std::vector<at::Tensor> grads = tensors_of(a.grads, device);
    const at::Tensor inv_scale = scalar_at(a.inv_scale, device);
    if (!a.norm) {
      at::Tensor found_inf = scalar_at(a.found_inf, device);
      if (!grads.empty())
        at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale);
      set_unless(are_finite(grads, device), a.found_inf, device);
      return Status::ok;
    }
    const at::Tensor norm = scalar_at(a.norm, device), finite = at::isfinite(norm);
    const at::Tensor coefficient =
        at::clamp((norm + 1e-6).reciprocal() * a.max_norm, std::nullopt, 1);
    const at::Tensor one = at::ones({}, norm.options());
    const at::Tensor factors[] = {at::where(finite, inv_scale, one),
                                  at::where(finite, coefficient, one)};
    for (at::Tensor& grad : grads) grad.copy_(widened(grad) * factors[0] * factors[1]);
    set_unless(finite.logical_and(are_finite(grads, device)), a.found_inf, device);
    return Status::ok;
  }

  Status check_finite(const CheckFiniteArgs& a, Services& services) const override {
    const BelowAutograd guard;
    const c10::Device device = device_of(services);
    set_unless(are_finite(tensors_of(a.grads, device), device), a.found_inf, device);
    return Status::ok;
  }

  Status grad_norm(const GradNormArgs& a, Services& services) const override {
    const BelowAutograd guard;
    const c10::Device device = device_of(services);
    at::Tensor finite = are_finite({}, device);
    at::Tensor norms = at::zeros({a.grads.size}, at::TensorOptions(at::kDouble).device(device));
    for (int64_t i = 0; i < a.grads.size; ++i) {
      const std::vector<at::Tensor> grads = tensors_of({a.grads.refs + i, 1}, device);
      if (grads.empty()) continue;
      at::Tensor products = widened(grads[0]);
      if (a.inv_scale) products = products * scalar_at(a.inv_scale, device);
      finite.logical_and_(are_finite({products}, device));
      norms[i].copy_(at::linalg_vector_norm(products, 2, std::nullopt, false, at::kDouble));
    }
    set_unless(finite, a.found_inf, device);
    scalar_at(a.norm, device).copy_(at::linalg_vector_norm(norms));
    if (a.norms) tensor_of(VectorRef{a.norms, DType::f32, 1}, a.grads.size, device).copy_(norms);
    return Status::ok;
  }

  Status cast(const CastArgs& a, Services& services) const override {
    const BelowAutograd guard;
    const c10::Device device = device_of(services);
    for (int64_t i = 0; i < a.casts.size; ++i) {
      const CastRef& c = a.casts.refs[i];
      const auto as_tensor = [&](const void* data, DType dtype) {
        return tensor_of(VectorRef{const_cast<void*>(data), dtype, 1}, c.numel, device);
      };
      const at::Tensor input = as_tensor(c.input, c.input_dtype);
      const bool to_16_bits = size_of(c.output_dtype) == 2;
      as_tensor(c.output, c.output_dtype)
          .copy_(c.input_dtype == DType::f64 && to_16_bits ? input.to(at::kFloat) : input);
    }
    return Status::ok;
  }

  // As move_scale of scale.h.
  Status update_scale(const UpdateScaleArgs& a, Services& services) const override {
    const BelowAutograd guard;
    const c10::Device device = device_of(services);
    const ScaleUpdate& u = a.update;
    std::vector<at::Tensor> found_infs;
    for (int64_t i = 0; i < a.found_inf_count; ++i)
      found_infs.push_back(scalar_at(a.found_infs[i], device));
    const at::Tensor overflow = at::stack(found_infs).ne(0).any();

    at::Tensor scale = scalar_at(u.scale, device), tracker = scalar_at(u.growth_tracker, device);
    const auto times = [&](double factor) {
      return (scale.to(at::kDouble) * factor).to(at::kFloat);
    };
    const at::Tensor steps = tracker.to(at::kLong) + 1, grows = steps >= u.growth_interval;
    const at::Tensor larger = times(u.growth_factor);
    const at::Tensor grown = at::where(grows.logical_and(at::isfinite(larger)),
                                       at::minimum(larger, at::clamp(scale, u.max_scale)), scale);
    at::Tensor backed_off =
        at::maximum(times(u.backoff_factor), at::clamp(scale, std::nullopt, u.min_scale));
    if (u.hysteresis_tracker) {
      at::Tensor left = scalar_at(u.hysteresis_tracker, device);
      if (u.hysteresis > 1) {
        left.sub_(overflow.to(at::kInt));
        backed_off = at::where(left > 0, scale, backed_off);
      }
      left.masked_fill_(overflow.logical_not(), u.hysteresis);
    }
    if (u.skipped_steps) scalar_at(u.skipped_steps, device).add_(overflow.to(at::kLong));
    tracker.copy_(steps.to(at::kInt).masked_fill(overflow.logical_or(grows), 0));
    scale.copy_(at::where(overflow, backed_off, grown));
    return Status::ok;
  }

  const char* why_not(const GemmArgs&) const override { return "it has the ops on lists alone"; }
  Status gemm(const GemmArgs&, Services&) const override { return Status::not_built; }
};

}  // namespace

const Backend& torch_lists() {
  static const TorchLists backend;
  return backend;
}

}  // namespace amp_ext
