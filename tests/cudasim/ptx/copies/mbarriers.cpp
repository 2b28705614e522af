// Count arrivals and bytes: mbarriers, 64 bits in shared memory.
#include "copies/async.h"

namespace cudasim {
namespace {

struct Mbarrier {
  int pending, expected;
  s64 bytes;
  u32 phase;
};
constexpr s64 kMostBytes = (1 << 20) - 1;
constexpr u64 kMark = u64{1} << 63;

u64 pack(const Mbarrier& b) {
  return static_cast<u64>(b.pending) | static_cast<u64>(b.expected) << 20 |
         static_cast<u64>(b.bytes + (1 << 20)) << 40 | static_cast<u64>(b.phase) << 62 | kMark;
}

Mbarrier read(Block& block, u32 offset, const char* what, int lane = -1) {
  u64 bits;
  memcpy(&bits, shared_bytes(block, offset, 8, 8, what, lane), 8);
  const auto known = block.mbarriers.find(offset);
  if (known == block.mbarriers.end())
    fault_of(lane, "mbarrier.init comes first, with a fence and a barrier behind it.",
             "%s: no mbarrier at shared address %u", what, offset - kSharedStart);
  if (!(bits & kMark))
    fault_of(lane, "Something has written over the mbarrier.",
             "%s: no mbarrier at shared address %u any more", what, offset - kSharedStart);
  return {static_cast<int>(bits & 0xfffff), static_cast<int>(bits >> 20 & 0xfffff),
          static_cast<s64>(bits >> 40 & 0x3fffff) - (1 << 20), static_cast<u32>(bits >> 62 & 1)};
}

void write(Block& block, u32 offset, Mbarrier b) {
  if (b.bytes < -kMostBytes || b.bytes > kMostBytes)
    fault("Do the expected bytes match the copies?", "mbarrier at %u: a count of %ld bytes",
          offset - kSharedStart, b.bytes);
  MbarrierClock& clock = block.mbarriers.at(offset);
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.pending = b.expected;
    ++clock.phases;
    clock.completed = clock.arriving;
    // Copies that completed on it in this phase.
    const Role role = role_of_mbarrier(block, offset, true);
    clock.completed.set(role.actor, clock.phases);
  }
  const u64 bits = pack(b);
  memcpy(block.shared.base + offset, &bits, 8);
  ++block.grid->progress;
}

// rows[0]: the address, rows[1]: the count
void init(Warp& w, const Instruction& it, u32 lanes) {
  Accesses accesses(w, it, role_of(w, true));
  each_lane(lanes, [&](int lane) {
    const u32 address = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    const u32 count = w.source(it.rows[1])[lane];
    if (count == 0 || count > 0xfffff)
      fault_of(lane, "From 1 to 2^20 - 1.", "mbarrier.init of %u arrivals", count);
    u8* const at = shared_bytes(*w.block, address, 8, 8, "mbarrier.init", lane);
    accesses.shared(address, 8, lane);
    mark_written(*w.block, address, 8);
    const Clock none(w.block->order);
    MbarrierClock& clock = w.block->mbarriers[address];
    clock.arriving = clock.completed = none;
    clock.thread = static_cast<u32>(w.thread(lane));
    clock.fences = w.init_fences[lane];
    const u64 bits = pack({static_cast<int>(count), static_cast<int>(count), 0, 0});
    memcpy(at, &bits, 8);
  });
  accesses.finish();
}

// Uses of an mbarrier are strong; its initialisation is not, and has to come before them.
void note_use(Warp& w, const Instruction& it, u32 address, int lane) {
  Accesses accesses(w, it, role_of(w, true, true, true));
  accesses.shared(address, 8, lane);
  accesses.finish();
}

// it.kind: expects the bytes of rows[1]; it.count: arrives as often as rows[2] says; it.flags: its
// memory order is relaxed; it.mode: does not arrive
void arrive(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    const u32 address = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    Mbarrier b = read(*w.block, address, "mbarrier.arrive", lane);
    note_use(w, it, address, lane);
    if (it.kind) b.bytes += w.source(it.rows[1])[lane];
    const int count = it.mode ? 0 : it.count ? static_cast<int>(w.source(it.rows[2])[lane]) : 1;
    if (b.pending < count)
      fault_of(lane, "Compare the count of mbarrier.init with those that arrive in a phase.",
               "mbarrier.arrive at %u: more than the %d expected arrivals", address - kSharedStart,
               b.expected);
    b.pending -= count;
    if (!it.flags) w.block->mbarriers.at(address).arriving.join(w.clock);
    write(*w.block, address, b);
  });
  w.tick(lanes);
}

