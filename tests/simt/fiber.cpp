#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sanitizers.h"

#if !defined(__x86_64__) || defined(SIMT_PORTABLE)
#include <ucontext.h>
#define SIMT_UCONTEXT 1
#endif

namespace simt {
namespace {

// A context is whatever switch_context stored on leaving it.
#ifdef SIMT_UCONTEXT  // 30 times slower: it sets the signal mask too

void* new_context(char* stack, void (*entry)()) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = kStackBytes;
  makecontext(context, entry, 0);
  return context;
}

void delete_context(void* context) { delete static_cast<ucontext_t*>(context); }

void switch_context(void** from, void* to) {
  if (!*from) *from = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}

#else

// Registers that a call preserves are on the stack while it is left; the context is its top.
extern "C" void simt_switch_context(void** from, void* to);
asm(R"(
.text
.type simt_switch_context, @function
simt_switch_context:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size simt_switch_context, . - simt_switch_context
)");

void* new_context(char* stack, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // where the entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}

void delete_context(void*) {}

void switch_context(void** from, void* to) { simt_switch_context(from, to); }

#endif

struct Scheduler {
  void* context = nullptr;
  void* asan_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* tsan_fiber = nullptr;
};

Scheduler scheduler;
Fiber* entered = nullptr;

struct Spare {
  char* stack;
  void* tsan_fiber;
};
std::vector<Spare> spares;

char* new_stack() {
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, getpagesize(), PROT_NONE)) {
    perror("simt: a stack");
    abort();
  }
  return static_cast<char*>(memory);
}

}  // namespace

Fiber::~Fiber() {
  if (!stack_) return;
  delete_context(context_);
  asan::unpoison(stack_ + getpagesize(), kStackBytes - getpagesize());
  spares.push_back({stack_, tsan_fiber_});
}

void Fiber::start(void (*body)()) {
  if (spares.empty()) spares.push_back({new_stack(), tsan::new_fiber()});
  stack_ = spares.back().stack;
  tsan_fiber_ = spares.back().tsan_fiber;
  spares.pop_back();
  context_ = new_context(stack_, first_steps);
  body_ = body;
}

void Fiber::first_steps() {
  asan::after_switch(nullptr, &scheduler.stack, &scheduler.stack_bytes);
  entered->body_();
  abort();
}

void Fiber::enter() {
  entered = this;
  scheduler.tsan_fiber = tsan::this_fiber();
  asan::before_switch(&scheduler.asan_stack, stack_, kStackBytes);
  tsan::switch_fiber(tsan_fiber_);
  switch_context(&scheduler.context, context_);
  asan::after_switch(scheduler.asan_stack, nullptr, nullptr);
  entered = nullptr;
}

bool Fiber::inside() { return entered != nullptr; }

void Fiber::leave(bool for_good) {
  asan::before_switch(for_good ? nullptr : &asan_stack_, scheduler.stack, scheduler.stack_bytes);
  tsan::switch_fiber(scheduler.tsan_fiber);
  switch_context(&context_, scheduler.context);
  asan::after_switch(asan_stack_, &scheduler.stack, &scheduler.stack_bytes);
}

void Fiber::leave() { leave(false); }

void Fiber::leave_for_good() {
  leave(true);
  abort();
}

}  // namespace simt
