// Load, store, convert addresses.
#include <algorithm>

#include "memory/memory.h"
#include "parser/words.h"

namespace cudasim {
namespace {

// The target of a lane's address in its own space.
struct Target {
  u8* data;
  u32 shared = 0;  // the address in shared memory, if it is there
  bool is_global = false;
};

template <Space kSpace>
inline Target resolve(Warp& w, int lane, u64 address, u32 bytes) {
  if constexpr (kSpace == Space::shared) {
    const u32 at = static_cast<u32>(address);
    return {shared_bytes(*w.block, at, bytes, bytes, lane), at};
  } else if constexpr (kSpace == Space::local) {
    if (address % bytes || address + bytes > w.kernel->local_bytes)
      fault_of(lane, "Compare the index with the local array.", "%u bytes at local address %ld",
               bytes, static_cast<s64>(address));
    return {w.local + static_cast<size_t>(lane) * w.kernel->local_bytes + address};
  } else if constexpr (kSpace == Space::parameter) {
    return {reinterpret_cast<u8*>(address)};
  } else {
    if (kSpace == Space::generic && address & kTags) {
      if ((address & kTags) == kSharedTag)
        return resolve<Space::shared>(w, lane, address & kAllLanes, bytes);
      if ((address & kTags) == kLocalTag)
        return resolve<Space::local>(w, lane, address & ~kTags, bytes);
    }
    if (address - reinterpret_cast<uintptr_t>(w.grid->parameters) < w.kernel->parameter_bytes)
      return {reinterpret_cast<u8*>(address)};
    if (w.kernel->waits_for_grid && !(w.waited >> lane & 1))
      fault_of(lane,
               "The grid before may write still: cudaGridDependencySynchronize() comes first.",
               "accesses global memory before griddepcontrol.wait");
    Target target{global_bytes(w, lane, address, bytes, bytes)};
    target.is_global = true;
    return target;
  }
}

// ---- ld and st ----------------------------------------------------------------------------------

// rows[0]: the address, rows[1...]: it.count elements. it.mode: bits of the register, negative
// if the element is sign-extended.
template <int kBytes>
inline void load_element(const u8* from, int mode, u32* to, int lane) {
  if constexpr (kBytes == 8) {
    memcpy(to + 2 * lane, from, 8);
  } else {
    u32 value = 0;
    memcpy(&value, from, kBytes);
    if (mode < 0) {
      constexpr int kShift = 32 - 8 * kBytes;
      value = static_cast<u32>(static_cast<s32>(value << kShift) >> kShift);
    }
    if (mode == 64 || mode == -64)
      put<u64>(to, lane, mode < 0 ? static_cast<u64>(s64{static_cast<s32>(value)}) : u64{value});
    else
      to[lane] = mode == -16 ? value & 0xffff : value;
  }
}

constexpr u32 kCountedLoad = 16;  // bytes: see Statistics

template <Space kSpace, int kBytes>
void load(Warp& w, const Instruction& it, u32 lanes) {
  const u32 bytes = static_cast<u32>(kBytes * it.count);
  Accesses accesses(w, it, role_of(w, false, it.flags & strong, it.flags & wide));
  each_lane(lanes, [&](int lane) {
    const Target at = resolve<kSpace>(w, lane, address_of(w, it, it.rows[0], lane), bytes);
    if (kSpace != Space::local && kSpace != Space::parameter) {
      if (at.shared) {
        check_written(*w.block, at.shared, bytes, lane);
        accesses.shared(at.shared, bytes, lane);
      } else if (at.is_global) {
        check_fresh(at.data, bytes, lane);
        if (it.count > 1 && bytes >= kCountedLoad) {
          statistics.bytes_loaded += bytes;
          w.grid->most_loads = std::max(w.grid->most_loads, ++w.loads[lane]);
        }
        accesses.global(reinterpret_cast<uintptr_t>(at.data), bytes, lane);
      }
      if (it.flags & strong) acquire(w, at.data, it.flags);
    }
    for (int i = 0; i < it.count; ++i)
      load_element<kBytes>(at.data + kBytes * i, it.mode, w.destination(it.rows[1 + i]), lane);
  });
  accesses.finish();
}

template <Space kSpace, int kBytes>
void store(Warp& w, const Instruction& it, u32 lanes) {
  const u32 bytes = static_cast<u32>(kBytes * it.count);
  Accesses accesses(w, it, role_of(w, true, it.flags & strong, it.flags & wide));
  each_lane(lanes, [&](int lane) {
    const Target at = resolve<kSpace>(w, lane, address_of(w, it, it.rows[0], lane), bytes);
    if (at.shared) {
      note_generic_write(w, lane, at.shared, bytes);
      accesses.shared(at.shared, bytes, lane);
    } else if (at.is_global) {
      accesses.global(reinterpret_cast<uintptr_t>(at.data), bytes, lane);
      if (it.count > 1) statistics.bytes_stored += bytes;
    }
    if (it.flags & strong) release(w, at.data, it.flags | replaces);
    for (int i = 0; i < it.count; ++i) {
      const u32* const from = w.source(it.rows[1 + i]);
      memcpy(at.data + kBytes * i, kBytes == 8 ? from + 2 * lane : from + lane, kBytes);
    }
  });
  accesses.finish();
  if (it.flags & strong) w.tick(lanes);
}

template <Space kSpace>
Run by_bytes(bool loads, int bytes) {
  switch (bytes) {
    case 1: return loads ? load<kSpace, 1> : store<kSpace, 1>;
    case 2: return loads ? load<kSpace, 2> : store<kSpace, 2>;
    case 4: return loads ? load<kSpace, 4> : store<kSpace, 4>;
    default: return loads ? load<kSpace, 8> : store<kSpace, 8>;
  }
}

bool decode_access(Decoder& d) {
  const bool loads = d.name() != "st";
  const std::string type = d.type();
  const int bits = bits_of(type), bytes = bits / 8;
  const Space space = space_of(d);
  if (!bits || bits == 128 || d.operands.size() != 2) d.unknown();
  d.to.count = d.has("v2") ? 2 : d.has("v4") ? 4 : d.has("v8") ? 8 : 1;
  d.to.flags = order_of(d, false);
  d.to.rows[0] = d.base(loads, space == Space::shared || space == Space::local ? 32 : 64);
  const Operand& value = d.operands[!loads];
  const auto parts = d.to.count > 1 ? value.parts : std::vector{value};
  if (static_cast<int>(parts.size()) != d.to.count) d.unknown("another number of elements");
  for (int i = 0; i < d.to.count; ++i) {
    const Operand& part = parts[static_cast<size_t>(i)];
    const int width = loads && part.type == Operand::row ? part.bits : std::max(bits, 16);
    d.to.rows[1 + i] = loads ? d.destination(part, width) : d.source(part, width);
    d.to.mode = type[0] == 's' && bits < width ? -width : width;
  }
  switch (space) {
    case Space::shared: return d.runs(by_bytes<Space::shared>(loads, bytes));
    case Space::local: return d.runs(by_bytes<Space::local>(loads, bytes));
    case Space::global: return d.runs(by_bytes<Space::global>(loads, bytes));
    case Space::generic: return d.runs(by_bytes<Space::generic>(loads, bytes));
    default: return loads && d.runs(by_bytes<Space::parameter>(loads, bytes));
  }
}

// ---- conversions of addresses -------------------------------------------------------------------

u64 tag_of(Space space) {
  return space == Space::shared ? kSharedTag : space == Space::local ? kLocalTag : 0;
}

void to_generic(Warp& w, const Instruction& it, u32 lanes) {
  const u64 tag = tag_of(static_cast<Space>(it.kind));
  each_lane(lanes, [&](int lane) {
    put<u64>(w.destination(it.rows[0]), lane, get<u64>(w.source(it.rows[1]), lane) | tag);
  });
}

// An address of another space becomes one that no access takes: compilers convert speculatively.
void from_generic(Warp& w, const Instruction& it, u32 lanes) {
  const u64 tag = tag_of(static_cast<Space>(it.kind));
  each_lane(lanes, [&](int lane) {
    const u64 address = get<u64>(w.source(it.rows[1]), lane);
    put<u64>(w.destination(it.rows[0]), lane,
             (address & kTags) == tag ? address & ~kTags : address | u64{0xdead} << 48);
  });
}

}  // namespace

bool decode_memory(Decoder& d) {
  const std::string& name = d.name();
  if (name == "ld" || name == "st") return decode_access(d);
  if (name != "cvta") return false;
  if (d.type() != "u64") d.unknown("a width");
  d.to.kind = static_cast<s32>(space_of(d));
  d.to.rows[0] = d.destination(0, 64);
  d.to.rows[1] = d.source(1, 64);
  return d.runs(d.has("to") ? from_generic : to_generic);
}

}  // namespace cudasim
