// Remembers a tensor, to find out whether it has been written since.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace amp_ext {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// A tensor's version and memory. The weak references keep the addresses of the tensor and of its
// storage from becoming another's.
class Seen {
 public:
  explicit Seen(const at::Tensor& tensor)
      : tensor_(tensor.getIntrusivePtr()),
        storage_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(tensor))),
        data_(data_of(tensor)),
        version_(version_of(tensor)) {}

  // Returns whether `now` is the tensor, and nothing has changed.
  bool is(const at::Tensor& now) const {
    return tensor_._unsafe_get_target() == now.unsafeGetTensorImpl() &&
           storage_._unsafe_get_target() == storage_of(now) && data_ == data_of(now) &&
           version_ == version_of(now);
  }

  // Returns the tensor, if nothing has changed.
  at::Tensor unchanged() const {
    auto alive = tensor_.lock();
    if (!alive) return {};
    at::Tensor now(std::move(alive));
    return is(now) ? now : at::Tensor();
  }

  bool is_gone() const { return tensor_.expired(); }

 private:
  // Traced tensors have no address, and would throw.
  static const void* data_of(const at::Tensor& tensor) {
    const auto* const data =
        static_cast<const char*>(storage_of(tensor)->_mutable_data_ptr_no_checks().get());
    return data ? data + tensor.storage_offset() * tensor.element_size() : nullptr;
  }

  static int64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
  }

  WeakTensor tensor_;
  WeakStorage storage_;
  const void* data_;
  int64_t version_;
};

}  // namespace amp_ext
