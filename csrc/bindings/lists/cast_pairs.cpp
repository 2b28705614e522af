#include "lists/cast_pairs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>

namespace amp_ext {

void check_cast_lengths(size_t outputs, size_t inputs) {
  TORCH_CHECK(outputs == inputs, kCast, ": inputs must have as many tensors as outputs, ", outputs,
              ", got ", inputs);
}

void CastPairs::reserve(size_t n) {
  refs_.reserve(n);
  written_.reserve(n);
  outputs_.reserve(n);
  inputs_.reserve(n);
}

void CastPairs::add(const at::Tensor& output, const at::Tensor& input) {
  const size_t index = refs_.size();
  const Item output_item{kCast, "outputs", index};
  const DType output_dtype = checked_dtype(output_item, output, device_);
  const Item input_item{kCast, "inputs", index};
  const DType input_dtype = checked_dtype(input_item, input, device_);
  check_cast_shapes(index, output.sizes(), input.sizes());
  check_not_negated(kCast, output_item, output);
  const bool dense = output.is_non_overlapping_and_dense();
  if (!dense) check_no_internal_overlap(output_item, output);
  check_no_history(output_item, output, records_gradients_);
  written_.push_back(output.unsafeGetTensorImpl());

  const MemoryRange to = checked_memory(kCast, output_item, output, Access::write);
  const MemoryRange from = checked_memory(kCast, input_item, input, Access::read);
  CastRef& ref = refs_.emplace_back(
      CastRef{to.data(), from.data(), output.numel(), 0, output_dtype, input_dtype});
  outputs_.push_back(to);
  inputs_.push_back(from);
  if (ref.numel == 0) return;
  if (!same_order(output, input) || input.is_neg()) return rearrange(ref, output, input);
  if (ref.output == ref.input && output_dtype == input_dtype) {
    ref.numel = 0;
    outputs_.back() = {};
  } else if (!dense) {
    rearrange(ref, output, input);
  }
}

void CastPairs::rearrange(CastRef& ref, const at::Tensor& output, const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  const bool input_dense = input.is_non_overlapping_and_dense();
  at::Tensor target = output;
  if (!output.is_non_overlapping_and_dense()) {
    target = input_dense ? empty_in_order_of(input, output)
                         : at::empty(output.sizes(), output.options());
    scattered_.push_back({refs_.size() - 1, output, target});
    ref.output = target.mutable_data_ptr();
  }
  if (!input_dense || !same_order(target, input) || input.is_neg()) {
    gathered_.push_back(empty_in_order_of(target, input).copy_(input));
    ref.input = gathered_.back().const_data_ptr();
  }
}

void CastPairs::close() const {
  const size_t n = refs_.size();
  std::vector<MemoryRange> ranges = outputs_;
  for (const Scattered& s : scattered_)
    ranges[s.index] = {ranges[s.index].data(), s.view.element_size()};
  ranges.insert(ranges.end(), inputs_.begin(), inputs_.end());
  std::optional<IndexPair> found = find_overlap(ranges, n);
  TORCH_CHECK(!found || found->second >= n, kCast, ": outputs[", found->first, "] and outputs[",
              found->second, "] overlap in memory, expected tensors that share none: clone() one");
  for (const Scattered& s : scattered_) {
    for (size_t i = 0; i < n && !found; ++i) {
      if (overlap(outputs_[s.index], inputs_[i])) found.emplace(s.index, n + i);
    }
  }
  TORCH_CHECK(!found, kCast, ": inputs[", found->second - n, "] and outputs[", found->first,
              "] overlap in memory, expected inputs apart from all that is written: clone() it");
}

void CastPairs::finish_writes() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Scattered& s : scattered_) s.view.copy_(s.dense);
  mark_written(written_);
}

}  // namespace amp_ext
