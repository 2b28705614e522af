// The call of an op on lists: by the device's backend or, where its kernels have not been verified
// (backends/verified.h), by torch's own ops.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <vector>

#include "backends/backends.h"

namespace amp_ext {

// Each method is beside the binding of its op. It waits for no device, so that calls can be
// captured.
class TorchLists final : public Backend {
 public:
  const char* name() const override { return "torch"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&) const override { return "it has the ops on lists alone"; }
  Status gemm(const GemmArgs&, Services&) const override { return Status::not_built; }
};
inline const TorchLists torch_lists;

template <class Args>
void run(const char* op, c10::Device device,
         Status (Backend::*method)(const Args&, Services&) const, const Args& args) {
  const Backend& chosen = choose(op, device);
  const bool verified = is_verified(chosen, family_of(args), device);
  const Backend& backend = verified ? chosen : torch_lists;
  run(op, backend, device, [&](Services& services) { return (backend.*method)(args, services); });
}

// What a method of TorchLists is given, as tensors in the same memory. While it exists, neither
// autograd nor an active autocast takes part.
class TorchCall {
 public:
  explicit TorchCall(Services& services) : device_(device_of(services)) {}

  // Of shape ().
  template <class T>
  at::Tensor scalar(const T* data) const {
    return at::for_blob(const_cast<T*>(data), {})
        .options(at::TensorOptions(c10::CppTypeToScalarType<T>::value).device(device_))
        .target_device(device_)
        .make_tensor();
  }

  // Of shape [numel].
  at::Tensor flat(const void* data, DType dtype, int64_t numel) const {
    return tensor_of(VectorRef{const_cast<void*>(data), dtype, 1}, numel, device_);
  }

  std::vector<at::Tensor> tensors(const TensorList& list) const {
    std::vector<at::Tensor> tensors;
    for (int64_t i = 0; i < list.size; ++i)
      tensors.push_back(flat(list.refs[i].data, list.refs[i].dtype, list.refs[i].numel));
    return tensors;
  }

  // found_inf = 1 if an element is not finite.
  void check_finite(std::vector<at::Tensor> tensors, float* found_inf) const {
    std::erase_if(tensors, [](const at::Tensor& x) { return x.numel() == 0; });
    if (tensors.empty()) return;
    const at::Tensor largest = at::stack(at::_foreach_norm(tensors, INFINITY));
    scalar(found_inf).masked_fill_(at::isfinite(largest).all().logical_not(), 1);
  }

 private:
  c10::Device device_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

// In the type in which factors are applied.
inline at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

}  // namespace amp_ext
