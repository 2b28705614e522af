// Find accesses of the same bytes that nothing orders.
#pragma once

#include <bit>
#include <unordered_map>
#include <vector>

#include "order/clock.h"

namespace cudasim {

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

// A race: the access before, and its instruction.
struct Race {
  bool found = false;
  Access before;
  u32 code;
};

// Notes an access of a cell. In shared memory, `kept` has the cell's lanes, `lanes` has the lanes
// that access each byte now, and `in_order` says whether the lanes of an earlier access come before
// these.
template <class InOrder>
Race note_access(Cell& cell, const Access& now, u32 code, const Clock& clock, u64& random,
                 CellLanes* kept, const u32* lanes, InOrder in_order) {
  u64 packed = std::bit_cast<u64>(now);
  int place = -1;
  u32 joined[16];
  if (kept) memcpy(joined, lanes, sizeof joined);
  for (int i = 0; i < Cell::kAccesses; ++i) {
    const u64 bits = cell.accesses[i];
    if (!bits) {
      if (place < 0) place = i;
      continue;
    }
    const bool same = (bits ^ packed) >> 16 == 0;  // perhaps more bytes of the same access
    if (same && !kept && (bits | packed) == bits) return {};
    const Access before = std::bit_cast<Access>(bits);
    const bool covered = (before.bytes & ~now.bytes) == 0;
    const bool ordered = before.actor == now.actor || before.time <= clock.of(before.actor);
    if ((before.bytes & now.bytes) && (before.writes || now.writes)) {
      const bool agreed =
          before.strong && now.strong &&
          ((before.wide && now.wide) || block_of(before.actor) == block_of(now.actor));
      if (!agreed && !(ordered && (!kept || in_order(before, kept->of[i]))))
        return {true, before, cell.codes[i]};
    }
    if (same) {
      packed |= bits;
      place = i;
      for (int j = 0; kept && j < 16; ++j)
        if (!now.writes || !(now.bytes >> j & 1)) joined[j] |= kept->of[i][j];
      continue;
    }
    if (before.actor == now.actor) {
      if (covered && (now.writes || !before.writes) && before.strong == now.strong) place = i;
      continue;
    }
    if (ordered && covered && (now.writes || !before.writes) && place < 0) place = i;
  }
  if (place < 0) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    place = static_cast<int>(random >> 62);
  }
  cell.accesses[place] = packed;
  cell.codes[place] = code;
  if (kept) memcpy(kept->of[place], joined, sizeof joined);
  return {};
}

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
