// Find accesses of the same bytes that nothing orders.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base.h"

namespace cudasim {

// An actor: its block, in the order of starts, and its number within the block.
using Actor = u32;
constexpr int kActorBits = 9;
constexpr u32 kMostActors = 1u << kActorBits;  // of a block
constexpr u32 kMostBlocks = 1u << 15;          // of a grid; races of later blocks go unseen
constexpr u32 block_of(Actor actor) { return actor >> kActorBits; }
constexpr u32 number_of(Actor actor) { return actor & (kMostActors - 1); }

// The time up to which each actor's accesses happened before. Times of the own block are dense.
// Few kernels exchange times of other blocks: these are a map that clocks share.
class Clock {
 public:
  explicit Clock(u32 block = 0) : block_(block) {}

  u32 of(Actor actor) const;
  void set(Actor actor, u32 time);  // of the own block
  void join(const Clock& other);

 private:
  using Times = std::map<Actor, u32>;

  u32 block_;
  std::vector<u32> near_;
  std::shared_ptr<const Times> far_ = none_;
  static inline const std::shared_ptr<const Times> none_ = std::make_shared<Times>();
};

// The last accesses of 16 bytes of memory.
struct Cell {
  static constexpr int kAccesses = 4;
  u64 accesses[kAccesses];
  u32 codes[kAccesses];  // numbers of instructions
};

// The lanes of each byte of a cell's accesses, where warps have made them.
struct CellLanes {
  u32 of[Cell::kAccesses][16];
};

// One access, in 64 bits that are 0 for none.
struct Access {
  u64 bytes : 16;  // a mask
  u64 writes : 1;
  u64 wide : 1;    // unordered accesses are no race if both are strong, and of a block ...
  u64 strong : 1;  // ... or wide: of the device's scope. Volatile, relaxed, atomic ones are strong.
  u64 actor : 24;
  u64 time : 21;

  static constexpr u32 kMostTime = (1u << 21) - 1;
};

// The order of a warp's lanes. Each of the warp's times ends with what some lanes did.
class LaneOrder {
 public:
  enum Does : u8 { releases = 1, meets = 2, acquires = 4 };

  // `until`: what had been released up to this time is acquired.
  void add(u32 time, u32 lanes, u8 does, bool all, u32 until = 0);
  void acquire(u32 time, u32 lanes, u32 until) { add(time, lanes, acquires, false, until); }
  // Whether an acquisition by lanes can order accesses of others.
  bool matters(u32 lanes, u32 until) const;
  // Lanes that come behind what a lane did at a time.
  u32 behind(int lane, u32 time) const;
  // Whether a lane's accesses at a time had been released up to another time.
  bool released(int lane, u32 time, u32 until) const;

 private:
  struct Step {
    u32 lanes, until;
    u8 does;
  };
  std::vector<Step> steps_;  // by time
  u32 all_met_ = 0;
};

// Cells of global memory, of one launch at a time.
class GlobalCells {
 public:
  void start_launch();
  Cell& at(u64 address);

 private:
  static constexpr int kPageBits = 12;
  struct Page {
    u64 launch = 0;
    Cell cells[(1 << kPageBits) / 16];
  };

  u64 launch_ = 0, last_ = ~u64{0};
  Page* page_ = nullptr;
  std::unordered_map<u64, std::unique_ptr<Page>> pages_;
};

// The clocks that releases at an address have published.
struct Released {
  Clock wide;    // by releases of the device's scope
  Clock narrow;  // by any release of one block, which is
  u64 block = ~u64{0};
};

}  // namespace cudasim
