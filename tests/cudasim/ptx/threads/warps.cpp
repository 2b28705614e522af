// Exchange values between the lanes of a warp.
#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

void set_members(Decoder& d, size_t mask) {
  d.to.flow = Flow::members;
  d.to.rows[9] = d.source(mask, 32);
}

enum Shuffle { up, down, butterfly, indexed };

void shuffle(Warp& w, const Instruction& it, u32 lanes) {
  const u32 *const a = w.source(it.rows[1]), *const b = w.source(it.rows[2]),
                   *const c = w.source(it.rows[3]);
  u32 results[kLanes], valid = 0;
  each_lane(lanes, [&](int lane) {
    const int distance = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int least = lane & segment, most = least | (clamp & ~segment);
    int from = it.kind == up          ? lane - distance
               : it.kind == down      ? lane + distance
               : it.kind == butterfly ? lane ^ distance
                                      : least | (distance & ~segment);
    const bool inside = it.kind == up ? from >= most : from <= most;
    if (!inside) from = lane;
    if (!(lanes >> from & 1))
      fault_of(lane, "Each lane that is read needs its bit in the mask, and to come here.",
               "shfl.sync: reads lane %d, which is not in the mask", from);
    results[lane] = a[from];
    valid |= static_cast<u32>(inside) << lane;
  });
  each_lane(lanes, [&](int lane) { w.destination(it.rows[0])[lane] = results[lane]; });
  w.set_predicate(it.predicates[0], lanes, valid);
}

void vote(Warp& w, const Instruction& it, u32 lanes) {  // it.kind: all
  const u32 bits = w.source_predicate(it, 1) & lanes;
  w.set_predicate(it.predicates[0], lanes, bits && (!it.kind || bits == lanes) ? kAllLanes : 0);
}

}  // namespace

bool decode_warp(Decoder& d) {
  const std::string& name = d.name();
  if (name == "bar" && d.has("warp")) {
    set_members(d, 0);
    // Alone of a warp's instructions it orders memory; those that exchange values do not.
    return d.runs([](Warp& w, const Instruction&, u32 lanes) { w.tick(lanes, LaneOrder::meets); });
  }
  if (name == "elect") {
    const Operand& to = d.operands.at(0);
    if (to.type != Operand::pair || to.parts[0].type != Operand::sink) d.unknown("a lane");
    d.set_predicate(0, to.parts[1]);
    set_members(d, 1);
    return d.runs([](Warp& w, const Instruction& it, u32 lanes) {
      w.set_predicate(it.predicates[0], lanes, lanes & -lanes);
    });
  }
  if (!d.has("sync")) return false;
  if (name == "shfl") {
    d.to.kind = d.has("up") ? up : d.has("down") ? down : d.has("bfly") ? butterfly : indexed;
    const Operand& to = d.operands.at(0);
    const bool is_pair = to.type == Operand::pair;
    d.to.rows[0] = d.destination(is_pair ? to.parts[0] : to, 32);
    if (is_pair) d.set_predicate(0, to.parts[1]);
    for (size_t i = 1; i <= 3; ++i) d.to.rows[i] = d.source(i, 32);
    set_members(d, 4);
    return d.runs(shuffle);
  }
  if (name == "vote") {
    d.to.kind = d.has("all");
    if (!d.to.kind && !d.has("any")) d.unknown("a vote");
    d.set_predicate(0, 0);
    d.set_source_predicate(1, 1);
    set_members(d, 2);
    return d.runs(vote);
  }
  return false;
}

}  // namespace cudasim
