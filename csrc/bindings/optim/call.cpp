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

}  // namespace amp_ext
