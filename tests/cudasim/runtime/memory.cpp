// Device memory (memory of the host that may be closed to it), pinned memory, and copies.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "memory/fresh.h"
#include "runtime.h"

namespace fake_cuda {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAddresses = size_t{1} << 42;  // of each device
constexpr size_t kFilled = 16 << 20;            // bytes of fresh memory; more only takes time
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kNan = 0xff;  // in any format, as fresh device memory is
constexpr int kPinned = -1;

struct Block {
  size_t bytes;
  int device;  // or kPinned
};

auto& blocks = *new std::map<const char*, Block>;  // that are allocated
auto& allocated = *new std::map<int, size_t>;      // bytes of each device
int accesses = 0;

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void die(const char* call) {
  perror(call);
  abort();
}

void protect(const char* begin, size_t bytes, int protection) {
  if (mprotect(const_cast<char*>(begin), pages(bytes), protection) != 0) die("fake cuda: mprotect");
}

// Protect the memory of one device, or of all.
void protect_all(int device, int protection) {
  if (!settings().guarded) return;
  for (const auto& [begin, block] : blocks)
    if (block.device != kPinned && (device == Access::kAll || device == block.device))
      protect(begin, block.bytes, protection);
}

struct sigaction other_handler;

void tell(int, siginfo_t* info, void*);

// Hands out the addresses of all devices, which lie one behind another. None is used twice.
struct Addresses {
  char* begin;
  std::vector<size_t> used;  // bytes by device

  // Inaccessible memory, with such memory around it.
  char* take(int device, size_t bytes) {
    char* const taken = begin + device * kAddresses + used[device];
    used[device] += pages(bytes) + kPage;
    return taken;
  }

  bool holds(const void* pointer) const {
    return pointer >= begin && pointer < begin + kAddresses * used.size();
  }
};

Addresses& addresses() {
  static Addresses& instance = *[] {
    const size_t count = settings().devices;
    void* const begin = mmap(nullptr, kAddresses * count, PROT_NONE, kReserved, -1, 0);
    if (begin == MAP_FAILED) die("fake cuda: mmap");
    struct sigaction action{};
    action.sa_sigaction = tell;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &other_handler);
    return new Addresses{static_cast<char*>(begin), std::vector<size_t>(count, kPage)};
  }();
  return instance;
}

void tell(int, siginfo_t* info, void*) {
  if (addresses().holds(info->si_addr)) {
    char text[128];
    const int length = snprintf(text, sizeof text, "fake cuda: %s touched device memory at %p\n",
                                accesses ? "an operation" : "the host", info->si_addr);
    (void)!write(STDERR_FILENO, text, length);
  }
  sigaction(SIGSEGV, &other_handler, nullptr);  // the repeated access reaches it
}

// The allocation that an address is in, or nothing.
std::map<const char*, Block>::const_iterator find_block(const void* pointer) {
  const auto* const at = static_cast<const char*>(pointer);
  auto block = blocks.upper_bound(at);
  if (block == blocks.begin()) return blocks.end();
  --block;
  return at < block->first + std::max<size_t>(block->second.bytes, 1) ? block : blocks.end();
}

cudaError_t free_block(void* pointer, bool pinned, const char* call) {
  FAKE_CUDA_CHECK(check_captures(call));
  if (!pointer) return cudaSuccess;
  record("wait", call);
  run_all();
  const auto block = blocks.find(static_cast<char*>(pointer));
  if (block == blocks.end() || (block->second.device == kPinned) != pinned)
    return refuse(cudaErrorInvalidValue, "%s of %p", call, pointer);
  const auto [bytes, device] = block->second;
  blocks.erase(block);
  if (pinned) {
    free(pointer);
  } else {
    allocated[device] -= bytes;
    // A new mapping merges with the mappings around, whose number Linux limits.
    if (mmap(pointer, pages(bytes), PROT_NONE, kReserved | MAP_FIXED, -1, 0) == MAP_FAILED)
      die("fake cuda: mmap");
  }
  // A fault of an operation stays for the next call: an error here ends torch's process.
  return cudaSuccess;
}

