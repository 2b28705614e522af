#include "amp_ext/scale.h"
#include "backend.h"

namespace amp_ext::cpu {

Status CpuBackend::update_scale(const UpdateScaleArgs& args, Services&) const {
  bool overflow = false;
  for (int64_t i = 0; i < args.found_inf_count; ++i) overflow |= *args.found_infs[i] != 0.0f;
  close_step(args.update, overflow);
  return Status::ok;
}

}  // namespace amp_ext::cpu
