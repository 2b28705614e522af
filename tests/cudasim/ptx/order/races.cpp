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

Cell& GlobalCells::at(u64 address) {
  const u64 number = address >> kPageBits;
  if (number != last_ || !page_ || page_->launch != launch_) {
    constexpr size_t kMostPages = 4096;
    auto& page = pages_[number];
    if (!page) {
      if (pages_.size() > kMostPages)  // pages of earlier launches
        std::erase_if(pages_,
                      [&](const auto& it) { return it.second && it.second->launch != launch_; });
      auto& kept = pages_[number];
      if (!kept) kept = std::make_unique<Page>();
      page_ = kept.get();
    } else {
      page_ = page.get();
    }
    if (page_->launch != launch_) {
      memset(page_->cells, 0, sizeof page_->cells);
      page_->launch = launch_;
    }
    last_ = number;
  }
  return page_->cells[address % (1 << kPageBits) / 16];
}

}  // namespace cudasim
