// Votes, barriers of warps, blocks and clusters, and the pool of registers: all of them meetings.
#include <algorithm>
#include <ptx_sm90.cuh>
#include <string_view>

#include "engine.h"
#include "sanitizers.h"

namespace simt {

bool Operation::operator==(const Operation& other) const {
  return std::string_view(name) == other.name && std::ranges::equal(operands, other.operands);
}

std::string Operation::text() const {
  std::string result = name;
  for (const uint64_t operand : operands)
    if (operand) result += simt::text(operand < 1 << 16 ? " %lu" : " 0x%lx", operand);
  return result;
}

Meeting::Meeting(int size, std::string place)
    : size_(size), place_(std::move(place)), arguments_(size) {
  arrived_.reserve(size);
  waiting_.reserve(size);
}

bool Meeting::come(const Operation& operation, int place, void* argument, bool ordered) {
  if (arrived_.empty()) operation_ = operation;
  if (!(operation_ == operation)) {
    std::vector<int> others;
    for (const Thread* thread : arrived_) others.push_back(thread->number);
    fail("divergent collective: %s, while threads %s of %s are in %s", operation.text().c_str(),
         ranges(others).c_str(), place_.c_str(), operation_.text().c_str());
  }
  arguments_[place] = argument;
  if (ordered) tsan::release(token());
  arrived_.push_back(current);
  return missing() == 0;
}

void Meeting::release(bool ordered) {
  if (ordered) tsan::acquire(token());
  ++round_;
  arrived_.clear();
  wake_all(waiting_);
  may_preempt();
}

void Meeting::wait(bool ordered) {
  uint64_t* const mine = token();
  waiting_.push_back(current);
  suspend([this] {
    return "wait in " + operation_.text() + " for " + std::to_string(missing()) + " more of " +
           place_;
  });
  if (ordered) tsan::acquire(mine);
}

void Meeting::barrier(const Operation& operation) {
  if (come(operation, 0, nullptr, true))
    release(true);
  else
    wait(true);
}

void Meeting::arrive(const Operation& operation) {
  if (come(operation, 0, nullptr, true)) release(true);
}

bool Meeting::has(const Thread& thread) const {
  return std::ranges::find(arrived_, &thread) != arrived_.end();
}

// ---- warps -------------------------------------------------------------------------------------

Warp& whole_warp(const char* operation) {
  Warp& warp = *current->warp;
  if (warp.meeting.size() != kWarpThreads)
    fail("%s: the warp has %d lanes", operation, warp.meeting.size());
  return warp;
}

const uint64_t* warp_values(const char* operation, uint64_t mine) {
  Warp& warp = whole_warp(operation);
  warp.meeting.meet({operation}, current->lane, &mine, false, [&](uint64_t* const* all) {
    for (int i = 0; i < kWarpThreads; ++i) warp.values[i] = *all[i];
  });
  return warp.values;
}

int lane() { return current->lane; }

// ---- blocks ------------------------------------------------------------------------------------

namespace {

// The named barrier, which the first thread to come makes one of so many threads.
Meeting& named_barrier(const char* operation, int id, int threads) {
  whole_warp(operation);
  Meeting& barrier = current->block->named_barriers[id];
  if (threads > static_cast<int>(current->block->threads.size()))
    fail("%s: barrier %d waits for %d threads of a block of %zu", operation, id, threads,
         current->block->threads.size());
  if (barrier.has(*current))
    fail("%s: this thread has come to barrier %d before, and it still waits for others", operation,
         id);
  if (barrier.empty()) barrier.resize(threads);
  return barrier;
}

Operation of_threads(int threads) { return {"barrier of", {static_cast<uint64_t>(threads)}}; }

}  // namespace

void barrier_sync(int id, int threads) {
  named_barrier("barrier_sync", id, threads).barrier(of_threads(threads));
}

void barrier_arrive(int id, int threads) {
  named_barrier("barrier_arrive", id, threads).arrive(of_threads(threads));
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

void Warpgroup::resize_registers() {
  const int needed = (wanted - registers) * kWarpgroupThreads;
  if (needed > block.registers) return;
  block.registers -= needed;
  registers = wanted;
  wake_all(waiting_for_registers);
}

void setmaxnreg(int registers, bool increase) {
  const char* const operation = increase ? "setmaxnreg.inc" : "setmaxnreg.dec";
  Warpgroup& group = whole_warpgroup(operation);
  if (increase ? registers < group.registers : registers > group.registers)
    fail("%s %d: the threads have %d registers", operation, registers, group.registers);
  int nothing;
  const Operation all{operation, {static_cast<uint64_t>(registers)}};
  group.meeting.meet(all, current->number % kWarpgroupThreads, &nothing, false, [&](int* const*) {
    group.wanted = registers;
    group.resize_registers();
    for (Warpgroup& other : group.block.warpgroups) other.resize_registers();
  });
  while (group.registers != registers) {
    group.waiting_for_registers.push_back(current);
    suspend([&group] {
      return text("wait, as setmaxnreg.inc %d needs %d registers, the pool has %d", group.wanted,
                  (group.wanted - group.registers) * kWarpgroupThreads, group.block.registers);
    });
  }
}

}  // namespace simt

namespace amp_ext::ptx {

using namespace simt;

bool warp_any(bool predicate) {
  const uint64_t* values = warp_values("warp_any", predicate);
  return std::any_of(values, values + kWarpThreads, [](uint64_t value) { return value != 0; });
}

uint32_t warp_ballot(bool predicate) {
  const uint64_t* values = warp_values("warp_ballot", predicate);
  uint32_t ballot = 0;
  for (int i = 0; i < kWarpThreads; ++i) ballot |= static_cast<uint32_t>(values[i]) << i;
  return ballot;
}

uint32_t warp_max(uint32_t value) {
  const uint64_t* values = warp_values("warp_max", value);
  return static_cast<uint32_t>(*std::max_element(values, values + kWarpThreads));
}

void warp_sync() { whole_warp("warp_sync").meeting.barrier({"warp_sync"}); }

bool warp_elect() {
  warp_values("warp_elect", 0);
  return static_cast<uint64_t>(lane()) == options.seed % kWarpThreads;
}

void block_sync() { current->block->barrier.barrier({"block_sync"}); }

bool block_any(bool predicate) {
  Meeting& meeting = current->block->barrier;
  meeting.meet({"block_any"}, current->number, &predicate, true, [&](bool* const* predicates) {
    bool result = false;
    for (int i = 0; i < meeting.size(); ++i) result |= *predicates[i];
    for (int i = 0; i < meeting.size(); ++i) *predicates[i] = result;
  });
  return predicate;
}

int cluster_rank() { return current->block->rank; }

int cluster_size() { return static_cast<int>(current->block->cluster.blocks.size()); }

void cluster_arrive() {
  if (current->in_cluster_barrier) fail("cluster_arrive: twice without a cluster_wait between");
  Meeting& barrier = current->block->cluster.barrier;
  current->in_cluster_barrier = true;
  current->cluster_round = barrier.round();
  barrier.arrive({"cluster_wait"});
}

void cluster_wait() {
  if (!current->in_cluster_barrier) fail("cluster_wait: without a cluster_arrive before");
  Meeting& barrier = current->block->cluster.barrier;
  current->in_cluster_barrier = false;
  if (barrier.round() == current->cluster_round) barrier.wait(true);
}

}  // namespace amp_ext::ptx
