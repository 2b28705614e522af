// Whether a list is the one before: its chunk table then need not be sent again.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "amp_ext/chunk_table.h"

namespace amp_ext {

template <class Ref>
class LastTable {
 public:
  // Builds the table of a list. *differs says whether it is another one than that of the last call.
  Status update(const Ref* refs, int64_t size, bool* differs) {
    std::vector<EntryOf<Ref>> entries(size);
    const Status status = build_chunk_table(refs, size, entries.data(), &chunks_);
    if (status != Status::ok) return status;
    *differs = entries != entries_;
    if (*differs) entries_ = std::move(entries);
    return Status::ok;
  }

  // To be called when the table could not be sent.
  void forget() { entries_.clear(); }

  const std::vector<EntryOf<Ref>>& entries() const { return entries_; }
  uint32_t chunks() const { return chunks_; }

 private:
  std::vector<EntryOf<Ref>> entries_;
  uint32_t chunks_ = 0;
};

}  // namespace amp_ext
