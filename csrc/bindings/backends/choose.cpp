// Chooses the backend of a call, and calls it.
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "backends/backends.h"
#include "backends/services.h"
#include "backends/table.h"

namespace amp_ext {
namespace {

enum class GemmMode { automatic, kernel, library };
constexpr std::array<const char*, 3> kModes{"auto", "kernel", "library"};
std::atomic<GemmMode> mode = GemmMode::automatic;

// Null stands for the device's own backend.
std::array<std::atomic<const Backend*>, 2> chosen{};

thread_local const Backend* under_test = nullptr;

// Returns null for a device without a backend.
const Backend* backend_of(c10::DeviceType type) {
  if (type != at::kCPU && type != at::kCUDA) return nullptr;
  if (under_test) return under_test;
  if (const Backend* const backend = chosen[type == at::kCUDA]) return backend;
  return type == at::kCPU ? &cpu_backend() : cuda_backend();
}

// Returns null for CUDA kernels that were not built.
const Backend* backend_named(const std::string& name) {
  if (name == "triton") return &triton_backend();
  TORCH_CHECK_VALUE(name == "cpu" || name == "cuda", "amp_ext: unknown backend ", name);
  return name == "cpu" ? &cpu_backend() : cuda_backend();
}

}  // namespace

void use_backend(c10::DeviceType type, const std::string& name) {
  chosen[type == at::kCUDA] = name.empty() ? nullptr : backend_named(name);
}

void put_under_test(const std::string& name) {
  under_test = backend_named(name);
  relax_capture_mode();
}
bool is_under_test(const Backend& backend) { return under_test == &backend; }

std::optional<const Backend*> gemm_backend(c10::DeviceType type, const std::string& name) {
  const bool is_cpu = type == at::kCPU;
  const Backend* const all[] = {backend_of(type), is_cpu ? &cpu_backend() : cuda_backend(),
                                is_cpu ? nullptr : &triton_backend()};
  for (const Backend* const backend : all)
    if (backend && backend->name() == name) return backend;
  if (name == name_of(nullptr)) return nullptr;
  return std::nullopt;
}

void set_gemm_mode(const std::string& name) {
  const auto* const found = std::ranges::find(kModes, name);
  TORCH_CHECK_VALUE(found != kModes.end(), "AMP_EXT_GEMM must be auto, kernel or library, got ",
                    name);
  mode = static_cast<GemmMode>(found - kModes.begin());
}
std::string gemm_mode() { return kModes[static_cast<int>(mode.load())]; }

const Backend& choose(const char* op, c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_cuda(), op,
                              ": tensors must be on the CPU or a CUDA device, got ", device);
  const Backend* const backend = backend_of(device.type());
  TORCH_CHECK(
      backend, op,
      ": amp_ext was built without CUDA kernels and was given a CUDA tensor; install Triton "
      "for its Triton kernels, or, with a CUDA toolkit and a CUDA build of torch installed, "
      "rebuild it from its source tree with: FORCE_CUDA=1 pip install --force-reinstall "
      "--no-deps .");
  return *backend;
}

const Backend& choose_verified(const char* op, Family family, c10::Device device) {
  const Backend& own = choose(op, device);
  if (is_verified(own, family, device).value_or(true)) return own;
  TORCH_CHECK(device.is_cuda() && is_verified(triton_backend(), family, device).value_or(true), op,
              ": no kernels of this op have passed their verification on ", device,
              "; see python -m amp_ext, and use torch.amp here");
  return triton_backend();
}

namespace {

// Returns whether torch's library multiplies with the processor's instructions for a 16-bit type,
// its rounding is within bounds, and no NaN spreads from behind rows: they have whole steps, or can
// be padded(). (torch copies batches, and matrices without dense rows, without the padding.)
bool library_multiplies(const GemmArgs& g) {
  const int64_t step = torchs_product_step(g.a.dtype);
  const auto is_same = [&](const auto& x) { return !x.data || x.dtype == g.a.dtype; };
  return step != 0 && (g.k % step == 0 || (g.batch * g.terms == 1 && g.a.column_stride == 1)) &&
         is_same(g.b) && is_same(g.c) && is_same(g.bias) && g.out.dtype == g.a.dtype;
}

// Returns why a backend is not to compute a product; null if it may. torch's library always may.
const char* obstacle_of(const Backend* backend, c10::Device device, const GemmArgs& g) {
  if (!backend) return nullptr;
  const Backend* const only = chosen[device.is_cuda()];
  if (only && backend != only && backend != &cpu_backend()) return "another backend was chosen";
  if (const char* const obstacle = backend->why_not(g, capability_of(device))) return obstacle;
  if (is_verified(*backend, family_of(g), device).value_or(false)) return nullptr;
  return "the kernels have not passed their verification; see python -m amp_ext";
}

// Returns the backend of a product without measurements, and the reason.
std::pair<const Backend*, const char*> default_gemm(c10::Device device, const GemmArgs& g) {
  if (!device.is_cpu()) return {nullptr, "not measured: torch's library"};
  if (const char* const obstacle = cpu_backend().why_not(g, 0)) return {nullptr, obstacle};
  if (library_multiplies(g))
    if (const char* const reason = cpu_backend().why_slow(g, 0)) return {nullptr, reason};
  return {&cpu_backend(), "16-bit or FP32 operands on a CPU"};
}

}  // namespace

const Backend* choose_gemm(c10::Device device, GemmArgs& args, std::string* reason) {
  const auto choice = [&](const Backend* backend, const auto& why, int64_t variant = 0) {
    if (reason) *reason = why;
    args.variant = variant;
    return backend;
  };
  const GemmMode mode = amp_ext::mode;
  if (mode == GemmMode::automatic && (device.is_cpu() || device.is_cuda())) {
    if (const auto found = find_measured(device, args)) {
      const auto& [name, variant, why] = *found;
      const auto backend = gemm_backend(device.type(), name);
      if (backend && !obstacle_of(*backend, device, args)) return choice(*backend, why, variant);
    }
  }
  if (mode == GemmMode::kernel) {
    const Backend* const kernels = backend_of(device.type());
    const char* obstacle =
        kernels ? obstacle_of(kernels, device, args) : "amp_ext has no kernels here";
    if (!obstacle) obstacle = kernels->why_slow(args, capability_of(device));
    if (!obstacle && kernels != &cpu_backend()) return choice(kernels, "AMP_EXT_GEMM is kernel");
    if (!device.is_cpu()) return choice(nullptr, obstacle);
  }
  const auto [backend, why] = default_gemm(device, args);
  return choice(backend, why);
}

std::vector<const Backend*> gemm_candidates(c10::Device device, const GemmArgs& args, bool triton) {
  std::vector<const Backend*> candidates{default_gemm(device, args).first};
  const auto add = [&](const Backend* backend) {
    if (!std::ranges::count(candidates, backend) && !obstacle_of(backend, device, args))
      candidates.push_back(backend);
  };
  if (device.is_cuda() || library_multiplies(args)) add(nullptr);
  add(backend_of(device.type()));  // null without CUDA kernels: the default, listed already
  if (device.is_cpu()) add(&cpu_backend());
  if (device.is_cuda() && triton) add(&triton_backend());
  return candidates;
}

void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch) {
  Status status;
  if (device.is_cpu()) {
    TorchServices services(device);
    status = launch(services);
  } else {
    status = run_on_cuda(device, launch);
  }
  if (status == Status::ok) return;
  const std::string more = backend.last_error();
  TORCH_CHECK(false, op, ": ", text(status), more.empty() ? "" : ": ", more);
}

}  // namespace amp_ext
