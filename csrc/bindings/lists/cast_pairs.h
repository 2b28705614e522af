// Makes plain arguments of cast_'s two lists.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

#include "amp_ext/lists.h"
#include "checks/tensors.h"

namespace amp_ext {

constexpr auto kCast = "amp_ext::cast_";

// Throw unless the lists have the same length, and tensors of one index the same shape: an ArrayRef
// of int64_t or SymInt.
void check_cast_lengths(size_t outputs, size_t inputs);

template <class Shape>
void check_cast_shapes(size_t index, const Shape& output, const Shape& input) {
  TORCH_CHECK(output == input, kCast, ": inputs[", index, "] must have the shape of outputs[",
              index, "], ", output, ", got ", input);
}

// The pairs of one call, all on one device. Tensors must outlive the list.
class CastPairs {
 public:
  explicit CastPairs(at::Device device) : device_(device) {}

  void reserve(size_t n);

  // Checks a pair and appends it. Throws as checked_dtype and check_cast_shapes do, for memory that
  // has been freed, and for an output that is negated, overlaps within itself or has a history to
  // autograd.
  void add(const at::Tensor& output, const at::Tensor& input);

  // Throws when two outputs overlap, as GradList::close does, or an input overlaps an output. A
  // tensor may be its own input. Call it once after the last add. Nothing has been written before.
  void close() const;

  // Copies results to the outputs that are not dense, and bumps the outputs' versions for autograd.
  // Call it after the launch.
  void finish_writes();

  CastList args() const { return {refs_.data(), static_cast<int64_t>(refs_.size())}; }

 private:
  // An output with holes, and the dense tensor that kernels write.
  struct Scattered {
    size_t index;
    at::Tensor view;
    at::Tensor dense;
  };

  // Gives kernels dense memory in one order, if two tensors are not so.
  void rearrange(CastRef& ref, const at::Tensor& output, const at::Tensor& input);

  at::Device device_;
  bool records_gradients_ = at::GradMode::is_enabled();
  std::vector<CastRef> refs_;
  std::vector<c10::TensorImpl*> written_;
  std::vector<MemoryRange> outputs_;  // without those that are their own inputs
  std::vector<MemoryRange> inputs_;
  std::vector<Scattered> scattered_;
  std::vector<at::Tensor> gathered_;  // dense copies of inputs, kept for the launch
};

}  // namespace amp_ext
