// Passes an update to Python: to the Triton kernels, and to the ops' references.
#include <algorithm>
#include <span>
#include <type_traits>
#include <vector>

#include "backends/triton.h"
#include "lists/run.h"
#include "optim/optim.h"

namespace amp_ext {
namespace {

// Returns the tensors of one role, by members of UpdateRef.
template <class Data, class Dtype>
std::vector<at::Tensor> tensors_of_role(const ReferenceCall& call, const UpdateList& list,
                                        Data data, Dtype dtype) {
  std::vector<at::Tensor> tensors;
  for (const UpdateRef& u : std::span(list.refs, list.size)) {
    const bool is_there = u.*data || u.numel == 0;
    tensors.push_back(is_there ? call.flat(u.*data, u.*dtype, u.numel) : at::Tensor());
  }
  return tensors;
}

template <class Args>
void add_common(ReferenceCall& call, const Args& args) {
  const UpdateList& list = args.list;
  const StepScalars& s = args.scalars;
  call.add("params", tensors_of_role(call, list, &UpdateRef::param, &UpdateRef::param_dtype));
  call.add("grads", tensors_of_role(call, list, &UpdateRef::grad, &UpdateRef::grad_dtype));
  const auto has_copy = [](const UpdateRef& u) { return u.copy != nullptr; };
  if (std::ranges::any_of(std::span(list.refs, list.size), has_copy))
    call.add("copies", tensors_of_role(call, list, &UpdateRef::copy, &UpdateRef::copy_dtype));
  if (has_steps(list) || std::is_same_v<Args, AdamArgs>) {
    std::vector<at::Tensor> steps;
    for (const UpdateRef& u : std::span(list.refs, list.size)) steps.push_back(call.scalar(u.step));
    call.add("steps", steps);
  }
  call.add("lr", args.options.lr);
  call.add("weight_decay", args.options.weight_decay);
  call.add("maximize", args.options.maximize);
  call.add("stochastic_rounding", args.options.stochastic_rounding);
  call.add("tensor_lr", s.lr);
  call.add("found_inf", s.found_inf);
  call.add("inv_scale", s.inv_scale);
  call.add("norm", s.norm);
  call.add("max_norm", s.max_norm);
}

}  // namespace

void add_arguments(ReferenceCall& call, const AdamArgs& args) {
  const UpdateList& list = args.list;
  add_common(call, args);
  call.add("exp_avgs", tensors_of_role(call, list, &UpdateRef::exp_avg, &UpdateRef::exp_avg_dtype));
  const auto squares = &UpdateRef::exp_avg_sq_dtype;
  call.add("exp_avg_sqs", tensors_of_role(call, list, &UpdateRef::exp_avg_sq, squares));
  const auto has_max = [](const UpdateRef& u) { return u.max_exp_avg_sq != nullptr; };
  if (std::ranges::any_of(std::span(list.refs, list.size), has_max))
    call.add("max_exp_avg_sqs", tensors_of_role(call, list, &UpdateRef::max_exp_avg_sq, squares));
  call.add("beta1", args.options.beta1);
  call.add("beta2", args.options.beta2);
  call.add("eps", args.options.eps);
  call.add("decoupled", args.options.decoupled);
}

void add_arguments(ReferenceCall& call, const SgdArgs& args) {
  add_common(call, args);
  const auto momentum = &UpdateRef::exp_avg;
  if (args.options.momentum != 0)
    call.add("momentum_buffers",
             tensors_of_role(call, args.list, momentum, &UpdateRef::exp_avg_dtype));
  call.add("momentum", args.options.momentum);
  call.add("dampening", args.options.dampening);
  call.add("nesterov", args.options.nesterov);
}

namespace {

template <class Args, class... Options>
Status launch(const char* module, const char* function, const Args& args, Services& services,
              Options... options) {
  const int64_t ticket = has_steps(args.list) ? address(services.tickets(1)) : 0;
  const StepScalars& s = args.scalars;
  return launch_list(module, function, args.list, services, ticket || s.norm, options...,
                     address(s.lr), address(s.found_inf), address(s.inv_scale), address(s.norm),
                     s.max_norm, ticket);
}

}  // namespace

Status TritonBackend::adam(const AdamArgs& args, Services& services) const {
  const AdamOptions& o = args.options;
  return launch("optim.adam", "adam_", args, services, bits(o.lr), bits(o.beta1), bits(o.beta2),
                bits(o.eps), bits(o.weight_decay), int{o.decoupled}, int{o.maximize},
                int{o.stochastic_rounding});
}

Status TritonBackend::sgd(const SgdArgs& args, Services& services) const {
  const SgdOptions& o = args.options;
  return launch("optim.sgd", "sgd_", args, services, bits(o.lr), bits(o.momentum),
                bits(o.dampening), bits(o.weight_decay), int{o.nesterov}, int{o.maximize},
                int{o.stochastic_rounding});
}

}  // namespace amp_ext
