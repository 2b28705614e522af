// The border between the ops and what runs them: one method per op, and what a backend needs from
// its surroundings. No torch, no CUDA headers, so that a backend can come from a library of its own
// (library.h), which shares the C++ library of its host: a vector may pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "amp_ext/gemm.h"
#include "amp_ext/lists.h"
#include "amp_ext/optim.h"
#include "amp_ext/scale.h"
#include "amp_ext/status.h"

namespace amp_ext {

namespace cuda {

using Stream = void*;  // a cudaStream_t

// Where a launch goes.
struct Target {
  int device = 0;  // its index; -1 for the host
  Stream stream = nullptr;
  int multiprocessors = 1;
  int capability = 0;  // 90 for compute capability 9.0
};

}  // namespace cuda

// What the launches of one call need. Memory is the call's own device's, and lives until the
// device's current stream has passed the launches.
class Services {
 public:
  virtual ~Services() = default;

  virtual cuda::Target target() = 0;

  // Memory of unknown content, aligned to 64 bytes.
  virtual void* scratch(size_t bytes) = 0;

  // Counters that are 0, and that the launches leave at 0.
  virtual uint32_t* tickets(size_t count) = 0;

  // `count` entries of `entry_bytes` bytes in the device's memory. A table that equals the last one
  // of entries of this size need not be sent again: gradients often stay where they are.
  virtual const void* table(const void* entries, size_t count, size_t entry_bytes) = 0;
};

// The ops on lists, OP(method, arguments). Each is declared here once for all backends.
#define AMP_EXT_LIST_OPS(OP)        \
  OP(unscale, UnscaleArgs)          \
  OP(check_finite, CheckFiniteArgs) \
  OP(grad_norm, GradNormArgs)       \
  OP(cast, CastArgs)                \
  OP(update_scale, UpdateScaleArgs) \
  OP(adam, AdamArgs)                \
  OP(sgd, SgdArgs)

// AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE) declares them in a backend.
#define AMP_EXT_OVERRIDE(op, Args) Status op(const Args&, Services&) const override;

// The ops on lists of tensors of one device. Arguments have been checked.
class ListBackend {
 public:
  virtual ~ListBackend() = default;

#define AMP_EXT_DECLARE(op, Args) virtual Status op(const Args&, Services&) const = 0;
  AMP_EXT_LIST_OPS(AMP_EXT_DECLARE)
#undef AMP_EXT_DECLARE
};

// The products of matrices on one device. Arguments have been checked.
class GemmBackend {
 public:
  virtual ~GemmBackend() = default;

  // Why it cannot compute a product, in a few words; null if it can. Follows no pointers.
  virtual const char* why_not(const GemmArgs&) const = 0;
  virtual Status gemm(const GemmArgs&, Services&) const = 0;

  // Those of GemmArgs::kernels that compute products on a device; empty where it has others.
  virtual std::optional<GemmKernels> gemm_kernels(const cuda::Target&) const { return {}; }

  // Why a product that it can compute is left to torch's library where neither has been measured;
  // null if it is not.
  virtual const char* why_slow(const GemmArgs&, Services&) const { return nullptr; }

  // Whether the device has instructions for products of a dtype.
  virtual bool multiplies(DType) const { return false; }

  // The value of GemmArgs::variant for one of the tiles of its kernels, which are numbered without
  // a gap; 0 where there is none of this number, or it cannot be cut like this.
  virtual int64_t variant_of(const GemmTileChoice&) const { return 0; }

  // The values of GemmArgs::variant that are worth measuring for a product that it can compute, 0
  // the first. A value that means nothing for a product, as from another build, is 0 to gemm.
  virtual std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const { return {0}; }
};

class Backend : public ListBackend, public GemmBackend {
 public:
  virtual const char* name() const = 0;

  // More about the last Status other than `ok`; may be empty.
  virtual const char* last_error() const { return ""; }
};

// The list as a chunk table in the device's memory: for kernels that cannot take it as a parameter.
template <class Ref>
Status send_table(const ListOf<Ref>& list, Services& services, const EntryOf<Ref>** table,
                  uint32_t* chunks) {
  using Entry = EntryOf<Ref>;
  std::vector<Entry> entries(list.size);
  if (const Status status = build_chunk_table(list, entries.data(), chunks); status != Status::ok)
    return status;
  *table = static_cast<const Entry*>(services.table(entries.data(), entries.size(), sizeof(Entry)));
  return Status::ok;
}

}  // namespace amp_ext
