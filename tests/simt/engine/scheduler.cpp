// A launch: clusters of blocks come and go, the warp of the highest priority runs, and a warp loses
// its priority now and then. Order at random finds less: threads then stay close together.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr size_t kMostShared = 232448;           // bytes of a block
constexpr size_t kMostSharedUnasked = 48 << 10;  // without cudaFuncSetAttribute
constexpr unsigned kMostBlocksAcross = 65535;    // along y, and z
constexpr unsigned kMostThreads = 1024, kMostThreadsDeep = 64;
constexpr unsigned kMostClusterBlocks = 8;
constexpr uint64_t kPriorities = 1 << 20;
constexpr int kDemoteOneIn = 256;    // steps of the scheduler
constexpr int kPreemptOneIn = 4;     // calls of may_preempt
constexpr int kMostIdleRounds = 64;  // in which all that can run polls

std::mt19937_64 generator;
std::list<Cluster> ended;
std::map<const void*, size_t> shared_limits;
std::vector<Thread*> polling;
int idle_rounds;
const std::function<void()>* thread_body;
uint64_t launch_start, launch_end;  // tokens
int64_t most_loads;                 // of a thread of this launch
bool begins_early;                  // which need not wait for the one before

void demote(Warp& warp) { warp.priority = random(kPriorities); }

void make_ready(Thread& thread) {
  thread.warp->ready |= 1u << thread.lane;
  idle_rounds = 0;
}

void run_thread() {
  tsan::acquire(&launch_start);
  current->alone = !begins_early;
  (*thread_body)();
  if (!current->alone) fail("exit without wait_for_previous_grid");
  check_copies_at_exit(*current);
  check_wgmmas_at_exit(*current->warp);
  tsan::release(&launch_end);
  current->exited = true;
  most_loads = std::max(most_loads, current->loads);
  --current->block->running;
}

// A sanitizer is about to end the process.
void say_where() {
  if (current) fprintf(stderr, "simt: the above happened in %s\n", name(*current).c_str());
}

Warp* most_urgent() {
  Warp* best = nullptr;
  for (Cluster& cluster : resident)
    for (Block& block : cluster.blocks)
      for (Warp& warp : block.warps)
        if (warp.ready && (!best || warp.priority > best->priority)) best = &warp;
  return best;
}

// Runs every lane that is ready, from a random one on.
void run_warp(Warp& warp) {
  const uint32_t ready = warp.ready;
  const auto first = static_cast<unsigned>(random(kWarpThreads));
  for (unsigned i = 0; i < kWarpThreads && fault.empty(); ++i) {
    const unsigned lane = (first + i) % kWarpThreads;
    if (!(ready >> lane & 1)) continue;
    warp.ready &= ~(1u << lane);
    current = warp.lanes[lane];
    threadIdx = current->index;
    blockIdx = current->block->index;
    ++counters.switches;
    current->fiber.enter();
    current = nullptr;
  }
}

// Has all who poll look again; false if that has been in vain too often.
bool look_again() {
  if (polling.empty() || idle_rounds == kMostIdleRounds) return false;
  const int rounds = idle_rounds + 1;
  wake_all(polling);
  idle_rounds = rounds;
  return true;
}

void start_cluster(unsigned first_block, int blocks, size_t shared_bytes) {
  for (Block& block : resident.emplace_back(first_block, blocks, shared_bytes).blocks) {
    for (Warp& warp : block.warps) warp.priority = kPriorities + random(kPriorities);
    for (Thread& thread : block.threads) {
      thread.fiber.start(run_thread);
      make_ready(thread);
    }
    ++counters.blocks;
  }
  polling.reserve(resident.size() * blocks * volume(blockDim));
  tsan::release(&launch_start);
}

void end_block(Block& block) {
  block.check_guard();
  check_copies_at_end(block);
  for (const Block& other : block.cluster.blocks)
    if (other.running != 0) return;
  const auto at = std::ranges::find(resident, &block.cluster, [](Cluster& c) { return &c; });
  // A block that gets this one's fibers would count as ordered after it.
  if (tsan::is_on())
    ended.splice(ended.end(), resident, at);
  else
    resident.erase(at);
}

