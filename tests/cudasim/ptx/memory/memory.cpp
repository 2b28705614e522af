// Resolve addresses, and check reads and writes there.
#include "memory/memory.h"

#include <algorithm>

#include "memory/fresh.h"

namespace cudasim {

FindAllocation find_allocation = nullptr;

// ---- shared memory ------------------------------------------------------------------------------

SharedMemory::SharedMemory(u32 bytes) {
  constexpr u32 kAlign = 1024;
  memory.assign(bytes + 2 * kAlign, 0xff);
  u8* const first = memory.data();
  base = first + (kAlign - reinterpret_cast<uintptr_t>(first) % kAlign) % kAlign - kSharedStart;
  end = kSharedStart + bytes;
  written.assign(bytes / 16 + 2, 0);
}

u8* shared_bytes(Block& block, u32 address, u32 bytes, u32 align, int lane) {
  if (address % align)
    fault_of(lane, "An access of n bytes needs an address that is a multiple of n.",
             "shared address %u is not aligned to %u bytes", address - kSharedStart, align);
  if (address < kSharedStart || u64{address} + bytes > block.shared.end)
    fault_of(lane, "Compare the index with the array, and dynamic shared memory with the launch.",
             "%u bytes at shared address %d, but the block has %u bytes", bytes,
             static_cast<int>(address - kSharedStart), block.shared.end - kSharedStart);
  return block.shared.base + address;
}

namespace {

// Calls visit(number of 16 bytes, mask of bytes).
template <class Visit>
void each_sixteen(u64 at, u32 bytes, Visit visit) {
  for (const u64 end = at + bytes; at < end;) {
    const u32 first = at % 16, last = static_cast<u32>(std::min<u64>(16, first + end - at));
    visit(at / 16, static_cast<u16>((1u << last) - (1u << first)));
    at += last - first;
  }
}

}  // namespace

void check_written(Block& block, u32 address, u32 bytes, int lane) {
  each_sixteen(address - kSharedStart, bytes, [&](u64 i, u16 mask) {
    if (mask & ~block.shared.written[i])
      fault_of(lane, "Is a store, a copy or a barrier missing, or a bound too low?",
               "reads shared address %u, which nothing has written", address - kSharedStart);
  });
}

void mark_written(Block& block, u32 offset, u32 bytes) {
  each_sixteen(offset - kSharedStart, bytes,
               [&](u64 i, u16 mask) { block.shared.written[i] |= mask; });
}

void note_generic_write(Warp& w, int lane, u32 address, u32 bytes) {
  mark_written(*w.block, address, bytes);
  if (!w.kernel->uses_async_proxy) return;
  const u64 mark = static_cast<u64>(w.thread(lane) + 1) << 32 | w.proxy_fences[lane];
  each_sixteen(address - kSharedStart, bytes,
               [&](u64 i, u16) { w.block->shared.writers[i] = mark; });
}

void check_proxy(Block& block, u32 offset, u32 bytes) {
  each_sixteen(offset - kSharedStart, bytes, [&](u64 i, u16) {
    u64& mark = block.shared.writers[i];
    if (!mark) return;
    const u32 thread = static_cast<u32>(mark >> 32) - 1;
    if (block.warps[thread / kLanes]->proxy_fences[thread % kLanes] == static_cast<u32>(mark))
      fault("The writing thread needs fence.proxy.async between its stores and the barrier.",
            "the async proxy reads shared address %u, which thread %u wrote without "
            "fence.proxy.async",
            static_cast<u32>(i) * 16, thread);
    mark = 0;
  });
}

void forget_generic_writes(Block& block, u32 offset, u32 bytes) {
  if (block.shared.writers.empty()) return;
  each_sixteen(offset - kSharedStart, bytes, [&](u64 i, u16) { block.shared.writers[i] = 0; });
}

// ---- global memory ------------------------------------------------------------------------------

u8* global_bytes(Warp& w, int lane, u64 address, u32 bytes, u32 align) {
  Grid& grid = *w.grid;
  if (address % align)
    fault_of(lane, "An access of n bytes needs an address that is a multiple of n.",
             "global address 0x%lx is not aligned to %u bytes", address, align);
  const auto holds = [&](const Range& r) { return address >= r.begin && address + bytes <= r.end; };
  if (!holds(grid.ranges[0])) {
    std::swap(grid.ranges[0], grid.ranges[1]);
    if (!holds(grid.ranges[0])) {
      const Range found =
          find_allocation && !(address & kTags) ? find_allocation(address) : Range{};
      if (!holds(found))
        fault_of(lane, "Compare the index with the tensor's size, and the pointer with its memory.",
                 found.end ? "%u bytes at 0x%lx, beyond the allocation of %lu bytes at 0x%lx"
                           : "%u bytes at 0x%lx, which is in no allocation",
                 bytes, address, found.end - found.begin, found.begin);
      grid.ranges[0] = found;
    }
  }
  return reinterpret_cast<u8*>(address);
}

void check_fresh(const u8* data, u32 bytes, int lane) {
  if (!options().fresh) return;
  const u64 address = reinterpret_cast<uintptr_t>(data);
  for (u64 at = address & ~u64{7}; at < address + bytes; at += 8) {
    u64 word;
    memcpy(&word, reinterpret_cast<const void*>(at), 8);
    if (word == fresh_word(at))
      fault_of(lane, "Is the memory initialised, and does the index stay within the tensor?",
               "reads 0x%lx, which nothing has written since its allocation", address);
  }
}

// ---- races --------------------------------------------------------------------------------------

void Accesses::shared(u32 address, u32 bytes, int lane, u32 more) {
  if (!w_.grid->races) return;
  SharedMemory& memory = w_.block->shared;
  each_sixteen(address - kSharedStart, bytes, [&](u64 i, u16 mask) {
    add(memory.cells[i], i * 16, mask, lane, &memory.lanes[i], more | 1u << lane);
  });
}

void Accesses::global(u64 address, u32 bytes, int lane) {
  if (!w_.grid->races) return;
  each_sixteen(address, bytes, [&](u64 i, u16 mask) {
    add(w_.grid->cells->at(i * 16), i * 16, mask, lane, nullptr, 0);
  });
}

void Accesses::add(Cell& cell, u64 begin, u32 mask, int lane, CellLanes* kept, u32 lanes) {
  if (cell_ == &cell) {
    if (role_.writes && !role_.strong && (bytes_ & mask))
      fault_of(lane, "Which of the values stays? Let one lane store, or use an atomic operation.",
               "race: lanes %d and %d store to the same bytes of %s memory", lane_, lane,
               kept ? "shared" : "global");
    bytes_ |= static_cast<u16>(mask);
  } else {
    finish();
    cell_ = &cell;
    kept_ = kept;
    bytes_ = static_cast<u16>(mask);
    begin_ = begin;
    lane_ = lane;
    memset(lanes_, 0, sizeof lanes_);
  }
  for (int i = 0; kept && i < 16; ++i)
    if (mask >> i & 1) lanes_[i] |= lanes;
}

// Whether the lanes that made an access of shared memory come before those of this one. The warps'
// own order is known. Copies and products have no lanes.
bool Accesses::in_order(const Access& before, const u32* lanes) const {
  const u32 number = number_of(before.actor);
  if (number >= w_.block->warps.size()) return true;
  const LaneOrder& order = w_.block->warps[number]->lane_order;
  const u32 until = w_.clock.of(before.actor);
  const u32 both = static_cast<u32>(before.bytes & bytes_);
  for (int i = 0; i < 16; ++i) {
    if (!(both >> i & 1) ||
        (i && both >> (i - 1) & 1 && lanes[i] == lanes[i - 1] && lanes_[i] == lanes_[i - 1]))
      continue;
    bool found = true;
    each_lane(lanes[i], [&](int lane) {
      if (lanes_[i] == 1u << lane && before.actor == w_.actor) return;
      found &= before.actor == w_.actor ? !(lanes_[i] & ~order.behind(lane, before.time))
                                        : order.released(lane, before.time, until);
    });
    if (!found) return false;
  }
  return true;
}

// Compares the access with those that its cell keeps, and takes the place of one of them.
void Accesses::finish() {
  if (!cell_) return;
  Cell& cell = *std::exchange(cell_, nullptr);
  const Access now{bytes_, role_.writes, role_.wide, role_.strong, role_.actor, role_.time};
  u64 packed = std::bit_cast<u64>(now);
  int place = -1;
  u32 joined[16];
  memcpy(joined, lanes_, sizeof joined);
  for (int i = 0; i < Cell::kAccesses; ++i) {
    const u64 bits = cell.accesses[i];
    if (!bits) {
      if (place < 0) place = i;
      continue;
    }
    const bool same = (bits ^ packed) >> 16 == 0;  // perhaps more bytes of the same access
    if (same && !kept_ && (bits | packed) == bits) return;
    const Access before = std::bit_cast<Access>(bits);
    const bool replaced = (before.bytes & ~now.bytes) == 0 && (now.writes || !before.writes);
    const bool ordered = before.actor == now.actor || before.time <= w_.clock.of(before.actor);
    if ((before.bytes & now.bytes) && (before.writes || now.writes)) {
      const bool agreed =
          before.strong && now.strong &&
          ((before.wide && now.wide) || block_of(before.actor) == block_of(now.actor));
      if (!agreed && !(ordered && (!kept_ || in_order(before, kept_->of[i]))))
        report(before, cell.codes[i]);
    }
    if (same) {
      packed |= bits;
      place = i;
      for (int j = 0; kept_ && j < 16; ++j)
        if (!now.writes || !(now.bytes >> j & 1)) joined[j] |= kept_->of[i][j];
    } else if (before.actor == now.actor) {
      if (replaced && before.strong == now.strong) place = i;
    } else if (ordered && replaced && place < 0) {
      place = i;
    }
  }
  if (place < 0) {
    u64& random = w_.grid->random_cell;
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    place = static_cast<int>(random >> 62);
  }
  cell.accesses[place] = packed;
  cell.codes[place] = static_cast<u32>(&it_ - w_.kernel->code.data());
  if (kept_) memcpy(kept_->of[place], joined, sizeof joined);
}

void Accesses::report(const Access& before, u32 code) {
  const Actor actor = before.actor;
  const u32 block = w_.grid->numbers.at(block_of(actor)), number = number_of(actor);
  const std::string who =
      number < w_.block->warps.size()
          ? text("%swarp %u of block %u", actor == w_.actor ? "other lanes of " : "", number, block)
          : text("an asynchronous copy or product of block %u", block);
  fault_of(lane_,
           kept_ && before.time <= w_.clock.of(actor)
               ? "Is a __syncwarp() missing that all lanes reach before one of them goes on?"
               : "Is a barrier missing between the two, or a fence with the ticket, or a wait for "
                 "the copy?",
           "race: %s %s memory at 0x%lx, and nothing orders it with a %s by %s\n  before: %s",
           role_.writes ? "writes" : "reads", kept_ ? "shared" : "global",
           begin_ + static_cast<u64>(__builtin_ctz(before.bytes & bytes_)),
           before.writes ? "write" : "read", who.c_str(), describe(*w_.kernel, code).c_str());
}

// ---- decoding -----------------------------------------------------------------------------------

Space space_of(const Decoder& d) {
  if (d.has("const")) d.unknown("a space");
  if (d.has("global")) return Space::global;
  if (d.has("shared") || d.has("shared::cta") || d.has("shared::cluster")) return Space::shared;
  if (d.has("local")) return Space::local;
  if (d.has("param") || d.has("param::entry")) return Space::parameter;
  return Space::generic;
}

}  // namespace cudasim
