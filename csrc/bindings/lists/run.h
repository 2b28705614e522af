// Calls an op on lists by the device's backend.
#pragma once

#include "backends/backends.h"

namespace amp_ext {

template <class Args>
void run(const char* op, c10::Device device,
         Status (ListBackend::*method)(const Args&, Services&) const, const Args& args) {
  const Backend& backend = choose_verified(op, family_of(args), device);
  run(op, backend, device, [&](Services& services) { return (backend.*method)(args, services); });
}

}  // namespace amp_ext
