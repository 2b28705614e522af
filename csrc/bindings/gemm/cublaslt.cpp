// Products with a gelu by one call of cuBLASLt, which torch has loaded: nothing links to it.
#include "backends/backends.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#endif

#include <atomic>

namespace amp_ext {
namespace {

constexpr auto kAbsent = "this build or torch has no cuBLASLt";

#if __has_include(<cublasLt.h>)

#define AMP_EXT_CUBLASLT_FUNCTIONS(USE)     \
  USE(cublasLtGetVersion)                   \
  USE(cublasLtCreate)                       \
  USE(cublasLtMatmulDescCreate)             \
  USE(cublasLtMatmulDescDestroy)            \
  USE(cublasLtMatmulDescSetAttribute)       \
  USE(cublasLtMatrixLayoutCreate)           \
  USE(cublasLtMatrixLayoutDestroy)          \
  USE(cublasLtMatmulPreferenceCreate)       \
  USE(cublasLtMatmulPreferenceDestroy)      \
  USE(cublasLtMatmulPreferenceSetAttribute) \
  USE(cublasLtMatmulAlgoGetHeuristic)       \
  USE(cublasLtMatmul)

struct Library {
#define AMP_EXT_FUNCTION(name) decltype(&::name) name = nullptr;
  AMP_EXT_CUBLASLT_FUNCTIONS(AMP_EXT_FUNCTION)
#undef AMP_EXT_FUNCTION

  Library() {
    const std::string file = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* const loaded = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!loaded) return;
    // First what was preloaded, as tests/fake_cuda is.
    const auto find = [&](const char* name) {
      void* const first = dlsym(RTLD_DEFAULT, name);
      return first ? first : dlsym(loaded, name);
    };
#define AMP_EXT_FIND(name) name = reinterpret_cast<decltype(name)>(find(#name));
    AMP_EXT_CUBLASLT_FUNCTIONS(AMP_EXT_FIND)
#undef AMP_EXT_FIND
#define AMP_EXT_IS_FOUND(name) name&&
    is_complete = AMP_EXT_CUBLASLT_FUNCTIONS(AMP_EXT_IS_FOUND) cublasLtGetVersion() / 10000 ==
                  CUBLAS_VER_MAJOR;
#undef AMP_EXT_IS_FOUND
  }

