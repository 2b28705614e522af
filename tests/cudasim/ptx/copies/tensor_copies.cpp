// Copy in bulk between global and shared memory: TMA, bulk groups, proxy fences.
#include "copies/async.h"

namespace cudasim {
namespace {

// ---- boxes --------------------------------------------------------------------------------------

struct Box {
  TensorMap map;
  s64 at[5] = {};

  u32 row_bytes() const { return u32{map.box[0]} * map.element; }
  u32 bytes() const {
    u32 n = row_bytes();
    for (int i = 1; i < map.rank; ++i) n *= map.box[i];
    return n;
  }

  // Calls visit(offset in the box, global address, bytes within the tensor, bytes before these)
  // for each row.
  template <class Visit>
  void each_row(Visit visit) const {
    const s64 first = std::max<s64>(at[0], 0);
    const s64 last = std::min<s64>(at[0] + map.box[0], static_cast<s64>(map.size[0]));
    const u32 inside = first < last ? static_cast<u32>(last - first) * map.element : 0;
    const u32 before = inside ? static_cast<u32>(first - at[0]) * map.element : 0;
    const u32 rows = bytes() / row_bytes();
    for (u32 row = 0; row < rows; ++row) {
      u64 address = reinterpret_cast<uintptr_t>(map.base) + static_cast<u64>(first * map.element);
      bool is_inside = inside > 0;
      u32 left = row;
      for (int i = 1; i < map.rank; ++i) {
        const s64 index = at[i] + left % map.box[i];
        left /= map.box[i];
        is_inside &= index >= 0 && index < static_cast<s64>(map.size[i]);
        address += static_cast<u64>(index) * map.stride[i - 1];
      }
      visit(row * row_bytes(), address, is_inside ? inside : 0, before);
    }
  }
};

// Swizzle modes 1 to 3 of 32, 64 and 128 bytes exchange address bits from 4 on by bits from 7 on.
u32 swizzled(const TensorMap& map, u32 address) {
  const u32 bits = map.swizzle ? ((16u << map.swizzle) - 1) & ~15u : 0;
  return address ^ (address >> 3 & bits);
}

Box box_of(Warp& w, const Instruction& it, int lane) {
  Box box;
  const u64 address = get<u64>(w.source(it.rows[1]), lane);
  if (address & kTags || address % 64)
    fault_of(lane, "A tensor map is a __grid_constant__ parameter or in global memory.",
             "TMA: a tensor map at 0x%lx", address);
  const u64 in_parameters = address - reinterpret_cast<uintptr_t>(w.grid->parameters);
  if (in_parameters >= w.kernel->parameter_bytes)
    global_bytes(w, lane, address, sizeof box.map, 64);
  memcpy(&box.map, reinterpret_cast<const void*>(address), sizeof box.map);
  if (box.map.magic != kTensorMap)
    fault_of(lane, "cuTensorMapEncodeTiled() makes it.", "TMA: no tensor map at 0x%lx", address);
  if (box.map.rank != it.count)
    fault_of(lane, "The instruction has as many coordinates as the map has dimensions.",
             "TMA: %d coordinates for a tensor map of rank %d", it.count, box.map.rank);
  for (int i = 0; i < it.count; ++i) box.at[i] = static_cast<s32>(w.source(it.rows[3 + i])[lane]);
  if (box.at[0] * box.map.element % 16)
    fault_of(lane, "An H100 ends such a copy with an illegal instruction.",
             "TMA: the first coordinate, %ld, is not at a multiple of 16 bytes", box.at[0]);
  return box;
}

// ---- loads --------------------------------------------------------------------------------------

void finish_load(const Box& box, Block& block, u32 to, u32 full) {
  box.each_row([&](u32 offset, u64 address, u32 inside, u32 before) {
    for (u32 i = 0; i < box.row_bytes(); i += 16) {
      u8 piece[16] = {};
      for (u32 j = 0; j < 16; ++j)
        if (const u32 x = i + j; x >= before && x < before + inside)
          piece[j] = reinterpret_cast<const u8*>(address)[x - before];
      memcpy(block.shared.base + swizzled(box.map, to + offset + i), piece, 16);
    }
  });
  forget_generic_writes(block, to, box.bytes());
  complete_bytes(block, full, box.bytes());
}

// rows[0]: to, rows[1]: the map, rows[2]: the mbarrier, rows[3...]: coordinates
void load(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    const Box box = box_of(w, it, lane);
    const u32 bytes = box.bytes();
    statistics.bytes_copied += bytes;
    Block* const block = w.block;
    const u32 to = w.source(it.rows[0])[lane], full = w.source(it.rows[2])[lane];
    u8* const data = shared_bytes(*block, to, bytes, 128, lane);
    check_mbarrier(*block, full);
    Accesses reads(w, it, role_of_mbarrier(*block, full, false));
    box.each_row([&](u32, u64 address, u32 inside, u32) {
      if (!inside) return;
      check_fresh(global_bytes(w, lane, address, inside, 1), inside, lane);
      reads.global(address, inside, lane);
    });
    reads.finish();
    Accesses writes(w, it, role_of_mbarrier(*block, full, true));
    writes.shared(to, bytes, lane);
    writes.finish();
    mark_written(*block, to, bytes);
    const auto run = [=] { finish_load(box, *block, to, full); };
    if (!w.grid->is_late()) return run();
    memset(data, 0xff, bytes);
    w.grid->pending.push_back({run, block});
  });
}

