// Wait for the warps of a block.
#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

enum Result { none, any, every };

// rows[0]: the barrier's number, rows[1]: the number of threads if it.count
void barrier(Warp& w, const Instruction& it, u32 lanes) {
  Block& block = *w.block;
  const u32 number = w.source(it.rows[0])[0];
  if (number > 15) fault("A block has the barriers 0 to 15.", "barrier %u", number);
  Barrier& b = block.barriers[number];
  const u32 warps = static_cast<u32>(block.warps.size());
  const u32 expected = it.count ? w.source(it.rows[1])[0] : warps * kLanes;
  if (expected == 0 || expected % kLanes || expected > warps * kLanes)
    fault("A barrier has whole warps of its block.", "barrier %u of %u threads", number, expected);
  if (!it.count && block.live != w.grid->threads())
    fault("All threads of a block reach __syncthreads(), or none: return behind it.",
          "barrier %u of all threads, of which %u have exited", number,
          w.grid->threads() - block.live);
  if (b.arrived && b.expected != expected)
    fault("All that meet at a barrier give it the same number of threads.",
          "barrier %u of %u threads, to which others came as one of %u", number, expected,
          b.expected);
  if (b.arrived == 0) {
    b.any = false, b.every = true;
    b.clock = Clock(block.order);
  }
  b.expected = expected;
  b.arrived += kLanes;
  if (it.kind != none) {
    const u32 bits = w.source_predicate(it, 1) & lanes;
    b.any |= bits != 0;
    b.every &= bits == lanes;
  }
  b.clock.join(w.clock);
  w.tick(w.all, LaneOrder::releases | LaneOrder::meets);
  if (b.arrived < expected) {
    b.waiting.push_back({&w, &it});
    w.group().state = Group::blocked;
    return;
  }
  const auto leave = [&](Warp& warp, const Instruction& waiting) {
    if (waiting.kind != none)
      warp.set_predicate(waiting.predicates[0], warp.all,
                         (waiting.kind == any ? b.any : b.every) ? kAllLanes : 0);
    warp.clock.join(b.clock);
  };
  for (const auto& [warp, instruction] : b.waiting) {
    leave(*warp, *instruction);
    warp->group().state = Group::runs;
    ++warp->group().pc;
  }
  leave(w, it);
  b.waiting.clear();
  b.arrived = 0;
  ++w.grid->progress;
}

}  // namespace

bool decode_barrier(Decoder& d) {
  const std::string& name = d.name();
  if (name != "bar" && name != "barrier") return false;
  d.to.flow = Flow::aligned;
  if (d.has("cluster") || d.has("arrive") || d.has("popc")) d.unknown("a kind of barrier");
  size_t at = 0;
  if (d.has("red")) {
    d.to.kind = d.has("or") ? any : every;
    d.set_predicate(0, at++);
  }
  d.to.rows[0] = d.source(at++, 32);
  if (d.operands.size() > at && d.operands[at].type != Operand::predicate) {
    d.to.count = 1;
    d.to.rows[1] = d.source(at++, 32);
  }
  if (d.to.kind != none) d.set_source_predicate(1, at++);
  if (at != d.operands.size()) d.unknown("another number of operands");
  return d.runs(barrier);
}

}  // namespace cudasim
