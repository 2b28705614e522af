#include "autocast/regions.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace amp_ext {
namespace {

// The log of regions. An entry says whether nodes were made in a region of ours. A thread numbers
// its nodes in the order of their creation: an entry holds for the thread's nodes from its number
// on, up to the next entry. A checkpoint's second forward pass runs during backward, in an autocast
// region that torch opens. It has to do the same as the first pass: the node that is being run
// identifies the region of the first pass.
class Log {
 public:
  // Adds an entry. Entries of a thread alternate, and the first says yes. The thread must have no
  // entry after `begin`. With too many entries, the thread's oldest region of torch counts as ours.
  void add(uint64_t thread, uint64_t begin, bool is_ours) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<uint64_t, bool>& entries = threads_[thread];
    const auto entry = entries.insert_or_assign(begin, is_ours).first;
    const bool is_before = entry != entries.begin() && std::prev(entry)->second;
    if (is_before == is_ours) entries.erase(entry);
    const auto oldest = entries.begin();
    if (entries.size() > kMost) entries.erase(std::next(oldest), std::next(oldest, 3));
  }

  bool is_ours(uint64_t thread, uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::map<uint64_t, bool>& entries = threads_[thread];
    const auto after = entries.upper_bound(number);
    return after != entries.begin() && std::prev(after)->second;
  }

 private:
  static constexpr size_t kMost = 2048;

  std::mutex mutex_;
  std::map<uint64_t, std::map<uint64_t, bool>> threads_;  // by thread, then by node
};

Log& regions() {
  static auto* const log = new Log;  // never destroyed: threads may outlive it
  return *log;
}

// The number of removals of the overrides. From a removal to the next registration, products in
// torch's regions are not seen.
std::atomic<int> blind_times = 0;

// The regions of this thread. Only torch's regions that contain products have to be distinguished
// from ours: a thread without such a region has one entry.
class Thread {
 public:
  // Notes that this thread enters a region of ours, or is in one. With `again`, the thread
  // recomputes a part of one during backward: nodes may precede its first product.
  void note_ours(bool again = false) {
    if (const int now = blind_times; std::exchange(blind_times_, now) != now) note_torchs();
    const uint64_t next = at::sequence_number::peek();
    if (!is_in_ours_) {
      // A reentrant checkpoint makes its node first, and then products without nodes.
      const bool has_node = again && !at::GradMode::is_enabled();
      const uint64_t begin = has_node ? std::max(last_ours_ + 1, next) - 1 : next;
      regions().add(id(), again && !has_torchs_ ? 0 : begin, true);
      is_in_ours_ = true;
    }
    last_ours_ = next;
  }

  // Notes that this thread is in a region of torch's.
  void note_torchs() {
    if (is_in_ours_) regions().add(id(), last_ours_, false);
    is_in_ours_ = false;
    has_torchs_ = true;
  }

  void note_exit() {
    if (is_in_ours_) last_ours_ = at::sequence_number::peek();
  }

 private:
  static uint64_t id() { return at::RecordFunction::currentThreadId(); }

  bool is_in_ours_ = false;
  bool has_torchs_ = false;
  int blind_times_ = blind_times;
  uint64_t last_ours_ = 0;  // the number of the next node when a region of ours was last noted
};

thread_local Thread this_thread;

std::atomic<bool> installed = false;
std::atomic<int> open_regions = 0;

}  // namespace

void enter_region() {
  ++open_regions;
  override_torchs();
  this_thread.note_ours();
}

void exit_region() {
  // A region may be left twice, by two threads.
  for (int open = open_regions; open > 0 && !open_regions.compare_exchange_weak(open, open - 1);) {
  }
  this_thread.note_exit();
}

void install() {
  override_torchs();
  installed = true;
}

void uninstall() {
  installed = false;
  if (open_regions > 0) return;
  ++blind_times;
  restore_torchs();
}

bool is_installed() { return installed; }

bool in_our_region() {
  if (installed) return true;
  if (at::autocast::is_autocast_enabled(kRegionMark)) {
    this_thread.note_ours();
    return true;
  }
  const auto node = torch::autograd::get_current_node();
  const bool repeats = node && regions().is_ours(node->thread_id(), node->sequence_nr());
  repeats ? this_thread.note_ours(/*again=*/true) : this_thread.note_torchs();
  return repeats;
}

}  // namespace amp_ext
