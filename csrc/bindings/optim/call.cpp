#include "optim/call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

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
  for (const auto& [name, scalar] :
       {std::pair("tensor_lr", &scalars.tensor_lr), std::pair("found_inf", &scalars.found_inf),
        std::pair("inv_scale", &scalars.inv_scale), std::pair("norm", &scalars.norm)}) {
    if (*scalar) check_device(op, name, **scalar, *place);
  }
}

}  // namespace amp_ext
