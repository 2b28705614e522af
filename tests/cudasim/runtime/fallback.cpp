// torch's operators for CUDA tensors: each runs torch's CPU kernel on the same memory, as one
// operation of the current stream. Operators that only allocate, view or copy memory are unchanged.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fake_cuda {

cudaError_t launch_on_host(cudaStream_t stream, const std::string& name, std::function<void()> run);

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// Dispatches as below autograd, whatever the state of the waiting thread.
class PlainDispatch {
 public:
  PlainDispatch() : no_keys_(excluded()), no_inference_(false) {}

 private:
  static c10::DispatchKeySet excluded() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
           c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Functionalize,
                                c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  }
  c10::impl::ExcludeDispatchKeyGuard no_keys_;
  c10::InferenceMode no_inference_;
};

// Random numbers follow from the device's generator at the time of the call.
class Seeded {
 public:
  explicit Seeded(uint64_t seed) : generator_(at::globalContext().defaultGenerator(at::kCPU)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~Seeded() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  Seeded(const Seeded&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

uint64_t next_seed(const IValue* generator, c10::cuda::CUDAStream stream) {
  static uint64_t captured = 0;  // a graph has the same numbers whenever it is replayed
  cudaStreamCaptureStatus status;
  TORCH_CHECK(cudaStreamIsCapturing(stream.stream(), &status) == cudaSuccess);
  if (status != cudaStreamCaptureStatusNone) return ++captured;
  at::Generator chosen =
      generator ? generator->toGenerator() : at::globalContext().defaultGenerator(stream.device());
  const std::lock_guard<std::mutex> lock(chosen.mutex());
  const uint64_t offset = chosen.get_offset();
  chosen.set_offset(offset + 4);  // torch requires a multiple of 4
  return chosen.current_seed() * 0x9E3779B97F4A7C15 + offset;
}

void keep_kind(const Tensor& from, Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// The tensor as one of the host, of the same memory; scalars of the host are read now.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  Tensor host;
  if (tensor.is_cuda()) {
    TORCH_CHECK(!tensor.is_neg(), "fake cuda: a negative view");
    host = at::from_blob(tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(),
                         tensor.strides(), tensor.options().device(at::kCPU));
    if (tensor.is_conj()) host = host.conj();
  } else {
    host = tensor.dim() == 0 ? tensor.clone() : tensor;
  }
  keep_kind(tensor, host);
  return host;
}

// One of the host that is like it, but has zeros in memory of its own.
Tensor zeros_like(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  Tensor host =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_cuda())
    host.zero_();
  else
    host.copy_(tensor);
  keep_kind(tensor, host);
  return host;
}

Tensor empty_on_device(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCUDA));
}

template <class Map>
IValue mapped(const IValue& value, Map map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isGenerator()) return IValue();
  return value;
}

template <class Map>
Stack mapped(const Stack& stack, Map map) {
  Stack result;
  for (const IValue& value : stack) result.push_back(mapped(value, map));
  return result;
}

void copy_results(const IValue& from, const IValue& to) {
  const auto copy = [](const Tensor& source, const Tensor& target) {
    // The caller's mode has ended, perhaps, when the operation runs.
    const c10::InferenceMode mode(target.defined() && target.is_inference());
    if (source.defined() && source.numel()) target.copy_(source);
  };
  if (from.isTensor()) return copy(from.toTensor(), to.toTensor());
  const auto sources = from.toTensorVector(), targets = to.toTensorVector();
  for (size_t i = 0; i < sources.size(); ++i) copy(sources[i], targets[i]);
}

// Calls an operator with tensors of the host, in other words where these are for CUDA alone.
void compute(const c10::OperatorHandle& op, Stack& stack) {
  const std::string& name = op.schema().name();
  const std::string& overload = op.schema().overload_name();
  if (overload == "dtype" || overload == "dtype_out") {  // a product with a result of that dtype
    const int dtype = *op.schema().argumentIndexWithName("out_dtype");
    const at::ScalarType type = stack[dtype].toScalarType();
    stack.erase(stack.begin() + dtype);
    for (IValue& value : stack)
      if (value.isTensor()) value = value.toTensor().to(type);
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name.c_str(), overload == "dtype" ? "" : "out")
        .callBoxed(&stack);
  }
  if (name == "aten::_amp_foreach_non_finite_check_and_unscale_")
    for (const Tensor& grad : stack[0].toTensorVector())
      TORCH_CHECK_NOT_IMPLEMENTED(grad.scalar_type() != at::kBFloat16, name,
                                  ": torch's kernel for CUDA is not implemented for BFloat16");
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && stack[2].toBool()) {
    stack[0] = stack[0].toTensor().to(at::kFloat);
    stack[2] = false;
  }
  if ((name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") &&
      overload.empty()) {
    const at::ScalarType type =
        std::exchange(stack[3], stack[0].toTensor().scalar_type()).toScalarType();
    op.callBoxed(&stack);
    stack[0] = stack[0].toTensor().to(type);
    return;
  }
  op.callBoxed(&stack);
}

