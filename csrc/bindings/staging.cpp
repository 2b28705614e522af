#include "staging.h"

#include <mutex>
#include <utility>
#include <vector>

namespace amp_ext {

void keep_for_graph(at::Tensor staged) {
  static std::mutex mutex;
  // Never destroyed: the CUDA context may go first.
  static auto* kept = new std::vector<at::Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(staged));
}

}  // namespace amp_ext
