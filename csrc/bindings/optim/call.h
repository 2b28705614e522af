// Declares the common parts of adam_ and sgd_.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <initializer_list>

#include "backends/backends.h"
#include "optim/optim.h"

namespace amp_ext {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = std::optional<at::TensorList>;

// The tensors of a call of Op. Each list has as many tensors as params, or is empty.
template <class Op>
struct UpdateCall {
  std::array<at::TensorList, kRoles> lists;
  ScalarTensors scalars;

  // Throws unless each list has as many tensors as params. `optional` lists may be empty.
  void check_lengths(std::initializer_list<Role> optional) const {
    const size_t n = lists[kParam].size();
    for (int role = 0; role < kRoles; ++role) {
      const size_t size = lists[role].size();
      const bool may_be_empty = !Op::kNames[role] || std::ranges::count(optional, Role(role));
      TORCH_CHECK(size == n || (size == 0 && may_be_empty), Op::kOp, ": ", Op::kNames[role],
                  " must have as many tensors as params, ", n, ", got ", size);
    }
  }

  void run(const typename Op::Options& options) const {
    std::optional<at::Device> device;
    const auto& [lr, found_inf, inv_scale, norm, _] = scalars;
    for (const OptionalTensor& scalar : {lr, found_inf, inv_scale, norm})
      if (scalar) device = scalar->device();
    if (!lists[kParam].empty()) device = lists[kParam][0].device();
    if (!device) return;
    Updates updates(Op::kOp, Op::kNames, *device);
    updates.reserve(lists[kParam].size());
    for (size_t i = 0; i < lists[kParam].size(); ++i) {
      UpdateTensors tensors;
      for (int role = 0; role < kRoles; ++role)
        tensors[role] = lists[role].empty() ? nullptr : &lists[role][i];
      updates.add(tensors, i);
    }
    const StepScalars step_scalars = updates.add_scalars(scalars);
    check_overlap(Op::kOp, updates.uses());
    amp_ext::run(Op::kOp, *device, Op::kLaunch,
                 typename Op::Args{updates.list(), options, step_scalars});
    for (int role = 0; role < kRoles; ++role) {
      for (const at::Tensor& tensor : role == kGrad ? at::TensorList() : lists[role])
        mark_written(tensor.unsafeGetTensorImpl());
    }
    if (scalars.found_inf) mark_written(scalars.found_inf->unsafeGetTensorImpl());
  }
};

}  // namespace amp_ext
