#include "optim/call.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "op.h"

namespace amp_ext {

void UpdateCall::check_lengths(std::initializer_list<Role> optional) const {
  const size_t n = lists[kParam].size();
  for (int role = 0; role < kRoles; ++role) {
    const size_t size = lists[role].size();
    const bool may_be_empty = !names[role] || std::ranges::count(optional, Role(role));
    TORCH_CHECK(size == n || (size == 0 && may_be_empty), op, ": ", names[role],
                " must have as many tensors as params, ", n, ", got ", size);
  }
}

std::optional<at::Device> UpdateCall::device() const {
  if (!lists[kParam].empty()) return lists[kParam][0].device();
  for (const OptionalTensor* const scalar :
       {&scalars.tensor_lr, &scalars.found_inf, &scalars.inv_scale, &scalars.norm}) {
    if (*scalar) return (*scalar)->device();
  }
  return std::nullopt;
}

void UpdateCall::check_fakes() const {
  check_max_norm(op, scalars.max_norm, scalars.norm.has_value());
  const std::optional<at::Device> place = device();
  if (!place) return;
  for (int role = 0; role < kRoles; ++role) {
    for (size_t i = 0; i < lists[role].size(); ++i) {
      const Item item{op, names[role], i};
      const at::Tensor &tensor = lists[role][i], &param = lists[kParam][i];
      check_device(op, item, tensor, *place);
      TORCH_CHECK(role == kStep || tensor.sym_sizes() == param.sym_sizes(), op, ": ", item,
                  " must have the shape of params[", i, "], ", param.sym_sizes(), ", got ",
                  tensor.sym_sizes());
    }
  }
  check_devices(op, *place, "tensor_lr", scalars.tensor_lr, "found_inf", scalars.found_inf,
                "inv_scale", scalars.inv_scale, "norm", scalars.norm);
}

void UpdateCall::add_to(Updates& updates) const {
  const size_t n = lists[kParam].size();
  updates.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    UpdateTensors tensors;
    for (int role = 0; role < kRoles; ++role)
      tensors[role] = lists[role].empty() ? nullptr : &lists[role][i];
    updates.add(tensors);
  }
}

void UpdateCall::mark_written() const {
  for (int role = 0; role < kRoles; ++role) {
    if (role == kGrad) continue;
    for (const at::Tensor& tensor : lists[role])
      amp_ext::mark_written(tensor.unsafeGetTensorImpl());
  }
  if (scalars.found_inf) amp_ext::mark_written(scalars.found_inf->unsafeGetTensorImpl());
}

}  // namespace amp_ext