// ---- stores and reductions ----------------------------------------------------------------------

template <class T>
void add_to(u8* to, const u8* from, u32 bytes) {
  for (u32 i = 0; i < bytes; i += sizeof(T)) {
    T sum, x;
    memcpy(&sum, to + i, sizeof(T));
    memcpy(&x, from + i, sizeof(T));
    sum += x;
    memcpy(to + i, &sum, sizeof(T));
  }
}

Role role_of_store(Warp& w, Engine engine, int lane) {
  return {w.block->actor(engine, static_cast<u32>(w.index)), w.bulk_groups[lane] + 1,
          engine == Engine::bulk_write, false, false};
}

// rows[0]: from, rows[1]: the map, rows[3...]: coordinates; it.kind: adds
void store(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    const Box box = box_of(w, it, lane);
    const u32 bytes = box.bytes();
    statistics.bytes_copied += bytes;
    const u32 from = w.source(it.rows[0])[lane];
    shared_bytes(*w.block, from, bytes, 128, lane);
    if (it.kind && box.map.type != kFloat32Map)
      fault_of(lane, "The executor adds fp32.", "TMA: a reduction of data type %d", box.map.type);
    check_written(*w.block, from, bytes, lane);
    check_proxy(*w.block, from, bytes);
    Accesses reads(w, it, role_of_store(w, Engine::bulk_read, lane));
    reads.shared(from, bytes, lane);
    reads.finish();
    Role role = role_of_store(w, Engine::bulk_write, lane);
    role.strong = role.wide = it.kind;  // reductions are atomic
    Accesses writes(w, it, role);
    box.each_row([&](u32, u64 address, u32 inside, u32) {
      if (!inside) return;
      global_bytes(w, lane, address, inside, 1);
      writes.global(address, inside, lane);
    });
    writes.finish();
    Block* const block = w.block;
    BulkStore bulk;
    bulk.group = w.bulk_groups[lane];
    bulk.fetch = [=](std::vector<u8>& data) {
      data.resize(bytes);
      for (u32 i = 0; i < bytes; i += 16)
        memcpy(&data[i], block->shared.base + swizzled(box.map, from + i), 16);
    };
    const bool adds = it.kind;
    bulk.write = [=](const std::vector<u8>& data) {
      box.each_row([&](u32 offset, u64 address, u32 inside, u32 before) {
        u8* const to = reinterpret_cast<u8*>(address);
        if (inside && adds)
          add_to<float>(to, &data[offset + before], inside);
        else if (inside)
          memcpy(to, &data[offset + before], inside);
      });
    };
    if (!w.grid->is_late()) {
      bulk.fetch(bulk.data);
      bulk.write(bulk.data);
      bulk.read = bulk.written = true;
    }
    w.bulk_stores[lane].push_back(std::move(bulk));
  });
}

