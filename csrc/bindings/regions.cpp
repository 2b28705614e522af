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

  void end() {
    const Interval interval{begins_.back(), at::sequence_number::peek()};
    begins_.pop_back();
    if (!begins_.empty() || interval.begin == interval.end) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<Interval>& intervals = intervals_[at::RecordFunction::currentThreadId()];
    intervals.push_back(interval);
    if (intervals.size() > kKept) intervals.pop_front();
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
  static constexpr size_t kKept = 1 << 16;  // a megabyte; a backward pass reaches no further back

  static thread_local std::vector<uint64_t> begins_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::deque<Interval>> intervals_;  // by thread, in order
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
  override_torchs();
  ++open_regions;
  region_log().begin();
}

void exit_region() {
  region_log().end();
  --open_regions;
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
