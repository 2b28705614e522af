// Launches updates by the Triton kernels.
#include "backends/triton.h"

#include "optim/optim.h"

namespace amp_ext {
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
