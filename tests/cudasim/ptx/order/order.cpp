// Order accesses by release, acquire and fences, as the PTX memory model has it.
#include "order/order.h"

namespace cudasim {

s32 order_of(const Decoder& d, bool is_atomic) {
  const bool is_volatile = d.has("volatile") || d.has("mmio");
  s32 flags = 0;
  if (d.has("acquire") || d.has("acq_rel")) flags |= strong | acquires;
  if (d.has("release") || d.has("acq_rel")) flags |= strong | releases;
  if (d.has("relaxed") || is_volatile || is_atomic) flags |= strong;
  if ((flags & strong) && !d.has("cta")) flags |= wide;
  return flags;
}

void acquire(Warp& w, int lane, const u8* address, s32 flags) {
  if (!w.grid->races) return;
  const auto found = w.grid->released.find(reinterpret_cast<uintptr_t>(address));
  if (found == w.grid->released.end()) return;
  const Released& released = found->second;
  const bool same_block = released.block == w.block->number;
  if (flags & acquires) {
    if (flags & wide) w.acquire(1u << lane, released.wide);
    if (same_block) w.acquire(1u << lane, released.narrow);
    return;
  }
  if (flags & wide) w.unfenced[1].join(released.wide);
  if (same_block) w.unfenced[0].join(released.narrow);
}

void release(Warp& w, const u8* address, s32 flags) {
  if (!w.grid->races) return;
  const bool own = flags & releases;
  if (!own && !w.has_fenced[0] && !(flags & replaces)) return;
  const Clock none(w.block->order);
  auto [found, is_new] = w.grid->released.try_emplace(reinterpret_cast<uintptr_t>(address));
  Released& released = found->second;
  if (is_new || flags & replaces) released = {none, none, w.block->number};
  if (own || w.has_fenced[0]) {
    if (released.block != w.block->number) {
      released.narrow = none;
      released.block = w.block->number;
    }
    released.narrow.join(own ? w.clock : w.fenced[0]);
  }
  if (flags & wide && (own || w.has_fenced[1])) released.wide.join(own ? w.clock : w.fenced[1]);
}

namespace {

void fence(Warp& w, const Instruction& it, u32 lanes) {
  if (!w.grid->races) return;
  const bool by_device = it.kind;
  w.acquire(lanes, w.unfenced[0]);
  if (by_device) w.acquire(lanes, w.unfenced[1]);
  w.fenced[0] = w.clock;
  w.has_fenced[0] = true;
  if (by_device) {
    w.fenced[1] = w.clock;
    w.has_fenced[1] = true;
  }
  w.tick(lanes);
}

}  // namespace

bool decode_fence(Decoder& d) {
  if (d.name() != "membar" && d.name() != "fence") return false;
  if (d.has("proxy") || d.has("mbarrier_init")) return false;
  d.to.kind = !d.has("cta");
  d.to.run = fence;
  return true;
}

}  // namespace cudasim
