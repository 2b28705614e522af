// Checks all arguments of an op, and makes plain arguments of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "amp_ext/lists.h"
#include "checks/memory.h"

namespace amp_ext {

std::optional<DType> dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType type);

template <class Name>
void check_device(const char* op, const Name& name, const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK(tensor.device() == device, op,
              ": Expected all tensors to be on the same device, but ", name, " is on ",
              tensor.device(), " and others are on ", device);
}

// Returns a pointer to the elements of `tensor`. Throws unless it is a contiguous tensor of `size`
// elements of this type on `device`, no negated view, and in memory that has not been freed.
void* elements(const char* op, const char* name, const at::Tensor& tensor, at::ScalarType type,
               at::Device device, int64_t size = 1);

// Throws for a negated view. Its values are the negatives of the stored numbers.
template <class Name>
void check_not_negated(const char* op, const Name& name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_neg(), op, ": ", name,
              " is a negated view, expected a tensor that is stored as it is: resolve_neg() it");
}

// Throws unless gradients can be clipped to max_norm. A max_norm needs a norm.
void check_max_norm(const char* op, std::optional<double> max_norm, bool norm_given);

// Bumps the version of a tensor, for autograd. Call it for every tensor that a launch writes.
inline void mark_written(at::TensorImpl* tensor) {
  if (tensor->version_counter().enabled()) tensor->bump_version();  // an inference tensor has none
}

// A tensor of a list. Errors name it with the list and the index: "grads[3]".
struct Item {
  const char* op;
  const char* list;
  size_t index;
};

std::ostream& operator<<(std::ostream& out, const Item& item);

// Returns the element type of `tensor`. Throws for another one than fp16, bf16, fp32 and fp64, a
// layout other than strided, and another device.
template <class Name>
DType checked_dtype(const char* op, const Name& name, const at::Tensor& tensor, at::Device device) {
  check_device(op, name, tensor, device);
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, op, ": ", name,
                              " must be a strided tensor, got layout ", tensor.layout());
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(dtype, '"', op, "\" not implemented for '", tensor.scalar_type(),
                              "': ", name, " must be float16, bfloat16, float32 or float64");
  return *dtype;
}

// Throws where elements of a tensor to be written share memory.
void check_no_internal_overlap(const Item& item, const at::Tensor& tensor);

// Throws for a tensor that requires grad, where gradients are recorded
// (at::GradMode::is_enabled()).
template <class Name>
void check_no_history(const char* op, const Name& name, const at::Tensor& tensor,
                      bool records_gradients) {
  TORCH_CHECK(!(records_gradients && tensor.requires_grad()), op, ": ", name,
              " requires grad, and this op is not differentiable: expected torch.no_grad()");
}

// Returns whether elements of one index lie at the same place of two tensors of one shape.
bool same_order(const at::Tensor& a, const at::Tensor& b);

// The gradients of one call, all on one device. Tensors must outlive the list.
class GradList {
 public:
  GradList(const char* op, Access access, at::Device device)
      : op_(op), access_(access), device_(device) {}
  GradList(const char* op, Access access, at::TensorList grads, at::Device device)
      : GradList(op, access, device) {
    reserve(grads.size());
    for (const at::Tensor& grad : grads) add(grad);
  }

  void reserve(size_t n);

  // Checks `grad` and appends it. Throws for an element type other than fp16, bf16, fp32 and fp64,
  // a layout other than strided, another device, and memory that has been freed. If the list is
  // written, it throws for memory that overlaps within the tensor. It also throws for a tensor that
  // requires grad while gradients are recorded. Negated views are accepted: no op on gradients
  // depends on their signs.
  void add(const at::Tensor& grad);

  // Copies results back into the views that are not dense, and bumps the tensors' versions for
  // autograd. Call it after the launch of a list to be written.
  void finish_writes();

  TensorList args() const { return {refs_.data(), static_cast<int64_t>(refs_.size())}; }
  at::Device device() const { return device_; }
  const char* op() const { return op_; }
  bool is_written() const { return access_ == Access::write; }

  // Returns the memory of all tensors, once.
  std::vector<MemoryUse> take_uses() { return std::move(uses_); }

 private:
  const char* op_;
  Access access_;
  at::Device device_;
  bool records_gradients_ = at::GradMode::is_enabled();
  std::vector<TensorRef> refs_;
  std::vector<c10::TensorImpl*> written_;
  std::vector<MemoryUse> uses_;
  // Views with holes, and the dense copies that kernels work on.
  std::vector<std::pair<at::Tensor, at::Tensor>> gathered_;
};

// The other tensors of a call, by name.
class Arguments {
 public:
  Arguments(const char* op, at::Device device) : op_(op), device_(device) {}

  // Return elements, or null for no tensor.
  template <class T>
  const T* read(const char* name, const std::optional<at::Tensor>& tensor) {
    if (!tensor) return nullptr;
    void* const data = elements(op_, name, *tensor, c10::CppTypeToScalarType<T>::value, device_);
    read_tensor(name, *tensor);
    return static_cast<const T*>(data);
  }
  template <class T>
  T* write(const char* name, const std::optional<at::Tensor>& tensor, int64_t size = 1) {
    if (!tensor) return nullptr;
    constexpr auto type = c10::CppTypeToScalarType<T>::value;
    void* const data = elements(op_, name, *tensor, type, device_, size);
    write_tensor(name, *tensor);
    return static_cast<T*>(data);
  }

  // Add a tensor of any shape.
  void read_tensor(const char* name, const at::Tensor& tensor) {
    uses_.push_back({checked_memory(op_, name, tensor, Access::read), name, -1, false});
  }
  void write_tensor(const char* name, const at::Tensor& tensor) {
    uses_.push_back({checked_memory(op_, name, tensor, Access::write), name, -1, true});
    tensors_.push_back(tensor.unsafeGetTensorImpl());
  }

  // Throws where memory that is written overlaps anything else, the gradients included. Call it
  // after the last argument, for each list: nothing has been written before.
  void check_apart(GradList* grads = nullptr) const;

  // Bumps versions. Call it after the launch.
  void mark_written() const;

 private:
  const char* op_;
  at::Device device_;
  c10::SmallVector<MemoryUse, 4> uses_;
  c10::SmallVector<at::TensorImpl*, 6> tensors_;  // the written ones
};

}  // namespace amp_ext
