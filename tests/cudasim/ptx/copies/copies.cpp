// Copy from global to shared memory asynchronously: cp.async and its groups.
#include "copies/async.h"
#include "memory/memory.h"

namespace cudasim {
namespace {

// A group of a warp is a time of its engine.
Role role_of_group(Warp& w, int lane, bool writes) {
  return {w.block->actor(Engine::copy, static_cast<u32>(w.index)), w.copy_groups[lane] + 1, writes};
}

void finish_copy(u8* to, const u8* from, int read, int bytes) {
  if (read) memcpy(to, from, static_cast<size_t>(read));
  memset(to + read, 0, static_cast<size_t>(bytes - read));
}

// rows[0]: to, rows[1]: from, at it.mode, rows[2]: bytes to read if it.kind; it.count: bytes
void copy(Warp& w, const Instruction& it, u32 lanes) {
  CopyInFlight copy{};
  copy.lanes = lanes;
  copy.bytes = it.count;
  const u32 bytes = static_cast<u32>(it.count);
  copy.is_late = w.grid->is_late();
  const int first = __builtin_ctz(lanes);
  Accesses writes(w, it, role_of_group(w, first, true)),
      reads(w, it, role_of_group(w, first, false));
  each_lane(lanes, [&](int lane) {
    const u32 to = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    const u64 from = get<u64>(w.source(it.rows[1]), lane) + static_cast<u64>(s64{it.mode});
    const u32 read = it.kind ? w.source(it.rows[2])[lane] : bytes;
    if (read > bytes)
      fault_of(lane, "The source size is at most that of the copy.", "reads %u bytes of %u", read,
               bytes);
    u8* const at = shared_bytes(*w.block, to, bytes, bytes, lane);
    statistics.bytes_copied += read;
    if (read) {
      check_fresh(global_bytes(w, lane, from, read, bytes), read, lane);
      reads.global(from, read, lane);
    }
    writes.shared(to, bytes, lane);
    note_generic_write(w, lane, to, bytes);
    copy.to[lane] = to;
    copy.from[lane] = reinterpret_cast<const u8*>(from);
    copy.read[lane] = static_cast<int>(read);
    copy.group[lane] = w.copy_groups[lane];
    if (copy.is_late)
      memset(at, 0xff, bytes);
    else
      finish_copy(at, copy.from[lane], copy.read[lane], copy.bytes);
  });
  writes.finish();
  reads.finish();
  w.copies.push_back(copy);
}

void commit(Warp& w, const Instruction&, u32 lanes) {
  each_lane(lanes, [&](int lane) { ++w.copy_groups[lane]; });
}

void wait(Warp& w, const Instruction& it, u32 lanes) {
  for (CopyInFlight& copy : w.copies)
    each_lane(copy.lanes & lanes, [&](int lane) {
      if (s64{copy.group[lane]} >= s64{w.copy_groups[lane]} - it.offset) return;
      if (copy.is_late)
        finish_copy(w.block->shared.base + copy.to[lane], copy.from[lane], copy.read[lane],
                    copy.bytes);
      copy.lanes &= ~(1u << lane);
    });
  while (!w.copies.empty() && !w.copies.front().lanes) w.copies.pop_front();
  const Actor actor = w.block->actor(Engine::copy, static_cast<u32>(w.index));
  each_lane(lanes, [&](int lane) {
    const s64 done = s64{w.copy_groups[lane]} - it.offset;
    if (done > 0) w.clock.set(actor, static_cast<u32>(done));
  });
}

}  // namespace

bool decode_copy(Decoder& d) {
  if (d.name() != "cp" || d.has("bulk") || d.has("reduce")) return false;
  if (d.has("mbarrier")) d.unknown();
  if (d.has("commit_group")) {
    return d.runs(commit);
  }
  if (d.has("wait_group")) {
    d.to.offset = d.operands.at(0).value;
    return d.runs(wait);
  }
  if (d.words.at(1) != "async" || (!d.has("ca") && !d.has("cg"))) return false;
  const Operand& from = d.operands.at(1);
  d.to.rows[0] = d.base(0, 32);
  d.to.rows[1] = d.source(from.parts.at(0), 64);
  d.to.mode = static_cast<s32>(from.offset);
  d.to.count = static_cast<s32>(d.operands.at(2).value);
  const bool fits =
      d.has("cg") ? d.to.count == 16 : d.to.count == 4 || d.to.count == 8 || d.to.count == 16;
  if (!fits) d.unknown("a number of bytes");
  d.to.kind = d.operands.size() > 3;
  if (d.to.kind) d.to.rows[2] = d.source(3, 32);
  return d.runs(copy);
}

}  // namespace cudasim
