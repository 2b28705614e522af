// Clusters, blocks and their shared memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ptx/sm90.cuh>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr size_t kGuardBytes = 1024;     // behind the shared memory
constexpr unsigned char kPoison = 0xff;  // a NaN in every floating-point type
constexpr int kNamedBarriers = 16;       // of which kernels use 1 to 15
constexpr int kRegisters = 65536;        // of a multiprocessor, which runs one block
constexpr int kMostRegisters = 255;      // of a thread when it starts
constexpr size_t kMarkBytes = 16;

size_t with_guard(size_t shared_bytes) {
  return (shared_bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes + kGuardBytes;
}

bool holds(const Block& block, const void* pointer) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  return at >= block.shared && at < block.shared + block.shared_bytes;
}

void set_marks(Block& block, size_t offset, size_t bytes, Block::Mark mark) {
  for (size_t i = offset / kMarkBytes; i * kMarkBytes < offset + bytes; ++i) block.marks[i] = mark;
}

}  // namespace

size_t volume(dim3 n) { return static_cast<size_t>(n.x) * n.y * n.z; }

uint3 index_of(unsigned number, dim3 n) {
  return {number % n.x, number / n.x % n.y, number / n.x / n.y};
}

Block::Block(Cluster& cluster, int rank, unsigned number, size_t shared_bytes)
    : cluster(cluster),
      rank(rank),
      index(index_of(number, gridDim)),
      shared_bytes(shared_bytes),
      shared(static_cast<unsigned char*>(aligned_alloc(1024, with_guard(shared_bytes)))),
      marks(shared_bytes / kMarkBytes + 1),
      barrier(volume(blockDim), "the block"),
      running(barrier.size()) {
  memset(shared, kPoison, with_guard(shared_bytes));
  asan::poison(shared + shared_bytes, with_guard(shared_bytes) - shared_bytes);
  const int of_thread = std::min(kMostRegisters, kRegisters / running) / 8 * 8;
  for (int i = 0; i < kNamedBarriers; ++i)
    named_barriers.emplace_back(running, "barrier " + std::to_string(i));
  for (int i = 0; i < running / kWarpgroupThreads; ++i)
    warpgroups.push_back({Meeting(kWarpgroupThreads, "warpgroup " + std::to_string(i)), of_thread});
  for (int i = 0; i < running; ++i) {
    if (i % kWarpThreads == 0)
      warps.emplace_back(i / kWarpThreads, std::min(kWarpThreads, running - i));
    threads.emplace_back(this, &warps.back(), index_of(i, blockDim), i, i % kWarpThreads);
    warps.back().lanes.push_back(&threads.back());
  }
}

Block::~Block() {
  asan::unpoison(shared, with_guard(shared_bytes));
  free(shared);
}

void Block::check_guard() const {
  for (size_t i = shared_bytes; i < with_guard(shared_bytes); ++i) {
    if (shared[i] != kPoison)
      return set_fault(text("shared overrun: %s wrote at byte %zu of %zu, seen when it ended",
                            name(*this).c_str(), i, shared_bytes));
  }
}

Cluster::Cluster(unsigned first_block, int size, size_t shared_bytes)
    : barrier(size * volume(blockDim), "the cluster") {
  for (int i = 0; i < size; ++i) blocks.emplace_back(*this, i, first_block + i, shared_bytes);
}

Block& Cluster::at(int rank, const char* operation) {
  const int size = static_cast<int>(blocks.size());
  if (rank < 0 || rank >= size) fail("%s: block %d of a cluster of %d", operation, rank, size);
  if (blocks[rank].running == 0) fail("%s: block %d of the cluster has exited", operation, rank);
  return blocks[rank];
}

void* shared_memory(size_t bytes) {
  const Block& block = *current->block;
  if (bytes > block.shared_bytes)
    fail("shared overrun: %zu bytes of shared memory are used, %zu were asked for", bytes,
         block.shared_bytes);
  return block.shared;
}

bool is_shared(const void* address) {
  for (const Cluster& cluster : resident)
    for (const Block& block : cluster.blocks)
      if (holds(block, address)) return true;
  return false;
}

size_t shared_offset(const char* operation, const void* pointer, size_t bytes, size_t alignment) {
  const Block& block = *current->block;
  if (!holds(block, pointer))
    fail("%s: %p is not in the block's shared memory", operation, pointer);
  const size_t offset = static_cast<const unsigned char*>(pointer) - block.shared;
  if (offset + bytes > block.shared_bytes)
    fail("%s: shared overrun: %zu bytes at shared+%zu of %zu", operation, bytes, offset,
         block.shared_bytes);
  if (offset % alignment != 0)
    fail("%s: misaligned: shared+%zu, which is no multiple of %zu", operation, offset, alignment);
  return offset;
}

void wrote_shared(const void* to, size_t bytes) {
  const size_t offset = shared_offset("store_shared", to, bytes, 1);
  set_marks(*current->block, offset, bytes, {current->number, current->proxy_fences});
}

void check_marks(const char* operation, const Block& block, size_t offset, size_t bytes) {
  for (size_t i = offset / kMarkBytes; i * kMarkBytes < offset + bytes; ++i) {
    const Block::Mark& mark = block.marks[i];
    if (mark.writer < 0 || mark.proxy_fences != block.threads[mark.writer].proxy_fences) continue;
    fail(
        "missing proxy fence: %s reads shared+%zu, which thread %d wrote without a "
        "fence_proxy_async behind it",
        operation, i * kMarkBytes, mark.writer);
  }
}

void poison(Block& block, size_t offset, size_t bytes) {
  memset(block.shared + offset, kPoison, bytes);
  set_marks(block, offset, bytes, {});
}

void check_aligned(const char* operation, const void* address, size_t bytes) {
  const size_t off = reinterpret_cast<uintptr_t>(address) % bytes;
  if (off != 0) fail("%s: misaligned: %p, %zu bytes off", operation, address, off);
}

void check_global(const char* operation, const void* pointer, size_t bytes) {
  if (!current->alone) fail("%s before wait_for_previous_grid", operation);
  if (asan::is_poisoned(pointer, bytes))
    fail("%s: global overrun: %zu bytes at %p are not all memory", operation, bytes, pointer);
}

void load(const void* from, size_t bytes) {
  check_global("load", from, bytes);
  check_aligned("load", from, bytes);
  counters.bytes_loaded += bytes;
  ++current->loads;
}

void store(const void* to, size_t bytes) {
  check_global("store", to, bytes);
  check_aligned("store", to, bytes);
  counters.bytes_stored += bytes;
  if (holds(*current->block, to)) wrote_shared(to, bytes);
}

}  // namespace simt

namespace amp_ext::ptx {
using namespace simt;

uint32_t shared_address(const void* pointer) {
  return kSharedWindow + static_cast<uint32_t>(shared_offset("shared_address", pointer, 0, 1));
}

void fence_proxy_async() {
  ++current->proxy_fences;
  may_preempt();
}

}  // namespace amp_ext::ptx
