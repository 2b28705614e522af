// Hold the state of a launch: grid, blocks, warps.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "order/races.h"
#include "parser/module.h"

namespace cudasim {

// Shared memory begins here, so that address 0 is never valid.
constexpr u32 kSharedStart = 1024;
// Generic addresses of other spaces than global memory.
constexpr u64 kSharedTag = u64{1} << 48, kLocalTag = u64{2} << 48, kTags = u64{0xffff} << 48;

struct Block;
struct Grid;

// Lanes of a warp that share a program counter.
struct Group {
  enum State : u8 { runs, converges, blocked, polls };
  u32 pc, lanes;
  State state;
  u64 seen;  // the grid's progress when it last polled
};

// A cp.async of the lanes of a warp that no wait has covered.
struct CopyInFlight {
  u32 lanes;
  bool is_late;  // its bytes arrive at the wait
  int bytes;
  u32 to[kLanes];
  const u8* from[kLanes];
  int read[kLanes];
  u32 group[kLanes];
};

// A bulk copy from shared to global memory, by one thread.
struct BulkStore {
  u32 group;
  bool read = false, written = false;
  std::function<void(std::vector<u8>&)> fetch;
  std::function<void(const std::vector<u8>&)> write;
  std::vector<u8> data;
};

// An asynchronous product of a warpgroup; a warp has 16 rows of it.
struct Product {
  const Instruction* instruction;
  u64 a, b;  // descriptors
  bool accumulates;
  int chain;
};

// Accumulator registers of products in flight: [register][lane].
struct Chain {
  std::vector<float> values;
  int in_flight = 0;
};

// The asynchronous actors of a warp, and the actor of an mbarrier.
enum class Engine : u8 { copy, bulk_read, bulk_write, product, mbarrier };

struct Warp {
  Grid* grid;
  Block* block;
  Kernel* kernel;
  int index;
  u32* registers;
  const u32* constants;
  u32* predicates;
  u8* local;
  u32 all, live;
  Group groups[kLanes];
  int group_count = 1, current = 0;
  u32 waited = 0;          // lanes behind griddepcontrol.wait
  u32 loads[kLanes] = {};  // as in Statistics

  // Order of accesses.
  Actor actor = 0;
  Clock clock;
  // Two scopes, block and device: the clock at the last fence, and clocks acquired since. The next
  // fence joins them.
  Clock fenced[2], unfenced[2];
  bool has_fenced = false;
  LaneOrder lane_order;

  // cp.async
  std::deque<CopyInFlight> copies;
  u32 copy_groups[kLanes] = {};

  // Bulk stores and proxy fences.
  std::vector<BulkStore> bulk_stores[kLanes];
  u32 bulk_groups[kLanes] = {};
  u32 proxy_fences[kLanes] = {};
  u32 init_fences[kLanes] = {};  // these, and fences of mbarrier.init

  // wgmma: groups; the last one is open
  std::deque<std::vector<Product>> products{1};
  u32 product_groups = 0;
  std::vector<Chain> chains;
  bool products_fenced = false;

  template <class T = u32>
  const T* source(Row row) const {
    return reinterpret_cast<const T*>(row.at >= 0 ? registers + row.at : constants + ~row.at);
  }
  template <class T = u32>
  T* destination(Row row) {
    return reinterpret_cast<T*>(registers + row.at);
  }
  void set_predicate(int i, u32 lanes, u32 bits) {
    if (i >= 0) predicates[i] = (predicates[i] & ~lanes) | (bits & lanes);
  }
  u32 source_predicate(const Instruction& it, int i) const {
    const u32 bits = predicates[it.predicates[i]];
    return it.negated >> i & 1 ? ~bits : bits;
  }
  int thread(int lane) const { return index * kLanes + lane; }
  Group& group() { return groups[current]; }

