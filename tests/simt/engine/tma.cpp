// Tensor maps, and copies of boxes between tensors and shared memory.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <ptx/sm90.cuh>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr uint64_t kMagic = 0x70616d20726f736e;
constexpr int kRank = 3;
constexpr uint64_t kMostElements = 1ull << 32;  // of a dimension
constexpr uint64_t kMostStride = 1ull << 40;    // below this, in bytes
constexpr uint32_t kMostBox = 256;
constexpr size_t kChunkBytes = 16;  // which swizzles leave together
constexpr size_t kBoxAlignment = 128;
constexpr size_t kAtomBytes = 1024;  // after which the swizzle of 128 bytes repeats

// In the order of CUtensorMapDataType; the types behind these are not modelled.
constexpr int kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};

// What the executor keeps in a CUtensorMap.
struct TensorMap {
  uint64_t magic;
  unsigned char* base;
  uint64_t size[kRank];    // in elements, the contiguous dimension first
  uint64_t stride[kRank];  // in bytes
  uint32_t box[kRank];     // in elements
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;

  int element_bytes() const { return kElementBytes[type]; }
  size_t row_bytes() const { return static_cast<size_t>(box[0]) * element_bytes(); }
  size_t box_bytes() const { return row_bytes() * box[1] * box[2]; }
  // Bytes of a row within which chunks change places.
  size_t swizzle_span() const { return swizzle ? kChunkBytes << swizzle : 0; }

  size_t box_alignment() const {
    return swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? kAtomBytes : kBoxAlignment;
  }
};

static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

std::string refusal(const TensorMap& map) {
  if (!map.base || !is_aligned(map.base, kChunkBytes))
    return text("the tensor's address %p is not aligned to 16 bytes", map.base);
  for (int i = 0; i < kRank; ++i) {
    if (map.size[i] == 0 || map.size[i] > kMostElements)
      return text("dimension %d has %lu elements, not 1 to 2^32", i, map.size[i]);
    if (map.box[i] == 0 || map.box[i] > kMostBox)
      return text("the box has %u elements in dimension %d, not 1 to 256", map.box[i], i);
    if (i > 0 && (map.stride[i] % kChunkBytes != 0 || map.stride[i] >= kMostStride))
      return text("dimension %d has a stride of %lu bytes, not a multiple of 16 below 2^40", i,
                  map.stride[i]);
  }
  if (map.row_bytes() % kChunkBytes != 0)
    return text("the box's rows have %zu bytes, not a multiple of 16", map.row_bytes());
  if (const size_t span = map.swizzle_span(); span && map.row_bytes() > span)
    return text("the box's rows have %zu bytes, the swizzle spans %zu", map.row_bytes(), span);
  return "";
}

// Fails if cuTensorMapEncodeTiled has not made it.
const TensorMap& tensor_map(const char* operation, const CUtensorMap& map) {
  const auto& result = reinterpret_cast<const TensorMap&>(map);
  if (result.magic != kMagic) fail("%s: not a tensor map", operation);
  return result;
}

struct Coordinates {
  int64_t x, y, z;
};

// Where a byte of a box lies: the number of its row of 128 bytes is added, bit by bit, to the
// number of its chunk.
size_t swizzled(const TensorMap& map, size_t offset) {
  const size_t span = map.swizzle_span();
  return span ? offset ^ ((offset >> 3) & (span - kChunkBytes)) : offset;
}

// Calls visit(place in the box, address, bytes) for what of each row is in the tensor.
template <class Visit>
void each_row(const TensorMap& map, Coordinates at, Visit visit) {
  const auto inside = [&](int64_t i, int dimension) {
    return std::clamp<int64_t>(i, 0, map.size[dimension]);
  };
  const int64_t x = inside(at.x, 0), end = inside(at.x + map.box[0], 0);
  if (x == end) return;
  for (int64_t z = inside(at.z, 2); z < inside(at.z + map.box[2], 2); ++z) {
    for (int64_t y = inside(at.y, 1); y < inside(at.y + map.box[1], 1); ++y) {
      const size_t row = (z - at.z) * map.box[1] + (y - at.y);
      visit(row * map.row_bytes() + (x - at.x) * map.element_bytes(),
            map.base + z * map.stride[2] + y * map.stride[1] + x * map.element_bytes(),
            static_cast<size_t>(end - x) * map.element_bytes());
    }
  }
}

void check_tensor(const char* operation, const TensorMap& map, Coordinates at) {
  each_row(map, at, [&](size_t, const void* global, size_t bytes) {
    check_global(operation, global, bytes);
  });
}

