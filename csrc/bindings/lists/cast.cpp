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

// Casts dense pairs by one launch, and others by torch's copies. A tensor may be its own input.
// Nothing is written before all pairs have been checked.
void cast_op(at::TensorList outputs, at::TensorList inputs) {
  TORCH_CHECK(outputs.size() == inputs.size(), kCast, ": inputs must have as many tensors as ",
              "outputs, ", outputs.size(), ", got ", inputs.size());
  if (outputs.empty()) return;
  const at::Device device = outputs[0].device();
  std::vector<CastRef> refs;
  std::vector<MemoryUse> uses;
  std::vector<size_t> copied;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor &output = outputs[i], &input = inputs[i];
    const Item output_item{kCast, "outputs", i}, input_item{kCast, "inputs", i};
    const DType output_dtype = checked_dtype(kCast, output_item, output, device);
    const DType input_dtype = checked_dtype(kCast, input_item, input, device);
    TORCH_CHECK(output.sizes() == input.sizes(), kCast, ": ", input_item,
                " must have the shape of ", output_item, ", ", output.sizes(), ", got ",
                input.sizes());
    check_not_negated(kCast, output_item, output);
    const bool dense = output.is_non_overlapping_and_dense();
    if (!dense) check_no_internal_overlap(output_item, output);
    check_no_history(kCast, output_item, output, at::GradMode::is_enabled());

    const MemoryRange to = checked_memory(kCast, output_item, output, Access::write);
    const MemoryRange from = checked_memory(kCast, input_item, input, Access::read);
    uses.push_back({from, "inputs", static_cast<int64_t>(i), /*is_written=*/false});
    const bool is_same_order = same_order(output, input) && !input.is_neg();
    if (is_same_order && to.data() == from.data() && output_dtype == input_dtype) continue;
    const int64_t first_bytes = dense ? 0 : output.element_size();
    uses.push_back({to, "outputs", static_cast<int64_t>(i), /*is_written=*/true, first_bytes});
    if (is_same_order && dense) {
      refs.push_back({to.data(), from.data(), output.numel(), 0, output_dtype, input_dtype});
    } else {
      copied.push_back(i);
    }
  }
  check_overlap(kCast, std::move(uses));
  run(kCast, device, &Backend::cast, CastArgs{{refs.data(), static_cast<int64_t>(refs.size())}});
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const size_t i : copied) outputs[i].copy_(inputs[i]);
  }
  for (const at::Tensor& output : outputs) mark_written(output.unsafeGetTensorImpl());
}

}  // namespace

Status TritonBackend::cast(const CastArgs& a, Services& services) const {
  return launch_list("lists.cast", "cast_", a.casts, services, false);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "cast_", TORCH_FN(cast_op)); }

}  // namespace amp_ext
