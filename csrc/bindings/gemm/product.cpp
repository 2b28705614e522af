#include "gemm/product.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <utility>

#include "backends/python.h"
#include "checks/tensors.h"

namespace amp_ext {

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

namespace {

// The address of a result that is not allocated yet, aligned as results are.
void* const kToAllocate = reinterpret_cast<void*>(64);

int64_t batch_of(at::IntArrayRef sizes) {
  return c10::multiply_integers(sizes.slice(0, sizes.size() - 2));
}

// Return whether the rows, or the columns, of consecutive matrices form one matrix.
bool rows_join(const MatrixRef& x, int64_t rows) { return x.batch_stride == rows * x.row_stride; }
bool columns_join(const MatrixRef& x, int64_t columns) {
  return x.batch_stride == columns * x.column_stride;
}

}  // namespace

Product::Product(const char* op, const at::Tensor& a, const at::Tensor& b,
                 const GemmOptions& options, c10::SymIntArrayRef sym_sizes,
                 const at::Tensor* target)
    : op_(op),
      sizes_(C10_AS_INTARRAYREF_SLOW(sym_sizes)),
      options_(a.options().requires_grad(false)),
      out_type_(out_dtype_of(a, b, options.out_dtype)) {
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
    checked_memory(op, "bias", *options.bias, Access::read);
    tensors_.bias = options.bias->contiguous();
    args_.bias = {const_cast<void*>(tensors_.bias.const_data_ptr()),
                  *dtype_of(tensors_.bias.scalar_type())};
  }
  args_.out = {kToAllocate, *dtype_of(out_type_), args_.m * args_.n, args_.n, 1};
  if (target) {
    describe(args_.out, "c", tensors_.c = *target);
    args_.out.data = target->mutable_data_ptr();
    args_.c = args_.out;
    args_.beta = 1;
  }
  join_terms();
  join_rows();
}

at::Tensor Product::compute(const Backend* backend, bool strict) {
  at::Tensor out = adds_to_out(args_) ? tensors_.c : at::Tensor();
  if (backend && is_computed_by(*backend, strict, out)) return out;
  out = library_gemm(args_, tensors_);
  return adds_to_out(args_) || out.sizes() == sizes_ ? out : out.view(sizes_);
}

bool Product::is_computed_by(const Backend& backend, bool strict, at::Tensor& out) {
  GemmArgs args = args_;
  if (!out.defined()) {
    out = at::empty(sizes_, options_.dtype(out_type_));
    args.out.data = out.mutable_data_ptr();
  }
  Status status;
  amp_ext::run(op_, backend, device(), [&](Services& services) {
    status = backend.gemm(args, services);
    const bool is_left = status == Status::not_compiled || status == Status::no_tensor_map;
    return is_left && !strict ? Status::ok : status;
  });
  if (status == Status::no_tensor_map) {
    const UntracedPython python;
    pybind11::module_::import("amp_ext._warnings")
        .attr("warn")(
            "amp_ext: the driver refused a tensor map: torch's library computes this product");
  }
  return status == Status::ok;
}

// Makes one long product of a sum of several.
void Product::join_terms() {
  if (args_.terms <= 1 || !columns_join(args_.a, args_.k) || !rows_join(args_.b, args_.k)) return;
  args_.k *= args_.terms;
  args_.terms = 1;
}

// Makes one tall matrix of a batch. The strides of an absent c are 0.
void Product::join_rows() {
  if (args_.batch <= 1 || args_.b.batch_stride != 0 || !rows_join(args_.a, args_.m) ||
      !rows_join(args_.c, args_.m) || !rows_join(args_.out, args_.m))
    return;
  args_.m *= args_.batch;
  args_.batch = 1;
}

// Describes the last two dimensions as matrices, the leading ones as a batch of them. A tensor
// whose leading dimensions have no common stride is replaced by a copy.
void Product::describe(MatrixRef& matrix, const char* name, at::Tensor& tensor, bool transposed) {
  checked_memory(op_, name, tensor, Access::read);
  if (!batch_stride(tensor)) tensor = tensor.clone(at::MemoryFormat::Contiguous);
  matrix = {const_cast<void*>(tensor.const_data_ptr()), *dtype_of(tensor.scalar_type()),
            *batch_stride(tensor), tensor.stride(-2), tensor.stride(-1)};
  if (tensor.size(-2) == 1) matrix.row_stride = matrix.batch_stride;
  if (transposed) std::swap(matrix.row_stride, matrix.column_stride);
}

}  // namespace amp_ext