const char* name_of(Place place) {
  return place == Place::device ? "device" : place == Place::pinned ? "pinned" : "pageable";
}

cudaMemcpyKind kind_of(Place to, Place from) {
  if (to == Place::device)
    return from == Place::device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return from == Place::device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t handle) {
  FAKE_CUDA_STREAM(stream, handle);
  if (bytes == 0) return cudaSuccess;
  const Place target = place_of(to), source = place_of(from);
  for (const void* pointer : {const_cast<const void*>(to), from})
    if (!is_allocated(pointer, bytes))
      return refuse(cudaErrorInvalidValue, "a copy of %zu bytes at %p, not all allocated", bytes,
                    pointer);
  if (kind != cudaMemcpyDefault && kind != kind_of(target, source))
    return refuse(cudaErrorInvalidValue, "a copy from %s to %s memory as one of kind %d",
                  name_of(source), name_of(target), kind);
  const bool pageable = target == Place::pageable || source == Place::pageable;
  if (pageable && stream->capture) return refuse_captured(*stream, "a copy of pageable memory");

  std::shared_ptr<std::vector<char>> read;  // pageable memory, before the call returns
  if (const auto* const first = static_cast<const char*>(from); source == Place::pageable)
    read = std::make_shared<std::vector<char>>(first, first + bytes);
  std::function<void()> run = [=] {
    const auto is_there = [&](const void* pointer, Place place) {
      return place_of(pointer) == place && is_allocated(pointer, bytes);
    };
    if (!is_there(to, target) || (!read && !is_there(from, source)))
      return lose_context("a copy of %zu bytes from %p to %p, where memory was freed", bytes, from,
                          to);
    const Access access(Access::kAll);
    memmove(to, read ? read->data() : from, bytes);
  };
  const std::string name = std::to_string(bytes) + " bytes from " + name_of(source) + " to " +
                           name_of(target) + " memory";
  FAKE_CUDA_CHECK(enqueue(*stream, "copy", name, std::move(run)));
  if (target == Place::pageable) run_until(*stream, stream->issued);
  return done(lost_context);
}

cudaError_t set(void* to, int value, size_t bytes, cudaStream_t handle) {
  FAKE_CUDA_STREAM(stream, handle);
  if (bytes == 0) return cudaSuccess;
  if (place_of(to) != Place::device || !is_allocated(to, bytes))
    return refuse(cudaErrorInvalidValue, "a memset of %zu bytes at %p", bytes, to);
  return enqueue(*stream, "memset", std::to_string(bytes) + " bytes", [=] {
    if (!is_allocated(to, bytes))
      return lose_context("a memset of %zu bytes at %p, where memory was freed", bytes, to);
    const Access access(Access::kAll);
    memset(to, value, bytes);
  });
}

}  // namespace

Access::Access(int device) : device_(device) {
  if (accesses++ == 0) protect_all(device_, PROT_READ | PROT_WRITE);
}

Access::~Access() {
  if (--accesses == 0) protect_all(device_, PROT_NONE);
}

Place place_of(const void* pointer) {
  if (addresses().holds(pointer)) return Place::device;
  return find_block(pointer) == blocks.end() ? Place::pageable : Place::pinned;
}

int device_of(const void* pointer) {
  const auto block = find_block(pointer);
  return block == blocks.end() ? -1 : block->second.device;
}

bool is_allocated(const void* pointer, size_t bytes) {
  const auto block = find_block(pointer);
  if (block == blocks.end()) return !addresses().holds(pointer);
  return static_cast<const char*>(pointer) + bytes <= block->first + block->second.bytes;
}

}  // namespace fake_cuda

using namespace fake_cuda;

// The allocation around an address, or an empty one: cudasim::FindAllocation.
struct Range {
  const char *begin, *end;
};
FAKE_CUDA_API Range fake_cuda_allocation(const void* address) {
  const auto block = find_block(address);
  if (block == blocks.end()) return {};
  return {block->first, block->first + block->second.bytes};
}

