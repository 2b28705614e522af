// Order accesses by vector clocks.
#include "order/clock.h"

#include <algorithm>

namespace cudasim {

u32 Clock::of(Actor actor) const {
  if (block_of(actor) == block_) {
    const u32 number = number_of(actor);
    return number < near_.size() ? near_[number] : 0;
  }
  if (!far_) return 0;
  const auto found = std::lower_bound(far_->begin(), far_->end(), std::pair<Actor, u32>(actor, 0));
  return found != far_->end() && found->first == actor ? found->second : 0;
}

void Clock::set(Actor actor, u32 time) {
  const u32 number = number_of(actor);
  if (number >= near_.size()) near_.resize(number + 1);
  near_[number] = std::max(near_[number], time);
}

void Clock::join(const Clock& other) {
  if (other.block_ == block_) {
    if (other.near_.size() > near_.size()) near_.resize(other.near_.size());
    for (size_t i = 0; i < other.near_.size(); ++i) near_[i] = std::max(near_[i], other.near_[i]);
    if (other.far_ && other.far_ != far_) {
      if (far_)
        join_far(*other.far_);
      else
        far_ = other.far_;
    }
    return;
  }
  Times near;
  for (u32 i = 0; i < other.near_.size(); ++i)
    if (other.near_[i]) near.emplace_back(other.block_ << kActorBits | i, other.near_[i]);
  if (!near.empty()) join_far(near);
  if (other.far_ && other.far_ != far_) join_far(*other.far_);
}

void Clock::join_far(const Times& other) {
  static const Times none;
  const Times& mine = far_ ? *far_ : none;
  auto joined = std::make_shared<Times>();
  joined->reserve(mine.size() + other.size());
  auto a = mine.begin(), b = other.begin();
  while (a != mine.end() || b != other.end()) {
    if (b == other.end() || (a != mine.end() && a->first < b->first)) {
      joined->push_back(*a++);
    } else if (a == mine.end() || b->first < a->first) {
      joined->push_back(*b++);
    } else {
      joined->emplace_back(a->first, std::max(a->second, b->second));
      ++a, ++b;
    }
  }
  for (const auto& [actor, time] : *joined)
    if (block_of(actor) == block_) set(actor, time);
  far_ = std::move(joined);
}

}  // namespace cudasim
