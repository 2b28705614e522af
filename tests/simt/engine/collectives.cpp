// Votes, barriers of warps, blocks and clusters, and the pool of registers: all of them meetings.
// Fences and atomic operations.
#include <algorithm>
#include <ptx/sm90.cuh>

#include "engine.h"
#include "sanitizers.h"

namespace simt {

std::string Operation::text() const {
  std::string result(name);
  for (const uint64_t operand : operands)
    if (operand) result += simt::text(operand < 1 << 16 ? " %lu" : " 0x%lx", operand);
  return result;
}

Meeting::Meeting(int size, std::string place)
    : size_(size), place_(std::move(place)), arguments_(size) {
  arrived_.reserve(size);
  waiting_.reserve(size);
}

bool Meeting::come(const Operation& operation, int place, void* argument) {
  if (arrived_.empty()) operation_ = operation;
  if (operation_ != operation) {
    std::vector<int> others;
    for (const Thread* thread : arrived_) others.push_back(thread->number);
    fail("divergent collective: %s, while threads %s of %s are in %s", operation.text().c_str(),
         ranges(others).c_str(), place_.c_str(), operation_.text().c_str());
  }
  arguments_[place] = argument;
  if (token()) tsan::release(token());
  arrived_.push_back(current);
  return missing() == 0;
}

void Meeting::release() {
  if (token()) tsan::acquire(token());
  ++round_;
  arrived_.clear();
  wake_all(waiting_);
  may_preempt();
}

void Meeting::wait() {
  uint64_t* const mine = token();
  waiting_.push_back(current);
  suspend([this] {
    return text("wait in %s for %zu more of %s", operation_.text().c_str(), missing(),
                place_.c_str());
  });
  if (mine) tsan::acquire(mine);
}

Warp& whole_warp(const char* operation) {
  Warp& warp = *current->warp;
  if (warp.meeting.size() != kWarpThreads)
    fail("%s: the warp has %d lanes", operation, warp.meeting.size());
  return warp;
}

const uint64_t* warp_values(const char* operation, uint64_t mine) {
  Warp& warp = whole_warp(operation);
  warp.meeting.meet({operation}, current->lane, &mine, [&](uint64_t* const* all) {
    for (int i = 0; i < kWarpThreads; ++i) warp.values[i] = *all[i];
  });
  return warp.values;
}

static int count(const char* operation, bool predicate) {
  const uint64_t* const values = warp_values(operation, predicate);
  return static_cast<int>(std::count(values, values + kWarpThreads, uint64_t{1}));
}

int lane() { return current->lane; }

void named_barrier(int id, int threads) {
  whole_warp("barrier_sync");
  Meeting& barrier = current->block->named_barriers[id];
  if (barrier.empty()) barrier.resize(threads);
  barrier.barrier({"barrier of", {static_cast<uint64_t>(threads)}, true});
}

// ---- warpgroups: registers ---------------------------------------------------------------------

Warpgroup& whole_warpgroup(const char* operation) {
  Block& block = *current->block;
  const size_t i = current->number / kWarpgroupThreads;
  if (i >= block.warpgroups.size())
    fail("%s: the last %zu threads of the block are no warpgroup", operation,
         block.threads.size() % kWarpgroupThreads);
  return block.warpgroups[i];
}

void setmaxnreg(int registers, bool increase) {
  const char* const operation = increase ? "setmaxnreg.inc" : "setmaxnreg.dec";
  Warpgroup& group = whole_warpgroup(operation);
  int& pool = current->block->registers;
  if (increase ? registers < group.registers : registers > group.registers)
    fail("%s %d: the threads have %d registers", operation, registers, group.registers);
  group.meeting.barrier({operation, {static_cast<uint64_t>(registers)}});
  const auto needed = [&] { return (registers - group.registers) * kWarpgroupThreads; };
  while (needed() > pool) {
    poll([&pool, needed, registers] {
      return text("wait, as setmaxnreg.inc %d needs %d registers, the pool has %d", registers,
                  needed(), pool);
    });
  }
  if (needed() == 0) return;  // another thread of the warpgroup has changed them
  pool -= needed();
  group.registers = registers;
  wake_polling();
}

// ---- order between blocks ----------------------------------------------------------------------

// A fence and an atomic operation behind it publish; an atomic operation and a fence behind it
// receive.
void order_atomic(void* location) {
  check_global("an atomic operation", location, sizeof(uint32_t));
  may_preempt();
  tsan::hand_over(&current->fenced, location);
  tsan::hand_over(location, &current->observed);
}

}  // namespace simt

namespace amp_ext::ptx {
using namespace simt;

bool warp_any(bool predicate) { return count("warp_any", predicate) > 0; }
int warp_count(bool predicate) { return count("warp_count", predicate); }

void warp_sync() { whole_warp("warp_sync").meeting.barrier({"warp_sync", {}, true}); }

bool warp_elect() {
  warp_values("warp_elect", 0);
  return static_cast<uint64_t>(lane()) == options.seed % kWarpThreads;
}

void block_sync() { current->block->barrier.barrier({"block_sync", {}, true}); }

bool block_any(bool predicate) {
  Meeting& meeting = current->block->barrier;
  meeting.meet({"block_any", {}, true}, current->number, &predicate, [&](bool* const* predicates) {
    bool result = false;
    for (int i = 0; i < meeting.size(); ++i) result |= *predicates[i];
    for (int i = 0; i < meeting.size(); ++i) *predicates[i] = result;
  });
  return predicate;
}

int cluster_rank() { return current->block->rank; }

void cluster_sync() { current->block->cluster.barrier.barrier({"cluster_sync", {}, true}); }

void wait_for_previous_grid() { current->alone = true; }

void device_fence() {
  tsan::release(&current->fenced);
  tsan::acquire(&current->observed);
  may_preempt();
}

}  // namespace amp_ext::ptx