CUDA(cudaMalloc)(void** pointer, size_t bytes) {
  has_context = true;
  FAKE_CUDA_LOCK;
  *pointer = nullptr;
  FAKE_CUDA_CHECK(check_captures("cudaMalloc"));
  if (bytes == 0) return cudaSuccess;
  if (allocated[current_device] + bytes > settings().memory) return done(cudaErrorMemoryAllocation);
  record("malloc", std::to_string(bytes) + " bytes");
  char* const begin = addresses().take(current_device, bytes);
  protect(begin, bytes, PROT_READ | PROT_WRITE);
  cudasim::fill_fresh(begin, std::min(bytes, kFilled));
  if (settings().guarded && !accesses) protect(begin, bytes, PROT_NONE);
  blocks[begin] = {bytes, current_device};
  allocated[current_device] += bytes;
  *pointer = begin;
  return cudaSuccess;
}

CUDA(cudaFree)(void* pointer) {
  FAKE_CUDA_LOCK;
  return free_block(pointer, /*pinned=*/false, "cudaFree");
}

CUDA(cudaHostAlloc)(void** pointer, size_t bytes, unsigned) {
  FAKE_CUDA_LOCK;
  *pointer = nullptr;
  FAKE_CUDA_CHECK(check_captures("cudaHostAlloc"));
  record("malloc", std::to_string(bytes) + " bytes of pinned memory");
  *pointer = aligned_alloc(kPage, pages(bytes));
  if (!*pointer) return done(cudaErrorMemoryAllocation);
  memset(*pointer, kNan, bytes);
  blocks[static_cast<char*>(*pointer)] = {bytes, kPinned};
  return cudaSuccess;
}

CUDA(cudaFreeHost)(void* pointer) {
  FAKE_CUDA_LOCK;
  return free_block(pointer, /*pinned=*/true, "cudaFreeHost");
}

CUDA(cudaMemGetInfo)(size_t* available, size_t* total) {
  FAKE_CUDA_LOCK;
  *total = settings().memory;
  *available = *total - allocated[current_device];
  return cudaSuccess;
}

CUDA(cudaPointerGetAttributes)(cudaPointerAttributes* attributes, const void* pointer) {
  FAKE_CUDA_LOCK;
  *attributes = {};
  auto* const at = const_cast<void*>(pointer);
  const auto block = find_block(pointer);
  if (block == blocks.end()) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = at;
    return cudaSuccess;
  }
  const bool pinned = block->second.device == kPinned;
  attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = pinned ? 0 : block->second.device;
  attributes->devicePointer = at;
  attributes->hostPointer = pinned ? at : nullptr;
  return cudaSuccess;
}

CUDA(cudaMemcpyAsync)(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                      cudaStream_t stream) {
  FAKE_CUDA_LOCK;
  return copy(to, from, bytes, kind, stream);
}

CUDA(cudaMemcpy)(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  FAKE_CUDA_LOCK;
  FAKE_CUDA_CHECK(check_captures("cudaMemcpy"));
  FAKE_CUDA_CHECK(copy(to, from, bytes, kind, nullptr));
  return cudaStreamSynchronize(nullptr);
}

CUDA(cudaMemcpyPeerAsync)(void* to, int to_device, const void* from, int from_device, size_t bytes,
                          cudaStream_t stream) {
  FAKE_CUDA_LOCK;
  if (bytes && (place_of(to) != Place::device || place_of(from) != Place::device ||
                device_of(to) != to_device || device_of(from) != from_device))
    return refuse(cudaErrorInvalidValue, "a copy between memory of other devices than it says");
  return copy(to, from, bytes, cudaMemcpyDefault, stream);
}

CUDA(cudaMemsetAsync)(void* to, int value, size_t bytes, cudaStream_t stream) {
  FAKE_CUDA_LOCK;
  return set(to, value, bytes, stream);
}

CUDA(cudaMemset)(void* to, int value, size_t bytes) {
  FAKE_CUDA_LOCK;
  FAKE_CUDA_CHECK(check_captures("cudaMemset"));
  return set(to, value, bytes, nullptr);
}
