// cast_.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>
#include <vector>

#include "backends/triton.h"
#include "lists/run.h"
#include "op.h"

namespace amp_ext {
namespace {

constexpr auto kCast = "amp_ext::cast_";

// The pairs of one call, all on one device. Tensors must outlive the list.
class CastPairs {
 public:
  explicit CastPairs(at::Device device) : device_(device) {}

  // Checks a pair and appends it. Throws as checked_dtype does, for other shapes, for memory that
  // has been freed, and for an output that is negated, overlaps within itself or has a history to
  // autograd.
  void add(const at::Tensor& output, const at::Tensor& input) {
    const size_t index = refs_.size();
    const Item output_item{kCast, "outputs", index}, input_item{kCast, "inputs", index};
    const DType output_dtype = checked_dtype(output_item, output, device_);
    const DType input_dtype = checked_dtype(input_item, input, device_);
    TORCH_CHECK(output.sizes() == input.sizes(), kCast, ": ", input_item,
                " must have the shape of ", output_item, ", ", output.sizes(), ", got ",
                input.sizes());
    check_not_negated(kCast, output_item, output);
    const bool dense = output.is_non_overlapping_and_dense();
    if (!dense) check_no_internal_overlap(output_item, output);
    check_no_history(output_item, output, at::GradMode::is_enabled());

    const MemoryRange to = checked_memory(kCast, output_item, output, Access::write);
    const MemoryRange from = checked_memory(kCast, input_item, input, Access::read);
    CastRef& ref = refs_.emplace_back(
        CastRef{to.data(), from.data(), output.numel(), 0, output_dtype, input_dtype});
    const auto place = static_cast<int64_t>(index);
    uses_.push_back({from, "inputs", place, /*is_written=*/false});
    const bool is_same_order = same_order(output, input) && !input.is_neg();
    if (is_same_order && ref.output == ref.input && output_dtype == input_dtype) {
      ref.numel = 0;
      return;
    }
    const auto first_bytes = static_cast<int64_t>(dense ? 0 : output.element_size());
    uses_.push_back({to, "outputs", place, /*is_written=*/true, first_bytes});
    if (ref.numel > 0 && (!is_same_order || !dense)) rearrange(ref, output, input);
  }

  // Throws when two outputs, or an input and an output, overlap. A tensor may be its own input.
  // Call it once after the last add. Nothing has been written before.
  void close() const { check_overlap(kCast, uses_); }

  // Copies results to the outputs that are not dense. Call it after the launch.
  void finish_writes() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const Scattered& s : scattered_) s.view.copy_(s.dense);
  }

  CastList args() const { return {refs_.data(), static_cast<int64_t>(refs_.size())}; }

 private:
  // An output with holes, and the dense tensor that kernels write.
  struct Scattered {
    at::Tensor view, dense;
  };

  // Gives kernels dense memory in one order, if two tensors are not so.
  void rearrange(CastRef& ref, const at::Tensor& output, const at::Tensor& input) {
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

  at::Device device_;
  std::vector<CastRef> refs_;
  std::vector<MemoryUse> uses_;
  std::vector<Scattered> scattered_;
  std::vector<at::Tensor> gathered_;  // dense copies of inputs, kept for the launch
};

void cast_op(at::TensorList outputs, at::TensorList inputs) {
  TORCH_CHECK(outputs.size() == inputs.size(), kCast, ": inputs must have as many tensors as ",
              "outputs, ", outputs.size(), ", got ", inputs.size());
  if (outputs.empty()) return;
  const at::Device device = outputs[0].device();
  CastPairs pairs(device);
  for (size_t i = 0; i < outputs.size(); ++i) pairs.add(outputs[i], inputs[i]);
  pairs.close();
  run(kCast, device, &Backend::cast, CastArgs{pairs.args()});
  pairs.finish_writes();
  for (const at::Tensor& output : outputs) mark_written(output.unsafeGetTensorImpl());
}

}  // namespace

void add_arguments(ReferenceCall& call, const CastArgs& args) {
  std::vector<at::Tensor> outputs, inputs;
  for (int64_t i = 0; i < args.casts.size; ++i) {
    const CastRef& c = args.casts.refs[i];
    outputs.push_back(call.flat(c.output, c.output_dtype, c.numel));
    inputs.push_back(call.flat(c.input, c.input_dtype, c.numel));
  }
  call.add("outputs", outputs);
  call.add("inputs", inputs);
}

Status TritonBackend::cast(const CastArgs& a, Services& services) const {
  return launch_list("lists.cast", "cast_", a.casts, services, false);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  implement(m, "cast_", TORCH_FN(cast_op));
  // Empty lists name no device: they come here.
  m.impl("cast_", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(cast_op)));
}

}  // namespace amp_ext
