// The ops of matrix products on tensors with data: from tensors to plain arguments, and on to the
// device's kernel or to torch's library.
#include "gemm.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "backend.h"
#include "tensor_args.h"
#include "triton.h"

namespace amp_ext {

std::atomic<bool> uses_gemm_kernels = false;

namespace {

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

int64_t batch_of(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes.slice(0, sizes.size() - 2));
}

// Whether the rows, or the columns, of consecutive matrices are those of one.
bool rows_join(const MatrixRef& x, int64_t rows) { return x.batch_stride == rows * x.row_stride; }
bool columns_join(const MatrixRef& x, int64_t columns) {
  return x.batch_stride == columns * x.column_stride;
}

// A product as kernels take it, with the tensors that its pointers lead to.
class Product {
 public:
  // Only what it writes is still missing.
  Product(const char* op, const at::Tensor& a, const at::Tensor& b, const GemmOptions& options,
          at::IntArrayRef sizes)
      : sizes_(sizes.vec()), options_(a.options().requires_grad(false)) {
    args_.a = read(a, options.trans_a);
    args_.b = read(b, options.trans_b);
    args_.m = sizes[sizes.size() - 2];
    args_.n = sizes.back();
    args_.k = a.size(options.trans_a ? -2 : -1);
    args_.batch = batch_of(sizes);
    args_.terms = options.sum_batch ? batch_of(a.sizes()) : 1;
    args_.alpha = options.alpha;
    if (options.c && options.beta != 0) {
      args_.c = read(options.c->expand(sizes));
      args_.beta = options.beta;
    }
    if (options.bias) args_.bias = read_vector(*options.bias);
    args_.activation = activation_of(op, options.activation);
    out_type_ = out_dtype_of(a, b, options.out_dtype);
    args_.out = {nullptr, *dtype_of(out_type_), args_.m * args_.n, args_.n, 1};
  }

  void differentiate_at(const at::Tensor& aux) {
    args_.aux = read(aux.size(-1) == 1 || aux.stride(-1) == 1 ? aux : aux.contiguous());
    args_.derivative = true;
  }

  void accumulate_into(const at::Tensor& c) {
    args_.out = read(c);
    args_.out.data = c.mutable_data_ptr();
    args_.c = args_.out;
    args_.beta = 1;
  }

  // Whether a kernel here is to form it, and not torch's library.
  bool is_served() const {
    return options_.device().is_cpu() ? cpu::gemm_serves(args_)
                                      : uses_gemm_kernels && cuda_serves(args_);
  }

  at::Tensor new_out() {
    const at::Tensor out = at::empty(sizes_, options_.dtype(out_type_));
    args_.out.data = out.mutable_data_ptr();
    return out;
  }

  at::Tensor new_aux() {
    const at::Tensor aux = at::empty(sizes_, options_.dtype(out_type_));
    args_.aux = args_.out;
    args_.aux.data = aux.mutable_data_ptr();
    return aux;
  }

  at::Tensor new_column_sums() {
    const at::Tensor sums = at::empty({args_.n}, options_.dtype(at::kFloat));
    args_.column_sums = sums.mutable_data_ptr<float>();
    return sums;
  }

  void run(const char* op) {
    join_terms();
    join_rows();
    native_backend_for(op, options_.device()).gemm(op, args_, options_.device());
  }

 private:
  // A dimension of size 1 may have any stride; of a joined one that is not so.
  void join(const GemmArgs& joined) {
    if (options_.device().is_cpu() || cuda_serves(joined)) args_ = joined;
  }

  // One long product instead of a sum of several.
  void join_terms() {
    if (args_.terms <= 1 || !columns_join(args_.a, args_.k) || !rows_join(args_.b, args_.k)) return;
    GemmArgs joined = args_;
    joined.k *= args_.terms;
    joined.terms = 1;
    join(joined);
  }

  // One tall matrix instead of a batch.
  void join_rows() {
    const auto joins = [&](const MatrixRef& x) { return !x.data || rows_join(x, args_.m); };
    if (args_.batch <= 1 || args_.terms > 1 || args_.b.batch_stride != 0 || !joins(args_.a) ||
        !joins(args_.c) || !joins(args_.aux) || !joins(args_.out))
      return;
    GemmArgs joined = args_;
    joined.m *= args_.batch;
    joined.batch = 1;
    join(joined);
  }

  // The last two dimensions as matrices, the leading ones as a batch of them.
  MatrixRef read(const at::Tensor& tensor, bool transposed = false) {
    std::optional<int64_t> stride = batch_stride(tensor);
    at::Tensor& owner =
        owners_.emplace_back(stride ? tensor : tensor.clone(at::MemoryFormat::Contiguous));
    const int64_t rows = owner.size(-2), columns = owner.size(-1);
    MatrixRef result{const_cast<void*>(owner.const_data_ptr()), *dtype_of(owner.scalar_type()),
                     stride.value_or(rows * columns), owner.stride(-2), owner.stride(-1)};
    if (rows == 1) result.row_stride = result.batch_stride;
    if (transposed) std::swap(result.row_stride, result.column_stride);
    return result;
  }

  static VectorRef read_vector(const at::Tensor& tensor) {
    return {const_cast<void*>(tensor.const_data_ptr()), *dtype_of(tensor.scalar_type()),
            tensor.stride(0)};
  }

