// What the CUDA runtime of runtime.cpp counts and bounds, for backend.cpp.
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
extern uint64_t next_seed;  // of the launches to come, each of which adds one
extern bool refuse_tensor_maps;

// The memory that kernels may access.
void forget_memory();
void allow_memory(const void* begin, int64_t bytes);
// Allows memory, and fills it as what nothing has written.
void* fresh_memory(void* begin, int64_t bytes);

}  // namespace ptx_backend
