// A launch: clusters of blocks come and go, the warp of the highest priority runs, and a warp loses
// its priority now and then. Order at random finds less: threads then stay close together.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr size_t kMostSharedUnasked = 48 << 10;  // without cudaFuncSetAttribute
constexpr int kMostThreads = 1024;
constexpr int kMostClusterBlocks = 8;
constexpr uint64_t kPriorities = 1 << 20;
constexpr int kDemoteOneIn = 256;    // steps of the scheduler
constexpr int kPreemptOneIn = 4;     // calls of may_preempt
constexpr int kMostIdleRounds = 64;  // in which all that can run polls

std::mt19937_64 generator;
std::deque<std::unique_ptr<Cluster>> resident;
std::vector<std::unique_ptr<Cluster>> ended;
std::map<const void*, size_t> shared_limits;
std::vector<Thread*> polling;
int idle_rounds;
const std::function<void()>* thread_body;
uint64_t launch_start, launch_end;  // tokens

size_t volume(dim3 n) { return static_cast<size_t>(n.x) * n.y * n.z; }

void demote(Warp& warp) { warp.priority = random(kPriorities); }

void run_thread() {
  tsan::acquire(&launch_start);
  (*thread_body)();
  check_copies_at_exit(*current);
  check_wgmmas_at_exit(*current->warp);
  tsan::release(&launch_end);
  current->exited = true;
  --current->block->running;
  current->fiber.leave_for_good();
}

// A sanitizer is about to end the process.
void say_where() {
  if (current) fprintf(stderr, "simt: the above happened in %s\n", name(*current).c_str());
}

Warp* most_urgent() {
  Warp* best = nullptr;
  for (const auto& cluster : resident) {
    for (Block& block : cluster->blocks) {
      for (Warp& warp : block.warps) {
        if (warp.ready && (!best || warp.priority > best->priority)) best = &warp;
      }
    }
  }
  return best;
}

// Runs every lane that is ready, from a random one on.
void run_warp(Warp& warp) {
  const uint32_t ready = warp.ready;
  const auto first = static_cast<unsigned>(random(kWarpThreads));
  for (unsigned i = 0; i < kWarpThreads && !has_fault(); ++i) {
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
  if (polling.empty() || ++idle_rounds > kMostIdleRounds) return false;
  const int rounds = idle_rounds;
  wake_all(polling);
  idle_rounds = rounds;
  return true;
}

size_t resident_blocks() {
  size_t blocks = 0;
  for (const auto& cluster : resident) blocks += cluster->blocks.size();
  return blocks;
}

void start_cluster(uint3 first, dim3 size, const cudaLaunchConfig_t& config) {
  resident.push_back(
      std::make_unique<Cluster>(first, size, config.blockDim, config.dynamicSmemBytes));
  for (Block& block : resident.back()->blocks) {
    for (Warp& warp : block.warps) warp.priority = kPriorities + random(kPriorities);
    for (Thread& thread : block.threads) {
      thread.fiber.start(run_thread);
      make_ready(thread);
    }
    ++counters.blocks;
  }
  polling.reserve(resident_blocks() * volume(config.blockDim));
  tsan::release(&launch_start);
}

void end_block(Block& block) {
  block.check_guard();
  check_copies_at_end(block);
  Cluster& cluster = block.cluster;
  for (const Block& other : cluster.blocks)
    if (other.running != 0) return;
  const auto at = std::find_if(resident.begin(), resident.end(),
                               [&](const auto& c) { return c.get() == &cluster; });
  // A block that gets this one's fibers would count as ordered after it.
  if constexpr (tsan::kOn) ended.push_back(std::move(*at));
  resident.erase(at);
}

void run_grid(const cudaLaunchConfig_t& config, dim3 cluster) {
  const dim3 clusters(config.gridDim.x / cluster.x, config.gridDim.y / cluster.y,
                      config.gridDim.z / cluster.z);
  std::vector<unsigned> order(volume(clusters));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  size_t started = 0;
  const auto has_room = [&] {
    return resident.empty() ||
           resident_blocks() + volume(cluster) <= static_cast<size_t>(options.resident_blocks);
  };
  for (;;) {
    while (started < order.size() && has_room()) {
      const unsigned i = order[started++];
      const uint3 first{i % clusters.x * cluster.x, i / clusters.x % clusters.y * cluster.y,
                        i / clusters.x / clusters.y * cluster.z};
      start_cluster(first, cluster, config);
    }
    advance_now_and_then();
    Warp* warp = most_urgent();
    if (!warp && (advance_needed() || look_again())) continue;
    if (!warp && resident.empty()) return;
    if (!warp) return set_fault(deadlock());
    if (random(kDemoteOneIn) == 0) demote(*warp);
    Block& block = *warp->lanes[0]->block;
    run_warp(*warp);
    if (has_fault()) return;
    if (block.running == 0) end_block(block);
    if (has_fault()) return;
  }
}

// Returns what is wrong with a launch; nothing if it can run.
std::string refusal(const cudaLaunchConfig_t& config, const void* kernel, dim3 cluster) {
  const size_t blocks = volume(config.gridDim), threads = volume(config.blockDim);
  if (blocks == 0 || blocks > INT32_MAX || threads == 0 || threads > kMostThreads)
    return text("a launch of %zu blocks of %zu threads", blocks, threads);
  const auto raised = shared_limits.find(kernel);
  const size_t limit = raised == shared_limits.end() ? kMostSharedUnasked : raised->second;
  if (config.dynamicSmemBytes > limit)
    return text("a launch with %zu bytes of shared memory, of which the kernel may have %zu",
                config.dynamicSmemBytes, limit);
  if (volume(cluster) == 0 || volume(cluster) > kMostClusterBlocks)
    return text("a launch with clusters of %zu blocks", volume(cluster));
  const dim3 grid = config.gridDim;
  if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0)
    return text("a launch of %ux%ux%u blocks in clusters of %ux%ux%u", grid.x, grid.y, grid.z,
                cluster.x, cluster.y, cluster.z);
  return "";
}

}  // namespace

uint64_t random(uint64_t below) { return generator() % below; }

void make_ready(Thread& thread) {
  thread.warp->ready |= 1u << thread.lane;
  idle_rounds = 0;
}

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

const std::deque<std::unique_ptr<Cluster>>& resident_clusters() { return resident; }

bool raise_shared_limit(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMostShared) return false;
  shared_limits[kernel] = bytes;
  return true;
}

bool read_attributes(const cudaLaunchConfig_t& config, dim3* cluster) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& n = attribute.val.clusterDim;
      *cluster = dim3(n.x, n.y, n.z);
    } else if (attribute.id != cudaLaunchAttributeProgrammaticStreamSerialization) {
      set_fault(text("a launch with attribute %d", static_cast<int>(attribute.id)));
      return false;
    }
  }
  return true;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   const std::function<void()>& thread) {
  on_death(say_where);
  tsan::launching_fiber = tsan::this_fiber();
  clear_fault();
  ++counters.launches;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  dim3 cluster;
  if (!read_attributes(config, &cluster)) return cudaErrorInvalidValue;
  if (const std::string reason = refusal(config, kernel, cluster); !reason.empty()) {
    set_fault(reason);
    return cudaErrorInvalidConfiguration;
  }
  generator.seed(options.seed);
  thread_body = &thread;
  try {
    run_grid(config, cluster);
  } catch (const Stopped&) {
    current = nullptr;
  }
  tsan::acquire(&launch_end);
  polling.clear();
  forget_copies();
  ended.clear();
  resident.clear();
  return has_fault() ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace simt
