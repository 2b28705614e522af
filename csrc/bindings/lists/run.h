// Calls an op on lists by the device's backend. The first call verifies the backend's kernels
// (backends/verified.h). If they fail, calls run the op's reference in amp_ext/ops.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/backends.h"
#include "backends/python.h"
#include "checks/tensors.h"

namespace amp_ext {

// A call of an op's reference on tensors in the memory of the op's arguments. While it exists,
// neither autograd nor an active autocast takes part.
class ReferenceCall {
 public:
  // Throws during a capture of a CUDA graph: the reference waits for the device.
  ReferenceCall(const char* op, at::Device device);

  void run();

  // Adds an argument: a tensor, several, a list, one element in the device's memory, or a number. A
  // null pointer stands for None.
  void add(const char* name, const at::Tensor& tensor);
  void add(const char* name, const std::vector<at::Tensor>& tensors);
  void add(const char* name, const TensorList& list);
  template <class T>
  void add(const char* name, const T* element) {
    if (element) add(name, scalar(element));
  }
  template <class T>
    requires std::is_arithmetic_v<T>
  void add(const char* name, T number) {
    arguments_[name] = number;
  }

  // The reference's result is copied here.
  void returns_into(float* result) { result_ = result; }

  // Return a tensor of shape (), and a tensor of shape [numel].
  template <class T>
  at::Tensor scalar(const T* element) const {
    return flat(element, c10::CppTypeToScalarType<T>::value, 1)[0];
  }
  at::Tensor flat(const void* data, at::ScalarType type, int64_t numel) const;
  at::Tensor flat(const void* data, DType dtype, int64_t numel) const {
    return flat(data, scalar_type_of(dtype), numel);
  }

 private:
  const char* op_;
  at::Device device_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  UntracedPython python_;
  pybind11::dict arguments_;
  float* result_ = nullptr;
};

// Adds an op's arguments by name, in each op's own file.
#define AMP_EXT_ADD_ARGUMENTS(op, Args) void add_arguments(ReferenceCall& call, const Args& args);
AMP_EXT_LIST_OPS(AMP_EXT_ADD_ARGUMENTS)
#undef AMP_EXT_ADD_ARGUMENTS

template <class Args>
void run(const char* op, c10::Device device,
         Status (ListBackend::*method)(const Args&, Services&) const, const Args& args) {
  const Backend& backend = choose(op, device);
  if (is_verified(backend, family_of(args), device))
    return run(op, backend, device,
               [&](Services& services) { return (backend.*method)(args, services); });
  ReferenceCall call(op, device);
  add_arguments(call, args);
  call.run();
}

}  // namespace amp_ext
