// The gemm op: checks, and the way to the CPU's kernel or to torch's library.
#include "gemm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "backend.h"
#include "tensor_args.h"

namespace amp_ext {
namespace {

constexpr auto kOp = "amp_ext::gemm";

template <class Int>
c10::ArrayRef<Int> sizes_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<Int, c10::SymInt>) {
    return tensor.sym_sizes();
  } else {
    return tensor.sizes();
  }
}

void check_dtype(const char* op, const char* name, at::ScalarType type) {
  TORCH_CHECK_NOT_IMPLEMENTED(dtype_of(type), op, ": ", name,
                              " must be float16, bfloat16, float32 or float64, got ", type);
}

}  // namespace

void check_operand(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK(tensor.device() == device, op,
              ": Expected all tensors to be on the same device, but ", name, " is on ",
              tensor.device(), " and others are on ", device);
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, op, ": ", name,
                              " must be a strided tensor, got layout ", tensor.layout());
  check_dtype(op, name, tensor.scalar_type());
}

Activation activation_of(const char* op, std::string_view name) {
  if (name == "none") return Activation::none;
  TORCH_CHECK_VALUE(name == "relu", op, ": activation must be 'none' or 'relu', got '", name, "'");
  return Activation::relu;
}

template <class Int>
c10::SmallVector<Int, 5> check_gemm(const at::Tensor& a, const at::Tensor& b,
                                    const GemmOptions& options) {
  const at::Device device = a.device();
  check_operand(kOp, "a", a, device);
  check_operand(kOp, "b", b, device);
  activation_of(kOp, options.activation);
  check_dtype(kOp, "out_dtype", out_dtype_of(a, b, options.out_dtype));

  const c10::ArrayRef<Int> as = sizes_of<Int>(a), bs = sizes_of<Int>(b);
  TORCH_CHECK(as.size() >= 2, kOp, ": a must have at least 2 dimensions, got shape ", as);
  TORCH_CHECK(bs.size() >= 2, kOp, ": b must have at least 2 dimensions, got shape ", bs);
  const Int& m = as[as.size() - (options.trans_a ? 1 : 2)];
  const Int& k = as[as.size() - (options.trans_a ? 2 : 1)];
  const Int& b_rows = bs[bs.size() - (options.trans_b ? 1 : 2)];
  const Int& n = bs[bs.size() - (options.trans_b ? 2 : 1)];
  TORCH_CHECK(k == b_rows, kOp, ": a of shape ", as, options.trans_a ? " (transposed)" : "",
              " needs a b of ", k, options.trans_b ? " columns" : " rows", ", got shape ", bs);
  const bool a_shared = as.size() == 2, b_shared = bs.size() == 2;
  const auto a_batch = as.slice(0, as.size() - 2), b_batch = bs.slice(0, bs.size() - 2);
  TORCH_CHECK(a_shared || b_shared || a_batch.equals(b_batch), kOp,
              ": leading dimensions of a and b must be equal, or absent in one, got shapes ", as,
              " and ", bs);

  const auto batch = a_shared ? b_batch : a_batch;
  TORCH_CHECK(!options.sum_batch || (!a_shared && !b_shared), kOp,
              ": sum_batch needs leading dimensions in a and b, got shapes ", as, " and ", bs);
  c10::SmallVector<Int, 5> out;
  if (!options.sum_batch) out.append(batch.begin(), batch.end());
  out.push_back(m);
  out.push_back(n);
  if (options.bias) {
    check_operand(kOp, "bias", *options.bias, device);
    const auto sizes = sizes_of<Int>(*options.bias);
    TORCH_CHECK(sizes.size() == 1 && sizes[0] == n, kOp, ": bias must have shape [", n,
                "], got shape ", sizes);
  }
  if (options.c) {
    check_operand(kOp, "c", *options.c, device);
    const auto sizes = sizes_of<Int>(*options.c);
    bool expands = sizes.size() <= out.size();
    for (size_t d = 0; expands && d < sizes.size(); ++d) {
      const Int& size = sizes[sizes.size() - 1 - d];
      expands = size == out[out.size() - 1 - d] || size == 1;
    }
    TORCH_CHECK(expands, kOp, ": c must be expandable to the result's shape ",
                c10::ArrayRef<Int>(out), ", got shape ", sizes);
  }
  return out;
}

template c10::SmallVector<int64_t, 5> check_gemm(const at::Tensor&, const at::Tensor&,
                                                 const GemmOptions&);
template c10::SmallVector<c10::SymInt, 5> check_gemm(const at::Tensor&, const at::Tensor&,
                                                     const GemmOptions&);

