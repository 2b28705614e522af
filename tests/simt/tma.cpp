// Copies of boxes between tensors and shared memory, in chunks of 16 bytes.
#include <algorithm>
#include <cstring>
#include <ptx_sm90.cuh>

#include "elements.h"
#include "engine.h"
#include "tensor_map.h"

namespace simt {
namespace {

constexpr size_t kChunkBytes = 16;
constexpr size_t kBoxAlignment = 128;
constexpr size_t kAtomBytes = 1024;  // after which the swizzle of 128 bytes repeats

size_t alignment(const TensorMap& map) {
  return map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? kAtomBytes : kBoxAlignment;
}

// Where a byte of a box lies: the number of its row of 128 bytes is added, bit by bit, to the
// number of its chunk.
size_t swizzled(const TensorMap& map, size_t offset) {
  const size_t span = swizzle_span(map.swizzle);
  return span ? offset ^ ((offset >> 3) & (span - kChunkBytes)) : offset;
}

struct Coordinates {
  int x, y, z;
};

// What of a chunk is in the tensor.
struct Part {
  unsigned char* global;
  size_t begin, bytes;  // in the chunk; no bytes if it is outside
};

Part part_of(const TensorMap& map, int64_t x, int64_t y, int64_t z) {
  const auto outside = [&](int64_t i, int dimension) {
    return i < 0 || i >= static_cast<int64_t>(map.size[dimension]);
  };
  if (outside(y, 1) || outside(z, 2)) return {nullptr, 0, 0};
  const int64_t elements = kChunkBytes / map.element_bytes;
  const int64_t first = std::max<int64_t>(x, 0);
  const int64_t end = std::min<int64_t>(x + elements, map.size[0]);
  if (first >= end) return {nullptr, 0, 0};
  return {map.base + first * map.element_bytes + y * map.stride[1] + z * map.stride[2],
          static_cast<size_t>(first - x) * map.element_bytes,
          static_cast<size_t>(end - first) * map.element_bytes};
}

// Calls visit(place in the box, part) for each chunk.
template <class Visit>
void each_chunk(const TensorMap& map, Coordinates at, Visit visit) {
  size_t place = 0;
  for (uint32_t z = 0; z < map.box[2]; ++z)
    for (uint32_t y = 0; y < map.box[1]; ++y)
      for (size_t byte = 0; byte < map.row_bytes(); byte += kChunkBytes, place += kChunkBytes) {
        const int64_t x = at.x + static_cast<int64_t>(byte) / map.element_bytes;
        visit(place, part_of(map, x, int64_t{at.y} + y, int64_t{at.z} + z));
      }
}

void check_tensor(const char* operation, const TensorMap& map, Coordinates at) {
  each_chunk(map, at, [&](size_t, Part part) {
    if (part.bytes) check_global(operation, part.global, part.bytes);
  });
}

void read_tensor(const TensorMap& map, Coordinates at, unsigned char* shared, size_t offset) {
  each_chunk(map, at, [&](size_t place, Part part) {
    unsigned char* const to = shared + swizzled(map, offset + place);
    memset(to, 0, kChunkBytes);
    if (part.bytes) memcpy(to + part.begin, part.global, part.bytes);
  });
}

template <class T>
T sum(T a, T b) {
  return a + b;
}
__half sum(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
__nv_bfloat16 sum(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
}

template <class T>
void add_all(unsigned char* to, const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    memcpy(&a, to + i, sizeof(T));
    memcpy(&b, from + i, sizeof(T));
    a = sum(a, b);
    memcpy(to + i, &a, sizeof(T));
  }
}

using Put = void (*)(unsigned char* to, const unsigned char* from, size_t bytes);

void copy_all(unsigned char* to, const unsigned char* from, size_t bytes) {
  memcpy(to, from, bytes);
}

Put adder(const TensorMap& map) {
  switch (map.type) {
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return add_all<float>;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: return add_all<__half>;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return add_all<__nv_bfloat16>;
    default: fail("tma_reduce_add: of data type %d", static_cast<int>(map.type));
  }
}

void load(void* to, const CUtensorMap& opaque, const void* full, Coordinates at, uint32_t blocks) {
  constexpr char kOperation[] = "tma_load";
  const TensorMap& map = tensor_map(kOperation, opaque);
  const size_t bytes = map.box_bytes();
  const size_t offset = shared_offset(kOperation, to, bytes, alignment(map));
  const size_t barrier = shared_offset(kOperation, full, sizeof(uint64_t), sizeof(uint64_t));
  check_tensor(kOperation, map, at);
  if (blocks == 0) fail("%s: to no block", kOperation);
  counters.bytes_copied += bytes;
  for (int rank = 0; blocks >> rank != 0; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    Block& block = current->block->cluster.at(rank, kOperation);
    mbarrier_for_others(kOperation, block, barrier);
    poison(block, offset, bytes);
    const auto write = [=, &block, map = map] {
      read_tensor(map, at, block.shared, offset);
      complete_bytes(block, barrier, bytes);
    };
    start({kOperation, current, &block, true, offset, bytes, nullptr, write});
  }
  may_preempt();
}

void store(const CUtensorMap& opaque, const void* from, Coordinates at, bool add) {
  const char* const operation = add ? "tma_reduce_add" : "tma_store";
  const TensorMap& map = tensor_map(operation, opaque);
  const size_t bytes = map.box_bytes();
  const size_t offset = shared_offset(operation, from, bytes, alignment(map));
  Block& block = *current->block;
  check_marks(operation, block, offset, bytes);
  check_tensor(operation, map, at);
  counters.bytes_copied += bytes;
  const Put put = add ? adder(map) : copy_all;
  const auto box = std::make_shared<std::vector<unsigned char>>(bytes);
  const auto read = [=, &block, map = map] {
    check_marks(operation, block, offset, bytes);
    for (size_t i = 0; i < bytes; i += kChunkBytes)
      memcpy(box->data() + i, block.shared + swizzled(map, offset + i), kChunkBytes);
  };
  const auto write = [=, map = map] {
    each_chunk(map, at, [&](size_t place, Part part) {
      if (part.bytes) put(part.global, box->data() + place + part.begin, part.bytes);
    });
  };
  current->bulk.open.push_back(
      start({operation, current, &block, false, offset, bytes, read, write}));
  may_preempt();
}

}  // namespace

void bulk_wait(int pending, bool only_read) {
  only_read ? current->bulk.wait_read(pending) : current->bulk.wait(pending);
  may_preempt();
}

}  // namespace simt

namespace amp_ext::ptx {

using namespace simt;

void tma_prefetch(const CUtensorMap& map) { tensor_map("tma_prefetch", map); }

void tma_load(void* to, const CUtensorMap& map, Mbarrier& full, int x, int y, int z) {
  load(to, map, &full, {x, y, z}, 1u << cluster_rank());
}

void tma_load_multicast(void* to, const CUtensorMap& map, Mbarrier& full, int x, int y, int z,
                        uint16_t blocks) {
  load(to, map, &full, {x, y, z}, blocks);
}

void tma_store(const CUtensorMap& map, const void* from, int x, int y, int z) {
  store(map, from, {x, y, z}, false);
}

void tma_reduce_add(const CUtensorMap& map, const void* from, int x, int y, int z) {
  store(map, from, {x, y, z}, true);
}

void bulk_commit() { current->bulk.commit(); }

}  // namespace amp_ext::ptx
