// check_finite.
#include "backends/backends.h"
#include "backends/triton.h"
#include "lists/lists.h"
#include "op.h"

namespace amp_ext {

void check_finite(GradList& grads, const at::Tensor& found_inf) {
  const at::Device device = grads.device();
  Arguments arguments(grads.op(), device);
  CheckFiniteArgs args{};
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  arguments.check_apart(&grads);
  args.grads = grads.args();
  run(grads.op(), device, &Backend::check_finite, args);
  arguments.mark_written();
}

namespace {

void check_finite_op(at::TensorList grads, at::Tensor& found_inf) {
  GradList list = checked("amp_ext::check_finite", Access::read, grads, found_inf.device());
  check_finite(list, found_inf);
}

}  // namespace

Status TritonBackend::check_finite(const CheckFiniteArgs& a, Services& services) const {
  return launch_list("lists.check_finite", "check_finite", a.grads, services, false,
                     address(a.found_inf));
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "check_finite", TORCH_FN(check_finite_op)); }

}  // namespace amp_ext
