// Stacks that are left and entered again: one for each CUDA thread. Sanitizers are told of every
// change of stack.
#pragma once

#include <cstddef>

namespace simt {

constexpr size_t kStackBytes = 64 << 10;

// Entered from the scheduler's stack, and left to it.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  ~Fiber();

  void start(void (*body)());  // to be run from the first enter() on
  void enter();                // returns when the fiber leaves
  void leave(bool for_good = false);
  static bool inside();  // whether this is not the scheduler's stack

 private:
  static void first_steps();

  char* stack_ = nullptr;
  void* context_ = nullptr;
  void (*body_)() = nullptr;
  void* asan_stack_ = nullptr;
  void* tsan_fiber_ = nullptr;
};

}  // namespace simt
