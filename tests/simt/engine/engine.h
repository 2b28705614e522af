// What the engine's own files share: threads, warps, blocks, clusters, and where they meet.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fiber.h"
#include "simt.h"

namespace simt {

struct Block;
struct Cluster;
struct Thread;

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupThreads = 128;

// A collective operation, with the operands in which its threads agree.
struct Operation {
  std::string_view name;
  uint64_t operands[4] = {};
  bool orders_memory = false;

  bool operator==(const Operation&) const = default;
  std::string text() const;
};

// Where the threads that carry out one collective operation wait for each other.
class Meeting {
 public:
  // All memory is allocated here: ThreadSanitizer would take what fibers do with it for a race.
  Meeting(int size, std::string place);

  // Waits until all have come, each to its own place. The last one to come calls finish(arguments)
  // before anyone goes on.
  template <class Argument, class Finish>
  void meet(const Operation& operation, int place, Argument* argument, Finish finish) {
    if (!come(operation, place, argument)) return wait();
    finish(reinterpret_cast<Argument* const*>(arguments_.data()));
    release();
  }

  void barrier(const Operation& operation) {
    meet(operation, 0, this, [](Meeting* const*) {});
  }

  void resize(int size) { size_ = size; }  // of a barrier to which nobody has come
  int size() const { return size_; }
  bool empty() const { return arrived_.empty(); }

 private:
  bool come(const Operation& operation, int place, void* argument);
  void release();
  void wait();
  size_t missing() const { return size_ - arrived_.size(); }
  uint64_t* token() { return operation_.orders_memory ? &tokens_[round_ % 2] : nullptr; }

  int size_;
  std::string place_;
  std::vector<void*> arguments_;
  std::vector<Thread*> arrived_, waiting_;
  Operation operation_;
  uint64_t round_ = 0;
  // By turns, or who leaves late would learn what others did on their way to the next round.
  uint64_t tokens_[2] = {};
};

struct Copy {  // an asynchronous one
  const char* operation;
  Thread* issuer;
  Block* block;  // whose shared memory it writes; null if that of none
  size_t offset, bytes;
  std::function<void()> read, write;  // its steps, empty once they are done
  size_t place = 0;                   // among the copies in flight
  int group = 0;                      // of its issuer
  bool waited = false;                // for it to read, at least
};

struct CopyGroups {  // of one thread
  std::vector<std::shared_ptr<Copy>> copies;
  int committed = 0;
};

constexpr int kWarpRows = 16;  // of a wgmma's product

// Registers that wgmmas in flight add to: NaN in the threads, which do not see what is here.
struct Accumulator {
  std::vector<float*> lanes;
  int columns;
  std::vector<float> values;  // kWarpRows rows
  int in_flight = 0;          // wgmmas
};

struct WarpMatrices {  // the wgmmas of one warp: its rows of what the warpgroup has started
  struct Started {
    Wgmma operation;
    Accumulator* accumulator;
  };

  bool fenced = false;
  std::list<Accumulator> accumulators;
  std::deque<std::vector<Started>> groups{1};  // the last one is not yet committed
};

struct Warp {
  Warp(int number, int lanes) : meeting(lanes, "warp " + std::to_string(number)) {}

  std::vector<Thread*> lanes;
  Meeting meeting;
  uint32_t ready = 0;  // a bit for each lane that can run
  uint64_t priority = 0;
  uint64_t values[kWarpThreads] = {};  // of the last collective
  WarpMatrices matrices;
};

struct Warpgroup {
  Meeting meeting;
  int registers;  // of each thread
};

struct Thread {
  Block* block;
  Warp* warp;
  uint3 index;
  int number;  // in the block
  int lane;
  Fiber fiber;
  std::function<std::string()> waits;  // what a report says of it
  bool exited = false;
  uint64_t fenced = 0;    // token: what this thread did before its last fence
  uint64_t observed = 0;  // token: what its atomics have seen, but no fence has made usable
  CopyGroups copies;      // cp.async
  CopyGroups bulk;        // TMA stores
  uint32_t proxy_fences = 0;
  int64_t loads = 0;  // of 8 and 16 bytes
  bool alone;         // it knows that the grid before has ended
};

struct BarrierState {  // of an mbarrier
  size_t offset;
  int expected, pending;  // arrivals
  const Thread* initialiser;
  int64_t bytes = 0;  // outstanding
  uint64_t phase = 0;
  bool fenced = false;
};

struct Block {
  Block(Cluster& cluster, int rank, unsigned number, size_t shared_bytes);
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
  int registers = 0;                         // that its threads have given back
  int running;
};

struct Cluster {
  Cluster(unsigned first_block, int size, size_t shared_bytes);
  Block& at(int rank, const char* operation);  // fails if there is none or it has exited

  std::deque<Block> blocks;
  Meeting barrier;
};

size_t volume(dim3 n);
uint3 index_of(unsigned number, dim3 n);

inline std::list<Cluster> resident;
inline Thread* current = nullptr;  // null while the scheduler runs for none

// That of the current thread; fail if it has fewer threads than such a thing should.
Warp& whole_warp(const char* operation);
Warpgroup& whole_warpgroup(const char* operation);

void check_wgmmas_at_exit(const Warp& warp);  // fails if it has some in flight

// ---- asynchronous copies -----------------------------------------------------------------------

void start(Copy copy, CopyGroups* groups);  // of its issuer, or nullptr
void advance_now_and_then();
void forget_copies();

// Advances a copy to shared memory, for which others may wait, or if there is none another one;
// false if nothing is in flight. To be called when nothing else can run.
bool advance_needed();

// Fail if copies are in flight that nobody can wait for any more.
void check_copies_at_exit(const Thread& thread);
void check_copies_at_end(const Block& block);

// ---- scheduling --------------------------------------------------------------------------------

uint64_t random(uint64_t below);
void wake_all(std::vector<Thread*>& threads);  // and removes them

// Leave the current thread until somebody wakes it; poll() also until nothing else can run.
void suspend(std::function<std::string()> waits);
void poll(std::function<std::string()> waits);
void wake_polling();

// Lets other warps run first, now and then. To be called where another thread could notice.
void may_preempt();

// ---- shared memory, by the place of a byte in it -----------------------------------------------

constexpr uint32_t kSharedWindow = 1024;  // the address of the first byte

// Fails unless it is aligned memory of the current block.
size_t shared_offset(const char* operation, const void* pointer, size_t bytes, size_t alignment);

// Fails where a thread wrote what TMA or wgmma is now to read, and has not made it visible.
void check_marks(const char* operation, const Block& block, size_t offset, size_t bytes);

void poison(Block& block, size_t offset, size_t bytes);  // a copy to it is under way

void check_aligned(const char* operation, const void* address, size_t bytes);

// Fails where the thread does not know that the grid before has ended, or, in variant asan, where
// not all of it is memory.
void check_global(const char* operation, const void* pointer, size_t bytes);

// Of mbarriers, for TMA.
BarrierState& mbarrier_for_others(const char* operation, Block& block, size_t offset);
void complete_bytes(Block& block, size_t offset, int64_t bytes);

// ---- reports -----------------------------------------------------------------------------------

struct Stopped {};  // thrown by fail() on the scheduler's own stack

inline bool refuse_tensor_maps = false;   // as if the driver found a fault in each
inline std::string fault;                 // of the last launch or tensor map
void set_fault(const std::string& text);  // unless there is one
std::string deadlock();
std::string name(const Block& block);
std::string name(const Thread& thread);
std::string ranges(std::vector<int> numbers);  // "0-15, 31", in increasing order
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

}  // namespace simt
