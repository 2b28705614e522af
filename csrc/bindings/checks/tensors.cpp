#include "checks/tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace amp_ext {
void* elements(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType type,
               at::Device device, int64_t size) {
  check_device(op, name, tensor, device);
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", name,
              " must be a strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.numel() == size && tensor.is_contiguous(), op, ": ", name,
              " must be contiguous, of size ", size, ", got shape ", tensor.sizes(),
              " and strides ", tensor.strides());
  TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " must be a ", type, " tensor, got ",
              tensor.scalar_type());
  check_not_negated(op, name, tensor);
  return checked_memory(op, name, tensor, Access::write).data();
}

void check_max_norm(const char* op, std::optional<double> max_norm, bool norm_given) {
  TORCH_CHECK_VALUE(!max_norm || *max_norm >= 0, op,
                    ": max_norm must be a number that is not negative, got ", *max_norm);
  TORCH_CHECK_VALUE(!max_norm || norm_given, op, ": max_norm = ", *max_norm,
                    " needs a norm, got None");
}

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::f32;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kDouble: return DType::f64;
    default: return std::nullopt;
  }
}

at::ScalarType scalar_type_of(DType type) {
  switch (type) {
    case DType::f32: return at::kFloat;
    case DType::f16: return at::kHalf;
    case DType::bf16: return at::kBFloat16;
    case DType::f64: return at::kDouble;
  }
  TORCH_INTERNAL_ASSERT(false);
}

std::ostream& operator<<(std::ostream& out, const Item& item) {
  return out << item.list << '[' << item.index << ']';
}

namespace {

// Returns whether no two indices of a tensor share an address. The test is sufficient, and true of
// every view that slicing and permuting make. (torch's own check gives up on a tensor with holes.)
bool strides_clear_each_other(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

}  // namespace

void check_no_internal_overlap(const Item& item, const at::Tensor& tensor) {
  at::assert_no_internal_overlap(tensor);
  TORCH_CHECK(strides_clear_each_other(tensor), item.op, ": ", item, " has strides ",
              tensor.strides(),
              ": more than one element of the written-to tensor refers to a single memory "
              "location, clone() it");
}

bool same_order(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || a.strides() == b.strides()) return true;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

void GradList::reserve(size_t n) {
  refs_.reserve(n);
  uses_.reserve(n);
  if (is_written()) written_.reserve(n);
}

void GradList::add(const at::Tensor& grad) {
  const Item item{op_, "grads", refs_.size()};
  const DType dtype = checked_dtype(op_, item, grad, device_);
  if (grad._is_zerotensor()) {
    TORCH_CHECK(!is_written(), op_, ": ZeroTensors are immutable, expected ", item,
                " to have memory: clone() it");
    refs_.push_back({nullptr, 0, 0, dtype});
    return;
  }
  const MemoryRange memory = checked_memory(op_, item, grad, access_);
  const bool dense = grad.is_non_overlapping_and_dense();
  const int64_t first_bytes = dense || !is_written() ? 0 : grad.element_size();
  uses_.push_back({memory, "grads", static_cast<int64_t>(refs_.size()), is_written(), first_bytes});
  if (is_written()) {
    check_no_history(op_, item, grad, records_gradients_);
    if (!dense) check_no_internal_overlap(item, grad);
    written_.push_back(grad.unsafeGetTensorImpl());
  }
  if (dense) {
    refs_.push_back({memory.data(), grad.numel(), 0, dtype});
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor copy = grad.contiguous();
  gathered_.emplace_back(grad, copy);
  refs_.push_back({copy.mutable_data_ptr(), copy.numel(), 0, dtype});
}

void GradList::finish_writes() {
  if (!gathered_.empty()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [view, copy] : gathered_) view.copy_(copy);
  }
  for (at::TensorImpl* const tensor : written_) mark_written(tensor);
}

void Arguments::check_apart(GradList* grads) const {
  std::vector<MemoryUse> uses;
  if (grads) uses = grads->take_uses();
  uses.insert(uses.end(), uses_.begin(), uses_.end());
  check_overlap(op_, std::move(uses));
}

void Arguments::mark_written() const {
  for (at::TensorImpl* const tensor : tensors_) amp_ext::mark_written(tensor);
}

}  // namespace amp_ext