void commit(Warp& w, const Instruction&, u32 lanes) {
  each_lane(lanes, [&](int lane) { ++w.bulk_groups[lane]; });
}

// it.kind: waits for the reads alone
void wait(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    const s64 done = s64{w.bulk_groups[lane]} - it.offset;
    std::vector<BulkStore> left;
    for (BulkStore& bulk : w.bulk_stores[lane]) {
      if (s64{bulk.group} < done) {
        if (!bulk.read) bulk.fetch(bulk.data);
        bulk.read = true;
        if (!it.kind && !bulk.written) {
          bulk.write(bulk.data);
          bulk.written = true;
        }
      }
      if (!bulk.read || !bulk.written) left.push_back(std::move(bulk));
    }
    w.bulk_stores[lane] = std::move(left);
    if (done <= 0) return;
    const u32 index = static_cast<u32>(w.index), time = static_cast<u32>(done);
    w.clock.set(w.block->actor(Engine::bulk_read, index), time);
    if (!it.kind) w.clock.set(w.block->actor(Engine::bulk_write, index), time);
  });
}

}  // namespace

bool decode_tensor_copy(Decoder& d) {
  if (d.name() == "fence" && d.has("proxy")) {
    d.to.kind = d.has("async") || d.has("async::generic");
    return d.runs([](Warp& w, const Instruction& it, u32 lanes) {
      if (it.kind)
        each_lane(lanes, [&](int lane) { ++w.proxy_fences[lane], ++w.init_fences[lane]; });
    });
  }
  if (d.name() != "cp" || !d.has("bulk")) return false;
  if (d.has("commit_group")) {
    return d.runs(commit);
  }
  if (d.has("wait_group")) {
    d.to.kind = d.has("read");
    d.to.offset = d.operands.at(0).value;
    return d.runs(wait);
  }
  if (!d.has("tensor") || d.has("im2col")) d.unknown("a copy without a tile");
  for (int rank = 1; rank <= 5; ++rank)
    if (d.has((std::to_string(rank) + "d").c_str())) d.to.count = rank;
  const bool loads = d.words.at(1) == "async" &&
                     (d.words.at(5) == "shared::cluster" || d.words.at(5) == "shared::cta");
  const Operand& map = d.operands.at(loads ? 1 : 0);
  const Operand& memory = d.operands.at(loads ? 0 : 1);
  if (map.parts.size() != 2 || static_cast<int>(map.parts[1].parts.size()) != d.to.count)
    d.unknown("coordinates");
  const auto source_of_address = [&](const Operand& operand, int bits) {
    if (operand.offset) d.unknown("an offset");
    return d.source(operand.parts.at(0), bits);
  };
  d.to.rows[0] = source_of_address(memory, 32);
  d.to.rows[1] = source_of_address(map, 64);
  for (int i = 0; i < d.to.count; ++i)
    d.to.rows[3 + i] = d.source(map.parts[1].parts[static_cast<size_t>(i)], 32);
  if (loads) {
    if (!d.has("mbarrier::complete_tx::bytes")) d.unknown("a completion");
    d.to.rows[2] = source_of_address(d.operands.at(2), 32);
    if (d.operands.size() != 3) d.unknown("a multicast or a cache policy");
    d.to.run = load;
  } else {
    if (!d.has("bulk_group") || d.operands.size() != 2) d.unknown("a completion");
    d.to.kind = d.words.at(1) == "reduce";
    if (d.to.kind && !d.has("add")) d.unknown("a reduction");
    d.to.run = store;
  }
  return true;
}

}  // namespace cudasim
