// The CUDA kernels on the CPU as a backend for amp_ext, and what tests ask of it.
#include "backend.h"

#include <cstring>
#include <map>
#include <optional>
#include <string>

#include "amp_ext/library.h"
#include "engine.h"
#include "gemm/plan/choose.h"
#include "gemm/shared/scheduler.cuh"

namespace simt {
namespace {

using namespace amp_ext;

// The device, and the order in which each of the launches to come runs, follow from the seed,
// unless all of them are to be the same.
uint64_t seed = 0, launches = 0;
std::map<std::string, int64_t> calls;  // of each op
std::optional<Options> pinned;

bool sm90 = false;
int capability = 0;
constexpr int kDriverVersion = 13000;
std::optional<ForcedTile> forced;
GemmPlan last_plan;

void set_schedule() {
  const uint64_t number = seed + launches++;
  options = pinned.value_or(
      Options{number, 1 + static_cast<int>(number % 4), 1 + static_cast<int>(seed / 4 % 4)});
}

class SimtServices final : public Services {
 public:
  explicit SimtServices(Services& host) : host_(host) {}

  cuda::Target target() override {
    return {.device = -1, .multiprocessors = options.multiprocessors, .capability = capability};
  }
  void* scratch(size_t bytes) override {
    constexpr int kNan = 0xff;  // in any format
    return memset(host_.scratch(bytes), kNan, bytes);
  }
  uint32_t* tickets(size_t count) override { return host_.tickets(count); }
  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    return host_.table(entries, count, entry_bytes);
  }

 private:
  Services& host_;
};

// One of the tiles for sm_90a.
ForcedTile some_tile() {
  constexpr int kClusters[][2] = {{1, 1}, {2, 1}, {1, 2}};
  const int tile = static_cast<int>(seed % kSm90TileCount);
  const auto [m, n] = kClusters[options.multiprocessors > 1 ? seed / kSm90TileCount % 3 : 0];
  const uint64_t cut = seed / (3 * kSm90TileCount);
  const auto splits = static_cast<int64_t>(cut % 4);
  const auto ranges = static_cast<int64_t>(splits == 0 ? 3 : cut / 4 % 3);
  return {{true, tile, m, n, splits, ranges}, /*whole=*/0};
}

class SimtBackend final : public cuda::CudaBackend {
 public:
  const char* name() const override { return "simt"; }

#define AMP_EXT_RUN(op, Args)                                                     \
  Status op(const Args& args, Services& host) const override {                    \
    return run(#op, host, [&](Services& s) { return CudaBackend::op(args, s); }); \
  }
  AMP_EXT_LIST_OPS(AMP_EXT_RUN)
#undef AMP_EXT_RUN

  Status gemm(const GemmArgs& args, Services& host) const override {
    return run("gemm", host, [&](Services& s) { return CudaBackend::gemm(args, s); });
  }

  const char* why_slow(const GemmArgs& args, Services& host) const override {
    SimtServices services(host);
    return CudaBackend::why_slow(args, services);
  }

  std::vector<int64_t> gemm_variants(const GemmArgs& args, Services& host) const override {
    SimtServices services(host);
    return CudaBackend::gemm_variants(args, services);
  }

  std::optional<GemmKernels> gemm_kernels(const cuda::Target&) const override {
    const bool sm80 =
        capability == 0 || CudaBackend::gemm_kernels({.capability = capability})->sm80;
    return GemmKernels{sm80, sm90};
  }

 protected:
  GemmPlan plan(const GemmArgs& g, const GemmDevice& device) const override {
    std::optional<ForcedTile> tile = forced;
    if (!tile && may_run_sm90(g, device)) tile = some_tile();
    const auto candidate = tile ? forced_candidate(g, device, *tile) : std::nullopt;
    return last_plan = candidate ? make_plan(g, *candidate, device) : CudaBackend::plan(g, device);
  }

 private:
  template <class Launch>
  static Status run(const char* op, Services& host, Launch launch) {
    ++calls[op];
    set_schedule();
    fault.clear();
    SimtServices services(host);
    const Status status = launch(services);
    return status == Status::ok && !fault.empty() ? Status::launch_failed : status;
  }
};

}  // namespace
}  // namespace simt

// ---- what launchers ask of the CUDA runtime beside what the engine has --------------------------

// The code of a kernel is for the device, or for one that lets grids begin early.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = simt::capability ? simt::capability : 90;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = simt::kDriverVersion;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int*, const void*, const cudaLaunchConfig_t*) {
  return cudaErrorNotSupported;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// ---- what Python calls -------------------------------------------------------------------------

const amp_ext::BackendLibrary amp_ext_backend_library{
    AMP_EXT_ABI, AMP_EXT_VERSION,
    [](const amp_ext::Host&) -> const amp_ext::Backend& {
      static const simt::SimtBackend backend;
      return backend;
    },
    ""};

extern "C" {

// Each launch from now on has a schedule of its own, and all have one device, as `seed` has it.
void simt_seed(uint64_t seed) {
  simt::seed = seed;
  simt::launches = 0;
  simt::pinned.reset();
}

// Each launch from now on, until simt_seed, has this schedule.
void simt_pin(uint64_t seed, int resident_blocks, int multiprocessors) {
  simt::pinned = {seed, resident_blocks, multiprocessors};
}

// Whether the device is one of sm_90: then its kernel computes each product that it can, with a
// tile that follows from the seed.
void simt_set_sm90(bool sm90) { simt::sm90 = sm90; }

// What the device says of itself, 90 for 9.0; 0, as by default, for none in particular.
void simt_set_capability(int capability) { simt::capability = capability; }

void simt_refuse_tensor_maps(bool refuse) { simt::refuse_tensor_maps = refuse; }

// The tile of the products to come; -1 for none in particular. See amp_ext::ForcedTile.
void simt_force_tile(bool sm90, int tile, int cluster_m, int cluster_n, int64_t splits,
                     int64_t whole, int64_t ranges) {
  simt::forced.reset();
  if (tile >= 0) simt::forced = {{sm90, tile, cluster_m, cluster_n, splits, ranges}, whole};
}

// How often an op has been called: unscale, check_finite, grad_norm, cast, update_scale or gemm.
int64_t simt_calls(const char* op) { return simt::calls[op]; }

const char* simt_plan_text() {
  static std::string text;
  text = describe(simt::last_plan);
  return text.c_str();
}

}  // extern "C"
