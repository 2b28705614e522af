// The table of measured products: the fastest backend and its variant (GemmBackend::gemm_variants)
// of each product on a device. amp_ext/tune.py measures, reads and writes the table.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "amp_ext/backend.h"

namespace amp_ext {

// The facts that a product's time depends on: a CPU's threads; dtypes, layouts, epilogue; sizes.
using GemmKey = std::array<int64_t, 7>;
GemmKey key_of(c10::Device device, const GemmArgs& args);

// The backend, its variant, and the reason for the choice.
using Measured = std::tuple<std::string, int64_t, std::string>;

// Returns the measurement of a product, or none. The first call for a device reads its file.
std::optional<Measured> find_measured(c10::Device device, const GemmArgs& args);

// Replaces the measurements of a device. Backends that are not here are never chosen.
void set_measured(const std::string& device_name, std::map<GemmKey, Measured> table);

}  // namespace amp_ext