// A call of an operator: the arguments it returns, and its computation on the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), arguments_(std::move(arguments)), guard_(device()) {
    for (const auto& result : op.schema().returns()) returned_.push_back(argument_of(result));
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    const auto generator = std::ranges::find_if(arguments_, &IValue::isGenerator);
    seed_ = next_seed(generator == arguments_.end() ? nullptr : &*generator, stream);
  }

  Stack run() {
    // If the shape of a result or a number depends on values, they are computed first.
    if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output))
      return compute_at_once();
    const Stack tried = dry_run();
    for (size_t i = 0; i < tried.size(); ++i)
      if (returned_[i] < 0 && !tried[i].isTensor() && !tried[i].isTensorList())
        return compute_at_once();
    Stack results, targets;
    for (size_t i = 0; i < tried.size(); ++i) {
      results.push_back(returned_[i] < 0 ? mapped(tried[i], empty_on_device)
                                         : arguments_[returned_[i]]);
      targets.push_back(mapped(results[i], on_host));
    }
    launch([targets = std::move(targets), returned = returned_](const Stack& computed) {
      for (size_t i = 0; i < computed.size(); ++i)
        if (returned[i] < 0) copy_results(computed[i], targets[i]);
    });
    return results;
  }

 private:
  std::optional<c10::Device> device() const {
    std::optional<c10::Device> found;
    const auto use = [&](c10::Device device) {
      if (!found && device.is_cuda() && device.has_index()) found = device;
    };
    for (const IValue& value : arguments_) {
      if (value.isTensor() && value.toTensor().defined()) use(value.toTensor().device());
      if (value.isTensorList())
        for (const Tensor& tensor : value.toTensorVector()) use(tensor.device());
      if (value.isDevice()) use(value.toDevice());
    }
    return found;
  }

  int argument_of(const c10::Argument& result) const {
    if (!result.alias_info()) return -1;
    const auto& all = op_.schema().arguments();
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].alias_info() &&
          all[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return static_cast<int>(i);
    return -1;
  }

  // Finds the shapes of results, and errors.
  Stack dry_run() {
    const PlainDispatch plain;
    std::optional<Seeded> seeded;
    if (seed_) seeded.emplace(*seed_);
    const Stack zeros = mapped(arguments_, zeros_like);
    Stack stack = zeros;
    compute(op_, stack);
    for (size_t i = 0; i < zeros.size(); ++i) {
      const auto& argument = op_.schema().arguments()[i];
      if (!argument.is_out() || !arguments_[i].isTensor()) continue;
      const Tensor out = arguments_[i].toTensor();
      if (const auto sizes = zeros[i].toTensor().sizes(); out.sizes() != sizes) out.resize_(sizes);
    }
    return stack;
  }

  void launch(std::function<void(const Stack&)> use) {
    const cudaError_t error = launch_on_host(
        c10::cuda::getCurrentCUDAStream().stream(), op_.schema().name(),
        [op = op_, arguments = mapped(arguments_, on_host), seed = seed_, use = std::move(use)] {
          const PlainDispatch plain;
          std::optional<Seeded> seeded;
          if (seed) seeded.emplace(*seed);
          Stack stack = arguments;
          compute(op, stack);
          use(stack);
        });
    C10_CUDA_CHECK(error);
  }

  Stack compute_at_once() {
    const auto shared = std::make_shared<Stack>();  // it outlives this call in a capture
    launch([shared](const Stack& results) { *shared = results; });
    C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
    const Stack computed = std::exchange(*shared, {});
    Stack results;
    for (size_t i = 0; i < computed.size(); ++i) {
      if (returned_[i] >= 0) {
        results.push_back(arguments_[returned_[i]]);
        continue;
      }
      results.push_back(mapped(computed[i], [](const Tensor& tensor) {
        Tensor result = empty_on_device(tensor);
        if (result.defined() && result.numel()) result.copy_(tensor.contiguous());
        return result;
      }));
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  const Stack arguments_;
  const c10::cuda::OptionalCUDAGuard guard_;
  std::vector<int> returned_;  // the argument that a result is, or -1
  std::optional<uint64_t> seed_;
};

void call(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Stack arguments = torch::jit::last(*stack, count).vec();
  torch::jit::drop(*stack, count);
  for (IValue& result : Call(op, std::move(arguments)).run()) stack->push_back(std::move(result));
}

bool is_copied_by_runtime(const Tensor& to, const Tensor& from) {
  if (!to.is_cuda() || !from.is_cuda()) return true;
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
         to.is_neg() == from.is_neg() && to.is_conj() == from.is_conj() &&
         ((to.is_contiguous() && from.is_contiguous()) ||
          (to.strides() == from.strides() && to.is_non_overlapping_and_dense()));
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (is_copied_by_runtime(to, from)) return at::native::copy_(to, from, non_blocking);
  TORCH_CHECK(to.device() == from.device(), "fake cuda: a kernel copies between devices");
  const c10::cuda::CUDAGuard guard(to.device());
  C10_CUDA_CHECK(launch_on_host(c10::cuda::getCurrentCUDAStream().stream(), "aten::copy_",
                                [target = on_host(to), source = on_host(from)] {
                                  const PlainDispatch plain;
                                  target.copy_(source);
                                }));
  return to;
}

// Whether torch's own kernel for CUDA does without launches.
bool stays(const c10::FunctionSchema& schema) {
  constexpr const char* kStarts[] = {
      "aten::empty",           "aten::set_",          "aten::resize",
      "aten::_resize_output_", "aten::record_stream", "aten::_pin_memory",
      "aten::is_pinned",       "aten::is_set_to",     "aten::_copy_from",
      "aten::_has_",           "aten::_to_",          "aten::_local_scalar_dense",
      "aten::copy_",           "aten::as_strided_",   "aten::_efficientzerotensor"};
  for (const char* start : kStarts)
    if (schema.name().starts_with(start)) return true;
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();  // a view
  });
}

class Silent final : public c10::WarningHandler {  // each operator has had a kernel before
  void process(const c10::Warning&) override {}
};

struct Installed {
  Installed() {
    Silent silent;
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    at::globalContext().setUserEnabledCuDNN(false);
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!name.name.starts_with("aten::") || !op || stays(op->schema()) ||
          !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
        continue;
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&call>());
    }
    library.impl("copy_", TORCH_FN(copy));
  }

  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
};

const Installed installed;

}  // namespace
}  // namespace fake_cuda
