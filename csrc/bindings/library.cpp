// Every op's schema.
#include <torch/library.h>

#include <string>

TORCH_LIBRARY(amp_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale, *, Tensor? norm=None, "
      "float? max_norm=None) -> ()",
      tags);
  m.def("check_finite(Tensor[] grads, Tensor(a!) found_inf) -> ()", tags);
  m.def(
      "grad_norm(Tensor[] grads, Tensor(a!) found_inf, Tensor? inv_scale=None, *, "
      "Tensor(b!)? norms=None) -> Tensor",
      tags);
  m.def("cast_(Tensor(a!)[] outputs, Tensor[] inputs) -> ()", tags);
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor[] found_infs, float "
      "growth_factor, "
      "float backoff_factor, int growth_interval, *, float? min_scale=None, float? max_scale=None, "
      "int hysteresis=1, "
      "Tensor(c!)? hysteresis_tracker=None, Tensor(d!)? skipped_steps=None) -> ()",
      tags);
  const std::string gemm_arguments =
      "(Tensor a, Tensor b, *, bool trans_a=False, bool trans_b=False, bool sum_batch=False, "
      "Tensor? c=None, float alpha=1.0, float beta=1.0, Tensor? bias=None, "
      "str activation=\"none\", ScalarType? out_dtype=None)";
  m.def(("gemm" + gemm_arguments + " -> Tensor").c_str(), tags);
  m.def(("gemm_with_aux" + gemm_arguments + " -> (Tensor, Tensor)").c_str(), tags);
  m.def(
      "gemm_times_derivative(Tensor a, Tensor b, Tensor aux, *, bool trans_a=False, "
      "bool trans_b=False, str activation=\"none\", ScalarType? out_dtype=None) "
      "-> (Tensor, Tensor)",
      tags);
  m.def(
      "gemm_accumulate_(Tensor(a!) c, Tensor a, Tensor b, *, bool trans_a=False, "
      "bool trans_b=False, bool sum_batch=False, float alpha=1.0) -> ()",
      tags);
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, *, str activation=\"none\", "
      "bool accumulate_grad=False) -> Tensor",
      tags);
  m.def(
      "mlp(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, *, "
      "str activation=\"gelu\", bool accumulate_grad=False) -> Tensor",
      tags);
  m.def("_override_autocast() -> ()", tags);
}

// torch would negate or conjugate an argument around a call that writes it, in place, and can do so
// neither with a list nor for an op that returns nothing: the ops see such views, and judge them.
void see_views(torch::Library& m) {
  for (const char* op :
       {"unscale_", "check_finite", "grad_norm", "update_scale_", "cast_", "gemm_accumulate_"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(amp_ext, Negative, m) { see_views(m); }
TORCH_LIBRARY_IMPL(amp_ext, Conjugate, m) { see_views(m); }
