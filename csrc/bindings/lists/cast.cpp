// cast_.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "backends/backends.h"
#include "backends/triton.h"
#include "checks/tensors.h"
#include "op.h"

namespace amp_ext {
namespace {

constexpr auto kCast = "amp_ext::cast_";

// The pairs of one call, all on one device. Tensors must outlive the list.
class CastPairs {
 public:
  explicit CastPairs(at::Device device) : device_(device) {}

  // Checks a pair and appends it. Throws as checked_dtype does, for other shapes, for memory that
  // has been freed, and for an output that is negated, overlaps within itself, or requires grad
  // while gradients are recorded.
  void add(const at::Tensor& output, const at::Tensor& input, size_t index) {
    const Item output_item{kCast, "outputs", index}, input_item{kCast, "inputs", index};
    const DType output_dtype = checked_dtype(kCast, output_item, output, device_);
    const DType input_dtype = checked_dtype(kCast, input_item, input, device_);
    TORCH_CHECK(output.sizes() == input.sizes(), kCast, ": ", input_item,
                " must have the shape of ", output_item, ", ", output.sizes(), ", got ",
                input.sizes());
    check_not_negated(kCast, output_item, output);
    const bool dense = output.is_non_overlapping_and_dense();
    if (!dense) check_no_internal_overlap(output_item, output);
    check_no_history(kCast, output_item, output, at::GradMode::is_enabled());

    const MemoryRange to = checked_memory(kCast, output_item, output, Access::write);
    const MemoryRange from = checked_memory(kCast, input_item, input, Access::read);
    const auto place = static_cast<int64_t>(index);
    uses_.push_back({from, "inputs", place, /*is_written=*/false});
    const bool is_same_order = same_order(output, input) && !input.is_neg();
    if (is_same_order && to.data() == from.data() && output_dtype == input_dtype) return;
    const auto first_bytes = static_cast<int64_t>(dense ? 0 : output.element_size());
    uses_.push_back({to, "outputs", place, /*is_written=*/true, first_bytes});
    if (is_same_order && dense) {
      refs_.push_back({to.data(), from.data(), output.numel(), 0, output_dtype, input_dtype});
    } else {
      copies_.emplace_back(output, input);
    }
  }

  // Throws when two outputs, or an input and an output, overlap. A tensor may be its own input.
  // Call it once after the last add. Nothing has been written before.
  void close() const { check_overlap(kCast, uses_); }

  // Casts dense pairs by one launch, and others by torch's copies.
  void run() {
    amp_ext::run(kCast, device_, &Backend::cast,
                 CastArgs{{refs_.data(), static_cast<int64_t>(refs_.size())}});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [output, input] : copies_) output.copy_(input);
  }

 private:
  at::Device device_;
  std::vector<CastRef> refs_;
  std::vector<MemoryUse> uses_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // outputs and inputs
};

void cast_op(at::TensorList outputs, at::TensorList inputs) {
  TORCH_CHECK(outputs.size() == inputs.size(), kCast, ": inputs must have as many tensors as ",
              "outputs, ", outputs.size(), ", got ", inputs.size());
  if (outputs.empty()) return;
  const at::Device device = outputs[0].device();
  CastPairs pairs(device);
  for (size_t i = 0; i < outputs.size(); ++i) pairs.add(outputs[i], inputs[i], i);
  pairs.close();
  pairs.run();
  for (const at::Tensor& output : outputs) mark_written(output.unsafeGetTensorImpl());
}

}  // namespace

Status TritonBackend::cast(const CastArgs& a, Services& services) const {
  return launch_list("lists.cast", "cast_", a.casts, services, false);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "cast_", TORCH_FN(cast_op)); }

}  // namespace amp_ext
