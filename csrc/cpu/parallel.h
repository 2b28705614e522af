// Runs loops on several threads.
#pragma once

#include "amp_ext/host.h"

namespace amp_ext::cpu {

// Calls body(begin, end) as Host::parallel_for does. A count within the grain is one direct call:
// torch's preparations take longer than a small product or list. Loops inside the body may use
// threads.
template <class Body>
void parallel(const Host& host, int64_t count, int64_t grain, Body body) {
  if (count <= grain) return body(0, count);
  host.parallel_for(count, grain, &body, [](void* opaque, int64_t begin, int64_t end) {
    (*static_cast<Body*>(opaque))(begin, end);
  });
}

}  // namespace amp_ext::cpu
