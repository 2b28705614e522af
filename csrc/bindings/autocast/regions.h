// Which of torch's autocast regions run their matrix products on amp_ext::gemm.
#pragma once

#include <c10/core/Device.h>

namespace amp_ext {

// A region of ours is one in which autocast is also enabled for this device type, which is not to
// be had beside a CPU or a GPU any more. A variable of our own would do in eager programs, but what
// autocast holds torch.compile guards and restores, and backward hands to its threads.
constexpr c10::DeviceType kRegionMark = c10::DeviceType::IPU;

// To be called around every region in an eager program.
void enter_region();
void exit_region();

// Makes every region one of ours, in every thread.
void install();
void uninstall();
bool is_installed();

// Whether this thread is within a region of ours, or repeats a part of one for backward.
bool in_our_region();

}  // namespace amp_ext
