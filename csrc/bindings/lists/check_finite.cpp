// check_finite.
#include "backends/backends.h"
#include "backends/triton.h"
#include "checks/tensors.h"
#include "op.h"

namespace amp_ext {
namespace {

void check_finite_op(at::TensorList grads, at::Tensor& found_inf) {
  constexpr auto op = "amp_ext::check_finite";
  GradList list(op, Access::read, grads, found_inf.device());
  Arguments arguments(op, found_inf.device());
  float* const flag = arguments.write<float>("found_inf", found_inf);
  arguments.check_apart(&list);
  run(op, list.device(), &Backend::check_finite, CheckFiniteArgs{list.args(), flag});
  arguments.mark_written();
}

}  // namespace

Status TritonBackend::check_finite(const CheckFiniteArgs& a, Services& services) const {
  return launch_list("lists.check_finite", "check_finite", a.grads, services, false,
                     address(a.found_inf));
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "check_finite", TORCH_FN(check_finite_op)); }

}  // namespace amp_ext