using Box = std::vector<unsigned char>;

void move_box(const TensorMap& map, unsigned char* shared, size_t offset, Box& box, bool to_box) {
  for (size_t i = 0; i < box.size(); i += kChunkBytes) {
    unsigned char* const chunk = shared + swizzled(map, offset + i);
    memcpy(to_box ? &box[i] : chunk, to_box ? chunk : &box[i], kChunkBytes);
  }
}

void add(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(float); ++i)
    static_cast<float*>(to)[i] += static_cast<const float*>(from)[i];
}

void load(void* to, const CUtensorMap& opaque, const void* full, Coordinates at, uint32_t blocks) {
  static constexpr char kOperation[] = "tma_load";
  const TensorMap& map = tensor_map(kOperation, opaque);
  const size_t bytes = map.box_bytes();
  const size_t offset = shared_offset(kOperation, to, bytes, map.box_alignment());
  const size_t barrier = shared_offset(kOperation, full, sizeof(uint64_t), sizeof(uint64_t));
  check_tensor(kOperation, map, at);
  counters.bytes_copied += bytes;
  for (int rank = 0; blocks >> rank != 0; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    Block& block = current->block->cluster.at(rank, kOperation);
    mbarrier_for_others(kOperation, block, barrier);
    {
      const tsan::Quiet quiet;  // mbarriers order nothing for tsan
      poison(block, offset, bytes);
    }
    const auto write = [=, &block, map = map] {
      Box box(bytes);
      each_row(map, at, [&](size_t place, const void* global, size_t bytes) {
        memcpy(&box[place], global, bytes);
      });
      move_box(map, block.shared, offset, box, false);
      complete_bytes(block, barrier, bytes);
    };
    start({kOperation, current, &block, offset, bytes, nullptr, write}, nullptr);
  }
  may_preempt();
}

void store(const CUtensorMap& opaque, const void* from, Coordinates at, bool adds) {
  const char* const operation = adds ? "tma_reduce_add" : "tma_store";
  const TensorMap& map = tensor_map(operation, opaque);
  if (adds && map.type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
    fail("%s: of data type %d, which the executor does not have", operation, map.type);
  const size_t bytes = map.box_bytes();
  const size_t offset = shared_offset(operation, from, bytes, map.box_alignment());
  Block& block = *current->block;
  check_marks(operation, block, offset, bytes);
  check_tensor(operation, map, at);
  counters.bytes_copied += bytes;
  const auto box = std::make_shared<Box>(bytes);
  const auto read = [=, &block, map = map] {
    check_marks(operation, block, offset, bytes);
    move_box(map, block.shared, offset, *box, true);
  };
  const auto write = [=, map = map] {
    each_row(map, at, [&](size_t place, void* global, size_t bytes) {
      adds ? add(global, &(*box)[place], bytes) : void(memcpy(global, &(*box)[place], bytes));
    });
  };
  start({operation, current, nullptr, offset, bytes, read, write}, &current->bulk);
  may_preempt();
}

}  // namespace
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

}  // namespace amp_ext::ptx

CUresult cuTensorMapEncodeTiled(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* size, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  using namespace simt;
  if (refuse_tensor_maps) return CUDA_ERROR_INVALID_VALUE;
  const auto refuse = [](const std::string& reason) {
    fault.clear();
    set_fault("cuTensorMapEncodeTiled: " + reason);
    return CUDA_ERROR_INVALID_VALUE;
  };
  if (!is_aligned(result, alignof(CUtensorMap)))
    return refuse("the map is not aligned to 64 bytes");
  if (rank != kRank) return refuse(text("rank %u, the executor has %d alone", rank, kRank));
  if (type < 0 || type >= std::size(kElementBytes))
    return refuse(text("data type %d, which the executor does not have", type));
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
    return refuse("an interleave, fill or swizzle that the executor does not have");
  TensorMap map{kMagic, static_cast<unsigned char*>(base), {}, {}, {}, type, swizzle};
  for (int i = 0; i < kRank; ++i) {
    if (element_strides[i] != 1) return refuse("an element stride other than 1");
    map.size[i] = size[i];
    map.stride[i] = i == 0 ? map.element_bytes() : strides[i - 1];
    map.box[i] = box[i];
  }
  if (const std::string reason = refusal(map); !reason.empty()) return refuse(reason);
  memset(result, 0, sizeof(*result));
  memcpy(result, &map, sizeof(map));
  return CUDA_SUCCESS;
}
