// What the engine's own files share: threads, warps, blocks, clusters, and where they meet.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "copies.h"
#include "fiber.h"
#include "simt.h"
#include "wgmma.h"

namespace simt {

struct Block;
struct Cluster;
struct Thread;

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupThreads = 128;

// A collective operation, and the operands in which its threads agree.
struct Operation {
  const char* name;
  uint64_t operands[4] = {};

  bool operator==(const Operation& other) const;
  std::string text() const;
};

// Where the threads that carry out one collective operation wait for each other.
class Meeting {
 public:
  // All memory is allocated here: ThreadSanitizer would take what fibers do with it for a race.
  Meeting(int size, std::string place);

  // Waits until all have come, each to its own place. The last one to come calls finish(arguments)
  // before anyone goes on. An `ordered` meeting also orders memory.
  template <class Argument, class Finish>
  void meet(const Operation& operation, int place, Argument* argument, bool ordered,
            Finish finish) {
    if (come(operation, place, argument, ordered)) {
      finish(reinterpret_cast<Argument* const*>(arguments_.data()));
      release(ordered);
    } else {
      wait(ordered);
    }
  }

  void barrier(const Operation& operation);  // an ordered meeting without arguments

  // The two halves of a barrier: wait() is for the round in which this thread has come.
  void arrive(const Operation& operation);
  void wait(bool ordered);

  void resize(int size) { size_ = size; }  // of a barrier to which nobody has come
  int size() const { return size_; }
  int missing() const { return size_ - static_cast<int>(arrived_.size()); }
  bool empty() const { return arrived_.empty(); }
  bool has(const Thread& thread) const;
  uint64_t round() const { return round_; }

 private:
  bool come(const Operation& operation, int place, void* argument, bool ordered);
  void release(bool ordered);
  uint64_t* token() { return &tokens_[round_ % 2]; }

  int size_;
  std::string place_;
  std::vector<void*> arguments_;
  std::vector<Thread*> arrived_, waiting_;
  Operation operation_{};
  uint64_t round_ = 0;
  // By turns, or who leaves late would learn what others did on their way to the next round.
  uint64_t tokens_[2] = {};
};

struct Warp {
  Warp(int number, int lanes);

  std::vector<Thread*> lanes;
  Meeting meeting;
  uint32_t ready = 0;  // a bit for each lane that can run
  uint64_t priority = 0;
  uint64_t values[kWarpThreads] = {};  // of the last collective
  WarpMatrices matrices;
};

struct Warpgroup {
  Warpgroup(Block& block, int number, int registers);
  void resize_registers();  // if the block's pool has enough

  Block& block;
  Meeting meeting;
  int registers, wanted;  // of each thread
  std::vector<Thread*> waiting_for_registers;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  uint3 index{};
  int number = 0;  // in the block
  int lane = 0;
  std::function<std::string()> waits;  // what a report says of it
  bool exited = false;
  uint64_t fenced = 0;    // token: what this thread did before its last fence
  uint64_t observed = 0;  // token: what its atomics have seen, but no fence has made usable
  CopyGroups copies;      // cp.async
  CopyGroups bulk;        // TMA stores
  uint32_t proxy_fences = 0;
  bool in_cluster_barrier = false;
  uint64_t cluster_round = 0;  // in which it came to the cluster's barrier
};

struct BarrierState {             // of an mbarrier
  int expected = 0, pending = 0;  // arrivals
  int64_t bytes = 0;              // outstanding
  uint64_t phase = 0;
  const Thread* initialiser = nullptr;
  bool fenced = false;
  std::vector<Thread*> waiting;
};

struct Block {
  Block(Cluster& cluster, int rank, uint3 index, dim3 size, size_t shared_bytes);
  Block(const Block&) = delete;
  ~Block();
  void check_guard() const;  // fails where something was written behind the shared memory

  // 16 bytes of shared memory that a thread wrote, not yet visible to TMA and wgmma.
  struct Mark {
    int writer = -1;
    uint32_t proxy_fences = 0;  // of the writer before
  };

  Cluster& cluster;
  int rank;
  uint3 index;
  size_t shared_bytes;
  unsigned char* shared;
  std::vector<Mark> marks;
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  std::deque<Warpgroup> warpgroups;  // whole ones
  Meeting barrier;
  std::deque<Meeting> named_barriers;
  std::map<size_t, BarrierState> mbarriers;  // by their place in shared memory
  int registers;                             // that no thread has
  int running;
};

struct Cluster {
  Cluster(uint3 first_block, dim3 size, dim3 block, size_t shared_bytes);
  Block& at(int rank, const char* operation);  // fails if there is none or it has exited

  std::deque<Block> blocks;
  Meeting barrier;
};

// That of the current thread; fail if it has fewer threads than such a thing should.
Warp& whole_warp(const char* operation);
Warpgroup& whole_warpgroup(const char* operation);

inline Thread* current = nullptr;  // null while the scheduler runs for none

uint64_t random(uint64_t below);
void make_ready(Thread& thread);
void wake_all(std::vector<Thread*>& threads);  // and removes them

// Leaves the current thread until somebody makes it ready.
void suspend(std::function<std::string()> waits);

// As suspend, but until the next wake_polling() or until nothing else can run.
void poll(std::function<std::string()> waits);
void wake_polling();

// Lets other warps run first, now and then. To be called where another thread could notice.
void may_preempt();

const std::deque<std::unique_ptr<Cluster>>& resident_clusters();

// Finds the size of a launch's clusters; false where it has an attribute that is not known.
bool read_attributes(const cudaLaunchConfig_t& config, dim3* cluster);

constexpr size_t kMostShared = 232448;  // bytes of a block

// Of the launches to come; false if it is more than a block can have.
bool raise_shared_limit(const void* kernel, int bytes);

// ---- shared memory, by the place of a byte in it -----------------------------------------------

constexpr uint32_t kSharedWindow = 1024;  // the address of the first byte

// Fails unless it is aligned memory of the current block.
size_t shared_offset(const char* operation, const void* pointer, size_t bytes, size_t alignment);

// Fails where a thread wrote what TMA or wgmma is now to read, and has not made it visible.
void check_marks(const char* operation, const Block& block, size_t offset, size_t bytes);

void poison(Block& block, size_t offset, size_t bytes);  // a copy to it is under way

void check_aligned(const char* operation, const void* address, size_t bytes);

// Fails in the variant asan if it is not memory.
void check_global(const char* operation, const void* pointer, size_t bytes);

// ---- mbarriers, for TMA ------------------------------------------------------------------------

BarrierState& mbarrier_for_others(const char* operation, Block& block, size_t offset);
void complete_bytes(Block& block, size_t offset, int64_t bytes);

// ---- reports -----------------------------------------------------------------------------------

struct Stopped {};  // thrown by fail() on the scheduler's own stack

void set_fault(const std::string& text);
void clear_fault();
bool has_fault();
std::string deadlock();
std::string name(const Block& block);
std::string name(const Thread& thread);

// "0-15, 31": numbers in increasing order, neighbours together.
std::string ranges(const std::vector<int>& numbers);

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

}  // namespace simt
