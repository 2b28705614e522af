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

// The backends for which the answer was yes and no the last time. One backend does not take over
// another one's answer: whichever is chosen, it has to be the one that is named here.
struct Answer {
  std::atomic<const Backend*> yes, no;
};
std::array<std::array<Answer, kFamilyCount>, kMostDevices> answers{};

Answer& answer_of(Family family, c10::Device device) {
  const size_t index = device.is_cpu() ? 0 : 1 + device.index();
  TORCH_INTERNAL_ASSERT(index < kMostDevices);
  return answers[index][static_cast<size_t>(family)];
}

bool ask(Answer& answer, const Backend& backend, Family family, c10::Device device) {
  if (is_under_test()) return true;
  const bool on_cpu = &backend == &cpu_backend() || &backend == &triton_backend();
  if (device.is_cpu() && on_cpu) {
    answer.yes = &backend;
    return true;
  }
  if (is_capturing(device)) return false;
  const py::gil_scoped_acquire gil;
  const py::object found =
      py::module_::import("amp_ext.verify")
          .attr("is_right")(backend.name(), kFamilies[static_cast<size_t>(family)], device.str());
  if (found.is_none()) return false;  // for lack of memory, say: the next call asks again
  const bool is_right = found.cast<bool>();
  (is_right ? answer.yes : answer.no) = &backend;
  return is_right;
}

}  // namespace

bool is_verified(const Backend& backend, Family family, c10::Device device) {
  Answer& answer = answer_of(family, device);
  if (answer.yes.load(std::memory_order_relaxed) == &backend) return true;
  if (answer.no.load(std::memory_order_relaxed) == &backend) return is_under_test();
  return ask(answer, backend, family, device);
}

bool is_known(const Backend& backend, Family family, c10::Device device) {
  const Answer& answer = answer_of(family, device);
  return answer.yes == &backend || answer.no == &backend;
}

}  // namespace amp_ext
