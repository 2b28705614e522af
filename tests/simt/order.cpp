// The order of memory between blocks. A fence and an atomic operation behind it publish; an atomic
// operation and a fence behind it receive; a release and an acquire do by themselves.
#include <ptx.cuh>

#include "engine.h"
#include "sanitizers.h"

void simt::order_atomic(const void* address) {
  may_preempt();
  void* const location = const_cast<void*>(address);
  tsan::hand_over(&current->fenced, location);
  tsan::hand_over(location, &current->observed);
}

namespace amp_ext::ptx {

using namespace simt;

void device_fence() {
  tsan::release(&current->fenced);
  tsan::acquire(&current->observed);
  may_preempt();
}

void add_release(uint32_t* counter, uint32_t value) {
  may_preempt();
  tsan::release(counter);
  *counter += value;
  wake_polling();
}

void wait_acquire(const uint32_t* counter, uint32_t value) {
  may_preempt();
  while (*static_cast<const volatile uint32_t*>(counter) != value) {
    poll([=] {
      return text("wait in wait_acquire for %u, the counter at %p is %u", value,
                  static_cast<const void*>(counter), *counter);
    });
  }
  tsan::acquire(const_cast<uint32_t*>(counter));
}

}  // namespace amp_ext::ptx
