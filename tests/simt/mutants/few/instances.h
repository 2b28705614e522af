// Launchers of a few instances of a kernel, which compile quickly, in place of those of all.
#pragma once

#include <initializer_list>

#include "gemm/shared/instances.h"

namespace amp_ext {

struct Instance {
  int tile;
  Major a, b;
  GemmLauncher launch;
};

inline Status launch_one_of(std::initializer_list<Instance> instances, const GemmArgs& args,
                            const GemmPlan& plan, void* workspace, uint32_t* tickets,
                            cuda::Stream stream) {
  for (const Instance& one : instances)
    if (one.tile == plan.tile && one.a == plan.a_major && one.b == plan.b_major)
      return one.launch(args, plan, workspace, tickets, stream);
  return Status::not_built;
}

}  // namespace amp_ext
