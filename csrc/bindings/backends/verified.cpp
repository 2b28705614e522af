#include "backends/verified.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>

#include "backends/backends.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

constexpr const char* kFamilies[] = {
#define AMP_EXT_NAME(op, Args) #op,
    AMP_EXT_LIST_OPS(AMP_EXT_NAME)
#undef AMP_EXT_NAME
        "gemm_f16",
    "gemm_bf16",
};
constexpr size_t kFamilyCount = std::size(kFamilies);
constexpr size_t kMostDevices = 65;  // the CPU, and as many GPUs as torch can have

// The backends that have been asked about, of which there are few, and the answers. One backend
// does not take over another one's.
struct Answer {
  std::atomic<const Backend*> backend;
  std::atomic<bool> is_right;
};
using Answers = std::array<Answer, 8>;
std::array<std::array<Answers, kFamilyCount>, kMostDevices> answers{};

Answers& answers_of(Family family, c10::Device device) {
  const size_t index = device.is_cpu() ? 0 : 1 + device.index();
  TORCH_INTERNAL_ASSERT(index < kMostDevices);
  return answers[index][static_cast<size_t>(family)];
}

// null where there is none.
const Answer* find(const Answers& answers, const Backend& backend) {
  for (const Answer& each : answers)
    if (each.backend.load(std::memory_order_acquire) == &backend) return &each;
  return nullptr;
}

// Under the GIL.
void add(Answers& answers, const Backend& backend, bool is_right) {
  for (Answer& each : answers) {
    const Backend* const known = each.backend;
    if (known && known != &backend) continue;
    each.is_right = is_right;
    each.backend.store(&backend, std::memory_order_release);
    return;
  }
}

bool ask(Answers& answers, const Backend& backend, Family family, c10::Device device) {
  if (is_under_test()) return true;
  if (is_capturing(device)) return false;
  const py::gil_scoped_acquire gil;
  const py::object found =
      py::module_::import("amp_ext.verify")
          .attr("is_right")(backend.name(), kFamilies[static_cast<size_t>(family)], device.str());
  if (found.is_none()) return false;  // for lack of memory, say: the next call asks again
  const bool is_right = found.cast<bool>();
  add(answers, backend, is_right);
  return is_right;
}

// Whether the backend's code is not a GPU's: the CPU's own, torch's, or interpreted.
bool needs_none(const Backend& backend, c10::Device device) {
  return &backend == &cpu_backend() || &backend == &torch_library() ||
         (device.is_cpu() && &backend == &triton_backend());
}

}  // namespace

bool is_verified(const Backend& backend, Family family, c10::Device device) {
  if (needs_none(backend, device)) return true;
  Answers& answers = answers_of(family, device);
  const Answer* const known = find(answers, backend);
  if (known) return known->is_right || is_under_test();
  return ask(answers, backend, family, device);
}

bool is_known(const Backend& backend, Family family, c10::Device device) {
  return needs_none(backend, device) || find(answers_of(family, device), backend);
}

}  // namespace amp_ext
