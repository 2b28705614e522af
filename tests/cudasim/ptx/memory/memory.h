// Resolve addresses: state spaces, alignment, bounds, and the state of the bytes.
#pragma once

#include "arithmetic/lanes.h"

namespace cudasim {

enum class Space : int { generic, global, shared, local, parameter };

// Shared memory of a block.
u8* shared_bytes(Block& block, u32 address, u32 bytes, u32 align, int lane = -1);
// Global memory within one allocation.
u8* global_bytes(Warp& w, int lane, u64 address, u32 bytes, u32 align);

// Reads of shared memory that nothing wrote are faults.
void check_written(Block& block, u32 address, u32 bytes, int lane = -1);
void mark_written(Block& block, u32 address, u32 bytes);
// Reads of fresh global memory are faults.
void check_fresh(const u8* data, u32 bytes, int lane = -1);

// The generic proxy's writes are visible to the async proxy behind fence.proxy.async.
void note_generic_write(Warp& w, int lane, u32 address, u32 bytes);
void check_proxy(Block& block, u32 offset, u32 bytes);
void forget_generic_writes(Block& block, u32 offset, u32 bytes);

// The role of an access in races.
struct Role {
  Actor actor;
  u32 time;
  bool writes;
  bool strong = false, wide = false;
};
inline Role role_of(const Warp& w, bool writes, bool strong = false, bool wide = false) {
  return {w.actor, w.time(), writes, strong, wide};
}

// Accesses of an instruction, joined where lanes share 16 bytes; finish() checks the last ones.
class Accesses {
 public:
  Accesses(Warp& w, const Instruction& it, const Role& role) : w_(w), it_(it), role_(role) {}
  // `more`: lanes that take part beside the one that has the address.
  void shared(u32 address, u32 bytes, int lane, u32 more = 0);
  void global(u64 address, u32 bytes, int lane);
  void finish();

 private:
  void add(Cell& cell, u64 begin, u32 bytes, int lane, CellLanes* kept, u32 lanes);
  bool in_order(const Access& before, const u32* lanes) const;
  [[noreturn]] void report(const Access& before, u32 code);

  Warp& w_;
  const Instruction& it_;
  const Role role_;
  Cell* cell_ = nullptr;
  u16 bytes_ = 0;
  u64 begin_ = 0;
  int lane_ = 0;
  CellLanes* kept_ = nullptr;  // of shared memory
  u32 lanes_[16];
};

// ---- order --------------------------------------------------------------------------------------

// Flags of an access, from its words.
enum OrderFlags : s32 {
  strong = 1,    // volatile, relaxed, atomic
  wide = 2,      // of the scope of the device or more
  replaces = 4,  // a store; it ends earlier releases
};
s32 order_of(const Decoder& d, bool is_atomic);

// A strong read or write at `address`. After a writing one, the warp's clock ticks.
void acquire(Warp& w, const u8* address, s32 flags);
void release(Warp& w, const u8* address, s32 flags);

inline u64 address_of(const Warp& w, const Instruction& it, Row base, int lane) {
  if (it.wide) return get<u64>(w.source(base), lane) + static_cast<u64>(it.offset);
  return w.source(base)[lane] + static_cast<u32>(it.offset);
}

Space space_of(const Decoder& d);

}  // namespace cudasim
