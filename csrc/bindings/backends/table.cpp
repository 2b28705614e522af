// Keeps the table of measured products, and notes products for a measurement.
#include "backends/table.h"

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <bit>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

#include "backends/backends.h"
#include "backends/python.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

struct HashOfKey {
  size_t operator()(const GemmKey& key) const {
    uint64_t hash = 0;
    for (const int64_t field : key)
      hash = (std::rotl(hash, 23) ^ static_cast<uint64_t>(field)) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 32);
  }
};

using Table = std::unordered_map<GemmKey, Measured, HashOfKey>;

// Null until it is read. Threads may be reading a table that is replaced: no table is ever freed.
std::atomic<const Table*>& table_of(c10::Device device) {
  constexpr int kDevices = std::numeric_limits<c10::DeviceIndex>::max() + 1;
  static std::array<std::atomic<const Table*>, 1 + kDevices> tables{};
  return tables[device.is_cpu() ? 0 : 1 + device.index()];
}

class Notes {
 public:
  void add(c10::Device device, const GemmArgs& args) {
    const std::pair key(device.is_cpu() ? -1 : device.index(), key_of(device, args));
    const std::lock_guard<std::mutex> lock(mutex_);
    auto [place, is_new] = products_.try_emplace(key, NotedProduct{device, args, 0});
    ++place->second.calls;
  }
  std::vector<NotedProduct> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<NotedProduct> products;
    for (auto& [key, product] : products_) products.push_back(product);
    products_.clear();
    return products;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, GemmKey>, NotedProduct> products_;
};

std::atomic<bool> noting = false;

Notes& noted() {
  static Notes notes;
  return notes;
}

bool is_empty(const GemmArgs& g) {
  return g.batch == 0 || g.terms == 0 || g.m == 0 || g.n == 0 || g.k == 0;
}

}  // namespace

GemmKey key_of(c10::Device device, const GemmArgs& g) {
  // By rows or by columns, if it is, and whether all of them begin at multiples of 16 bytes (of
  // 32, if they are FP32).
  const auto layout = [](const MatrixRef& x, int64_t rows, int64_t columns) {
    const bool by_rows = x.column_stride == 1 || columns <= 1;
    const bool by_columns = x.row_stride == 1 || rows <= 1;
    const int64_t line = by_rows ? x.row_stride : x.column_stride;
    const bool aligned =
        reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (line | x.batch_stride) % 8 == 0;
    return by_rows ? 1 + aligned : by_columns ? 3 + aligned : 0;
  };
  const auto type = [](const auto& x) { return x.data ? 1 + static_cast<int>(x.dtype) : 0; };
  const int kinds[] = {static_cast<int>(g.a.dtype),
                       static_cast<int>(g.b.dtype),
                       static_cast<int>(g.out.dtype),
                       layout(g.a, g.m, g.k),
                       layout(g.b, g.k, g.n),
                       adds_to_out(g) ? 1 + kDTypes : type(g.c),
                       type(g.bias),
                       type(g.aux),
                       2 * static_cast<int>(g.activation) + g.derivative,
                       g.alpha == 1};
  int64_t packed = 0;
  for (const int kind : kinds) packed = packed * 16 + kind;
  return {device.is_cpu() ? at::get_num_threads() : 0, packed, g.batch, g.terms, g.m, g.n, g.k};
}

const Measured* find_measured(c10::Device device, const GemmArgs& args) {
  const Table* table = table_of(device).load(std::memory_order_acquire);
  if (!table) {
    const UntracedPython python;
    py::module_::import("amp_ext.tune").attr("load_table")(device.str());
    table = table_of(device).load(std::memory_order_acquire);
  }
  if (table->empty()) return nullptr;
  const auto found = table->find(key_of(device, args));
  return found == table->end() ? nullptr : &found->second;
}

void set_measured(c10::Device device, const std::vector<std::pair<GemmKey, Measured>>& entries) {
  table_of(device).store(new Table(entries.begin(), entries.end()), std::memory_order_release);
}

bool start_noting() { return !noting.exchange(true); }

std::vector<NotedProduct> stop_noting() {
  noting = false;
  return noted().take();
}

void note(c10::Device device, const GemmArgs& args) {
  if (noting.load(std::memory_order_relaxed) && !is_empty(args)) noted().add(device, args);
}

}  // namespace amp_ext
