// Decides on the autocast regions that run their matrix products on amp_ext::gemm.
#pragma once

#include <c10/core/Device.h>

namespace amp_ext {

// Marks a region of ours: autocast is also enabled for this device type. The type is no longer
// available together with a CPU or a GPU. A thread-local variable of our own would do in eager
// programs alone: torch.compile guards on autocast's state and restores it, and backward passes it
// to its threads.
constexpr c10::DeviceType kRegionMark = c10::DeviceType::IPU;

// Call these around every region in an eager program.
void enter_region();
void exit_region();

// Makes every region one of ours, in every thread.
void install();
void uninstall();
bool is_installed();

// Registers our autocast kernels in place of torch's. Outside of our regions they do the same as
// torch's kernels. (autocast.cpp)
void override_torchs();

// Restores torch's kernels. No thread may be within a region of ours.
void restore_torchs();

// Returns whether this thread is within a region of ours, or recomputes a part of one during
// backward.
bool in_our_region();

}  // namespace amp_ext
