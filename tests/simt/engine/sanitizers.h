// What the engine tells the sanitizers. The engine itself is never instrumented: their functions
// are there if the kernels are, and null otherwise.
#pragma once

#include <cstddef>

#define SIMT_WEAK __attribute__((weak))
extern "C" {
SIMT_WEAK void __sanitizer_set_death_callback(void (*callback)());
SIMT_WEAK void __sanitizer_start_switch_fiber(void** save, const void* stack, size_t bytes);
SIMT_WEAK void __sanitizer_finish_switch_fiber(void* saved, const void** left, size_t* bytes);
SIMT_WEAK void __asan_poison_memory_region(const volatile void* begin, size_t bytes);
SIMT_WEAK void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
SIMT_WEAK void* __asan_region_is_poisoned(void* begin, size_t bytes);
SIMT_WEAK void* __tsan_create_fiber(unsigned flags);
SIMT_WEAK void __tsan_destroy_fiber(void* fiber);
SIMT_WEAK void* __tsan_get_current_fiber();
SIMT_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
SIMT_WEAK void __tsan_acquire(void* token);
SIMT_WEAK void __tsan_release(void* token);
SIMT_WEAK void __tsan_read_range(void* begin, unsigned long bytes);
SIMT_WEAK void __tsan_write_range(void* begin, unsigned long bytes);
SIMT_WEAK void AnnotateIgnoreReadsBegin(const char* file, int line);
SIMT_WEAK void AnnotateIgnoreReadsEnd(const char* file, int line);
SIMT_WEAK void AnnotateIgnoreWritesBegin(const char* file, int line);
SIMT_WEAK void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace simt {

// Calls it if it is there.
template <class Result, class... Params, class... Args>
Result tell(Result (*function)(Params...), Args... args) {
  return function ? function(args...) : Result();
}

// Has `callback` called when a sanitizer ends the process.
inline void on_death(void (*callback)()) { tell(__sanitizer_set_death_callback, callback); }

namespace asan {

inline void poison(void* begin, size_t bytes) { tell(__asan_poison_memory_region, begin, bytes); }
inline void unpoison(void* begin, size_t bytes) {
  tell(__asan_unpoison_memory_region, begin, bytes);
}
inline bool is_poisoned(const void* begin, size_t bytes) {
  return tell(__asan_region_is_poisoned, const_cast<void*>(begin), bytes) != nullptr;
}
inline void before_switch(void** save, const void* stack, size_t bytes) {
  tell(__sanitizer_start_switch_fiber, save, stack, bytes);
}
inline void after_switch(void* saved, const void** left, size_t* bytes) {
  tell(__sanitizer_finish_switch_fiber, saved, left, bytes);
}

}  // namespace asan

namespace tsan {

inline bool is_on() { return __tsan_create_fiber != nullptr; }
inline void* new_fiber() { return tell(__tsan_create_fiber, 0); }
inline void* this_fiber() { return tell(__tsan_get_current_fiber); }
inline void switch_fiber(void* fiber) {
  constexpr unsigned kNoSync = 1;
  tell(__tsan_switch_to_fiber, fiber, kNoSync);
}

// What a thread did before it released a token is known to whoever acquires the token afterwards.
inline void acquire(void* token) { tell(__tsan_acquire, token); }
inline void release(void* token) { tell(__tsan_release, token); }
inline void reads(const void* begin, size_t bytes) {
  tell(__tsan_read_range, const_cast<void*>(begin), bytes);
}
inline void writes(void* begin, size_t bytes) { tell(__tsan_write_range, begin, bytes); }

// While it lives, memory that the C library allocates, frees and copies is no access of a thread.
struct Quiet {
  Quiet() {
    tell(AnnotateIgnoreReadsBegin, __FILE__, __LINE__);
    tell(AnnotateIgnoreWritesBegin, __FILE__, __LINE__);
  }
  Quiet(const Quiet&) = delete;
  ~Quiet() {
    tell(AnnotateIgnoreReadsEnd, __FILE__, __LINE__);
    tell(AnnotateIgnoreWritesEnd, __FILE__, __LINE__);
  }
};

inline void* launching_fiber = nullptr;

// Adds what is known at one token to another, past the current thread: through a fiber that knows
// nothing else. (A new fiber knows what its maker knew.)
inline void hand_over(void* from, void* to) {
  if (!is_on()) return;
  void* here = this_fiber();
  switch_fiber(launching_fiber);
  void* courier = new_fiber();
  switch_fiber(courier);
  acquire(from);
  release(to);
  switch_fiber(here);
  __tsan_destroy_fiber(courier);
}

}  // namespace tsan
}  // namespace simt
