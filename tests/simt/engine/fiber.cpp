#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "sanitizers.h"

namespace simt {
namespace {

// A context is whatever switch_context stored on leaving it.
#if !defined(__x86_64__) || defined(SIMT_PORTABLE)  // 30 times slower: it sets the signal mask too

void* new_context(char* stack, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(stack + kStackBytes) - 1;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  makecontext(context, entry, 0);
  return context;
}

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

void switch_context(void** from, void* to) { simt_switch_context(from, to); }

#endif

struct {
  void* context = nullptr;
  void* asan_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* tsan_fiber = nullptr;
} scheduler;

Fiber* entered = nullptr;
std::vector<std::pair<char*, void*>> spares;  // stacks and ThreadSanitizer's fibers

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
  asan::unpoison(stack_ + getpagesize(), kStackBytes - getpagesize());
  spares.emplace_back(stack_, tsan_fiber_);
}

void Fiber::start(void (*body)()) {
  if (spares.empty()) spares.emplace_back(new_stack(), tsan::new_fiber());
  std::tie(stack_, tsan_fiber_) = spares.back();
  spares.pop_back();
  context_ = new_context(stack_, first_steps);
  body_ = body;
}

void Fiber::first_steps() {
  asan::after_switch(nullptr, &scheduler.stack, &scheduler.stack_bytes);
  entered->body_();
  entered->leave(true);
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

void Fiber::leave(bool for_good) {
  asan::before_switch(for_good ? nullptr : &asan_stack_, scheduler.stack, scheduler.stack_bytes);
  tsan::switch_fiber(scheduler.tsan_fiber);
  switch_context(&context_, scheduler.context);
  asan::after_switch(asan_stack_, &scheduler.stack, &scheduler.stack_bytes);
}

bool Fiber::inside() { return entered != nullptr; }

}  // namespace simt
