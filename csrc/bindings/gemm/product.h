// Makes plain arguments of tensors, and calls the chosen backend.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <optional>
#include <string>

#include "backends/backends.h"
#include "gemm/gemm.h"

namespace amp_ext {

// Returns the stride of the leading dimensions taken as one; none if they cannot be. Strides of
// dimensions of size 1 are arbitrary.
std::optional<int64_t> batch_stride(const at::Tensor& tensor);

// A product as backends take it. A result is allocated once the backend is chosen; torch's library
// makes its own.
class Product {
 public:
  // The product is added to `target` if it is given, and is a new tensor otherwise.
  Product(const char* op, const at::Tensor& a, const at::Tensor& b, const GemmOptions& options,
          c10::SymIntArrayRef sym_sizes, const at::Tensor* target = nullptr);
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  at::Device device() const { return options_.device(); }
  const GemmArgs& args() const { return args_; }
  void set_variant(int64_t variant) { args_.variant = variant; }

  // Returns the backend of this product, and sets its variant.
  const Backend* choose(std::string* reason = nullptr) {
    return choose_gemm(device(), args_, reason);
  }

  // Computes the product by a backend, or by torch's library for null. The library also replaces a
  // kernel that is not compiled before a capture, or whose tensor map the driver refuses. If
  // `strict`, both are errors.
  at::Tensor compute(const Backend* backend, bool strict = false);

 private:
  void describe(MatrixRef& matrix, const char* name, at::Tensor& tensor, bool transposed = false);
  void join_terms();
  void join_rows();
  bool is_computed_by(const Backend& backend, bool strict, at::Tensor& out);

  const char* op_;
  at::DimVector sizes_;  // of the result
  at::TensorOptions options_;
  at::ScalarType out_type_;
  GemmArgs args_{};
  GemmTensors tensors_;
};

}  // namespace amp_ext
