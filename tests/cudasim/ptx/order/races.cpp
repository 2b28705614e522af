// Keep cells of global memory.
#include "order/races.h"

namespace cudasim {

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

}  // namespace cudasim
