// Count arrivals and bytes: mbarriers, 64 bits in shared memory.
#include "copies/async.h"

namespace cudasim {
namespace {

struct Mbarrier {
  u64 pending : 20, expected : 20;
  s64 bytes : 22;
  u64 phase : 1, mark : 1;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier read(Block& block, u32 offset, int lane = -1) {
  Mbarrier b;
  memcpy(&b, shared_bytes(block, offset, 8, 8, lane), 8);
  if (!block.mbarriers.contains(offset))
    fault_of(lane, "mbarrier.init comes first, with a fence and a barrier behind it.",
             "no mbarrier at shared address %u", offset - kSharedStart);
  if (!b.mark)
    fault_of(lane, "Something has written over the mbarrier.",
             "no mbarrier at shared address %u any more", offset - kSharedStart);
  return b;
}

// Expects bytes, or has them.
void write(Block& block, u32 offset, Mbarrier b, s64 bytes) {
  bytes += b.bytes;
  if (std::abs(bytes) >= 1 << 20)
    fault("Do the expected bytes match the copies?", "mbarrier at %u: a count of %ld bytes",
          offset - kSharedStart, bytes);
  b.bytes = bytes;
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
  memcpy(block.shared.base + offset, &b, 8);
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
    u8* const at = shared_bytes(*w.block, address, 8, 8, lane);
    accesses.shared(address, 8, lane);
    mark_written(*w.block, address, 8);
    const Clock none(w.block->order);
    MbarrierClock& clock = w.block->mbarriers[address];
    clock.arriving = clock.completed = none;
    clock.thread = static_cast<u32>(w.thread(lane));
    clock.fences = w.init_fences[lane];
    const Mbarrier b{count, count, 0, 0, 1};
    memcpy(at, &b, 8);
  });
  accesses.finish();
}

// Uses of an mbarrier are strong; its initialisation is not, and has to come before them.
void note_use(Warp& w, const Instruction& it, u32 address, int lane) {
  Accesses accesses(w, it, role_of(w, true, true, true));
  accesses.shared(address, 8, lane);
  accesses.finish();
}

// it.kind: expects the bytes of rows[1]; it.flags: its memory order is relaxed
void arrive(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    const u32 address = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    Mbarrier b = read(*w.block, address, lane);
    note_use(w, it, address, lane);
    if (b.pending == 0)
      fault_of(lane, "Compare the count of mbarrier.init with those that arrive in a phase.",
               "mbarrier.arrive at %u: more than the %u expected arrivals", address - kSharedStart,
               static_cast<u32>(b.expected));
    --b.pending;
    if (!it.flags) w.block->mbarriers.at(address).arriving.join(w.clock);
    write(*w.block, address, b, it.kind ? w.source(it.rows[1])[lane] : 0);
  });
  w.tick(lanes);
}

// rows[1]: the parity
void wait(Warp& w, const Instruction& it, u32 lanes) {
  u32 done = 0, addresses[kLanes];
  each_lane(lanes, [&](int lane) {
    const u32 address = addresses[lane] = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    const Mbarrier b = read(*w.block, address, lane);
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

void check_mbarrier(Block& block, u32 offset) {
  read(block, offset);
  const auto& [arriving, completed, phases, thread, fences] = block.mbarriers.at(offset);
  if (block.warps[thread / kLanes]->init_fences[thread % kLanes] == fences)
    fault("fence.mbarrier_init or fence.proxy.async comes between mbarrier.init and the barrier.",
          "completes on an mbarrier that thread %u made without a fence", thread);
}

Role role_of_mbarrier(Block& block, u32 offset, bool writes) {
  return {block.actor(Engine::mbarrier, offset), block.mbarriers.at(offset).phases + 1, writes};
}

void complete_bytes(Block& block, u32 offset, u32 bytes) {
  write(block, offset, read(block, offset), -s64{bytes});
}

bool decode_mbarrier(Decoder& d) {
  if (d.name() == "fence" && d.has("mbarrier_init")) {
    return d.runs([](Warp& w, const Instruction&, u32 lanes) {
      each_lane(lanes, [&](int lane) { ++w.init_fences[lane]; });
    });
  }
  if (d.name() != "mbarrier") return false;
  const std::string& what = d.words.at(1);
  d.to.flags = d.has("relaxed");
  if (what == "init") {
    d.to.rows[0] = d.base(0, 32);
    d.to.rows[1] = d.source(1, 32);
    return d.runs(init);
  }
  if (what == "arrive") {
    if (d.operands.at(0).type != Operand::sink || d.has("noComplete")) d.unknown("a state");
    d.to.rows[0] = d.base(1, 32);
    d.to.kind = d.has("expect_tx");
    if (d.to.kind) d.to.rows[1] = d.source(2, 32);
    if (d.operands.size() != (d.to.kind ? 3 : 2)) d.unknown("a count");
    return d.runs(arrive);
  }
  if (what != "try_wait" && what != "test_wait") return false;
  if (!d.has("parity")) d.unknown("a state");
  d.set_predicate(0, 0);
  d.to.rows[0] = d.base(1, 32);
  d.to.rows[1] = d.source(2, 32);
  return d.runs(wait);
}

}  // namespace cudasim
