#include "tensor_args.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace amp_ext {

void* one_element(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                  const char* words, at::Device device) {
  TORCH_CHECK(tensor.device() == device, op,
              ": Expected all tensors to be on the same device, but ", name, " is on ",
              tensor.device(), " and others are on ", device);
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", name,
              " must be a strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.numel() == 1, op, ": ", name, " must be a 1-element tensor, got shape ",
              tensor.sizes());
  TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " must be ", words, ", got ",
              tensor.scalar_type());
  return tensor.data_ptr();
}

template <>
float* one_element(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  return static_cast<float*>(one_element(op, name, tensor, at::kFloat, "a float tensor", device));
}

template <>
double* one_element(const char* op, const char* name, const at::Tensor& tensor, at::Device device) {
  return static_cast<double*>(
      one_element(op, name, tensor, at::kDouble, "a double tensor", device));
}

template <>
int32_t* one_element(const char* op, const char* name, const at::Tensor& tensor,
                     at::Device device) {
  return static_cast<int32_t*>(one_element(op, name, tensor, at::kInt, "an int tensor", device));
}

template <>
int64_t* one_element(const char* op, const char* name, const at::Tensor& tensor,
                     at::Device device) {
  return static_cast<int64_t*>(one_element(op, name, tensor, at::kLong, "a long tensor", device));
}

template <>
float* elements(const char* op, const char* name, const at::Tensor& tensor, int64_t size,
                at::Device device) {
  TORCH_CHECK(tensor.device() == device, op,
              ": Expected all tensors to be on the same device, but ", name, " is on ",
              tensor.device(), " and others are on ", device);
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", name,
              " must be a strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, op, ": ", name, " must have shape [",
              size, "], got shape ", tensor.sizes());
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got strides ",
              tensor.strides());
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, op, ": ", name, " must be a float tensor, got ",
              tensor.scalar_type());
  return tensor.mutable_data_ptr<float>();
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

std::ostream& operator<<(std::ostream& out, const Item& item) {
  return out << item.list << '[' << item.index << ']';
}

DType checked_dtype(const Item& item, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, item.op, ": ", item,
                              " must be a strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.device() == device, item.op,
              ": Expected all tensors to be on the same device, but ", item, " is on ",
              tensor.device(), " and others are on ", device);
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(dtype, '"', item.op, "\" not implemented for '", tensor.scalar_type(),
                              "': ", item, " must be float16, bfloat16, float32 or float64");
  return *dtype;
}

namespace {

// Whether no two indices of a tensor share an address: sufficient, and true of every view that
// slicing and permuting make. (torch's own check gives up on a tensor with holes.)
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

void check_no_history(const Item& item, const at::Tensor& tensor) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && tensor.requires_grad()), item.op, ": ", item,
              " requires grad, and this op is not differentiable: expected torch.no_grad()");
}

void mark_written(const std::vector<at::TensorImpl*>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + kAhead < tensors.size()) prefetch_version(tensors[i + kAhead]);
    mark_written(tensors[i]);
  }
}

int64_t extent_of(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.numel();
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last + 1;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto begin = [](const at::Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  const auto end = [&](const at::Tensor& t) {
    return begin(t) + extent_of(t) * static_cast<int64_t>(t.element_size());
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

void GradList::reserve(size_t n) {
  refs_.reserve(n);
  if (access_ == Access::write) written_.reserve(n);
}

void GradList::add(const at::Tensor& grad) {
  const Item item{op_, "grads", refs_.size()};
  const DType dtype = checked_dtype(item, grad, device_);
  if (grad._is_zerotensor()) {
    TORCH_CHECK(access_ == Access::read, op_, ": ZeroTensors are immutable, expected ", item,
                " to have memory: clone() it");
    refs_.push_back({nullptr, 0, dtype});
    return;
  }
  if (access_ == Access::write) {
    check_no_history(item, grad);
    written_.push_back(grad.unsafeGetTensorImpl());
  }
  if (grad.is_non_overlapping_and_dense()) {
    refs_.push_back({const_cast<void*>(access_ == Access::write ? grad.mutable_data_ptr()
                                                                : grad.const_data_ptr()),
                     grad.numel(), dtype});
    return;
  }
  if (access_ == Access::write) check_no_internal_overlap(item, grad);
  const at::NoGradGuard no_grad;
  const at::Tensor dense = grad.contiguous();
  refs_.push_back({dense.mutable_data_ptr(), dense.numel(), dtype});
  gathered_.push_back({refs_.size() - 1, grad, dense});
}

int64_t GradList::numel() const {
  int64_t total = 0;
  for (const TensorRef& t : refs_) total += t.numel;
  return total;
}

template <class Body>
void GradList::for_each_start(Body body) const {
  auto gathered = gathered_.begin();
  for (size_t i = 0; i < refs_.size(); ++i) {
    const bool dense = gathered == gathered_.end() || gathered->index != i;
    const void* start = dense ? refs_[i].data : (gathered++)->view.const_data_ptr();
    if (refs_[i].numel > 0) body(i, start);
  }
}

// A hash set of addresses with open addressing: it costs 5 ns a tensor, a library's map 20.
void GradList::close() const {
  if (access_ == Access::read) return;
  const size_t slots = std::bit_ceil(2 * refs_.size() + 1);
  const int shift = 64 - std::countr_zero(slots);
  std::vector<const void*> seen(slots);
  for_each_start([&](size_t i, const void* start) {
    size_t slot = (reinterpret_cast<uintptr_t>(start) * 0x9e3779b97f4a7c15) >> shift;
    while (seen[slot] && seen[slot] != start) slot = (slot + 1) % slots;
    if (seen[slot]) throw_shared(start, i);
    seen[slot] = start;
  });
}

void GradList::throw_shared(const void* start, size_t second) const {
  size_t first = second;
  for_each_start([&](size_t i, const void* other) {
    if (other == start) first = std::min(first, i);
  });
  TORCH_CHECK(false, op_, ": grads[", first, "] and grads[", second,
              "] start at the same address, expected tensors that share no memory");
}

void GradList::finish_writes() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Gathered& g : gathered_) g.view.copy_(g.dense);
  mark_written(written_);
}

}  // namespace amp_ext
