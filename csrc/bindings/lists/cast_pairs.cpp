#include "lists/cast_pairs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>

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
      CastRef{to.data(), from.data(), output.numel(), output_dtype, input_dtype});
  if (ref.numel == 0) return;
  outputs_.push_back({to, index, dense ? to.end : to.begin + output.element_size()});
  inputs_.push_back({from, index});
  if (!same_order(output, input) || input.is_neg()) return rearrange(ref, output, input);
  if (ref.output == ref.input && output_dtype == input_dtype) {
    ref.numel = 0;
    outputs_.back().end = outputs_.back().begin;
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
    scattered_.push_back({output, target});
    ref.output = target.mutable_data_ptr();
  }
  if (!input_dense || !same_order(target, input) || input.is_neg()) {
    gathered_.push_back(empty_in_order_of(target, input).copy_(input));
    ref.input = gathered_.back().const_data_ptr();
  }
}

void CastPairs::close() {
  const auto starts_before = [](const Span& a, const Span& b) { return a.begin < b.begin; };
  if (!std::is_sorted(outputs_.begin(), outputs_.end(), starts_before))
    std::sort(outputs_.begin(), outputs_.end(), starts_before);

  std::vector<uintptr_t> reach;  // the furthest end of the outputs up to each
  reach.reserve(outputs_.size());
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const Span& output = outputs_[i];
    reach.push_back(i == 0 ? output.end : std::max(reach.back(), output.end));
    if (i == 0 || output.begin >= outputs_[i - 1].solid_end) continue;
    const auto [first, second] = std::minmax(output.index, outputs_[i - 1].index);
    TORCH_CHECK(false, kCast, ": outputs[", first, "] and outputs[", second,
                "] overlap in memory, expected tensors that share none: clone() one");
  }

  size_t before = 0;  // how many outputs begin before the end of the input
  for (const Span& input : inputs_) {
    before = outputs_before(input.end, before);
    if (before > 0 && reach[before - 1] > input.begin) throw_overlap(input);
  }
}

size_t CastPairs::outputs_before(uintptr_t address, size_t guess) const {
  const auto starts_before = [&](const Span& output) { return output.begin < address; };
  for (const size_t n : {guess, guess + 1}) {
    if (n <= outputs_.size() && (n == 0 || starts_before(outputs_[n - 1])) &&
        (n == outputs_.size() || !starts_before(outputs_[n])))
      return n;
  }
  return std::partition_point(outputs_.begin(), outputs_.end(), starts_before) - outputs_.begin();
}

void CastPairs::throw_overlap(const Span& input) const {
  const auto output = std::find_if(outputs_.begin(), outputs_.end(),
                                   [&](const Span& output) { return overlap(output, input); });
  TORCH_CHECK(false, kCast, ": inputs[", input.index, "] and outputs[", output->index,
              "] overlap in memory, expected inputs apart from all that is written: clone() it");
}

void CastPairs::finish_writes() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Scattered& s : scattered_) s.view.copy_(s.dense);
  mark_written(written_);
}

}  // namespace amp_ext