  bool is_complete = false;
};

const Library& library() {
  static const Library instance;
  return instance;
}

bool is_ok(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS; }

// ---- what it computes ---------------------------------------------------------------------------

// Its gelu is the approximation by tanh. What the derivative of that is at infinities it does not
// say, nor what its relu makes of NaN: neither is used.
std::optional<cublasLtEpilogue_t> epilogue_of(const GemmArgs& g) {
  if (g.activation != Activation::gelu_tanh || g.derivative || g.column_sums) return std::nullopt;
  if (g.aux.data) return g.bias.data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return g.bias.data ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

// What it takes in every layout, for 16-bit elements.
constexpr int64_t kAlignment = 16, kAlignedElements = 8;

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

// cuBLASLt stores matrices column by column, and so computes the transpose: its first operand is
// that of b. `transposed`: memory holds the matrix itself column by column, not its transpose.
struct Layout {
  int64_t rows, columns, leading;  // in memory
  bool transposed;
};

std::optional<Layout> layout_of(const MatrixRef& x, int64_t rows, int64_t columns) {
  const bool by_rows = x.column_stride == 1 && x.row_stride >= columns;
  if (!by_rows && (x.row_stride != 1 || x.column_stride < rows)) return std::nullopt;
  const Layout layout = by_rows ? Layout{columns, rows, x.row_stride, false}
                                : Layout{rows, columns, x.column_stride, true};
  const bool aligned = is_aligned(x.data) && layout.leading % kAlignedElements == 0;
  return aligned ? std::optional(layout) : std::nullopt;
}

cudaDataType_t type_of(DType dtype) { return dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF; }

bool is_of_one_type(const GemmArgs& g) {
  const DType type = g.a.dtype;
  const auto is_of_type = [&](const auto& x) { return !x.data || x.dtype == type; };
  return (type == DType::f16 || type == DType::bf16) && g.b.dtype == type && g.out.dtype == type &&
         is_of_type(g.bias) && is_of_type(g.aux);
}

bool is_one_product(const GemmArgs& g) {
  return g.batch == 1 && g.terms == 1 && g.m > 0 && g.n > 0 && g.k > 0 &&
         static_cast<float>(g.alpha) != 0 && (!g.c.data || g.beta == 0);
}

bool are_results_in_place(const GemmArgs& g) {
  const auto is_in_place = [&](const MatrixRef& x) {
    const auto layout = layout_of(x, g.m, g.n);
    return layout && !layout->transposed;
  };
  return is_in_place(g.out) && (!g.aux.data || is_in_place(g.aux));
}

struct Form {
  cublasLtEpilogue_t epilogue;
  Layout a, b;
};

// Of a product that it computes.
std::optional<Form> form_of(const GemmArgs& g) {
  const auto epilogue = epilogue_of(g);
  if (!epilogue || !is_of_one_type(g) || !is_one_product(g) || !are_results_in_place(g))
    return std::nullopt;
  if (g.bias.data && (g.bias.stride != 1 || !is_aligned(g.bias.data))) return std::nullopt;
  const auto a = layout_of(g.a, g.m, g.k), b = layout_of(g.b, g.k, g.n);
  return a && b ? std::optional(Form{*epilogue, *a, *b}) : std::nullopt;
}

const char* obstacle(const GemmArgs& g) {
  if (!cuda_backend() || !library().is_complete) return kAbsent;
  return form_of(g) ? nullptr : "not a product of one 16-bit type and its gelu by tanh, aligned";
}

// ---- the call -----------------------------------------------------------------------------------

// One for each device, and all threads. Null where it would be created during a capture.
cublasLtHandle_t handle_on(c10::Device device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device.index()];
  if (!handle && !is_capturing(device) && !is_ok(library().cublasLtCreate(&handle)))
    handle = nullptr;
  return handle;
}

struct Destroy {
  void operator()(cublasLtMatmulDesc_t x) const { library().cublasLtMatmulDescDestroy(x); }
  void operator()(cublasLtMatrixLayout_t x) const { library().cublasLtMatrixLayoutDestroy(x); }
  void operator()(cublasLtMatmulPreference_t x) const {
    library().cublasLtMatmulPreferenceDestroy(x);
  }
};
template <class Pointer>
using Owned = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroy>;

constexpr uint64_t kMostWorkspace = 32 << 20;
constexpr size_t kWorkspaceAlignment = 256;

// All that the algorithm depends on.
using Key = std::array<int64_t, 17>;

uint32_t alignment_of(const void* data) {
  constexpr uintptr_t kMost = 256;
  const auto address = reinterpret_cast<uintptr_t>(data) | kMost;
  return static_cast<uint32_t>(address & -address);
}

Key key_of(const GemmArgs& g, const Form& form, int device) {
  const auto& [epilogue, a, b] = form;
  return {device,
          static_cast<int64_t>(g.a.dtype),
          epilogue,
          g.m,
          g.n,
          g.k,
          a.leading,
          a.transposed,
          b.leading,
          b.transposed,
          g.out.row_stride,
          g.aux.data ? g.aux.row_stride : 0,
          alignment_of(g.a.data),
          alignment_of(g.b.data),
          alignment_of(g.out.data),
          alignment_of(g.bias.data),
          alignment_of(g.aux.data)};
}

// A product as cuBLASLt describes it, and how it would compute it.
class Problem {
 public:
  Problem(const GemmArgs& g, const Form& form, cublasLtHandle_t handle) {
    has_algorithm_ = describe(g, form) && find_algorithm(g, handle);
  }

  bool run(const GemmArgs& g, cublasLtHandle_t handle, Services& services) {
    if (!has_algorithm_ || !set_pointers(g)) return false;
    uintptr_t workspace = 0;
    if (const size_t bytes = heuristic_.workspaceSize) {
      workspace = reinterpret_cast<uintptr_t>(services.scratch(bytes + kWorkspaceAlignment - 1));
      workspace = (workspace + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    }
    const auto alpha = static_cast<float>(g.alpha);
    constexpr float kBeta = 0;
    return is_ok(library().cublasLtMatmul(
        handle, description_.get(), &alpha, g.b.data, b_.get(), g.a.data, a_.get(), &kBeta,
        g.out.data, out_.get(), g.out.data, out_.get(), &heuristic_.algo,
        reinterpret_cast<void*>(workspace), heuristic_.workspaceSize,
        static_cast<cudaStream_t>(services.target().stream)));
  }

 private:
  template <class T>
  bool set(cublasLtMatmulDescAttributes_t attribute, T value) {
    return is_ok(library().cublasLtMatmulDescSetAttribute(description_.get(), attribute, &value,
                                                          sizeof(value)));
  }

  bool set_pointers(const GemmArgs& g) {
    return (!g.bias.data || set<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.data)) &&
           (!g.aux.data || set<void*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux.data));
  }

