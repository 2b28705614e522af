// The engine, as ptx.cuh and cuda_runtime.h see it: a CUDA launch on one thread of the host.
//
// Each CUDA thread is a fiber, which runs until it waits for others, exits or is pre-empted in one
// of the functions below. What runs next follows from a seed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace simt {

// Options of the launches to come.
struct Options {
  uint64_t seed = 0;        // the order in which threads run
  int resident_blocks = 2;  // how many blocks run at a time
  int multiprocessors = 4;  // what the device says it has
};

// Totals since the library was loaded.
struct Counters {
  int64_t launches;
  int64_t blocks;
  int64_t switches;
  int64_t bytes_loaded;  // by 16-byte loads
  int64_t bytes_stored;  // by 16-byte stores
};

inline Options options;
inline Counters counters;

// Runs `thread` once for each thread of the grid. On a fault the rest of the launch is dropped and
// report() says what happened.
cudaError_t launch(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

// The fault of the last launch, empty if there was none.
const char* report();

// Ends the launch with this message, the block and the thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// The block's dynamic shared memory, of which at least `bytes` must have been asked for.
void* shared_memory(size_t bytes);

// Whether an address lies in some block's shared memory.
bool is_shared(const void* address);

// Fails unless the address of a 16-byte access is aligned, and counts it.
void load16(const void* from);
void store16(const void* to);

// Lets other warps run first, now and then. To be called where another thread could notice.
void may_preempt();

// ---- collectives: every thread of the warp or the block must come with the same operation ------

void block_barrier(const char* operation);
bool block_or(const char* operation, bool predicate);
bool warp_or(const char* operation, bool predicate);
uint64_t warp_exchange(const char* operation, uint64_t bits, int from_lane);
int lane();

// ---- memory order between blocks: a fence before an atomic publishes, one after it receives ----

void fence();
void order_atomic(const void* address);  // to be called by every atomic operation

}  // namespace simt