namespace {

// Only `out` is written, and nobody else has it yet.
void* data_of(const at::Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

// torch's library is faster where it multiplies bf16 with the processor's own instructions, but for
// products that take no longer than its call.
bool torch_is_faster(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  if (a.numel() * b.size(options.trans_b ? -2 : -1) < (1 << 17)) return false;
  const auto bf16 = [](const at::Tensor& x) { return x.scalar_type() == at::kBFloat16; };
  return cpu::multiplies_bf16() && bf16(a) && bf16(b) &&
         out_dtype_of(a, b, options.out_dtype) == at::kBFloat16 &&
         (!options.c || bf16(*options.c)) && (!options.bias || bf16(*options.bias));
}

// The stride of the leading dimensions taken as one; none if they cannot be. Strides of dimensions
// of size 1 are arbitrary.
std::optional<int64_t> batch_stride(const at::Tensor& tensor) {
  std::optional<int64_t> stride;
  int64_t next = 0;
  for (int64_t d = tensor.dim() - 3; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (stride && tensor.stride(d) != next) return std::nullopt;
    if (!stride) stride = tensor.stride(d);
    next = tensor.stride(d) * tensor.size(d);
  }
  return stride.value_or(0);
}

// The last two dimensions as matrices, the leading ones as a batch of them. `owner` keeps their
// memory.
MatrixRef matrix(const at::Tensor& tensor, bool transposed, at::Tensor& owner) {
  const std::optional<int64_t> stride = batch_stride(tensor);
  owner = stride ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
  const int64_t rows = owner.size(-2), columns = owner.size(-1);
  MatrixRef result{data_of(owner), *dtype_of(owner.scalar_type()), stride.value_or(rows * columns),
                   owner.stride(-2), owner.stride(-1)};
  if (rows == 1) result.row_stride = result.batch_stride;
  if (transposed) std::swap(result.row_stride, result.column_stride);
  return result;
}

// Whether the rows, or the columns, of consecutive matrices are those of one.
bool rows_join(const MatrixRef& x, int64_t rows) {
  return !x.data || x.batch_stride == rows * x.row_stride;
}
bool columns_join(const MatrixRef& x, int64_t columns) {
  return x.batch_stride == columns * x.column_stride;
}

at::Tensor gemm_cpu(const at::Tensor& a, const at::Tensor& b, bool trans_a, bool trans_b,
                    bool sum_batch, const std::optional<at::Tensor>& c, double alpha, double beta,
                    const std::optional<at::Tensor>& bias, std::string_view activation,
                    std::optional<at::ScalarType> out_dtype) {
  const GemmOptions options{trans_a, trans_b, sum_batch,  c,        alpha,
                            beta,    bias,    activation, out_dtype};
  const auto sizes = check_gemm<int64_t>(a, b, options);
  if (a.scalar_type() == at::kDouble || b.scalar_type() == at::kDouble ||
      torch_is_faster(a, b, options)) {
    return torch_gemm(a, b, options);
  }
  const at::Tensor out =
      at::empty(sizes, a.options().dtype(out_dtype_of(a, b, out_dtype)).requires_grad(false));
  if (out.numel() == 0) return out;

  at::Tensor owners[3];
  GemmArgs args{};
  args.a = matrix(a, trans_a, owners[0]);
  args.b = matrix(b, trans_b, owners[1]);
  if (c && beta != 0) args.c = matrix(c->expand(sizes), false, owners[2]);
  if (bias) {
    args.bias = {data_of(*bias), *dtype_of(bias->scalar_type()), 0, 0, bias->stride(0)};
  }
  args.m = sizes[sizes.size() - 2];
  args.n = sizes[sizes.size() - 1];
  args.k = a.size(trans_a ? -2 : -1);
  args.out = {data_of(out), *dtype_of(out.scalar_type()), args.m * args.n, args.n, 1};
  args.batch = out.numel() / (args.m * args.n);
  args.terms = 1;
  if (sum_batch) {
    for (int64_t d = 0; d + 2 < a.dim(); ++d) args.terms *= a.size(d);
    if (columns_join(args.a, args.k) && rows_join(args.b, args.k)) {
      args.k *= args.terms;
      args.terms = 1;
    }
  } else if (b.dim() == 2 && rows_join(args.a, args.m) && rows_join(args.c, args.m)) {
    args.m *= args.batch;
    args.batch = 1;
  }
  args.alpha = alpha;
  args.beta = beta;
  args.activation = activation_of(kOp, activation);
  cpu_backend().gemm(args);
  return out;
}

at::Tensor gemm_torch(const at::Tensor& a, const at::Tensor& b, bool trans_a, bool trans_b,
                      bool sum_batch, const std::optional<at::Tensor>& c, double alpha, double beta,
                      const std::optional<at::Tensor>& bias, std::string_view activation,
                      std::optional<at::ScalarType> out_dtype) {
  const GemmOptions options{trans_a, trans_b, sum_batch,  c,        alpha,
                            beta,    bias,    activation, out_dtype};
  check_gemm<int64_t>(a, b, options);
  return torch_gemm(a, b, options);
}

}  // namespace

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kOp, "").typed<decltype(gemm_cpu)>();
  return op.call(a, b, o.trans_a, o.trans_b, o.sum_batch, o.c, o.alpha, o.beta, o.bias,
                 o.activation, o.out_dtype);
}

TORCH_LIBRARY_IMPL(amp_ext, CPU, m) { m.impl("gemm", TORCH_FN(gemm_cpu)); }
TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) { m.impl("gemm", TORCH_FN(gemm_torch)); }

// Sparse tensors reach the op's checks, whose errors name the argument.
TORCH_LIBRARY_IMPL(amp_ext, SparseCPU, m) { m.impl("gemm", TORCH_FN(gemm_cpu)); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCUDA, m) { m.impl("gemm", TORCH_FN(gemm_torch)); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCPU, m) { m.impl("gemm", TORCH_FN(gemm_cpu)); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCUDA, m) { m.impl("gemm", TORCH_FN(gemm_torch)); }

}  // namespace amp_ext
