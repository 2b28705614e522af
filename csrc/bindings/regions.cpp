#include "regions.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "autocast.h"

namespace amp_ext {
namespace {

// Which nodes of the autograd graph were made within our regions. A checkpoint's second forward
// pass runs during backward, in an autocast region of torch's making: it has to do what the first
// did, and the node that asked for it tells. Nodes are numbered in the order in which a thread
// makes them, so a region is an interval.
class RegionLog {
 public:
  void begin() { begins_.push_back(at::sequence_number::peek()); }

  // False if this thread is in no region: it was left before, or entered by another thread.
  bool end() {
    if (begins_.empty()) return false;
    const uint64_t begin = begins_.back();
    begins_.pop_back();
    if (begins_.empty()) add({begin, at::sequence_number::peek()});
    return true;
  }

  bool has(const torch::autograd::Node& node) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = intervals_.find(node.thread_id());
    if (found == intervals_.end()) return false;
    const auto after = std::upper_bound(
        found->second.begin(), found->second.end(), node.sequence_nr(),
        [](uint64_t number, const Interval& interval) { return number < interval.begin; });
    return after != found->second.begin() && node.sequence_nr() < std::prev(after)->end;
  }

 private:
  struct Interval {
    uint64_t begin;
    uint64_t end;
  };

  void add(Interval interval) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t thread = at::RecordFunction::currentThreadId();
    const auto [entry, is_new] = intervals_.try_emplace(thread);
    if (is_new) threads_.push_back(thread);
    std::deque<Interval>& intervals = entry->second;
    if (!intervals.empty() && intervals.back().end >= interval.begin) {
      intervals.back().end = std::max(intervals.back().end, interval.end);
    } else if (interval.begin < interval.end) {
      intervals.push_back(interval);
    }
    if (intervals.size() > kIntervals) intervals.pop_front();
    if (threads_.size() > kThreads) {
      intervals_.erase(threads_.front());
      threads_.pop_front();
    }
  }

  // No backward pass reaches further back.
  static constexpr size_t kIntervals = 1 << 16;  // of a thread
  static constexpr size_t kThreads = 1 << 12;

  static thread_local std::vector<uint64_t> begins_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::deque<Interval>> intervals_;  // by thread, in order
  std::deque<uint64_t> threads_;                                  // of intervals_, oldest first
};

thread_local std::vector<uint64_t> RegionLog::begins_;

RegionLog& region_log() {
  static auto* const log = new RegionLog;  // never destroyed: threads may outlive it
  return *log;
}

std::atomic<bool> installed = false;

std::atomic<int> open_regions = 0;

}  // namespace

void enter_region() {
  ++open_regions;
  override_torchs();
  region_log().begin();
}

void exit_region() {
  if (region_log().end()) --open_regions;
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
  if (installed || at::autocast::is_autocast_enabled(kRegionMark)) return true;
  const auto node = torch::autograd::get_current_node();
  return node && region_log().has(*node);
}

}  // namespace amp_ext
