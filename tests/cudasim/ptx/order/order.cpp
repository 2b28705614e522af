// Order accesses by clocks, and these by release, acquire and fences as the PTX memory model has
// it.
#include "memory/memory.h"

namespace cudasim {

// ---- clocks -------------------------------------------------------------------------------------

u32 Clock::of(Actor actor) const {
  if (block_of(actor) == block_) {
    const u32 number = number_of(actor);
    return number < near_.size() ? near_[number] : 0;
  }
  const auto found = far_->find(actor);
  return found == far_->end() ? 0 : found->second;
}

void Clock::set(Actor actor, u32 time) {
  const u32 number = number_of(actor);
  if (number >= near_.size()) near_.resize(number + 1);
  near_[number] = std::max(near_[number], time);
}

void Clock::join(const Clock& other) {
  std::vector<std::pair<Actor, u32>> later;  // of other blocks
  const auto join = [&](Actor actor, u32 time) {
    if (block_of(actor) == block_)
      set(actor, time);
    else if (time > of(actor))
      later.emplace_back(actor, time);
  };
  for (u32 i = 0; i < other.near_.size(); ++i) join(other.block_ << kActorBits | i, other.near_[i]);
  if (other.far_ != far_)
    for (const auto& [actor, time] : *other.far_) join(actor, time);
  if (later.empty()) return;
  auto joined = std::make_shared<Times>(*far_);
  for (const auto& [actor, time] : later) (*joined)[actor] = std::max((*joined)[actor], time);
  far_ = std::move(joined);
}

// ---- the lanes of a warp ------------------------------------------------------------------------

void LaneOrder::add(u32 time, u32 lanes, u8 does, bool all, u32 until) {
  steps_.resize(time + 1);
  steps_[time] = {lanes, until, does};
  if (all && does & meets) all_met_ = time;
}

bool LaneOrder::matters(u32 lanes, u32 until) const {
  if (until <= all_met_ || until >= steps_.size()) return false;
  const u32 both = lanes | steps_[until].lanes;
  return both & (both - 1);
}

u32 LaneOrder::behind(int lane, u32 time) const {
  if (time <= all_met_) return ~0u;
  u32 lanes = 1u << lane;
  for (u32 i = time; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if ((step.does & meets && step.lanes & lanes) ||
        (step.does & acquires && time <= step.until && released(lane, time, step.until)))
      lanes |= step.lanes;
  }
  return lanes;
}

bool LaneOrder::released(int lane, u32 time, u32 until) const {
  u32 lanes = 1u << lane;
  for (u32 i = time; i <= until && i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (!(step.lanes & lanes)) continue;
    if (step.does & releases) return true;
    if (step.does & meets) lanes |= step.lanes;
  }
  return false;
}

void GlobalCells::start_launch() {
  constexpr size_t kMostPages = 4096;
  if (pages_.size() > kMostPages) pages_.clear();
  page_ = nullptr;
  ++launch_;
}

Cell& GlobalCells::at(u64 address) {
  const u64 number = address >> kPageBits;
  if (number != last_ || !page_) {
    auto& page = pages_[number];
    if (!page) page = std::make_unique<Page>();
    if (page->launch != launch_) *page = {launch_, {}};
    page_ = page.get();
    last_ = number;
  }
  return page_->cells[address % (1 << kPageBits) / 16];
}

// ---- release, acquire and fences ----------------------------------------------------------------

s32 order_of(const Decoder& d, bool is_atomic) {
  if (d.has("acquire") || d.has("release") || d.has("acq_rel")) d.unknown("a memory order");
  if (!is_atomic && !d.has("relaxed") && !d.has("volatile") && !d.has("mmio")) return 0;
  return d.has("cta") ? strong : strong | wide;
}

void acquire(Warp& w, const u8* address, s32 flags) {
  if (!w.grid->races) return;
  const auto found = w.grid->released.find(reinterpret_cast<uintptr_t>(address));
  if (found == w.grid->released.end()) return;
  const Released& released = found->second;
  if (flags & wide) w.unfenced[1].join(released.wide);
  if (released.block == w.block->number) w.unfenced[0].join(released.narrow);
}

void release(Warp& w, const u8* address, s32 flags) {
  if (!w.grid->races || (!w.has_fenced && !(flags & replaces))) return;
  const Clock none(w.block->order);
  auto [found, is_new] = w.grid->released.try_emplace(reinterpret_cast<uintptr_t>(address));
  Released& released = found->second;
  if (is_new || flags & replaces) released = {none, none, w.block->number};
  if (!w.has_fenced) return;
  if (released.block != w.block->number) {
    released.narrow = none;
    released.block = w.block->number;
  }
  released.narrow.join(w.fenced[0]);
  if (flags & wide) released.wide.join(w.fenced[1]);
}

namespace {

void fence(Warp& w, const Instruction& it, u32 lanes) {
  if (!w.grid->races) return;
  for (int scope = 0; scope <= it.kind; ++scope) w.acquire(lanes, w.unfenced[scope]);
  for (int scope = 0; scope <= it.kind; ++scope) w.fenced[scope] = w.clock;
  w.has_fenced = true;
  w.tick(lanes);
}

}  // namespace

bool decode_fence(Decoder& d) {
  if (d.name() != "membar" && d.name() != "fence") return false;
  if (d.has("proxy") || d.has("mbarrier_init")) return false;
  d.to.kind = !d.has("cta");
  return d.runs(fence);
}

}  // namespace cudasim
