#include "optim/update.h"

namespace amp_ext::cpu {

Status CpuBackend::adam(const AdamArgs& args, Services&) const {
  if (leaves_out(args.scalars)) return Status::ok;
  const AdamOptions& options = args.options;
  const StepFactors step = step_factors(args.scalars, options.lr, options.maximize);
  const UpdateKernels& kernels = update_kernels();
  // Factors are computed once for the first step count, nearly always shared by all parameters. A
  // small parameter takes less time than its factors.
  const uint32_t first = has_steps(args.list) ? update_number(*args.list.refs[0].step) : 1;
  const AdamFactors of_first = adam_factors(options, step, first);
  for_each_chunk(args.list, host_, [&](const UpdateRef& u, const Chunk& chunk) {
    const uint32_t update = update_number(*u.step);
    const uint32_t key = options.stochastic_rounding ? key_of(update, u, chunk) : 0;
    kernels.adam(u, chunk.offset, chunk.numel,
                 update == first ? of_first : adam_factors(options, step, update),
                 options.stochastic_rounding ? &key : nullptr);
  });
  advance_steps(args.list);
  return Status::ok;
}

}  // namespace amp_ext::cpu