// rows[1]: the parity
void wait(Warp& w, const Instruction& it, u32 lanes) {
  u32 done = 0, addresses[kLanes];
  each_lane(lanes, [&](int lane) {
    const u32 address = addresses[lane] = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    const Mbarrier b = read(*w.block, address, "mbarrier.try_wait", lane);
    note_use(w, it, address, lane);
    const u32 parity = w.source(it.rows[1])[lane];
    if (parity > 1) fault_of(lane, "0 or 1.", "mbarrier.try_wait of parity %u", parity);
    if (b.phase == parity) return;
    done |= 1u << lane;
  });
  for (u32 left = it.flags ? 0 : done; left;) {
    const u32 address = addresses[__builtin_ctz(left)];
    u32 same = 0;
    each_lane(left, [&](int i) { same |= static_cast<u32>(addresses[i] == address) << i; });
    w.acquire(same, w.block->mbarriers.at(address).completed);
    left &= ~same;
  }
  w.set_predicate(it.predicates[0], lanes, done);
  if (done != lanes) w.poll();
}

}  // namespace

void check_mbarrier(Block& block, u32 offset, const char* what) {
  read(block, offset, what);
  const auto& [arriving, completed, phases, thread, fences] = block.mbarriers.at(offset);
  if (block.warps[thread / kLanes]->init_fences[thread % kLanes] == fences)
    fault("fence.mbarrier_init or fence.proxy.async comes between mbarrier.init and the barrier.",
          "%s: completes on an mbarrier that thread %u made without a fence", what, thread);
}

Role role_of_mbarrier(Block& block, u32 offset, bool writes) {
  return {block.actor(Engine::mbarrier, offset), block.mbarriers.at(offset).phases + 1, writes};
}

void complete_bytes(Block& block, u32 offset, u32 bytes) {
  Mbarrier b = read(block, offset, "a copy that completes");
  b.bytes -= bytes;
  write(block, offset, b);
}

bool decode_mbarrier(Decoder& d) {
  if (d.name() == "fence" && d.has("mbarrier_init")) {
    d.to.run = [](Warp& w, const Instruction&, u32 lanes) {
      each_lane(lanes, [&](int lane) { ++w.init_fences[lane]; });
    };
    return true;
  }
  if (d.name() != "mbarrier") return false;
  const std::string& what = d.words.at(1);
  d.to.flags = d.has("relaxed");
  if (what == "init") {
    d.to.rows[0] = d.base(d.operands.at(0), 32);
    d.to.rows[1] = d.source(d.operands.at(1), 32);
    d.to.run = init;
    return true;
  }
  if (what == "expect_tx") {
    d.to.kind = 1, d.to.mode = 1, d.to.flags = 1;
    d.to.rows[0] = d.base(d.operands.at(0), 32);
    d.to.rows[1] = d.source(d.operands.at(1), 32);
    d.to.run = arrive;
    return true;
  }
  if (what == "arrive") {
    const Operand& state = d.operands.at(0);
    if ((state.type != Operand::sink && state.type != Operand::row) || d.has("noComplete"))
      d.unknown("a state");
    if (state.type == Operand::row) d.unknown("a state that is used");
    d.to.rows[0] = d.base(d.operands.at(1), 32);
    d.to.kind = d.has("expect_tx");
    if (d.to.kind) d.to.rows[1] = d.source(d.operands.at(2), 32);
    if (!d.to.kind && d.operands.size() > 2) {
      d.to.count = 1;
      d.to.rows[2] = d.source(d.operands[2], 32);
    }
    d.to.run = arrive;
    return true;
  }
  if (what != "try_wait" && what != "test_wait") return false;
  if (!d.has("parity")) d.unknown("a state");
  d.set_predicate(0, d.operands.at(0));
  d.to.rows[0] = d.base(d.operands.at(1), 32);
  d.to.rows[1] = d.source(d.operands.at(2), 32);
  d.to.run = wait;
  return true;
}

}  // namespace cudasim
