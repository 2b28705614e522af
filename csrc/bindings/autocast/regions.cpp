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

#include "autocast/autocast.h"

namespace amp_ext {
namespace {

// A node's place among all nodes: its thread, and its number there. A thread numbers its nodes in
// the order in which it makes them.
using Place = std::pair<uint64_t, uint64_t>;

// The nodes of the autograd graph that were made in our regions, as intervals of places. A
// checkpoint's second forward pass runs during backward, in an autocast region that torch opens. It
// has to do what the first did, and the node that is being run identifies the region of that.
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

  // Merges the oldest intervals that begin in a thread, until at most `most` are left.
  void join_oldest(uint64_t thread, int most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto oldest = ends_.lower_bound({thread, 0});
    for (auto n = std::distance(oldest, ends_.lower_bound({thread + 1, 0})); n > most; --n) {
      const auto next = std::next(oldest);
      oldest->second = next->second;
      ends_.erase(next);
    }
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

// How many times the overrides were removed: meanwhile products in torch's regions are not seen.
std::atomic<int> blind_times = 0;

// Which of this thread's nodes are ours. Only torch's regions that contain products have to be
// distinguished from ours: a thread without such a region has one interval.
class ThreadLog {
 public:
  // This thread enters a region of ours, or is in one.
  void note_ours() {
    see_again();
    note_ours_from(at::sequence_number::peek());
  }

  // This thread recomputes a part of one during backward. Nodes may precede its first product.
  void note_repetition() {
    see_again();
    note_ours_from(has_torchs_ ? at::sequence_number::peek() : 0);
  }

  // This thread is in a region of torch's.
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

  // While products were not seen, this thread may have been in a region of torch's.
  void see_again() {
    if (blind_times_ == blind_times) return;
    blind_times_ = blind_times;
    note_torchs();
  }

  void note_ours_from(uint64_t begin) {
    if (!in_ours_) {
      our_nodes().add({id(), begin}, {id() + 1, 0});
      in_ours_ = true;
      if (++entries_ % kIntervals == 0) our_nodes().join_oldest(id(), kIntervals);
    }
    last_ours_ = at::sequence_number::peek();
  }

  // A thread keeps up to twice as many intervals. When there are more, older regions of torch's
  // count as ours.
  static constexpr int kIntervals = 1024;

  bool in_ours_ = false;
  bool has_torchs_ = false;
  uint64_t entries_ = 0;  // how many times it entered regions of ours
  int blind_times_ = blind_times;
  uint64_t last_ours_ = 0;  // the number of the next node when a region of ours was last noted
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
  // A region may be left twice, by two threads.
  for (int open = open_regions; open > 0 && !open_regions.compare_exchange_weak(open, open - 1);) {
  }
  thread_log.note_exit();
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
    thread_log.note_ours();
    return true;
  }
  const auto node = torch::autograd::get_current_node();
  const bool repeats = node && our_nodes().has({node->thread_id(), node->sequence_nr()});
  repeats ? thread_log.note_repetition() : thread_log.note_torchs();
  return repeats;
}

}  // namespace amp_ext
