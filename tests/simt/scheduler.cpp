// A launch: blocks come and go, the warp of the highest priority runs, and a warp loses its
// priority now and then. Order at random finds less: threads then stay close together.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr size_t kMostShared = 48 << 10;  // without cudaFuncSetAttribute
constexpr size_t kGuardBytes = 1024;      // behind the shared memory
constexpr unsigned char kPoison = 0xff;   // a NaN in every floating-point type
constexpr uint64_t kPriorities = 1 << 20;
constexpr int kDemoteOneIn = 256;  // steps of the scheduler
constexpr int kPreemptOneIn = 4;   // calls of may_preempt

std::mt19937_64 generator;
std::deque<Block*> resident;
std::vector<std::unique_ptr<Block>> ended;
const std::function<void()>* thread_body;
std::string fault;
uint64_t launch_start, launch_end;  // tokens

void demote(Warp& warp) { warp.priority = random(kPriorities); }

void run_thread() {
  tsan::acquire(&launch_start);
  (*thread_body)();
  tsan::release(&launch_end);
  current->exited = true;
  --current->block->running;
  current->fiber.leave_for_good();
}

std::string place(const Thread& thread) {
  const auto text = [](uint3 i, dim3 n) {
    std::string result = std::to_string(i.x);
    if (n.y * n.z > 1) result += "," + std::to_string(i.y) + "," + std::to_string(i.z);
    return result;
  };
  return "block " + text(thread.block->index, gridDim) + ", thread " + text(thread.index, blockDim);
}

// A sanitizer is about to end the process.
void say_where() {
  if (current) fprintf(stderr, "simt: the above happened in %s\n", place(*current).c_str());
}

std::string deadlock() {
  std::string result = "deadlock:";
  for (const Block* block : resident) {
    std::map<std::string, std::vector<int>> groups;
    std::map<std::string, int> missing;
    for (const Thread& thread : block->threads) {
      if (thread.exited) {
        groups["have exited"].push_back(thread.number);
        continue;
      }
      const bool of_block = thread.meeting == &block->barrier;
      const int n = thread.meeting->missing();
      const std::string key =
          "wait in " + std::string(thread.waits_in) + " for " + std::to_string(n) +
          (of_block ? " more of the block" : " more of warp " + std::to_string(thread.number / 32));
      groups[key].push_back(thread.number);
    }
    for (const auto& [what, threads] : groups) {
      result += "\n  block " + std::to_string(block->index.x) + ": threads " + ranges(threads) +
                " " + what;
    }
  }
  return result;
}

void set_fault(std::string text) {
  if (!fault.empty()) return;
  fault = std::move(text) + "\n  seed " + std::to_string(options.seed) + ", " +
          std::to_string(options.resident_blocks) + " resident blocks, " +
          std::to_string(options.multiprocessors) + " multiprocessors";
}

Warp* most_urgent() {
  Warp* best = nullptr;
  for (Block* block : resident) {
    for (Warp& warp : block->warps) {
      if (warp.ready && (!best || warp.priority > best->priority)) best = &warp;
    }
  }
  return best;
}