  std::vector<int64_t> sizes_;  // of the result
  at::TensorOptions options_;
  at::ScalarType out_type_;
  GemmArgs args_{};
  c10::SmallVector<at::Tensor, 4> owners_;
};

at::Tensor gemm_kernel(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  const auto sizes = check_gemm<int64_t>(kGemm, a, b, options);
  if (triton_serves(a, b, options)) return triton_gemm(a, b, options, sizes);
  Product product(kGemm, a, b, options, sizes);
  if (!product.is_served()) return torch_gemm(a, b, options);
  const at::Tensor out = product.new_out();
  product.run(kGemm);
  return out;
}

TensorPair gemm_with_aux_kernel(const at::Tensor& a, const at::Tensor& b,
                                const GemmOptions& options) {
  const auto sizes = check_gemm<int64_t>(kGemmWithAux, a, b, options);
  if (triton_serves(a, b, options)) return triton_gemm_with_aux(a, b, options, sizes);
  Product product(kGemmWithAux, a, b, options, sizes);
  if (!product.is_served()) return torch_gemm_with_aux(a, b, options);
  const at::Tensor out = product.new_out(), aux = product.new_aux();
  product.run(kGemmWithAux);
  return {out, aux};
}

TensorPair gemm_times_derivative_kernel(const at::Tensor& a, const at::Tensor& b,
                                        const at::Tensor& aux, const GemmOptions& options) {
  const auto sizes = check_gemm_times_derivative<int64_t>(a, b, aux, options);
  if (triton_serves(a, b, options)) return triton_gemm_times_derivative(a, b, aux, options, sizes);
  Product product(kGemmTimesDerivative, a, b, options, sizes);
  product.differentiate_at(aux);
  if (!product.is_served()) return torch_gemm_times_derivative(a, b, aux, options);
  const at::Tensor out = product.new_out(), sums = product.new_column_sums();
  product.run(kGemmTimesDerivative);
  return {out, sums};
}

// Whether kernels can write it: rows one after another, and matrices.
bool is_row_major(const at::Tensor& tensor) {
  int64_t extent = 1;
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    const bool last = d == tensor.dim() - 1;
    if (last ? tensor.stride(d) != 1 : tensor.stride(d) < extent) return false;
    extent = tensor.stride(d) * tensor.size(d);
  }
  return batch_stride(tensor).has_value();
}

void gemm_accumulate_kernel(const at::Tensor& c, const at::Tensor& given_a,
                            const at::Tensor& given_b, const GemmOptions& options) {
  check_gemm_accumulate<int64_t>(c, given_a, given_b, options);
  const at::Tensor a = given_a.resolve_neg(), b = given_b.resolve_neg();
  TORCH_CHECK(c.numel() == 0 || is_row_major(c), kGemmAccumulate,
              ": c must be row-major with a column stride of 1, its leading dimensions one after "
              "another, got strides ",
              c.strides());
  Arguments given(kGemmAccumulate, c.device());
  given.write_tensor("c", c);
  given.read_tensor("a", a);
  given.read_tensor("b", b);
  if (triton_serves(a, b, options)) {
    triton_gemm_accumulate_(c, a, b, options);
  } else {
    Product product(kGemmAccumulate, a, b, options, c.sizes());
    product.accumulate_into(c);
    if (product.is_served())
      product.run(kGemmAccumulate);
    else
      torch_gemm_accumulate_(c, a, b, options);
  }
  given.mark_written();
}

void register_gemm(torch::Library& m) {
  m.impl("gemm", TORCH_FN(gemm_op<gemm_kernel>));
  m.impl("gemm_with_aux", TORCH_FN(gemm_op<gemm_with_aux_kernel>));
  m.impl("gemm_times_derivative", TORCH_FN(gemm_times_derivative_op<gemm_times_derivative_kernel>));
  m.impl("gemm_accumulate_", TORCH_FN(gemm_accumulate_op<gemm_accumulate_kernel>));
}

}  // namespace

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  static const auto op = typed_op<decltype(gemm_op<gemm_kernel>)>(kGemm);
  return op.call(a, b, o.trans_a, o.trans_b, o.sum_batch, o.c, o.alpha, o.beta, o.bias,
                 o.activation, o.out_dtype);
}

TensorPair gemm_with_aux(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  static const auto op = typed_op<decltype(gemm_op<gemm_with_aux_kernel>)>(kGemmWithAux);
  return op.call(a, b, o.trans_a, o.trans_b, o.sum_batch, o.c, o.alpha, o.beta, o.bias,
                 o.activation, o.out_dtype);
}

TensorPair gemm_times_derivative(const at::Tensor& a, const at::Tensor& b, const at::Tensor& aux,
                                 const GemmOptions& o) {
  static const auto op = typed_op<decltype(gemm_times_derivative_op<gemm_times_derivative_kernel>)>(
      kGemmTimesDerivative);
  return op.call(a, b, aux, o.trans_a, o.trans_b, o.activation, o.out_dtype);
}

void gemm_accumulate_(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                      const GemmOptions& o) {
  static const auto op =
      typed_op<decltype(gemm_accumulate_op<gemm_accumulate_kernel>)>(kGemmAccumulate);
  at::Tensor written = c;
  op.call(written, a, b, o.trans_a, o.trans_b, o.sum_batch, o.alpha);
}

TORCH_LIBRARY_IMPL(amp_ext, CPU, m) { register_gemm(m); }
TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) { register_gemm(m); }

// Sparse tensors reach the ops' checks, whose errors name the argument.
TORCH_LIBRARY_IMPL(amp_ext, SparseCPU, m) { register_gemm(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCUDA, m) { register_gemm(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCPU, m) { register_gemm(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCUDA, m) { register_gemm(m); }

}  // namespace amp_ext
