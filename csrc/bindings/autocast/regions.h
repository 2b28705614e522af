// Which of torch's autocast regions run their matrix products on amp_ext::gemm.
#pragma once

#include <c10/core/Device.h>

namespace amp_ext {

// A region of ours is one in which autocast is also enabled for this device type, which is no
// longer available together with a CPU or a GPU. A thread-local variable of our own would do in
// eager programs, but torch.compile guards on autocast's state and restores it, and backward passes
// it to its threads.
constexpr c10::DeviceType kRegionMark = c10::DeviceType::IPU;

// To be called around every region in an eager program.
void enter_region();
void exit_region();

// Makes every region one of ours, in every thread.
void install();
void uninstall();
bool is_installed();

// Whether this thread is within a region of ours, or recomputes a part of one during backward.
bool in_our_region();

}  // namespace amp_ext