  static bool lay_out(Owned<cublasLtMatrixLayout_t>& owned, DType dtype, const Layout& layout) {
    cublasLtMatrixLayout_t created = nullptr;
    const cublasStatus_t status = library().cublasLtMatrixLayoutCreate(
        &created, type_of(dtype), layout.rows, layout.columns, layout.leading);
    owned.reset(created);
    return is_ok(status);
  }

  bool describe(const GemmArgs& g, const Form& form) {
    const auto& [epilogue, a, b] = form;
    cublasLtMatmulDesc_t description = nullptr;
    const cublasStatus_t status =
        library().cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    description_.reset(description);
    const auto operation = [](const Layout& layout) -> int32_t {
      return layout.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    };
    return is_ok(status) && lay_out(a_, g.a.dtype, a) && lay_out(b_, g.b.dtype, b) &&
           lay_out(out_, g.out.dtype, {g.n, g.m, g.out.row_stride, false}) &&
           set(CUBLASLT_MATMUL_DESC_TRANSA, operation(b)) &&
           set(CUBLASLT_MATMUL_DESC_TRANSB, operation(a)) &&
           set<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue) &&
           (!g.aux.data || set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.aux.row_stride)) &&
           set_pointers(g);
  }

  bool find_algorithm(const GemmArgs& g, cublasLtHandle_t handle) {
    cublasLtMatmulPreference_t created = nullptr;
    const cublasStatus_t status = library().cublasLtMatmulPreferenceCreate(&created);
    const Owned<cublasLtMatmulPreference_t> preference(created);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      return is_ok(library().cublasLtMatmulPreferenceSetAttribute(created, attribute, &value,
                                                                  sizeof(value)));
    };
    const uint32_t out_alignment = alignment_of(g.out.data);
    int found = 0;
    return is_ok(status) && prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspace) &&
           // Parts of a sum stay in FP32.
           prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                  uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE}) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(g.b.data)) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(g.a.data)) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment) &&
           prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment) &&
           is_ok(library().cublasLtMatmulAlgoGetHeuristic(handle, description_.get(), b_.get(),
                                                          a_.get(), out_.get(), out_.get(), created,
                                                          1, &heuristic_, &found)) &&
           found == 1 && is_ok(heuristic_.state);
  }

  Owned<cublasLtMatmulDesc_t> description_;
  Owned<cublasLtMatrixLayout_t> a_, b_, out_;
  cublasLtMatmulHeuristicResult_t heuristic_{};
  bool has_algorithm_;
};

// A thread's own. Bounded: where sizes never repeat, those of before are forgotten.
Problem& problem_of(const GemmArgs& g, const Form& form, int device, cublasLtHandle_t handle) {
  constexpr size_t kMost = 512;
  thread_local std::map<Key, Problem> problems;
  const Key key = key_of(g, form, device);
  auto found = problems.find(key);
  if (found == problems.end()) {
    if (problems.size() == kMost) problems.clear();
    found = problems.try_emplace(key, g, form, handle).first;
  }
  return found->second;
}

bool multiply(const GemmArgs& g, Services& services) {
  const auto form = form_of(g);
  const c10::Device device = device_of(services);
  const cublasLtHandle_t handle = form ? handle_on(device) : nullptr;
  return handle && problem_of(g, *form, device.index(), handle).run(g, handle, services);
}

int64_t version() {
  return library().is_complete ? static_cast<int64_t>(library().cublasLtGetVersion()) : 0;
}

#else

const char* obstacle(const GemmArgs&) { return kAbsent; }
bool multiply(const GemmArgs&, Services&) { return false; }
int64_t version() { return 0; }
#endif

std::atomic<int64_t> refused = 0;

class CublasLt final : public Backend {
 public:
  const char* name() const override { return "cublaslt"; }

#define AMP_EXT_NOT_BUILT(op, Args) \
  Status op(const Args&, Services&) const override { return Status::not_built; }
  AMP_EXT_LIST_OPS(AMP_EXT_NOT_BUILT)
#undef AMP_EXT_NOT_BUILT

  const char* why_not(const GemmArgs& g) const override { return obstacle(g); }

  Status gemm(const GemmArgs& g, Services& services) const override {
    if (multiply(g, services)) return Status::ok;
    ++refused;
    return torch_library().gemm(g, services);
  }
};

}  // namespace

const Backend& cublaslt() {
  static const CublasLt backend;
  return backend;
}

int64_t refused_by_cublaslt() { return refused; }
int64_t cublaslt_version() { return version(); }

}  // namespace amp_ext
