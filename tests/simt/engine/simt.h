// The engine, as kernels and launchers see it: a CUDA launch on one thread of the host.
//
// Each CUDA thread is a fiber, which runs until it waits for others, exits or is pre-empted in one
// of the functions below. What runs next follows from a seed.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace simt {

// Options of the launches to come.
struct Options {
  uint64_t seed = 0;        // the order in which threads run, and when copies are made
  int resident_blocks = 2;  // how many blocks run at a time, if a cluster is no larger
  int multiprocessors = 4;  // what the device says it has
};

// Totals since the library was loaded.
struct Counters {
  int64_t launches;
  int64_t blocks;
  int64_t switches;
  int64_t bytes_loaded;  // by loads of 8 and 16 bytes
  int64_t bytes_stored;  // by such stores
  int64_t bytes_copied;  // asynchronously: by cp.async, and whole boxes by TMA
  // Loads of 8 and 16 bytes by the thread of a launch that makes the most: its warp waits for
  // memory no more often, as loads that are issued together are waited for together.
  int64_t most_loads;
  int64_t parameter_bytes;  // of launches
};

inline Options options;
inline Counters counters;

// Runs `thread` once for each thread of the grid. On a fault the rest of the launch is dropped and
// simt_report() says what happened.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   const std::function<void()>& thread);

// Ends the launch with this message, the block and the thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// The block's dynamic shared memory, of which at least `bytes` must have been asked for.
void* shared_memory(size_t bytes);

// To be called after a write to the block's shared memory that TMA or wgmma may read.
void wrote_shared(const void* to, size_t bytes);

bool is_shared(const void* address);  // of any block

// Fails unless the address of an access of this size is aligned, and counts it.
void load(const void* from, size_t bytes);
void store(const void* to, size_t bytes);

// ---- what the ptx headers' templates call; they themselves declare the other functions ----------

void order_atomic(void* location);  // to be called by every relaxed atomic operation
int lane();
// What the lanes of the warp have come with; to be read before the warp's next collective.
const uint64_t* warp_values(const char* operation, uint64_t mine);

void named_barrier(int id, int threads);
void cp_async16(void* to, const void* from, int bytes);
void cp_async_wait(int pending);
void bulk_wait_read(int pending);

enum class Element { half, bfloat16 };

struct Wgmma {
  Element type;
  int columns;
  bool a_is_mn_major, b_is_mn_major;
  uint64_t a, b;
  bool accumulate;
};

struct MatrixMove {  // ldmatrix or stmatrix
  bool store, transpose;
  int matrices;
};

void move_matrices(const MatrixMove& move, void* row, uint32_t* registers);
void mma(Element type, float* d, const uint32_t* a, const uint32_t* b);
void setmaxnreg(int registers, bool increase);
void wgmma_fence();
void wgmma(const Wgmma& operation, float* d);
void wgmma_wait(int pending);

}  // namespace simt
