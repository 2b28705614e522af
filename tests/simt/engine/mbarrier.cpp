// mbarriers. Their state is the engine's; the memory holds a pattern, so that a write over it
// shows.
#include <cstring>
#include <ptx/sm90.cuh>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

using amp_ext::ptx::Mbarrier;

constexpr uint64_t kPattern = 0x7265697272616221;
constexpr int kMostArrivals = (1 << 20) - 1;
constexpr int64_t kMostBytes = (1 << 20) - 1;  // outstanding
constexpr int kSpuriousOneIn = 4;              // a try_wait that could be true

size_t offset_of(const char* operation, const Mbarrier& barrier) {
  return shared_offset(operation, &barrier, sizeof(kPattern), alignof(uint64_t));
}

BarrierState& find(const char* operation, Block& block, size_t offset) {
  const auto found = block.mbarriers.find(offset);
  if (found == block.mbarriers.end())
    fail("%s: no mbarrier has been initialised at shared+%zu of %s", operation, offset,
         name(block).c_str());
  if (memcmp(block.shared + offset, &kPattern, sizeof(kPattern)) != 0)
    fail("%s: the mbarrier at shared+%zu of %s has been overwritten", operation, offset,
         name(block).c_str());
  return found->second;
}

BarrierState& find(const char* operation, const Mbarrier& barrier) {
  return find(operation, *current->block, offset_of(operation, barrier));
}

void add_bytes(const char* operation, BarrierState& barrier, int64_t bytes) {
  barrier.bytes += bytes;
  if (std::abs(barrier.bytes) > kMostBytes)
    fail("%s: mbarrier at shared+%zu, phase %lu: %ld bytes are outstanding, of at most %ld",
         operation, barrier.offset, barrier.phase, barrier.bytes, kMostBytes);
  if (barrier.pending > 0) return;
  if (barrier.bytes < 0)
    fail("%s: mbarrier at shared+%zu, phase %lu: %ld bytes more than were expected", operation,
         barrier.offset, barrier.phase, -barrier.bytes);
  if (barrier.bytes > 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  wake_polling();
}

void arrive(const char* operation, BarrierState& barrier, int bytes = 0) {
  if (barrier.pending == 0)
    fail(
        "%s: over-arrival at the mbarrier at shared+%zu: phase %lu expects %d arrivals, and all "
        "have come",
        operation, barrier.offset, barrier.phase, barrier.expected);
  --barrier.pending;
  add_bytes(operation, barrier, bytes);
  may_preempt();
}

// As arrive, at a barrier of this block: only its threads see what this one wrote.
void arrive_here(const char* operation, const Mbarrier& mbarrier, int bytes = 0) {
  BarrierState& barrier = find(operation, mbarrier);
  tsan::release(&barrier);
  arrive(operation, barrier, bytes);
}

// Whether the phase of this parity has completed; if it has not, then after something happened.
bool has_completed(const char* operation, const Mbarrier& mbarrier, int parity) {
  BarrierState& barrier = find(operation, mbarrier);
  if (barrier.phase % 2 != static_cast<uint64_t>(parity & 1)) {
    tsan::acquire(&barrier);
    return true;
  }
  poll([&barrier] {
    return text("wait at the mbarrier at shared+%zu, phase %lu, for %d arrivals and %ld bytes",
                barrier.offset, barrier.phase, barrier.pending, barrier.bytes);
  });
  return false;
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
  add_bytes("tma_load", find("tma_load", block, offset), -bytes);
}

}  // namespace simt

namespace amp_ext::ptx {
using namespace simt;

void mbarrier_init(Mbarrier& barrier, int arrivals) {
  const size_t offset = offset_of("mbarrier_init", barrier);
  if (arrivals < 1 || arrivals > kMostArrivals)
    fail("mbarrier_init: %d arrivals at shared+%zu", arrivals, offset);
  const BarrierState state{offset, arrivals, arrivals, current};
  if (!current->block->mbarriers.emplace(offset, state).second)
    fail("mbarrier_init: there is a live mbarrier at shared+%zu", offset);
  memcpy(&barrier, &kPattern, sizeof(kPattern));
}

void fence_mbarrier_init() {
  for (auto& [offset, barrier] : current->block->mbarriers)
    barrier.fenced |= barrier.initialiser == current;
  may_preempt();
}

void mbarrier_arrive(Mbarrier& barrier) { arrive_here("mbarrier_arrive", barrier); }

void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  arrive_here("mbarrier_arrive_expect_tx", barrier, bytes);
}

void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
  constexpr char kOperation[] = "mbarrier_arrive_cluster";
  const size_t offset = offset_of(kOperation, barrier);
  Block& block = current->block->cluster.at(rank, kOperation);
  arrive(kOperation, &block == current->block ? find(kOperation, block, offset)
                                              : mbarrier_for_others(kOperation, block, offset));
}

bool mbarrier_try_wait(Mbarrier& barrier, int parity) {
  return has_completed("mbarrier_try_wait", barrier, parity) && random(kSpuriousOneIn) != 0;
}

void mbarrier_wait(Mbarrier& barrier, int parity) {
  while (!has_completed("mbarrier_wait", barrier, parity)) {
  }
}

}  // namespace amp_ext::ptx
