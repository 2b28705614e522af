// Shared parts of the fake CUDA runtime: operations, streams, captures and errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define FAKE_CUDA_API extern "C" __attribute__((visibility("default")))
#define CUDA(name) FAKE_CUDA_API cudaError_t name
#define CUDA_DRIVER(name) FAKE_CUDA_API CUresult name

namespace fake_cuda {

// ---- settings, from the environment -------------------------------------------------------------

enum class Order { now, late, random };

struct Settings {
  Order order;
  std::mt19937_64 generator;  // of a random order, and of the schedules of kernels
  int devices;
  int multiprocessors;
  int capability;  // 90 for 9.0
  int driver;      // the version of CUDA that it is for, 12010 for 12.1
  size_t memory;   // bytes of a device
  bool guarded;    // the host may not touch device memory
};

Settings& settings();
inline uint64_t random(uint64_t below) { return settings().generator() % below; }
size_t most_shared();                            // bytes of a block, by the compute capability
constexpr size_t kMostSharedUnasked = 48 << 10;  // without cudaFuncSetAttribute

// ---- errors and the record ----------------------------------------------------------------------

// Every function of the API holds the lock, and so do operations while they run. The objects these
// keep are destroyed after the lock is released: Python objects among them take the GIL, and its
// holder may wait here.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
};
#define FAKE_CUDA_LOCK const fake_cuda::Lock lock
void discard(std::shared_ptr<const void> kept);

inline thread_local int current_device = 0;
inline thread_local bool has_context = false;   // a call has bound one to the thread
inline cudaError_t lost_context = cudaSuccess;  // the error of an operation; it stays

cudaError_t done(cudaError_t error);  // remembers it for cudaGetLastError

// Like done(), with the reason in cudaGetErrorString.
__attribute__((format(printf, 2, 3))) cudaError_t refuse(cudaError_t error, const char* format,
                                                         ...);

void say(const char* text = nullptr);  // on stderr: a text, or the last reason

// Fails all calls from now on, as an operation has.
template <class... T>
void lose_context(const char* format, T... values) {
  if (lost_context != cudaSuccess) return;
  lost_context = refuse(cudaErrorLaunchFailure, format, values...);
  say();
}

// `kind` is launch, graph, copy, memset, host, wait, query or malloc.
void record(const char* kind, const std::string& what);

// ---- memory -------------------------------------------------------------------------------------

// The memory of a device is accessible to this process while one lives. They are not nested.
class Access {
 public:
  static constexpr int kAll = -1;  // devices
  explicit Access(int device);
  ~Access();
  Access(const Access&) = delete;

 private:
  int device_;
};

enum class Place { device, pinned, pageable };

Place place_of(const void* pointer);
int device_of(const void* pointer);  // of device memory; -1 if it is none
// Whether all bytes are of one allocation, where they are memory that CUDA has allocated.
bool is_allocated(const void* pointer, size_t bytes);

// ---- streams and captures -----------------------------------------------------------------------

struct Node {  // of a graph
  std::string name;
  std::function<void()> run;
  std::set<size_t> after;
};
using Nodes = std::vector<Node>;

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  CUstream_st* origin;
  std::vector<CUstream_st*> streams;
  Nodes nodes;
  bool invalid = false;
};

// A part of an operation; true if it was the last one.
using Step = std::function<bool()>;

}  // namespace fake_cuda

struct CUstream_st {
  int device = 0;
  int priority = 0;
  bool destroyed = false;
  std::deque<fake_cuda::Step> queue;
  int64_t issued = 0, finished = 0;
  std::shared_ptr<fake_cuda::Capture> capture;
  std::set<size_t> last;  // nodes of the capture that the next one follows
};

struct CUevent_st {
  unsigned flags = 0;
  CUstream_st* stream = nullptr;  // null before it is recorded
  int64_t at = 0;                 // done once the stream has finished so many operations
  std::shared_ptr<fake_cuda::Capture> capture;
  std::set<size_t> last;
};

namespace fake_cuda {

using Stream = CUstream_st;

// The stream of a handle, the current device's default stream if it is null. Null if it is none.
Stream* find_stream(cudaStream_t handle);

// Has the stream run an operation, now or later, or captures it.
cudaError_t enqueue(Stream& stream, const char* kind, const std::string& name,
                    std::function<void()> run);
void enqueue_steps(Stream& stream, Step step);

void run_until(Stream& stream, int64_t at);
void run_all();

// Refuses a call that captures forbid, unless the thread's mode allows it, and ends these.
cudaError_t check_captures(const char* call);
// Refuses to wait for the current device while a stream of it is captured, whatever the mode.
cudaError_t check_device_captures(const char* call);
cudaError_t refuse_captured(Stream& stream, const char* what);

}  // namespace fake_cuda

#define FAKE_CUDA_STREAM(stream, handle)                            \
  const fake_cuda::Lock stream##_lock;                              \
  fake_cuda::Stream* const stream = fake_cuda::find_stream(handle); \
  if (!stream) return fake_cuda::refuse(cudaErrorInvalidResourceHandle, "no stream")

#define FAKE_CUDA_CHECK(call) \
  if (const cudaError_t error_ = (call); error_ != cudaSuccess) return error_
