// Declares the common parts of adam_ and sgd_.
#pragma once

#include <array>
#include <initializer_list>

#include "optim/optim.h"

namespace amp_ext {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = std::optional<at::TensorList>;

// The tensors of a call of an op. Each list has as many tensors as params, or is empty.
struct UpdateCall {
  const char* op;
  const RoleNames& names;
  std::array<at::TensorList, kRoles> lists;
  ScalarTensors scalars;

  // Throws unless each list has as many tensors as params. `optional` lists may be empty.
  void check_lengths(std::initializer_list<Role> optional) const;

  // Returns the device of the first tensor, or none.
  std::optional<at::Device> device() const;

  // Checks the devices and shapes of tensors without data.
  void check_fakes() const;

  // Appends the tensors of all parameters.
  void add_to(Updates& updates) const;

  // Bumps the versions of the tensors that a launch has written, for autograd.
  void mark_written() const;

  template <class Args, class Options>
  void run(void (*launch)(at::Device, const Args&), const Options& options) const {
    const std::optional<at::Device> place = device();
    if (!place) return;
    Updates updates(op, names, *place);
    add_to(updates);
    const StepScalars step_scalars = updates.add_scalars(scalars);
    updates.close();
    launch(*place, {updates.list(), options, step_scalars});
    mark_written();
  }
};

}  // namespace amp_ext
