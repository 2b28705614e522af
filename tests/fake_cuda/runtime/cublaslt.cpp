// What amp_ext calls of cuBLASLt, by its documentation: what this does not list is refused. A
// product is one operation of the stream, in FP32 until its result is rounded.
#include <cublasLt.h>

#include <cmath>
#include <cstring>
#include <map>

#include "runtime.h"

namespace fake_cuda {
namespace {

struct Description {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;
  int64_t aux_leading = 0;
};

struct Layout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t leading;
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t aligned[4] = {256, 256, 256, 256};  // A, B, C, D
};

// What an algorithm was found for, in the place of the algorithm.
struct Found {
  uint64_t problem;
  uint32_t aligned[6];  // A, B, C, D, bias, aux
  uint32_t workspace;
};
static_assert(sizeof(Found) <= sizeof(cublasLtMatmulAlgo_t));

bool refuses_all = false, rounds_tanh = false;
constexpr size_t kWorkspace = 512;

template <class T, class Opaque>
T& as(Opaque* x) {
  return *reinterpret_cast<T*>(x);
}

template <class T>
cublasStatus_t read(T& value, const void* from, size_t bytes) {
  if (!from || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(&value, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

bool is_short(cudaDataType_t type) { return type == CUDA_R_16F || type == CUDA_R_16BF; }

float load(const void* data, cudaDataType_t type, int64_t i) {
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (type == CUDA_R_16F) {
    _Float16 value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

void store(void* data, cudaDataType_t type, int64_t i, float value) {
  uint16_t& bits = static_cast<uint16_t*>(data)[i];
  if (type == CUDA_R_16F) {
    const auto rounded = static_cast<_Float16>(value);
    memcpy(&bits, &rounded, sizeof(bits));
    return;
  }
  uint32_t wide;
  memcpy(&wide, &value, sizeof(wide));
  if (std::isnan(value))
    bits = 0x7fff;
  else
    bits = static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

constexpr float kRoot = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2 / pi)

// As exact as tanh.approx.f32, if asked.
float tanh_of(float x) {
  const float result = std::tanh(x);
  if (!rounds_tanh) return result;
  int exponent;
  const float fraction = std::frexp(result, &exponent);
  return std::ldexp(std::round(fraction * 2048) / 2048, exponent);
}

float gelu(float x) { return 0.5f * x * (1 + tanh_of(kRoot * (x + kCubic * x * x * x))); }

bool has_bias(uint32_t epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_GELU_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}
bool has_aux(uint32_t epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}
bool is_served(uint32_t epilogue) {
  return epilogue == CUBLASLT_EPILOGUE_GELU || has_bias(epilogue) || has_aux(epilogue);
}

// Why the documentation has no such product; null if it has.
const char* refusal(const Description& d, const Layout& a, const Layout& b, const Layout& c,
                    const Layout& out) {
  if (d.compute != CUBLAS_COMPUTE_32F || d.scale != CUDA_R_32F) return "the type of sums";
  if (!is_short(a.type) || b.type != a.type) return "the types of operands";
  if (out.type != a.type || c.type != a.type) return "the type of the result";
  for (const Layout* x : {&a, &b, &c, &out})
    if (x->leading < static_cast<int64_t>(x->rows)) return "a leading dimension";
  const bool ta = d.trans_a == CUBLAS_OP_T, tb = d.trans_b == CUBLAS_OP_T;
  if ((ta ? a.columns : a.rows) != out.rows || (tb ? b.rows : b.columns) != out.columns ||
      (ta ? a.rows : a.columns) != (tb ? b.columns : b.rows) || c.rows != out.rows ||
      c.columns != out.columns)
    return "the sizes";
  if (!is_served(d.epilogue)) return "an epilogue that is not served here";
  if (has_bias(d.epilogue) != (d.bias != nullptr)) return "a bias, or none";
  if (has_aux(d.epilogue) != (d.aux != nullptr)) return "an auxiliary matrix, or none";
  if (has_aux(d.epilogue) &&
      (d.aux_leading % 8 != 0 || d.aux_leading < static_cast<int64_t>(out.rows)))
    return "the auxiliary matrix's leading dimension";
  return nullptr;
}

cublasStatus_t refused(const char* why) {
  fprintf(stderr, "fake cuda: cuBLASLt takes no such product: %s\n", why);
  return CUBLAS_STATUS_INVALID_VALUE;
}

uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data) | 256;
  return static_cast<uint32_t>(address & -address);
}

uint64_t hash(const Description& d, std::initializer_list<const Layout*> layouts) {
  uint64_t result = current_device;
  const auto add = [&](uint64_t value) { result = (result ^ value) * 0x100000001b3 + 1; };
  for (const uint64_t value :
       {uint64_t(d.trans_a), uint64_t(d.trans_b), uint64_t(d.epilogue), uint64_t(d.aux_leading)})
    add(value);
  for (const Layout* x : layouts)
    for (const uint64_t value : {uint64_t(x->type), x->rows, x->columns, uint64_t(x->leading)})
      add(value);
  return result;
}

bool is_there(const void* data, const Layout& x) {
  const size_t elements = (x.columns - 1) * x.leading + x.rows;
  return place_of(data) == Place::device && is_allocated(data, elements * sizeof(uint16_t));
}

void compute(const Description& d, float alpha, const void* a_data, const Layout& a,
             const void* b_data, const Layout& b, void* out_data, const Layout& out) {
  const bool ta = d.trans_a == CUBLAS_OP_T, tb = d.trans_b == CUBLAS_OP_T;
  const int64_t k = ta ? a.rows : a.columns;
  const int64_t rows = out.rows, columns = out.columns;
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      float x = 0;
      for (int64_t p = 0; p < k; ++p)
        x += load(a_data, a.type, ta ? i * a.leading + p : p * a.leading + i) *
             load(b_data, b.type, tb ? p * b.leading + j : j * b.leading + p);
      x *= alpha;
      if (has_bias(d.epilogue)) x += load(d.bias, out.type, i);
      if (has_aux(d.epilogue)) store(d.aux, out.type, j * d.aux_leading + i, x);
      store(out_data, out.type, j * out.leading + i, gelu(x));
    }
  }
}

}  // namespace

cudaError_t launch_on_host(cudaStream_t, const std::string&, std::function<void()>);

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API void fake_cuda_refuse_products(bool refuses) { refuses_all = refuses; }
FAKE_CUDA_API void fake_cuda_round_tanh(bool rounds) { rounds_tanh = rounds; }

FAKE_CUDA_API size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

FAKE_CUDA_API cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  FAKE_CUDA_LOCK;
  if (check_captures("cublasLtCreate") != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(current_device));
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_CUDA_API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description,
                                                      cublasComputeType_t compute,
                                                      cudaDataType_t scale) {
  *description = reinterpret_cast<cublasLtMatmulDesc_t>(new Description{compute, scale});
  return CUBLAS_STATUS_SUCCESS;
}
FAKE_CUDA_API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete &as<Description>(description);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_CUDA_API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                                            cublasLtMatmulDescAttributes_t which,
                                                            const void* from, size_t bytes) {
  auto& d = as<Description>(description);
  switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return read(d.trans_a, from, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return read(d.trans_b, from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return read(d.epilogue, from, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return read(d.bias, from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return read(d.aux, from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return read(d.aux_leading, from, bytes);
    default: return refused("an attribute of the product");
  }
}

FAKE_CUDA_API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout,
                                                        cudaDataType type, uint64_t rows,
                                                        uint64_t columns, int64_t leading) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, leading});
  return CUBLAS_STATUS_SUCCESS;
}
FAKE_CUDA_API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete &as<Layout>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_CUDA_API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* created) {
  *created = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
FAKE_CUDA_API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t x) {
  delete &as<Preference>(x);
  return CUBLAS_STATUS_SUCCESS;
}
FAKE_CUDA_API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t which,
    const void* from, size_t bytes) {
  auto& p = as<Preference>(preference);
  switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return read(p.workspace, from, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return read(p.schemes, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return read(p.aligned[0], from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return read(p.aligned[1], from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return read(p.aligned[2], from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return read(p.aligned[3], from, bytes);
    default: return refused("a preference");
  }
}

FAKE_CUDA_API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
    cublasLtMatmulPreference_t preference, int requested, cublasLtMatmulHeuristicResult_t results[],
    int* count) {
  const auto& d = as<Description>(description);
  const auto& p = as<Preference>(preference);
  const Layout *la = &as<Layout>(a), *lb = &as<Layout>(b), *lc = &as<Layout>(c),
               *lout = &as<Layout>(out);
  *count = 0;
  if (!handle || as<int>(handle) != current_device || requested < 1) return refused("the handle");
  if (const char* why = refusal(d, *la, *lb, *lc, *lout)) return refused(why);
  if (p.schemes != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
    return refused("sums that may be rounded on their way");
  if (refuses_all) return CUBLAS_STATUS_NOT_SUPPORTED;
  Found found{hash(d, {la, lb, lc, lout}),
              {p.aligned[0], p.aligned[1], p.aligned[2], p.aligned[3], alignment_of(d.bias),
               alignment_of(d.aux)},
              static_cast<uint32_t>(std::min<uint64_t>(p.workspace, kWorkspace))};
  memset(results, 0, sizeof(*results));
  memcpy(&results[0].algo, &found, sizeof(found));
  results[0].workspaceSize = found.workspace;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_CUDA_API cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha, const void* a,
    cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
    const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* out,
    cublasLtMatrixLayout_t out_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
    size_t workspace_bytes, cudaStream_t stream) {
  const auto d = as<Description>(description);
  const auto la = as<Layout>(a_layout), lb = as<Layout>(b_layout), lc = as<Layout>(c_layout),
             lout = as<Layout>(out_layout);
  Found found;
  memcpy(&found, algorithm, sizeof(found));
  if (!handle || as<int>(handle) != current_device) return refused("the handle");
  if (const char* why = refusal(d, la, lb, lc, lout)) return refused(why);
  if (*static_cast<const float*>(beta) != 0) return refused("an addend");
  if (found.problem != hash(d, {&la, &lb, &lc, &lout})) return refused("another's algorithm");
  const void* const pointers[] = {a, b, c, out, d.bias, d.aux};
  for (size_t i = 0; i < std::size(pointers); ++i)
    if (alignment_of(pointers[i]) < found.aligned[i]) return refused("an address");
  {
    FAKE_CUDA_LOCK;
    if (!is_there(a, la) || !is_there(b, lb) || !is_there(out, lout) ||
        (has_bias(d.epilogue) &&
         !is_there(d.bias, {lout.type, lout.rows, 1, int64_t(lout.rows)})) ||
        (has_aux(d.epilogue) &&
         !is_there(d.aux, {lout.type, lout.rows, lout.columns, d.aux_leading})))
      return refused("memory");
    if (workspace_bytes < found.workspace || reinterpret_cast<uintptr_t>(workspace) % 256 != 0 ||
        place_of(workspace) != Place::device || !is_allocated(workspace, workspace_bytes))
      return refused("its workspace");
  }
  const float alpha_value = *static_cast<const float*>(alpha);
  const cudaError_t error = launch_on_host(stream, "cublasLtMatmul", [=] {
    memset(workspace, 0xff, workspace_bytes);
    compute(d, alpha_value, a, la, b, lb, out, lout);
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
