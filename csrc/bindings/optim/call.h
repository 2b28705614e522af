// What the bindings of the optimizers' ops have in common: lists of the dispatcher's values, which
// are not unboxed, since that would cost two atomic operations per tensor.
#pragma once

#include <ATen/core/ivalue.h>

#include <array>

#include "optim/optim.h"

namespace amp_ext {

using Values = c10::ArrayRef<c10::IValue>;
using RoleLists = std::array<Values, kRoles>;

inline Values list_of(const c10::IValue& value) {
  return value.isNone() ? Values() : value.toListRef();
}

// Throws unless each list has as many tensors as params. Those that are `optional` may be empty.
void check_lengths(const char* op, const RoleNames& names, const RoleLists& lists,
                   std::initializer_list<Role> optional);

// That of the first tensor; none where there is none.
std::optional<at::Device> device_of(const RoleLists& lists, const ScalarTensors& scalars);

// The tensors of one parameter.
UpdateTensors tensors_of(const RoleLists& lists, size_t index);

// To be called after the launch: bumps the versions of what is written so that autograd knows.
void mark_written(const RoleLists& lists, const ScalarTensors& scalars);

// For tensors without data: all on the device, of the shapes that they must have.
void check_fakes(const char* op, const RoleNames& names, const RoleLists& lists,
                 const ScalarTensors& scalars);

}  // namespace amp_ext
