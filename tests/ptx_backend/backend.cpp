// Serve the CUDA kernels as compiled PTX: a backend for tensors of the CPU, and its tests' calls.
#include "backend.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "../support/plan_text.h"
#include "amp_ext/library.h"
#include "gemm/plan/choose.h"
#include "operands.h"

namespace ptx_backend {
namespace {

// The seed determines the device, and the order of each later launch, unless all orders are pinned.
uint64_t seed = 0;
std::optional<uint64_t> pinned;
int multiprocessors = 1;

bool sm90 = false;
std::map<std::string, int64_t> calls;  // of each op
std::optional<GemmTileChoice> forced;
GemmPlan last_plan;

class PtxServices final : public Services {
 public:
  explicit PtxServices(Services& host) : host_(host) {}

  cuda::Target target() override {
    return {.device = -1, .multiprocessors = multiprocessors, .capability = 0};
  }
  void* scratch(size_t bytes) override {
    return fresh_memory(host_.scratch(bytes), static_cast<int64_t>(bytes));
  }
  uint32_t* tickets(size_t count) override {
    uint32_t* const counters = host_.tickets(count);
    allow(counters, static_cast<int64_t>(count));
    return counters;
  }
  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    const void* const sent = host_.table(entries, count, entry_bytes);
    allow_memory(sent, static_cast<int64_t>(count * entry_bytes));
    return sent;
  }

 private:
  Services& host_;
};

// One of the tiles for sm_90a.
GemmTileChoice some_tile() {
  const int tile = static_cast<int>(seed % kSm90TileCount);
  const auto splits = static_cast<int64_t>(1 + seed / kSm90TileCount % 4);
  return {true, tile, splits};
}

class PtxBackend final : public cuda::CudaBackend {
 public:
  const char* name() const override { return "ptx"; }

#define AMP_EXT_RUN(op, Args)                                                           \
  Status op(const Args& args, Services& host) const override {                          \
    return run(#op, args, host, [&](Services& s) { return CudaBackend::op(args, s); }); \
  }
  AMP_EXT_LIST_OPS(AMP_EXT_RUN)
#undef AMP_EXT_RUN

  Status gemm(const GemmArgs& args, Services& host) const override {
    return run("gemm", args, host, [&](Services& s) { return CudaBackend::gemm(args, s); });
  }

  const char* why_slow(const GemmArgs& args, int) const override {
    return CudaBackend::why_slow(args, 0);
  }

  std::vector<int64_t> gemm_variants(const GemmArgs& args, Services& host) const override {
    PtxServices services(host);
    return CudaBackend::gemm_variants(args, services);
  }

  const char* why_not(const GemmArgs& args, int) const override {
    return CudaBackend::why_not(args, PTX_CAPABILITY);
  }

 protected:
  GemmDevice device_of(const cuda::Target& target) const override {
    return {target.multiprocessors, sm90};
  }

  GemmPlan plan(const GemmArgs& g, const GemmDevice& device) const override {
    std::optional<GemmTileChoice> tile = forced;
    if (!tile && may_run_sm90(g, device)) tile = some_tile();
    const bool is_forced = tile && can_run(g, device, *tile);
    return last_plan = is_forced ? make_plan(g, *tile, device) : CudaBackend::plan(g, device);
  }

 private:
  template <class Args, class Launch>
  static Status run(const char* op, const Args& args, Services& host, Launch launch) {
    ++calls[op];
    if (pinned) next_seed = *pinned;
    forget_memory();
    allow(args);
    PtxServices services(host);
    return launch(services);
  }
};

}  // namespace
}  // namespace ptx_backend

const amp_ext::BackendLibrary amp_ext_backend_library{
    AMP_EXT_ABI, AMP_EXT_VERSION,
    [](const amp_ext::Host&) -> const amp_ext::Backend& {
      static const ptx_backend::PtxBackend backend;
      return backend;
    },
    ""};

// ---- interface to Python ------------------------------------------------------------------------

extern "C" {

// Each later launch has a schedule of its own, and all have one device, by `seed`.
void ptx_seed(uint64_t seed) {
  ptx_backend::seed = ptx_backend::next_seed = seed;
  ptx_backend::multiprocessors = 1 + static_cast<int>(seed / 4 % 4);
  ptx_backend::pinned.reset();
}

// Each launch from now on, until ptx_seed, has this schedule.
void ptx_pin(uint64_t seed, int multiprocessors) {
  ptx_backend::pinned = seed;
  ptx_backend::multiprocessors = multiprocessors;
}

// Whether the kernel for sm_90a computes each product that it can, with a tile that follows from
// the seed.
void ptx_set_sm90(bool sm90) { ptx_backend::sm90 = sm90; }

void ptx_refuse_tensor_maps(bool refuse) { ptx_backend::refuse_tensor_maps = refuse; }

// The tile of the products to come; -1 for none in particular.
void ptx_force_tile(bool sm90, int tile, int64_t splits) {
  ptx_backend::forced.reset();
  if (tile >= 0) ptx_backend::forced = {sm90, tile, splits};
}

// How often an op has been called: unscale, check_finite, grad_norm, cast, update_scale or gemm.
int64_t ptx_calls(const char* op) { return ptx_backend::calls[op]; }

const char* ptx_plan_text() {
  static std::string text;
  text = describe(ptx_backend::last_plan);
  return text.c_str();
}

}  // extern "C"
