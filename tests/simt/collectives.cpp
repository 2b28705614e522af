// Shuffles, votes and barriers, all of them meetings; fences and atomics.
#include <string_view>

#include "engine.h"
#include "sanitizers.h"

namespace simt {

bool Meeting::arrive(const char* operation, int place, void* argument, bool barrier) {
  if (waiting_.empty()) operation_ = operation;
  if (std::string_view(operation_) != operation) {
    std::vector<int> others;
    for (const Thread* thread : waiting_) others.push_back(thread->number);
    fail("divergent collective: %s, while threads %s of the same %s are in %s", operation,
         ranges(others).c_str(), this == &current->block->barrier ? "block" : "warp", operation_);
  }
  arguments_[place] = argument;
  if (barrier) tsan::release(token());
  if (missing() == 1) return true;
  waiting_.push_back(current);
  return false;
}

void Meeting::release(bool barrier) {
  if (barrier) tsan::acquire(token());
  ++round_;
  for (Thread* thread : waiting_) make_ready(*thread);
  waiting_.clear();
  may_preempt();
}

void Meeting::wait(bool barrier) {
  uint64_t* const mine = token();
  current->waits_in = operation_;
  current->meeting = this;
  suspend();
  current->meeting = nullptr;
  if (barrier) tsan::acquire(mine);
}

void block_barrier(const char* operation) {
  int nothing;
  current->block->barrier.meet(operation, current->number, &nothing, true, [](int* const*) {});
}

namespace {

bool any(Meeting& meeting, const char* operation, int place, bool predicate, bool barrier) {
  meeting.meet(operation, place, &predicate, barrier, [&](bool* const* predicates) {
    bool result = false;
    for (int i = 0; i < meeting.size(); ++i) result |= *predicates[i];
    for (int i = 0; i < meeting.size(); ++i) *predicates[i] = result;
  });
  return predicate;
}

}  // namespace

bool block_or(const char* operation, bool predicate) {
  return any(current->block->barrier, operation, current->number, predicate, true);
}

bool warp_or(const char* operation, bool predicate) {
  return any(current->warp->meeting, operation, current->lane, predicate, false);
}

uint64_t warp_exchange(const char* operation, uint64_t bits, int from_lane) {
  struct Exchange {
    uint64_t given, received;
    int from_lane;
  } mine{bits, 0, from_lane};
  Meeting& meeting = current->warp->meeting;
  if (from_lane < 0 || from_lane >= meeting.size())
    fail("%s: reads lane %d of a warp of %d", operation, from_lane, meeting.size());
  meeting.meet(operation, current->lane, &mine, false, [&](Exchange* const* all) {
    for (int i = 0; i < meeting.size(); ++i) all[i]->received = all[all[i]->from_lane]->given;
  });
  return mine.received;
}

int lane() { return current->lane; }

void fence() {
  tsan::release(&current->fenced);
  tsan::acquire(&current->observed);
  may_preempt();
}

void order_atomic(const void* address) {
  may_preempt();
  void* const location = const_cast<void*>(address);
  tsan::hand_over(&current->fenced, location);
  tsan::hand_over(location, &current->observed);
}

}  // namespace simt
