#include "backends/table.h"

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#include <map>
#include <mutex>
#include <utility>

#include "backends/backends.h"
#include "backends/python.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// The tables that have been read, by device.
struct Tables {
  std::mutex mutex;
  std::map<int, std::map<GemmKey, Measured>> measured;
};

Tables& tables() {
  static auto* const tables = new Tables;  // never destroyed: threads may outlive it
  return *tables;
}

int index_of(c10::Device device) { return device.is_cpu() ? -1 : device.index(); }

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
                       g.alpha == 1};
  int64_t packed = 0;
  for (const int kind : kinds) packed = packed * 16 + kind;
  return {device.is_cpu() ? at::get_num_threads() : 0, packed, g.batch, g.terms, g.m, g.n, g.k};
}

std::optional<Measured> find_measured(c10::Device device, const GemmArgs& args) {
  auto& [mutex, measured] = tables();
  std::unique_lock<std::mutex> lock(mutex);
  if (!measured.contains(index_of(device))) {
    lock.unlock();  // Python calls set_measured, and may wait for threads that come here
    {
      const UntracedPython python;
      py::module_::import("amp_ext.tune").attr("load_table")(device.str());
    }
    lock.lock();
  }
  const std::map<GemmKey, Measured>& table = measured[index_of(device)];
  if (table.empty()) return std::nullopt;
  const auto found = table.find(key_of(device, args));
  return found == table.end() ? std::nullopt : std::optional(found->second);
}

void set_measured(const std::string& device_name, std::map<GemmKey, Measured> table) {
  auto& [mutex, measured] = tables();
  const std::lock_guard<std::mutex> lock(mutex);
  measured[index_of(c10::Device(device_name))] = std::move(table);
}

}  // namespace amp_ext