  bool can_run() const;
  bool pick();           // merges groups, chooses one that can run
  void run(int budget);  // so many instructions, or until nothing runs
  // Ends the group's turn until the grid has made progress.
  void poll();
  // Ends an interval of these lanes: others that acquire it come after everything so far.
  void tick(u32 lanes, u8 does = LaneOrder::releases);
  // Lanes acquire what lanes of this warp may have released.
  void acquire(u32 lanes, const Clock& released);
  u32 time() const { return clock.of(actor); }
};

// Shared memory of a block, with the state of its bytes.
struct SharedMemory {
  std::vector<u8> memory;
  u8* base;  // of address 0
  u32 end;
  std::vector<u16> written;  // a bit for each byte
  std::vector<u64> writers;  // of 16 bytes: thread + 1, and its number of proxy fences
  std::vector<Cell> cells;
  std::vector<CellLanes> lanes;  // of the cells

  explicit SharedMemory(u32 bytes);
};

struct Barrier {
  struct Waiting {
    Warp* warp;
    const Instruction* instruction;
  };
  u32 arrived = 0, expected = 0;
  bool any = false, every = true;
  Clock clock;
  std::vector<Waiting> waiting;
};

struct MbarrierClock {
  Clock arriving, completed;
  u32 phases = 0;
  u32 thread = 0, fences = 0;  // the thread of mbarrier.init, and its number of init_fences then
};

struct Block {
  Grid* grid;
  u32 number, order;  // of the grid; in the order of starts
  u32 index[3];
  SharedMemory shared;
  Barrier barriers[16];
  std::map<u32, MbarrierClock> mbarriers;
  std::vector<std::unique_ptr<Warp>> warps;
  u32 live;
  std::vector<u32> registers, predicates;
  std::vector<u8> local;
  std::map<std::pair<Engine, u32>, Actor> actors;  // beside the warps
  u32 actor_count = 0;

  explicit Block(u32 shared_bytes) : shared(shared_bytes) {}
  Actor actor(Engine engine, u32 index);
};

// An asynchronous write to shared memory that no wait has forced yet.
struct Pending {
  std::function<void()> run;
  Block* block;
};

enum class Order { forward, reverse, random };
enum class Async { early, late, random };

struct Launch {
  u32 grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  u32 dynamic_shared = 0;
  void** parameters = nullptr;
  u64 seed = 0;
};

// Choices of a process for all launches.
struct Options {
  bool any_order = true, any_async = true;  // by the seed of each launch
  Order order = Order::forward;
  Async async = Async::early;
  bool races = true, fresh = true;
  u64 most_instructions = ~u64{0};  // of the process
};
Options& options();

struct Range {
  u64 begin = 0, end = 0;
};
// The allocation around an address of global memory, or an empty one.
using FindAllocation = Range (*)(u64 address);
extern FindAllocation find_allocation;

struct Grid {
  Kernel* kernel;
  Launch launch;
  Order order;
  Async async;
  bool races;
  std::mt19937_64 random;
  u64 random_cell = 1;
  u8* parameters = nullptr;
  u64 progress = 1;
  std::vector<std::unique_ptr<Block>> resident;
  std::deque<Pending> pending;
  std::vector<BulkStore> at_end;  // of blocks that have ended
  std::vector<u32> numbers;       // of blocks, in the order of starts
  GlobalCells* cells;
  std::unordered_map<u64, Released> released;
  Range ranges[2];  // of global memory, found last
  u32 most_loads = 0;

  u64 below(u64 n) { return random() % n; }
  bool is_late();  // whether an asynchronous operation waits
  void run_pending();
  u32 threads() const { return launch.block[0] * launch.block[1] * launch.block[2]; }
};

// Totals of a process. The fields in front of the texts are Python's Cost in
// tests/fake_cuda/recorder.py.
struct Statistics {
  u64 instructions = 0;
  u64 launches = 0, blocks = 0, parameter_bytes = 0;
  // Bytes of global memory by vector loads of 16 bytes, vector stores and asynchronous copies
  // (whole boxes). `most_loads` is the largest number of such loads of a thread, over all launches.
  u64 bytes_loaded = 0, bytes_stored = 0, bytes_copied = 0, most_loads = 0;
  const char* kernel = "";  // of the last launch
  std::string fault;        // of the last launch that had one
};
extern Statistics statistics;

// Runs a grid; returns the report of its fault, empty if it has none.
std::string run(Kernel& kernel, const Launch& launch);

}  // namespace cudasim