void run_grid(int cluster_blocks, size_t shared_bytes) {
  std::deque<unsigned> order(volume(gridDim) / cluster_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  const size_t room = std::max(options.resident_blocks / cluster_blocks, 1);
  while (fault.empty()) {
    while (!order.empty() && resident.size() < room) {
      start_cluster(order.front() * cluster_blocks, cluster_blocks, shared_bytes);
      order.pop_front();
    }
    advance_now_and_then();
    Warp* const warp = most_urgent();
    if (!warp && (advance_needed() || look_again())) continue;
    if (!warp && resident.empty()) return;
    if (!warp) return set_fault(deadlock());
    if (random(kDemoteOneIn) == 0) demote(*warp);
    Block& block = *warp->lanes[0]->block;
    run_warp(*warp);
    if (block.running == 0 && fault.empty()) end_block(block);
  }
}

// Finds the number of blocks in a cluster and whether it begins early. Returns what is wrong with a
// launch; nothing if it can run.
std::string refusal(const cudaLaunchConfig_t& config, const void* kernel, unsigned* cluster) {
  const size_t blocks = volume(config.gridDim), threads = volume(config.blockDim);
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (blocks == 0 || blocks > INT32_MAX || std::max(grid.y, grid.z) > kMostBlocksAcross)
    return text("a launch of %ux%ux%u blocks", grid.x, grid.y, grid.z);
  if (threads == 0 || threads > kMostThreads || block.z > kMostThreadsDeep)
    return text("a launch of blocks of %ux%ux%u threads", block.x, block.y, block.z);
  const size_t limit = std::max(shared_limits[kernel], kMostSharedUnasked);
  if (config.dynamicSmemBytes > limit)
    return text("a launch with %zu bytes of shared memory, of which the kernel may have %zu",
                config.dynamicSmemBytes, limit);
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    const auto& n = attribute.val.clusterDim;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      begins_early = attribute.val.programmaticStreamSerializationAllowed;
      continue;
    }
    if (attribute.id != cudaLaunchAttributeClusterDimension)
      return text("a launch with attribute %d", static_cast<int>(attribute.id));
    if (n.x == 0 || n.x > kMostClusterBlocks || n.y != 1 || n.z != 1)
      return text("a launch with clusters of %ux%ux%u blocks, not 1 to %u along x", n.x, n.y, n.z,
                  kMostClusterBlocks);
    if (config.gridDim.x % n.x != 0)
      return text("a launch of %u blocks along x in clusters of %u", config.gridDim.x, n.x);
    *cluster = n.x;
  }
  return "";
}

}  // namespace

uint64_t random(uint64_t below) { return generator() % below; }

void wake_all(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) make_ready(*thread);
  threads.clear();
}

void wake_polling() { wake_all(polling); }

void suspend(std::function<std::string()> waits) {
  current->waits = std::move(waits);
  current->fiber.leave();
}

void poll(std::function<std::string()> waits) {
  polling.push_back(current);
  suspend(std::move(waits));
}

void may_preempt() {
  if (random(kPreemptOneIn) != 0) return;
  demote(*current->warp);
  make_ready(*current);
  suspend({});
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   const std::function<void()>& thread) {
  on_death(say_where);
  tsan::launching_fiber = tsan::this_fiber();
  fault.clear();
  ++counters.launches;
  unsigned cluster_blocks = 1;
  begins_early = false;
  if (const std::string reason = refusal(config, kernel, &cluster_blocks); !reason.empty()) {
    set_fault(reason);
    return cudaErrorInvalidConfiguration;
  }
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  generator.seed(options.seed);
  thread_body = &thread;
  most_loads = 0;
  try {
    run_grid(static_cast<int>(cluster_blocks), config.dynamicSmemBytes);
  } catch (const Stopped&) {
    current = nullptr;
  }
  tsan::acquire(&launch_end);
  counters.most_loads += most_loads;
  polling.clear();
  forget_copies();
  ended.clear();
  resident.clear();
  return fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace simt

// ---- the part of the CUDA runtime that launchers call, and what Python calls --------------------

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > simt::kMostShared)
    return cudaErrorInvalidValue;
  simt::shared_limits[kernel] = value;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return simt::fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

const char* cudaGetErrorString(cudaError_t) { return simt::fault.c_str(); }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const bool found = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = found ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  if (status) *status = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

extern "C" {

void simt_set_options(uint64_t seed, int resident_blocks, int multiprocessors) {
  simt::options = {seed, resident_blocks, multiprocessors};
}

const char* simt_report() { return simt::fault.c_str(); }
void simt_counters(simt::Counters* result) { *result = simt::counters; }

}  // extern "C"
