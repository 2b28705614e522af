// The border between the ops and what runs them: one method per op, and what a backend needs from
// its surroundings. No torch, no CUDA headers, so that a backend can come from a library of its
// own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "amp_ext/gemm.h"
#include "amp_ext/lists.h"
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
  bool sm90 = false;  // runs code for sm_90a, and the build has it
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

// What runs the ops on the tensors of one device. Arguments have been checked.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;

  virtual Status unscale(UnscaleArgs, Services&) const = 0;
  virtual Status check_finite(CheckFiniteArgs, Services&) const = 0;
  virtual Status grad_norm(GradNormArgs, Services&) const = 0;
  virtual Status cast(CastArgs, Services&) const = 0;
  virtual Status update_scale(UpdateScaleArgs, Services&) const = 0;

  // Why it cannot compute a product, in a few words; null if it can. Pointers are not followed:
  // some stand for memory that is yet to be allocated.
  virtual const char* why_not(const GemmArgs&) const = 0;
  virtual Status gemm(const GemmArgs&, Services&) const = 0;

  // More about the last Status other than `ok`; may be empty.
  virtual const char* last_error() const { return ""; }
};

// The list as a table in the device's memory, for kernels that cannot take it as a parameter.
template <class Ref>
Status send_table(ListOf<Ref>& list, Services& services) {
  using Entry = EntryOf<Ref>;
  std::vector<Entry> entries(list.size);
  const Status status =
      build_chunk_table(list.refs, list.size, entries.data(), &list.device_chunks);
  if (status != Status::ok) return status;
  list.device_table =
      static_cast<const Entry*>(services.table(entries.data(), entries.size(), sizeof(Entry)));
  return Status::ok;
}

}  // namespace amp_ext
