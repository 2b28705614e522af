// What the engine tells the sanitizers; nothing in a build without one. The engine itself is never
// instrumented: SIMT_ASAN and SIMT_TSAN say what the kernels are built with.
#pragma once

#include <cstddef>

#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif
#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SIMT_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
extern "C" void __tsan_read_range(void*, unsigned long);
extern "C" void __tsan_write_range(void*, unsigned long);
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

namespace simt {

// Has `callback` called when a sanitizer ends the process.
#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
inline void on_death(void (*callback)()) { __sanitizer_set_death_callback(callback); }
#else
inline void on_death(void (*)()) {}
#endif

}  // namespace simt

namespace simt::asan {

#ifdef SIMT_ASAN
constexpr bool kOn = true;
inline void poison(void* begin, size_t bytes) { __asan_poison_memory_region(begin, bytes); }
inline void unpoison(void* begin, size_t bytes) { __asan_unpoison_memory_region(begin, bytes); }
inline bool is_poisoned(const void* begin, size_t bytes) {
  return __asan_region_is_poisoned(const_cast<void*>(begin), bytes) != nullptr;
}
inline void before_switch(void** save, const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(save, stack, bytes);
}
inline void after_switch(void* saved, const void** left, size_t* bytes) {
  __sanitizer_finish_switch_fiber(saved, left, bytes);
}
#else
constexpr bool kOn = false;
inline void poison(void*, size_t) {}
inline void unpoison(void*, size_t) {}
inline bool is_poisoned(const void*, size_t) { return false; }
inline void before_switch(void**, const void*, size_t) {}
inline void after_switch(void*, const void**, size_t*) {}
#endif

}  // namespace simt::asan

namespace simt::tsan {

// What a thread did before it released a token is known to whoever acquires the token afterwards.
#ifdef SIMT_TSAN
constexpr bool kOn = true;
inline void* new_fiber() { return __tsan_create_fiber(0); }
inline void delete_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void switch_fiber(void* fiber) {
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}
inline void acquire(void* token) { __tsan_acquire(token); }
inline void release(void* token) { __tsan_release(token); }
inline void reads(const void* begin, size_t bytes) {
  __tsan_read_range(const_cast<void*>(begin), bytes);
}
inline void writes(void* begin, size_t bytes) { __tsan_write_range(begin, bytes); }
inline void ignore(bool begin) {
  (begin ? AnnotateIgnoreReadsBegin : AnnotateIgnoreReadsEnd)(__FILE__, __LINE__);
  (begin ? AnnotateIgnoreWritesBegin : AnnotateIgnoreWritesEnd)(__FILE__, __LINE__);
}
#else
constexpr bool kOn = false;
inline void* new_fiber() { return nullptr; }
inline void delete_fiber(void*) {}
inline void* this_fiber() { return nullptr; }
inline void switch_fiber(void*) {}
inline void acquire(void*) {}
inline void release(void*) {}
inline void reads(const void*, size_t) {}
inline void writes(void*, size_t) {}
inline void ignore(bool) {}
#endif

// While it lives, memory that the C library allocates, frees and copies is no access of a thread.
struct Quiet {
  Quiet() { ignore(true); }
  Quiet(const Quiet&) = delete;
  ~Quiet() { ignore(false); }
};

inline void* launching_fiber = nullptr;

// Adds what is known at one token to another, past the current thread: through a fiber that knows
// nothing else. (A new fiber knows what its maker knew.)
inline void hand_over(void* from, void* to) {
  if constexpr (!kOn) return;
  void* here = this_fiber();
  switch_fiber(launching_fiber);
  void* courier = new_fiber();
  switch_fiber(courier);
  acquire(from);
  release(to);
  switch_fiber(here);
  delete_fiber(courier);
}

}  // namespace simt::tsan
