#include "regions.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "autocast.h"

namespace amp_ext {
namespace {

// A node's place among all nodes: its thread, and its number there. A thread numbers its nodes in
// the order in which it makes them.
using Place = std::pair<uint64_t, uint64_t>;

// The nodes of the autograd graph that were made in our regions, as intervals of places. A
// checkpoint's second forward pass runs during backward, in an autocast region of torch's making:
// it has to do what the first did, and the node that asked for it tells.
class Intervals {
 public:
  // [begin, end) overlaps none.
  void add(Place begin, Place end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = ends_.lower_bound(begin);
    if (after != ends_.end() && after->first == end) {
      end = after->second;
      after = ends_.erase(after);
    }
    if (after != ends_.begin() && std::prev(after)->second == begin) {
      std::prev(after)->second = end;
    } else {
      ends_.emplace_hint(after, begin, end);
    }
  }

  // [begin, end) lies in one.
  void remove(Place begin, Place end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::prev(ends_.upper_bound(begin));
    const Place old_end = std::exchange(found->second, begin);
    if (found->first == begin) ends_.erase(found);
    if (end != old_end) ends_.emplace(end, old_end);
  }

  // Makes one of the two oldest intervals that begin in the thread.
  void join_oldest(uint64_t thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto oldest = ends_.lower_bound({thread, 0}), next = std::next(oldest);
    oldest->second = next->second;
    ends_.erase(next);
  }

  bool has(Place place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = ends_.upper_bound(place);
    return after != ends_.begin() && place < std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<Place, Place> ends_;  // by begin
};

Intervals& our_nodes() {
  static auto* const intervals = new Intervals;  // never destroyed: threads may outlive it
  return *intervals;
}

// Which of this thread's nodes are ours. Only regions of torch's with products in them have to be
// told from ours, so that most threads have one interval, all their nodes, and that of consecutive
// threads is one too.
class ThreadLog {
 public:
  // This thread is in a region of ours.
  void note_ours() {
    if (!in_ours_) {
      our_nodes().add({id(), has_torchs_ ? at::sequence_number::peek() : 0}, {id() + 1, 0});
      in_ours_ = true;
      if (++intervals_ > kIntervals) {
        our_nodes().join_oldest(id());
        --intervals_;
      }
    }
    last_ours_ = at::sequence_number::peek();
  }

  // It is in a region of torch's.
  void note_torchs() {
    if (in_ours_) our_nodes().remove({id(), last_ours_}, {id() + 1, 0});
    in_ours_ = false;
    has_torchs_ = true;
  }

  void note_exit() {
    if (in_ours_) last_ours_ = at::sequence_number::peek();
  }

 private:
  static uint64_t id() { return at::RecordFunction::currentThreadId(); }

  // Where a thread has changed between the two kinds of regions more often than this, what is older
  // counts as ours.
  static constexpr int kIntervals = 1024;

  bool in_ours_ = false;
  bool has_torchs_ = false;
  int intervals_ = 0;
  uint64_t last_ours_ = 0;  // the number of the next node when ours was noted last
};

thread_local ThreadLog thread_log;

std::atomic<bool> installed = false;

std::atomic<int> open_regions = 0;

}  // namespace

void enter_region() {
  ++open_regions;
  override_torchs();
  thread_log.note_ours();
}

void exit_region() {
  --open_regions;
  thread_log.note_exit();
}

void install() {
  override_torchs();
  installed = true;
}

void uninstall() {
  installed = false;
  if (open_regions == 0) restore_torchs();
}

bool is_installed() { return installed; }

bool in_our_region() {
  if (installed) return true;
  bool ours = at::autocast::is_autocast_enabled(kRegionMark);
  if (!ours) {
    const auto node = torch::autograd::get_current_node();
    ours = node && our_nodes().has({node->thread_id(), node->sequence_nr()});
  }
  ours ? thread_log.note_ours() : thread_log.note_torchs();
  return ours;
}

}  // namespace amp_ext
