#include "optim/call.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "op.h"

namespace amp_ext {

void check_lengths(const char* op, const RoleNames& names, const RoleLists& lists,
                   std::initializer_list<Role> optional) {
  const size_t n = lists[kParam].size();
  for (int role = 0; role < kRoles; ++role) {
    const size_t size = lists[role].size();
    const bool may_be_empty = !names[role] || std::ranges::count(optional, Role(role));
    TORCH_CHECK(size == n || (size == 0 && may_be_empty), op, ": ", names[role],
                " must have as many tensors as params, ", n, ", got ", size);
  }
}

std::optional<at::Device> device_of(const RoleLists& lists, const ScalarTensors& scalars) {
  if (!lists[kParam].empty()) return lists[kParam][0].toTensor().device();
  for (const auto* scalar :
       {&scalars.tensor_lr, &scalars.found_inf, &scalars.inv_scale, &scalars.norm}) {
    if (*scalar) return (*scalar)->device();
  }
  return std::nullopt;
}

UpdateTensors tensors_of(const RoleLists& lists, size_t index) {
  UpdateTensors tensors;
  for (int role = 0; role < kRoles; ++role)
    tensors[role] = lists[role].empty() ? nullptr : &lists[role][index].toTensor();
  return tensors;
}

void mark_written(const RoleLists& lists, const ScalarTensors& scalars) {
  for (int role = 0; role < kRoles; ++role) {
    if (role == kGrad) continue;
    for (const c10::IValue& value : lists[role])
      mark_written(value.toTensor().unsafeGetTensorImpl());
  }
  if (scalars.found_inf) mark_written(scalars.found_inf->unsafeGetTensorImpl());
}

void check_fakes(const char* op, const RoleNames& names, const RoleLists& lists,
                 const ScalarTensors& scalars) {
  check_max_norm(op, scalars.max_norm, scalars.norm.has_value());
  const std::optional<at::Device> device = device_of(lists, scalars);
  if (!device) return;
  for (int role = 0; role < kRoles; ++role) {
    for (size_t i = 0; i < lists[role].size(); ++i) {
      const Item item{op, names[role], i};
      const at::Tensor& tensor = lists[role][i].toTensor();
      const at::Tensor& param = lists[kParam][i].toTensor();
      check_device(op, item, tensor, *device);
      TORCH_CHECK(role == kStep || tensor.sym_sizes() == param.sym_sizes(), op, ": ", item,
                  " must have the shape of params[", i, "], ", param.sym_sizes(), ", got ",
                  tensor.sym_sizes());
    }
  }
  check_devices(op, *device, "tensor_lr", scalars.tensor_lr, "found_inf", scalars.found_inf,
                "inv_scale", scalars.inv_scale, "norm", scalars.norm);
}

}  // namespace amp_ext
