// What has been measured of matrix products: for each product on a device which backend, and which
// of its ways (GemmBackend::gemm_variants), takes the least time. amp_ext/tune.py measures,
// reads and writes the table.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "amp_ext/backend.h"

namespace amp_ext {

// What the time of a product depends on: a CPU's threads; dtypes, layouts, epilogue; sizes.
using GemmKey = std::array<int64_t, 7>;
GemmKey key_of(c10::Device device, const GemmArgs& args);

struct Measured {
  const Backend* backend;  // null for torch's library
  int64_t variant;
  std::string reason;
};

// What is known of a product; null if nothing is. The first call for a device reads its file.
const Measured* find_measured(c10::Device device, const GemmArgs& args);

// Replaces what is known of the products of a device.
void set_measured(c10::Device device, const std::vector<std::pair<GemmKey, Measured>>& entries);

// ---- the products of a region ------------------------------------------------------------------

struct NotedProduct {
  c10::Device device;
  GemmArgs args;  // its pointers say what is there, and how it is aligned; none is followed
  int64_t calls;
};

// From start_noting to stop_noting, which returns them, distinct products are noted, of all
// threads. start_noting returns false if that is so already.
bool start_noting();
std::vector<NotedProduct> stop_noting();

// Notes a product if that is asked for.
void note(c10::Device device, const GemmArgs& args);

}  // namespace amp_ext
