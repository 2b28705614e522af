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

// Answers are a thread's own, so that a call waits for no other.
thread_local std::map<std::tuple<const Backend*, Family, int>, bool> answers;  // by device index

}  // namespace

std::optional<bool> is_verified(const Backend& backend, Family family, c10::Device device,
                                bool known_only) {
  if (device.is_cpu() || is_under_test(backend)) return true;
  const std::tuple question{&backend, family, int{device.index()}};
  if (const auto known = answers.find(question); known != answers.end()) return known->second;
  if (known_only) return std::nullopt;
  const bool captures = is_capturing(device);
  const UntracedPython python;
  const py::object found = py::module_::import("amp_ext.verify")
                               .attr("may_run")(backend.name(), family, device.str(), captures);
  if (!found.is_none()) return answers[question] = found.cast<bool>();
  TORCH_CHECK(!captures, "amp_ext: the ", backend.name(), " kernels of ", family,
              " have not been verified on ", device,
              ": run one step before the capture of a CUDA graph");
  return std::nullopt;  // the next call tries again
}

}  // namespace amp_ext
