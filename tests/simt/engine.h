// What the engine's own files share: threads, warps, blocks, and where they meet.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "fiber.h"
#include "simt.h"

namespace simt {

struct Block;
struct Thread;

// Where the threads that carry out one collective operation wait for each other.
class Meeting {
 public:
  // All memory is allocated here: ThreadSanitizer would take what fibers do with it for a race.
  explicit Meeting(int size) : arguments_(size) { waiting_.reserve(size); }

  // Waits until all have come, each to its own place. The last one to come calls finish(arguments)
  // before anyone goes on. A barrier also orders memory.
  template <class Argument, class Finish>
  void meet(const char* operation, int place, Argument* argument, bool barrier, Finish finish) {
    if (arrive(operation, place, argument, barrier)) {
      finish(reinterpret_cast<Argument* const*>(arguments_.data()));
      release(barrier);
    } else {
      wait(barrier);
    }
  }

  int size() const { return static_cast<int>(arguments_.size()); }
  int missing() const { return size() - static_cast<int>(waiting_.size()); }

 private:
  bool arrive(const char* operation, int place, void* argument, bool barrier);
  void release(bool barrier);
  void wait(bool barrier);
  uint64_t* token() { return &tokens_[round_ % 2]; }

  std::vector<void*> arguments_;
  std::vector<Thread*> waiting_;
  const char* operation_ = nullptr;
  uint64_t round_ = 0;
  // By turns, or who leaves late would learn what others did on their way to the next round.
  uint64_t tokens_[2] = {};
};

struct Warp {
  explicit Warp(int lanes) : meeting(lanes) {}

  std::vector<Thread*> lanes;
  Meeting meeting;
  uint32_t ready = 0;  // a bit for each lane that can run
  uint64_t priority = 0;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  uint3 index{};
  int number = 0;  // in the block
  int lane = 0;
  const char* waits_in = nullptr;
  const Meeting* meeting = nullptr;
  bool exited = false;
  uint64_t fenced = 0;    // token: what this thread did before its last fence
  uint64_t observed = 0;  // token: what its atomics have seen, but no fence has made usable
};

struct Block {
  Block(uint3 index, dim3 size, size_t shared_bytes);
  Block(const Block&) = delete;
  ~Block();
  void check_guard() const;  // fails where something was written behind the shared memory

  uint3 index;
  size_t shared_bytes;
  unsigned char* shared;
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  Meeting barrier;
  int running;
};

inline Thread* current = nullptr;  // null while the scheduler runs

uint64_t random(uint64_t below);
void make_ready(Thread& thread);
void suspend();  // leaves the current thread until somebody makes it ready
const std::deque<Block*>& resident_blocks();

// "0-15, 31": numbers in increasing order, neighbours together.
std::string ranges(const std::vector<int>& numbers);

}  // namespace simt
