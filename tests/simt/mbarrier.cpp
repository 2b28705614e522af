// mbarriers. Their state is the engine's; the memory holds a pattern, so that a write over it
// shows.
#include <cstring>
#include <ptx_sm90.cuh>

#include "engine.h"

namespace simt {
namespace {

constexpr uint64_t kPattern = 0x7265697272616221;
constexpr int kMostArrivals = (1 << 20) - 1;
constexpr int64_t kMostBytes = (1 << 20) - 1;  // outstanding
constexpr int kSpuriousOneIn = 4;              // a try_wait that could be true

size_t offset_of(const char* operation, const amp_ext::ptx::Mbarrier& barrier) {
  return shared_offset(operation, &barrier, sizeof(kPattern), alignof(uint64_t));
}

bool is_intact(const Block& block, size_t offset) {
  return memcmp(block.shared + offset, &kPattern, sizeof(kPattern)) == 0;
}

BarrierState& find(const char* operation, Block& block, size_t offset) {
  const auto found = block.mbarriers.find(offset);
  if (found == block.mbarriers.end())
    fail("%s: no mbarrier has been initialised at shared+%zu of %s", operation, offset,
         name(block).c_str());
  if (!is_intact(block, offset))
    fail("%s: the mbarrier at shared+%zu of %s has been overwritten", operation, offset,
         name(block).c_str());
  return found->second;
}

bool has_completed(const BarrierState& barrier, int parity) {
  return (barrier.phase & 1) != static_cast<uint64_t>(parity & 1);
}

void complete_phase_if_done(const char* operation, BarrierState& barrier, size_t offset) {
  if (barrier.bytes > kMostBytes || barrier.bytes < -kMostBytes)
    fail("%s: mbarrier at shared+%zu, phase %lu: %ld bytes are outstanding, of at most %ld",
         operation, offset, barrier.phase, barrier.bytes, kMostBytes);
  if (barrier.pending > 0) return;
  if (barrier.bytes < 0)
    fail("%s: mbarrier at shared+%zu, phase %lu: %ld bytes more than were expected", operation,
         offset, barrier.phase, -barrier.bytes);
  if (barrier.bytes > 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  wake_all(barrier.waiting);
}

void arrive(const char* operation, BarrierState& barrier, size_t offset, int bytes) {
  if (barrier.pending == 0)
    fail(
        "%s: over-arrival at the mbarrier at shared+%zu: phase %lu expects %d arrivals, and all "
        "have come",
        operation, offset, barrier.phase, barrier.expected);
  --barrier.pending;
  barrier.bytes += bytes;
  complete_phase_if_done(operation, barrier, offset);
  may_preempt();
}

void arrive(const char* operation, amp_ext::ptx::Mbarrier& barrier, int bytes) {
  const size_t offset = offset_of(operation, barrier);
  arrive(operation, find(operation, *current->block, offset), offset, bytes);
}

std::string describe(const Block& block, size_t offset) {
  const BarrierState& barrier = block.mbarriers.at(offset);
  return text("wait at the mbarrier at shared+%zu, phase %lu, for %d arrivals and %ld bytes",
              offset, barrier.phase, barrier.pending, barrier.bytes);
}

}  // namespace

BarrierState& mbarrier_for_others(const char* operation, Block& block, size_t offset) {
  BarrierState& barrier = find(operation, block, offset);
  if (!barrier.fenced)
    fail(
        "%s: thread %d, which initialised the mbarrier at shared+%zu of %s, has not executed "
        "fence_mbarrier_init",
        operation, barrier.initialiser->number, offset, name(block).c_str());
  return barrier;
}

void complete_bytes(Block& block, size_t offset, int64_t bytes) {
  BarrierState& barrier = find("tma_load", block, offset);
  barrier.bytes -= bytes;
  complete_phase_if_done("tma_load", barrier, offset);
}

}  // namespace simt

namespace amp_ext::ptx {

using namespace simt;

void mbarrier_init(Mbarrier& barrier, int arrivals) {
  const size_t offset = offset_of("mbarrier_init", barrier);
  Block& block = *current->block;
  if (arrivals < 1 || arrivals > kMostArrivals)
    fail("mbarrier_init: %d arrivals at shared+%zu", arrivals, offset);
  if (block.mbarriers.count(offset))
    fail("mbarrier_init: there is a live mbarrier at shared+%zu", offset);
  BarrierState& made = block.mbarriers[offset];
  made.expected = made.pending = arrivals;
  made.initialiser = current;
  memcpy(&barrier, &kPattern, sizeof(kPattern));
}

void fence_mbarrier_init() {
  for (auto& [offset, barrier] : current->block->mbarriers)
    barrier.fenced |= barrier.initialiser == current;
  may_preempt();
}

void mbarrier_arrive(Mbarrier& barrier) { arrive("mbarrier_arrive", barrier, 0); }

void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  arrive("mbarrier_arrive_expect_tx", barrier, bytes);
}

void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
  constexpr char kOperation[] = "mbarrier_arrive_cluster";
  const size_t offset = offset_of(kOperation, barrier);
  Block& block = current->block->cluster.at(rank, kOperation);
  BarrierState& remote = &block == current->block ? find(kOperation, block, offset)
                                                  : mbarrier_for_others(kOperation, block, offset);
  arrive(kOperation, remote, offset, 0);
}

bool mbarrier_try_wait(Mbarrier& barrier, int parity) {
  const size_t offset = offset_of("mbarrier_try_wait", barrier);
  Block& block = *current->block;
  const BarrierState& mine = find("mbarrier_try_wait", block, offset);
  if (has_completed(mine, parity)) return random(kSpuriousOneIn) != 0;
  poll([&block, offset] { return describe(block, offset); });
  return false;
}

void mbarrier_wait(Mbarrier& barrier, int parity) {
  const size_t offset = offset_of("mbarrier_wait", barrier);
  Block& block = *current->block;
  BarrierState& mine = find("mbarrier_wait", block, offset);
  while (!has_completed(mine, parity)) {
    mine.waiting.push_back(current);
    suspend([&block, offset] { return describe(block, offset); });
  }
}

}  // namespace amp_ext::ptx
