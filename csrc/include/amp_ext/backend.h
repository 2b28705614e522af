// Declares the interface between the ops and a backend: one method per op, and its services.
//
// The header needs neither torch nor CUDA, so that a backend can live in a library of its own
// (library.h). Such a library shares the host's C++ runtime, so a std::vector may cross the
// boundary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "amp_ext/gemm.h"
#include "amp_ext/lists.h"
#include "amp_ext/optim.h"
#include "amp_ext/scale.h"
#include "amp_ext/status.h"

namespace amp_ext {

namespace cuda {

using Stream = void*;  // a cudaStream_t

// The device and stream of a launch.
struct Target {
  int device = 0;  // -1 for the host
  Stream stream = nullptr;
  int multiprocessors = 1;
  int capability = 0;  // 90 for compute capability 9.0
};

}  // namespace cuda

// Provides memory and the stream for the launches of one call. The memory is on the call's device
// and lives until the device's current stream has passed the launches.
class Services {
 public:
  virtual ~Services() = default;

  virtual cuda::Target target() = 0;

  // Returns uninitialised memory, aligned to 64 bytes.
  virtual void* scratch(size_t bytes) = 0;

  // Returns counters of value 0. The launches leave them at 0.
  virtual uint32_t* tickets(size_t count) = 0;

  // Returns a copy of `count` entries of `entry_bytes` bytes in the device's memory.
  virtual const void* table(const void* entries, size_t count, size_t entry_bytes) = 0;
};

// Lists the ops on tensor lists as OP(method, arguments), once for all backends.
#define AMP_EXT_LIST_OPS(OP)        \
  OP(unscale, UnscaleArgs)          \
  OP(check_finite, CheckFiniteArgs) \
  OP(grad_norm, GradNormArgs)       \
  OP(cast, CastArgs)                \
  OP(update_scale, UpdateScaleArgs) \
  OP(adam, AdamArgs)                \
  OP(sgd, SgdArgs)

// Declares an op in a backend, by AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE).
#define AMP_EXT_OVERRIDE(op, Args) Status op(const Args&, Services&) const override;

// Runs the ops on lists of tensors of one device. The caller has checked the arguments.
class ListBackend {
 public:
  virtual ~ListBackend() = default;

#define AMP_EXT_DECLARE(op, Args) virtual Status op(const Args&, Services&) const = 0;
  AMP_EXT_LIST_OPS(AMP_EXT_DECLARE)
#undef AMP_EXT_DECLARE
};

// Computes products of matrices on one device. The caller has checked the arguments.
class GemmBackend {
 public:
  virtual ~GemmBackend() = default;

  // Returns a short reason if the backend cannot compute a product on GPUs of a compute capability,
  // 90 for 9.0 and 0 for the CPU; else null. Follows no pointers.
  virtual const char* why_not(const GemmArgs&, int capability) const = 0;
  virtual Status gemm(const GemmArgs&, Services&) const = 0;

  // Returns a reason to prefer torch's library for an unmeasured product, else null.
  virtual const char* why_slow(const GemmArgs&, int /*capability*/) const { return nullptr; }

  // Returns how many elements of a row the processor's instructions for products of a 16-bit type
  // take at once; 0 without such instructions.
  virtual int64_t product_step(DType) const { return 0; }

  // Encodes a choice of tile as GemmArgs::variant. Returns 0 if the tile's index or the number of
  // splits is out of range. Tile indices have no gaps.
  virtual int64_t variant_of(const GemmTileChoice&) const { return 0; }

  // Returns the values of GemmArgs::variant worth measuring for a product, 0 first. gemm() treats
  // an unknown value, for example from another build, as 0.
  virtual std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const { return {0}; }
};

class Backend : public ListBackend, public GemmBackend {
 public:
  virtual const char* name() const = 0;

  // Returns details about the last Status other than `ok`; may be empty.
  virtual const char* last_error() const { return ""; }
};

// Builds a list's chunk table in device memory, for kernels that cannot take it as a parameter.
template <class Ref>
Status send_table(const ListOf<Ref>& list, Services& services, const Ref** table,
                  uint32_t* chunks) {
  std::vector<Ref> entries(list.size);
  if (const Status status = build_chunk_table(list, entries.data(), chunks); status != Status::ok)
    return status;
  *table = static_cast<const Ref*>(services.table(entries.data(), entries.size(), sizeof(Ref)));
  return Status::ok;
}

}  // namespace amp_ext
