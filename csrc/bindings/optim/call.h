// Declares the common parts of adam_ and sgd_. Lists of the dispatcher's values are not unboxed:
// that would cost two atomic operations per tensor.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <array>

#include "optim/optim.h"

namespace amp_ext {

using Values = c10::ArrayRef<c10::IValue>;
using RoleLists = std::array<Values, kRoles>;

inline Values list_of(const c10::IValue& value) {
  return value.isNone() ? Values() : value.toListRef();
}

// Throws unless each list has as many tensors as params. `optional` lists may be empty.
void check_lengths(const char* op, const RoleNames& names, const RoleLists& lists,
                   std::initializer_list<Role> optional);

// Returns the device of the first tensor, or none.
std::optional<at::Device> device_of(const RoleLists& lists, const ScalarTensors& scalars);

// Returns the tensors of one parameter.
UpdateTensors tensors_of(const RoleLists& lists, size_t index);

// Bumps the versions of the tensors that a launch has written, for autograd.
void mark_written(const RoleLists& lists, const ScalarTensors& scalars);

// Checks the devices and shapes of tensors without data.
void check_fakes(const char* op, const RoleNames& names, const RoleLists& lists,
                 const ScalarTensors& scalars);

// The boxed kernel of an op. A Call has the op's name, the names of its lists, the number of its
// arguments, and its lists, options and scalars.
template <class Call>
void update_op(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  {
    const Call call(torch::jit::last(*stack, Call::kArguments));
    if (const std::optional<at::Device> device = device_of(call.lists, call.scalars)) {
      Updates updates(Call::kOp, Call::kNames, *device);
      const size_t n = call.lists[kParam].size();
      updates.reserve(n);
      for (size_t i = 0; i < n; ++i) updates.add(tensors_of(call.lists, i));
      const StepScalars scalars = updates.add_scalars(call.scalars);
      updates.close();
      Call::launch(*device, {updates.list(), call.options, scalars});
      mark_written(call.lists, call.scalars);
    }
  }
  torch::jit::drop(*stack, Call::kArguments);
}

template <class Call>
void update_fake(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  {
    const Call call(torch::jit::last(*stack, Call::kArguments));
    check_fakes(Call::kOp, Call::kNames, call.lists, call.scalars);
  }
  torch::jit::drop(*stack, Call::kArguments);
}

}  // namespace amp_ext
