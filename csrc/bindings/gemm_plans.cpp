// The planner of CUDA's gemm for Python: what it would do, without a GPU.
#include "gemm_plans.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;

namespace amp_ext {
namespace {

struct Forced {
  std::mutex mutex;
  std::optional<MeasuredPlan> plan;
};

Forced& forced() {
  static Forced instance;
  return instance;
}

void force(std::optional<int> tile, std::array<int, 2> cluster, int splits, int group) {
  constexpr auto op = "amp_ext._C.force_gemm_plan: ";
  TORCH_CHECK_VALUE(!tile || (*tile >= 0 && *tile < kSm90TileCount), op,
                    "tile must be None or a number below ", kSm90TileCount, ", got ", *tile);
  const auto [m, n] = cluster;
  TORCH_CHECK_VALUE(m >= 1 && n >= 1 && m * n <= 2, op,
                    "cluster must be (1, 1), (2, 1) or (1, 2), got (", m, ", ", n, ")");
  TORCH_CHECK_VALUE(splits >= 1 && group >= 0, op,
                    "splits must be at least 1 and group at least 0, got ", splits, " and ", group);
  std::optional<MeasuredPlan> plan;
  if (tile) {
    plan.emplace();
    plan->tile = kSm90Tiles[*tile];
    plan->cluster_m = m, plan->cluster_n = n;
    plan->splits = splits, plan->group = group;
  }
  const std::lock_guard<std::mutex> lock(forced().mutex);
  forced().plan = plan;
}

template <class Tile, int kCount>
std::vector<std::string> in_words(const Tile (&tiles)[kCount]) {
  std::vector<std::string> lines;
  for (const Tile& tile : tiles) lines.push_back(describe(tile) + ": " + describe_budget(tile));
  return lines;
}

py::dict tiles() {
  py::dict result;
  result["gemm_kernel"] = in_words(kGemmTiles);
  result["gemm_sm90_kernel"] = in_words(kSm90Tiles);
  return result;
}

// A dense matrix of 16-bit elements, or its transpose, that nobody reads.
MatrixRef dense(int64_t rows, int64_t columns, bool transposed, DType dtype) {
  void* const data = reinterpret_cast<void*>(1 << 20);
  return {data, dtype, rows * columns, transposed ? 1 : columns, transposed ? rows : 1};
}

py::dict plan(int64_t m, int64_t n, int64_t k, const std::string& layout, int64_t batch,
              bool fp32_out, bool accumulate, int multiprocessors, bool sm90) {
  constexpr auto op = "amp_ext._C.gemm_plan: ";
  TORCH_CHECK_VALUE(layout == "NN" || layout == "NT" || layout == "TN" || layout == "TT", op,
                    "layout must be NN, NT, TN or TT, got ", layout);
  TORCH_CHECK_VALUE(m >= 0 && n >= 0 && k >= 0 && batch >= 0, op,
                    "m, n, k and batch must be at least 0, got ", m, ", ", n, ", ", k, " and ",
                    batch);
  TORCH_CHECK_VALUE(multiprocessors > 0, op, "multiprocessors must be at least 1, got ",
                    multiprocessors);
  GemmArgs g{};
  g.batch = batch, g.terms = 1, g.m = m, g.n = n, g.k = k, g.alpha = 1;
  g.a = dense(m, k, layout[0] == 'T', DType::f16);
  g.b = dense(k, n, layout[1] == 'T', DType::f16);
  g.out = dense(m, n, false, fp32_out ? DType::f32 : DType::f16);
  if (accumulate) g.c = g.out, g.beta = 1;
  TORCH_CHECK_VALUE(gemm_serves(g), op, "the kernels do not serve ", m, "x", n, "x", k);
  const GemmDevice device{multiprocessors, sm90};
  const GemmPlan plan = chosen_plan(g, device);
  const GemmPrediction predicted = predict(g, plan, device);
  py::dict result;
  result["plan"] = describe(plan);
  result["prediction"] = describe(predicted);
  result["tile"] = plan.sm90 ? describe(kSm90Tiles[plan.tile]) : describe(kGemmTiles[plan.tile]);
  result["sm90"] = plan.sm90;
  result["cluster"] = py::make_tuple(plan.cluster_m, plan.cluster_n);
  result["splits"] = plan.splits;
  result["cycles"] = predicted.cycles;
  result["waves"] = predicted.waves;
  result["l2_bytes"] = predicted.l2_bytes;
  result["memory_bytes"] = predicted.memory_bytes;
  return result;
}

}  // namespace

GemmPlan chosen_plan(const GemmArgs& g, const GemmDevice& device) {
  if (device.sm90 && gemm_serves_sm90(g)) {
    const std::lock_guard<std::mutex> lock(forced().mutex);
    const auto& plan = forced().plan;
    if (plan && measured_serves(*plan, g) &&
        plan->cluster_m * plan->cluster_n <= device.multiprocessors)
      return plan_measured(*plan, g, device.multiprocessors);
  }
  return plan_gemm(g, device);
}

void bind_gemm_plans(py::module_& m) {
  m.def("gemm_tiles", &tiles,
        "The tiles of each kernel of the CUDA gemm, by their number, with what they are planned to "
        "take of a multiprocessor.");
  m.def("gemm_plan", &plan, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("layout") = "NN",
        py::kw_only(), py::arg("batch") = 1, py::arg("fp32_out") = false,
        py::arg("accumulate") = false, py::arg("multiprocessors") = 132, py::arg("sm90") = true,
        "How the CUDA gemm would multiply dense 16-bit matrices, and what that is predicted to "
        "take. Launches nothing.");
  m.def("force_gemm_plan", &force, py::arg("tile"), py::arg("cluster") = std::array<int, 2>{1, 1},
        py::arg("splits") = 1, py::arg("group") = 0,
        "Products that this tile of gemm_sm90_kernel serves are computed by it, whatever the "
        "planner thinks, until force_gemm_plan(None); for tests and for tuning.");
}

}  // namespace amp_ext
