#include "optim/update.h"

namespace amp_ext::cpu {

Status CpuBackend::sgd(const SgdArgs& args, Services&) const {
  if (leaves_out(args.scalars)) return Status::ok;
  const SgdOptions& options = args.options;
  const StepFactors step = step_factors(args.scalars, options.lr, options.maximize);
  const UpdateKernels& kernels = update_kernels();
  for_each_chunk(args.list, host_, [&](const UpdateRef& u, const Chunk& chunk) {
    const uint32_t update = u.step ? update_number(*u.step) : 0;
    const uint32_t key = options.stochastic_rounding ? key_of(update, u, chunk) : 0;
    kernels.sgd(u, chunk.offset, chunk.numel, sgd_factors(options, step, /*is_first=*/update == 1),
                options.stochastic_rounding ? &key : nullptr);
  });
  advance_steps(args.list);
  return Status::ok;
}

}  // namespace amp_ext::cpu
