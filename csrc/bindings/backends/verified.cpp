#include "backends/verified.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <map>
#include <tuple>

#include "backends/backends.h"
#include "backends/python.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

#define AMP_EXT_NAME(name, Args) #name,
constexpr const char* kFamilies[] = {AMP_EXT_FAMILIES(AMP_EXT_NAME)};
#undef AMP_EXT_NAME

// Answers are a thread's own, so that a call waits for no other.
using Question = std::tuple<const Backend*, Family, int>;  // of a device by its index
thread_local std::map<Question, bool> answers;

Question question(const Backend& backend, Family family, c10::Device device) {
  return {&backend, family, device.index()};
}

// Returns whether a backend needs no verification: it is under test, or its code is no GPU's (the
// CPU's own, or interpreted).
bool needs_none(const Backend& backend, c10::Device device) {
  return is_under_test() || &backend == &cpu_backend() ||
         (device.is_cpu() && &backend == &triton_backend());
}

}  // namespace

bool has_passed(const Backend& backend, Family family, c10::Device device) {
  if (needs_none(backend, device)) return true;
  const auto known = answers.find(question(backend, family, device));
  return known != answers.end() && known->second;
}

std::optional<bool> is_verified(const Backend& backend, Family family, c10::Device device) {
  if (needs_none(backend, device)) return true;
  const auto known = answers.find(question(backend, family, device));
  if (known != answers.end()) return known->second;
  const bool captures = is_capturing(device);
  const char* const name = kFamilies[static_cast<size_t>(family)];
  const UntracedPython python;
  const py::object found = py::module_::import("amp_ext.verify")
                               .attr("may_run")(backend.name(), name, device.str(), captures);
  if (!found.is_none()) return answers[question(backend, family, device)] = found.cast<bool>();
  TORCH_CHECK(!captures, "amp_ext: the ", backend.name(), " kernels of ", name,
              " have not been verified on ", device,
              ": run one step before the capture of a CUDA graph");
  return std::nullopt;  // the next call tries again
}

}  // namespace amp_ext
