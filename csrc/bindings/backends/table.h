// The table of measured products: the fastest backend and its variant (GemmBackend::gemm_variants)
// of each product on a device. amp_ext/tune.py measures, reads and writes the table.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "amp_ext/backend.h"

namespace amp_ext {

// The facts that a product's time depends on: a CPU's threads; dtypes, layouts, epilogue; sizes.
using GemmKey = std::array<int64_t, 7>;
GemmKey key_of(c10::Device device, const GemmArgs& args);

struct Measured {
  const Backend* backend;  // null for torch's library
  int64_t variant;
  std::string reason;
};

// Returns the measurement of a product, or none. The first call for a device reads its file.
std::optional<Measured> find_measured(c10::Device device, const GemmArgs& args);

// A measurement: key, backend, variant, reason.
using Entry = std::tuple<GemmKey, std::string, int64_t, std::string>;

// Replaces the measurements of a device. A later entry replaces an earlier one of its key. Entries
// of backends that are not here are left out.
void set_measured(const std::string& device_name, const std::vector<Entry>& entries);

}  // namespace amp_ext
