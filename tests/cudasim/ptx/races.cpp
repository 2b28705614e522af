// Keep cells of global memory.
#include "races.h"

namespace cudasim {

Cell& GlobalCells::at(u64 address) {
  const u64 number = address >> kPageBits;
  if (number != last_ || !page_ || page_->launch != launch_) {
    constexpr size_t kMostPages = 4096;
    auto& page = pages_[number];
    if (!page) {
      if (pages_.size() > kMostPages)  // pages of earlier launches
        std::erase_if(pages_,
                      [&](const auto& it) { return it.second && it.second->launch != launch_; });
      auto& kept = pages_[number];
      if (!kept) kept = std::make_unique<Page>();
      page_ = kept.get();
    } else {
      page_ = page.get();
    }
    if (page_->launch != launch_) {
      memset(page_->cells, 0, sizeof page_->cells);
      page_->launch = launch_;
    }
    last_ = number;
  }
  return page_->cells[address % (1 << kPageBits) / 16];
}

}  // namespace cudasim
