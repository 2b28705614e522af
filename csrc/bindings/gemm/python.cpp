// For Python: which backend computes a product, and the planner of the CUDA kernels. Needs no GPU.
#include "gemm/python.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/backends.h"
#include "checks/python.h"
#include "gemm/gemm.h"
#include "gemm/plan/choose.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

void force(std::optional<int> tile, std::array<int, 2> cluster, int splits, bool sm90, int ranges) {
  constexpr auto op = "amp_ext._C.force_gemm_tile: ";
  const int count = sm90 ? kSm90TileCount : kGemmTileCount;
  TORCH_CHECK_VALUE(!tile || (*tile >= 0 && *tile < count), op,
                    "tile must be None or a number below ", count, ", got ", *tile);
  const auto [m, n] = cluster;
  TORCH_CHECK_VALUE(m >= 1 && n >= 1 && m * n <= 2, op,
                    "cluster must be (1, 1), (2, 1) or (1, 2), got (", m, ", ", n, ")");
  TORCH_CHECK_VALUE(splits >= (ranges > 0 ? 0 : 1), op, "splits must be at least ",
                    ranges > 0 ? 0 : 1, ", got ", splits);
  TORCH_CHECK_VALUE(ranges >= 0 && (sm90 || ranges == 0), op, "ranges must be at least 0, and 0 ",
                    "for gemm_kernel, got ", ranges);
  forced_tile.reset();
  if (tile)
    forced_tile = {.sm90 = sm90,
                   .tile = *tile,
                   .cluster_m = m,
                   .cluster_n = n,
                   .splits = splits,
                   .ranges = ranges};
}

template <class Tile, int kCount>
std::vector<std::string> in_words(const Tile (&tiles)[kCount]) {
  std::vector<std::string> lines;
  for (const Tile& tile : tiles) lines.push_back(describe(tile));
  return lines;
}

py::dict tiles() {
  py::dict result;
  result["gemm_kernel"] = in_words(kGemmTiles);
  result["gemm_sm90_kernel"] = in_words(kSm90Tiles);
  return result;
}

// A dense matrix, or its transpose; its memory is never read.
MatrixRef dense(int64_t rows, int64_t columns, bool transposed, DType dtype) {
  void* const data = reinterpret_cast<void*>(1 << 20);
  return {data, dtype, rows * columns, transposed ? 1 : columns, transposed ? rows : 1};
}

std::tuple<std::string, double, std::optional<double>> plan(int64_t m, int64_t n, int64_t k,
                                                            const std::string& layout,
                                                            bool fp32_out, bool accumulate,
                                                            int multiprocessors, bool sm90) {
  constexpr auto op = "amp_ext._C.gemm_plan: ";
  TORCH_CHECK_VALUE(layout == "NN" || layout == "NT" || layout == "TN" || layout == "TT", op,
                    "layout must be NN, NT, TN or TT, got ", layout);
  TORCH_CHECK_VALUE(m >= 0 && n >= 0 && k >= 0, op, "m, n and k must be at least 0, got ", m, ", ",
                    n, " and ", k);
  TORCH_CHECK_VALUE(multiprocessors > 0, op, "multiprocessors must be at least 1, got ",
                    multiprocessors);
  GemmArgs g{};
  g.batch = g.terms = 1;
  g.m = m;
  g.n = n;
  g.k = k;
  g.alpha = 1;
  g.a = dense(m, k, layout[0] == 'T', DType::f16);
  g.b = dense(k, n, layout[1] == 'T', DType::f16);
  g.out = dense(m, n, false, fp32_out ? DType::f32 : DType::f16);
  if (accumulate) {
    g.c = g.out;
    g.beta = 1;
  }
  TORCH_CHECK_VALUE(can_run_sm80(g), op, "the kernels cannot compute ", m, "x", n, "x", k);
  const GemmCandidate best = choose(g, {.multiprocessors = multiprocessors, .sm90 = sm90});
  const std::string text = describe(make_plan(g, best, multiprocessors));
  if (!best.sm90) return {text, best.predicted.cycles, std::nullopt};
  const double least = sm90_least_cycles(g, multiprocessors);
  return {text, std::max(best.predicted.cycles, least), least};
}

// (backend, reason) of gemm(a, b, ...).
std::pair<std::string, std::string> choice_of(py::handle a, py::handle b, py::handle c,
                                              py::handle bias, bool trans_a, bool trans_b,
                                              bool sum_batch) {
  HANDLE_TH_ERRORS
  GemmOptions options;
  options.trans_a = trans_a;
  options.trans_b = trans_b;
  options.sum_batch = sum_batch;
  if (!c.is_none()) options.c = tensor_of("c", c);
  if (!bias.is_none()) options.bias = tensor_of("bias", bias);
  return gemm_choice(tensor_of("a", a), tensor_of("b", b), options);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def("gemm_choice", &choice_of, py::arg("a"), py::arg("b"), py::arg("c") = py::none(),
        py::arg("bias") = py::none(), py::arg("trans_a") = false, py::arg("trans_b") = false,
        py::arg("sum_batch") = false,
        "Which backend computes gemm(a, b, ...), and why. Computes no product, but may have the "
        "backend's kernels verified first.");
  m.def("refused_by_cublaslt", &refused_by_cublaslt,
        "How many products cuBLASLt did not compute after all: torch's ops have computed them.");
  m.def("cublaslt_version", &cublaslt_version, "As cuBLASLt says itself; 0 where there is none.");
  m.def("gemm_tiles", &tiles, "The tiles of each kernel of the CUDA gemm, by their number.");
  m.def("gemm_plan", &plan, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("layout") = "NN",
        py::kw_only(), py::arg("fp32_out") = false, py::arg("accumulate") = false,
        py::arg("multiprocessors") = 132, py::arg("sm90") = true,
        "How the CUDA gemm would multiply dense 16-bit matrices, and add the product to the result "
        "or not: in words, the cycles that this is predicted to take, and of a plan for Hopper the "
        "cycles that none is predicted to take fewer than, else None. Launches nothing.");
  m.def("force_gemm_tile", &force, py::arg("tile"), py::arg("cluster") = std::array<int, 2>{1, 1},
        py::arg("splits") = 1, py::arg("sm90") = true, py::arg("ranges") = 0,
        "Products of this thread that this tile of gemm_sm90_kernel, or of gemm_kernel, can "
        "compute are computed by it, whatever the planner thinks, until force_gemm_tile(None).");
}

}  // namespace amp_ext
