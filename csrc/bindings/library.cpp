// Every op's schema.
#include <torch/library.h>

TORCH_LIBRARY(amp_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale) -> ()", tags);
  m.def("check_finite(Tensor[] grads, Tensor(a!) found_inf, Tensor(b!)? bad_tensor=None) -> ()",
        tags);
  m.def("grad_norm(Tensor[] grads, Tensor(a!) found_inf, Tensor? inv_scale=None) -> Tensor", tags);
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor[] found_infs, float "
      "growth_factor, "
      "float backoff_factor, int growth_interval, *, float? min_scale=None, float? max_scale=None, "
      "int hysteresis=1, "
      "Tensor(c!)? hysteresis_tracker=None, Tensor(d!)? skipped_steps=None) -> ()",
      tags);
}