// Runs every lane that is ready, from a random one on.
void run_warp(Warp& warp) {
  const uint32_t ready = warp.ready;
  const auto first = static_cast<unsigned>(random(32));
  for (unsigned i = 0; i < 32 && fault.empty(); ++i) {
    const unsigned lane = (first + i) % 32;
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

void run_grid(const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim;
  std::vector<unsigned> order(static_cast<size_t>(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  size_t started = 0;
  for (;;) {
    while (started < order.size() && static_cast<int>(resident.size()) < options.resident_blocks) {
      const unsigned i = order[started++];
      const uint3 index{i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
      resident.push_back(new Block(index, config.blockDim, config.dynamicSmemBytes));
      tsan::release(&launch_start);
      ++counters.blocks;
    }
    if (resident.empty()) return;
    Warp* warp = most_urgent();
    if (!warp) return set_fault(deadlock());
    if (random(kDemoteOneIn) == 0) demote(*warp);
    Block* block = warp->lanes[0]->block;
    run_warp(*warp);
    if (!fault.empty()) return;
    if (block->running == 0) {
      block->check_guard();
      resident.erase(std::find(resident.begin(), resident.end(), block));
      // A block that gets this one's fibers would count as ordered after it.
      if constexpr (tsan::kOn) ended.emplace_back(block);
      if constexpr (!tsan::kOn) delete block;
    }
  }
}

void check_aligned(const char* operation, const void* address, size_t bytes) {
  const size_t off = reinterpret_cast<uintptr_t>(address) % bytes;
  if (off != 0) fail("%s: misaligned: %p, %zu bytes off", operation, address, off);
}

size_t with_guard(size_t shared_bytes) {
  return (shared_bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes + kGuardBytes;
}

}  // namespace

Block::Block(uint3 index, dim3 size, size_t shared_bytes)
    : index(index),
      shared_bytes(shared_bytes),
      shared(static_cast<unsigned char*>(aligned_alloc(1024, with_guard(shared_bytes)))),
      barrier(size.x * size.y * size.z),
      running(barrier.size()) {
  memset(shared, kPoison, with_guard(shared_bytes));
  asan::poison(shared + shared_bytes, with_guard(shared_bytes) - shared_bytes);
  for (int number = 0; number < running; ++number) {
    if (number % 32 == 0) {
      Warp& warp = warps.emplace_back(std::min(32, running - number));
      warp.priority = kPriorities + random(kPriorities);
    }
    Thread& thread = threads.emplace_back();
    thread.block = this;
    thread.warp = &warps.back();
    thread.warp->lanes.push_back(&thread);
    thread.number = number;
    thread.lane = number % 32;
    const auto n = static_cast<unsigned>(number);
    thread.index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
    thread.fiber.start(run_thread);
    make_ready(thread);
  }
}

Block::~Block() {
  asan::unpoison(shared, with_guard(shared_bytes));
  free(shared);
}

void Block::check_guard() const {
  if constexpr (asan::kOn) return;
  for (size_t i = shared_bytes; i < with_guard(shared_bytes); ++i) {
    if (shared[i] == kPoison) continue;
    return set_fault("shared overrun: block " + std::to_string(index.x) + " wrote at byte " +
                     std::to_string(i) + " of " + std::to_string(shared_bytes) +
                     ", seen when it ended");
  }
}

uint64_t random(uint64_t below) { return generator() % below; }

void make_ready(Thread& thread) { thread.warp->ready |= 1u << thread.lane; }

void suspend() { current->fiber.leave(); }

const std::deque<Block*>& resident_blocks() { return resident; }

void may_preempt() {
  if (random(kPreemptOneIn) != 0) return;
  demote(*current->warp);
  make_ready(*current);
  suspend();
}

std::string ranges(const std::vector<int>& numbers) {
  std::vector<int> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  std::string result;
  for (size_t i = 0, end; i < sorted.size(); i = end) {
    for (end = i + 1; end < sorted.size() && sorted[end] == sorted[end - 1] + 1;) ++end;
    result += (i ? ", " : "") + std::to_string(sorted[i]);
    if (end - i > 1) result += "-" + std::to_string(sorted[end - 1]);
  }
  return result;
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  set_fault(std::string(text) + "\n  in " + place(*current));
  current->fiber.leave_for_good();
}

const char* report() { return fault.c_str(); }

cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  on_death(say_where);
  tsan::launching_fiber = tsan::this_fiber();
  fault.clear();
  ++counters.launches;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  const auto threads = static_cast<uint64_t>(blockDim.x) * blockDim.y * blockDim.z;
  const auto blocks = static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z;
  if (blocks == 0 || blocks > INT32_MAX || threads == 0 || threads > 1024) {
    set_fault("a launch of " + std::to_string(blocks) + " blocks of " + std::to_string(threads) +
              " threads");
    return cudaErrorInvalidConfiguration;
  }
  if (config.dynamicSmemBytes > kMostShared || config.numAttrs != 0) {
    set_fault("a launch with " + std::to_string(config.dynamicSmemBytes) +
              " bytes of shared memory and " + std::to_string(config.numAttrs) + " attributes");
    return cudaErrorInvalidValue;
  }
  generator.seed(options.seed);
  thread_body = &thread;
  run_grid(config);
  tsan::acquire(&launch_end);
  ended.clear();
  for (Block* block : resident) delete block;
  resident.clear();
  return fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

void* shared_memory(size_t bytes) {
  const Block& block = *current->block;
  if (bytes > block.shared_bytes)
    fail("shared overrun: %zu bytes of shared memory are used, %zu were asked for", bytes,
         block.shared_bytes);
  return block.shared;
}

bool is_shared(const void* address) {
  const auto* at = static_cast<const unsigned char*>(address);
  return std::any_of(resident.begin(), resident.end(), [&](const Block* block) {
    return at >= block->shared && at < block->shared + block->shared_bytes;
  });
}

void load16(const void* from) {
  check_aligned("load16", from, 16);
  counters.bytes_loaded += 16;
}

void store16(const void* to) {
  check_aligned("store16", to, 16);
  counters.bytes_stored += 16;
}

}  // namespace simt
