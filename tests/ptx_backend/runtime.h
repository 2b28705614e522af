// Declare the counters and bounds of runtime.cpp's CUDA runtime, for backend.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace ptx_backend {

// Totals since the library was loaded.
struct Counters {
  int64_t launches, blocks;
  int64_t bytes_loaded;  // by vector loads of 16 bytes
  int64_t bytes_stored;  // by vector stores
  int64_t bytes_copied;  // asynchronously: by cp.async, and whole boxes by TMA
  int64_t most_loads;    // such loads of the thread that makes most of them, of all launches
  int64_t parameter_bytes;
};
extern Counters counters;

extern std::string fault;   // of the last launch; empty if it had none
extern uint64_t next_seed;  // of the next launch; each launch adds one
extern bool refuse_tensor_maps;

// The memory that kernels may access.
void forget_memory();
void allow_memory(const void* begin, int64_t bytes);
// Allows memory, and fills it as memory without a write.
void* fresh_memory(void* begin, int64_t bytes);

}  // namespace ptx_backend
