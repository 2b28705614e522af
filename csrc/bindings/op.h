// The registration of an op, all of it in the op's own file.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <vector>

#include "checks/tensors.h"

namespace amp_ext {

// The names of all ops, by the part of the package to which they belong: "lists" or "gemm".
inline std::map<std::string, std::vector<std::string>>& all_ops() {
  static std::map<std::string, std::vector<std::string>> ops;
  return ops;
}

// A function that takes its arguments from the stack.
template <auto kFunction>
struct Boxed {};

template <class Function>
torch::CppFunction as_function(Function function) {
  return torch::CppFunction(function);
}
template <auto kFunction>
torch::CppFunction as_function(Boxed<kFunction>) {
  return torch::CppFunction::makeFromBoxedFunction<kFunction>();
}

// Declares an op. Returns its name.
inline std::string declare(torch::Library& m, const char* part, const std::string& schema) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(schema.c_str(), tags);
  return all_ops()[part].emplace_back(schema.substr(0, schema.find('(')));
}

// Declares an op with one function for all devices, which chooses a backend, and one for tensors
// without data ("fake" ones), for torch.compile:
//
//     TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
//       define(m, "lists", "scale_(Tensor(a!)[] grads, Tensor factor) -> ()", TORCH_FN(scale_op),
//              TORCH_FN(scale_fake));
//     }
template <class Function, class Fake>
void define(torch::Library& m, const char* part, const std::string& schema, Function function,
            Fake fake) {
  using Key = c10::DispatchKey;
  const std::string name = declare(m, part, schema);
  const auto implement = [&](Key key, torch::CppFunction f) {
    m.impl(name.c_str(), torch::dispatch(key, std::move(f)));
  };
  // Sparse tensors reach the op's checks, whose errors name the argument.
  for (const Key key : {Key::CPU, Key::CUDA, Key::SparseCPU, Key::SparseCUDA, Key::SparseCsrCPU,
                        Key::SparseCsrCUDA})
    implement(key, as_function(function));
  implement(Key::Meta, as_function(fake));
  if (schema.find('!') == std::string::npos) return;
  // torch would negate or conjugate an argument around a call that writes it, in place, and can do
  // so neither with a list nor for an op that returns nothing: the op's checks see such views.
  for (const Key key : {Key::Negative, Key::Conjugate})
    implement(key, torch::CppFunction::makeFallthrough());
}

// ---- for functions on tensors without data -----------------------------------------------------

inline void check_device(const char* op, const char* name, const std::optional<at::Tensor>& tensor,
                         at::Device device) {
  if (tensor) check_device(op, name, *tensor, device);
}
inline void check_device(const char* op, const char* name, at::TensorList tensors,
                         at::Device device) {
  for (size_t i = 0; i < tensors.size(); ++i)
    check_device(op, Item{op, name, i}, tensors[i], device);
}

// Arguments by name: check_devices(op, device, "grads", grads, "norm", norm).
template <class Tensors, class... Others>
void check_devices(const char* op, at::Device device, const char* name, const Tensors& tensors,
                   const Others&... others) {
  check_device(op, name, tensors, device);
  if constexpr (sizeof...(others) > 0) check_devices(op, device, others...);
}

}  // namespace amp_ext
