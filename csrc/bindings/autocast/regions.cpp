#include "autocast/regions.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace amp_ext {
namespace {

// A node's place among all nodes: its thread, and its number there. A thread numbers its nodes in
// the order of their creation.
using Place = std::pair<uint64_t, uint64_t>;

// The log of regions. An entry says whether nodes were made in a region of ours. It holds for the
// nodes of a thread from its place on, up to the thread's next entry. A checkpoint's second forward
// pass runs during backward, in an autocast region that torch opens. It has to do the same as the
// first pass: the node that is being run identifies the region of the first pass.
class Log {
 public:
  // Adds an entry. Entries of a thread alternate. A thread has no entry behind `begin`.
  void add(Place begin, bool is_ours) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = entries_.insert_or_assign(begin, is_ours).first;
    const bool is_first = entry == entries_.begin() || std::prev(entry)->first.first != begin.first;
    if (is_first ? !is_ours : std::prev(entry)->second == is_ours) entries_.erase(entry);
  }

  // Counts a thread's oldest regions of torch's as ours, beyond `most` of them.
  void forget_oldest(uint64_t thread, size_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto oldest = entries_.lower_bound({thread, 0});
    const auto end = entries_.lower_bound({thread + 1, 0});
    for (auto count = std::distance(oldest, end); count > static_cast<int64_t>(2 * most);
         count -= 2) {
      entries_.erase(std::next(oldest), std::next(oldest, 3));
    }
  }

  bool is_ours(Place place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = entries_.upper_bound(place);
    if (after == entries_.begin()) return false;
    const auto entry = std::prev(after);
    return entry->first.first == place.first && entry->second;
  }

 private:
  std::mutex mutex_;
  std::map<Place, bool> entries_;
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
      regions().add({id(), again && !has_torchs_ ? 0 : next}, true);
      is_in_ours_ = true;
      if (++entries_ % kMost == 0) regions().forget_oldest(id(), kMost);
    }
    last_ours_ = next;
  }

  // Notes that this thread is in a region of torch's.
  void note_torchs() {
    if (is_in_ours_) regions().add({id(), last_ours_}, false);
    is_in_ours_ = false;
    has_torchs_ = true;
  }

  void note_exit() {
    if (is_in_ours_) last_ours_ = at::sequence_number::peek();
  }

 private:
  static constexpr int kMost = 1024;

  static uint64_t id() { return at::RecordFunction::currentThreadId(); }

  bool is_in_ours_ = false;
  bool has_torchs_ = false;
  uint64_t entries_ = 0;  // how many times it entered regions of ours
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
  const bool repeats = node && regions().is_ours({node->thread_id(), node->sequence_nr()});
  repeats ? this_thread.note_ours(/*again=*/true) : this_thread.note_torchs();
  return repeats;
}

}  // namespace amp_ext
