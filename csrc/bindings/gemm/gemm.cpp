// Computes the ops of matrix products on tensors with data. It makes plain arguments of tensors,
// and calls the chosen backend.
#include "gemm/gemm.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "backends/backends.h"
#include "checks/tensors.h"
#include "op.h"

namespace amp_ext {

namespace {

// Returns the stride of the leading dimensions taken as one; none if they cannot be. Strides of
// dimensions of size 1 are arbitrary.
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

// Return whether the rows, or the columns, of consecutive matrices form one matrix.
bool rows_join(const MatrixRef& x, int64_t rows) { return x.batch_stride == rows * x.row_stride; }
bool columns_join(const MatrixRef& x, int64_t columns) {
  return x.batch_stride == columns * x.column_stride;
}

// A product as backends take it. Operands are copied, and results allocated, once the backend is
// chosen; torch's library makes its own.
class Product {
 public:
  Product(const char* op, const at::Tensor& a, const at::Tensor& b, const GemmOptions& options,
          c10::SymIntArrayRef sym_sizes)
      : op_(op),
        sizes_(C10_AS_INTARRAYREF_SLOW(sym_sizes)),
        options_(a.options().requires_grad(false)) {
    const at::IntArrayRef sizes = sizes_;
    describe(args_.a, "a", tensors_.a = a, options.trans_a);
    describe(args_.b, "b", tensors_.b = b, options.trans_b);
    args_.m = sizes[sizes.size() - 2];
    args_.n = sizes.back();
    args_.k = a.size(options.trans_a ? -2 : -1);
    args_.batch = batch_of(sizes);
    args_.terms = options.sum_batch ? batch_of(a.sizes()) : 1;
    args_.alpha = options.alpha;
    if (options.c) checked_memory(op, "c", *options.c, Access::read);
    if (options.c && options.beta != 0) {
      describe(args_.c, "c", tensors_.c = options.c->expand(sizes));
      args_.beta = options.beta;
    }
    if (options.bias) {
      tensors_.bias = *options.bias;
      args_.bias = {checked_memory(op, "bias", *options.bias, Access::read).data(),
                    *dtype_of(options.bias->scalar_type()), options.bias->stride(0)};
    }
    out_type_ = out_dtype_of(a, b, options.out_dtype);
    args_.out = {kToAllocate, *dtype_of(out_type_), args_.m * args_.n, args_.n, 1};
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  void accumulate_into(const at::Tensor& c) {
    describe(args_.out, "c", tensors_.c = c);
    args_.out.data = c.mutable_data_ptr();
    args_.c = args_.out;
    args_.beta = 1;
  }

  const Backend* choose(std::string* reason = nullptr) {
    join_terms();
    join_rows();
    return choose_gemm(options_.device(), args_, reason);
  }

  at::Tensor run() && {
    const Backend* const backend = choose();
    for (const auto& [matrix, tensor] : copies_) {
      *tensor = tensor->clone(at::MemoryFormat::Contiguous);
      matrix->data = tensor->mutable_data_ptr();
    }
    at::Tensor out;
    if (backend && is_computed_by(*backend, out)) return out;
    out = library_gemm(args_, tensors_);
    return adds_to_out(args_) || out.sizes() == sizes_ ? out : out.view(sizes_);
  }

 private:
  static inline void* const kToAllocate = reinterpret_cast<void*>(64);  // aligned as results are

  // Returns false if torch's library has to compute: the kernel is not for this moment or driver.
  bool is_computed_by(const Backend& backend, at::Tensor& out) {
    GemmArgs args = args_;
    if (args.out.data == kToAllocate) {
      out = at::empty(sizes_, options_.dtype(out_type_));
      args.out.data = out.mutable_data_ptr();
    }
    bool is_computed = true;
    amp_ext::run(op_, backend, options_.device(), [&](Services& services) {
      const Status status = backend.gemm(args, services);
      is_computed =
          status != Status::not_compiled && (status != Status::no_tensor_map || is_under_test());
      if (status == Status::no_tensor_map && !is_computed) {
        TORCH_WARN_ONCE(op_, ": the driver refused a tensor map: torch's library runs instead");
      }
      return is_computed ? status : Status::ok;
    });
    return is_computed;
  }

  // Makes one long product of a sum of several.
  void join_terms() {
    if (args_.terms <= 1 || !columns_join(args_.a, args_.k) || !rows_join(args_.b, args_.k)) return;
    args_.k *= args_.terms;
    args_.terms = 1;
  }

  // Makes one tall matrix of a batch.
  void join_rows() {
    const auto joins = [&](const MatrixRef& x) { return !x.data || rows_join(x, args_.m); };
    if (args_.batch <= 1 || args_.terms > 1 || args_.b.batch_stride != 0 || !joins(args_.a) ||
        !joins(args_.c) || !joins(args_.out))
      return;
    args_.m *= args_.batch;
    args_.batch = 1;
  }

  // Describes the last two dimensions as matrices, the leading ones as a batch of them. If the
  // leading dimensions have no common stride, it describes a copy to be made.
  void describe(MatrixRef& matrix, const char* name, at::Tensor& tensor, bool transposed = false) {
    const std::optional<int64_t> stride = batch_stride(tensor);
    const int64_t rows = tensor.size(-2), columns = tensor.size(-1);
    matrix = {checked_memory(op_, name, tensor, Access::read).data(),
              *dtype_of(tensor.scalar_type()), stride.value_or(0), tensor.stride(-2),
              tensor.stride(-1)};
    if (!stride) {
      matrix.batch_stride = rows * columns;
      matrix.row_stride = columns;
      matrix.column_stride = 1;
      copies_.push_back({&matrix, &tensor});
    }
    if (rows == 1) matrix.row_stride = matrix.batch_stride;
    if (transposed) std::swap(matrix.row_stride, matrix.column_stride);
  }

  struct Copy {
    MatrixRef* matrix;
    at::Tensor* tensor;
  };

  const char* op_;
  at::DimVector sizes_;  // of the result
  at::TensorOptions options_;
  at::ScalarType out_type_;
  GemmArgs args_{};
  GemmTensors tensors_;
  c10::SmallVector<Copy, 2> copies_;
};

at::Tensor gemm_kernel(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  return Product(kGemm, a, b, options, check_gemm(kGemm, a, b, options)).run();
}

// Returns whether kernels can write a tensor: rows one after another, and matrices too.
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

template <bool kFake>
void gemm_accumulate_op(at::Tensor& c, const at::Tensor& given_a, const at::Tensor& given_b,
                        bool trans_a, bool trans_b, bool sum_batch, double alpha) {
  const GemmOptions options{
      .trans_a = trans_a, .trans_b = trans_b, .sum_batch = sum_batch, .alpha = alpha};
  check_gemm_accumulate(c, given_a, given_b, options);
  if (kFake) return;
  const at::Tensor a = given_a.resolve_neg(), b = given_b.resolve_neg();
  TORCH_CHECK(c.numel() == 0 || is_row_major(c), kGemmAccumulate,
              ": c must be row-major with a column stride of 1, its leading dimensions one after "
              "another, got strides ",
              c.strides());
  Arguments given(kGemmAccumulate, c.device());
  given.write_tensor("c", c);
  given.read_tensor("a", a);
  given.read_tensor("b", b);
  given.check_apart();
  Product product(kGemmAccumulate, a, b, options, c.sym_sizes());
  product.accumulate_into(c);
  std::move(product).run();
  given.mark_written();
}

at::Tensor gemm_fake(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  const auto sizes = check_gemm(kGemm, a, b, options);
  return at::empty_symint(sizes, a.options().dtype(out_dtype_of(a, b, options.out_dtype)));
}

}  // namespace

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  static const auto op = typed_op<decltype(gemm_op<gemm_kernel>)>(kGemm);
  return op.call(a, b, o.trans_a, o.trans_b, o.sum_batch, o.c, o.alpha, o.beta, o.bias,
                 o.out_dtype);
}

std::pair<std::string, std::string> gemm_choice(const at::Tensor& a, const at::Tensor& b,
                                                const GemmOptions& options) {
  std::string reason;
  Product product(kGemm, a, b, options, check_gemm(kGemm, a, b, options));
  const Backend* const backend = product.choose(&reason);
  return {name_of(backend), reason};
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  implement(m, "gemm", TORCH_FN(gemm_op<gemm_kernel>), TORCH_FN(gemm_op<gemm_fake>));
  implement(m, "gemm_accumulate_", TORCH_FN(gemm_accumulate_op<false>),
            TORCH_FN(gemm_accumulate_op<true>));
}

}  // namespace amp_ext
