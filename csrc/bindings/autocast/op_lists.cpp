// Op lists of regions: a boxed autocast kernel casts the arguments of a listed op. Where no list of
// the thread has the op, the kernel hands on to the one that it has replaced.
#include "autocast/op_lists.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "autocast/regions.h"
#include "checks/python.h"

namespace amp_ext {
namespace {

enum class Type { low, fp32 };
using Lists = std::map<std::string, Type>;  // by the op's name with its namespace

// ---- the lists of a thread ----------------------------------------------------------------------

// torch.compile guards on the type of autocast on each kind of device. Two kinds that nothing else
// uses tell lists from each other: their types are the digits of a number, 0 where they are torch's
// defaults.
constexpr std::array kDigits{
    at::kHalf,        at::kBFloat16,     at::kFloat,         at::kDouble,      at::kByte,
    at::kChar,        at::kShort,        at::kInt,           at::kLong,        at::kBool,
    at::kUInt16,      at::kUInt32,       at::kUInt64,        at::kQInt8,       at::kQUInt8,
    at::kComplexHalf, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e5m2, at::kFloat8_e4m3fn,
    at::kQInt32,
};
constexpr int64_t kBase = kDigits.size();
constexpr int64_t kMaxLists = kBase * kBase - 1;

void tell_guards(int64_t lists) {
  at::autocast::set_autocast_dtype(kRegionMark, kDigits[lists % kBase]);
  at::autocast::set_autocast_dtype(c10::DeviceType::MAIA, kDigits[(lists / kBase + 1) % kBase]);
}

// Lists that regions have had, by number; none is ever destroyed. 0 is no list.
class KnownLists {
 public:
  int64_t number(const Lists& lists) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lists.empty()) return 0;
    const auto known = numbers_.find(lists);
    if (known != numbers_.end()) return known->second;
    TORCH_CHECK(static_cast<int64_t>(numbers_.size()) < kMaxLists,
                "amp_ext.autocast: a program may have ", kMaxLists,
                " different sets of custom_fp16_ops and custom_fp32_ops, ",
                "nested regions' together; this is one more");
    const int64_t number = static_cast<int64_t>(numbers_.size()) + 1;
    at_[number] = &numbers_.emplace(lists, number).first->first;
    return number;
  }

  const Lists& operator[](int64_t number) {
    static const Lists none;
    const std::lock_guard<std::mutex> lock(mutex_);
    return number ? *at_[number] : none;
  }

 private:
  std::mutex mutex_;
  std::map<Lists, int64_t> numbers_;
  std::array<const Lists*, kMaxLists + 1> at_{};
};

KnownLists& known_lists() {
  static auto* const lists = new KnownLists;
  return *lists;
}

// Under which lists the nodes of the autograd graph were made. A checkpoint's second forward pass
// runs during backward, and the node that is being run tells which lists the first one had.
class MadeUnder {
 public:
  static constexpr int64_t kForgotten = -1;

  // The thread's nodes from number `begin` on are made under `lists`.
  void note(uint64_t thread, uint64_t begin, int64_t lists) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& changes = changes_[thread];
    while (!changes.empty() && changes.back().first >= begin) changes.pop_back();
    if ((changes.empty() ? 0 : changes.back().second) == lists) return;
    changes.emplace_back(begin, lists);
    if (changes.size() <= kChanges) return;
    changes.erase(changes.begin() + 1, changes.begin() + kChanges / 2);
    changes.front() = {0, kForgotten};
  }

  int64_t operator()(const torch::autograd::Node& node) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = changes_.find(node.thread_id());
    if (found == changes_.end()) return 0;
    const auto& changes = found->second;
    const auto after = std::partition_point(
        changes.begin(), changes.end(),
        [&](const auto& change) { return change.first <= node.sequence_nr(); });
    return after == changes.begin() ? 0 : std::prev(after)->second;
  }

 private:
  static constexpr size_t kChanges = 4096;  // of a thread, at most

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::vector<std::pair<uint64_t, int64_t>>> changes_;
};

MadeUnder& made_under() {
  static auto* const made_under = new MadeUnder;
  return *made_under;
}

uint64_t this_thread() { return at::RecordFunction::currentThreadId(); }

class ThreadLists {
 public:
  // Those of the innermost region, or of the region that is being recomputed.
  int64_t current() {
    const auto node = torch::autograd::get_current_node();
    if (!node || node.get() == region_.under) return region_.lists;
    const int64_t lists = made_under()(*node);
    TORCH_CHECK(lists != MadeUnder::kForgotten,
                "amp_ext.autocast: a checkpoint cannot be recomputed, since its op lists are no "
                "longer known after thousands of regions with others: put custom_fp16_ops and "
                "custom_fp32_ops on a region within the checkpointed function");
    if (lists != noted_) note_recomputation(lists);
    return lists;
  }

  OpListRegion enter(int64_t lists) {
    const auto node = torch::autograd::get_current_node();
    note(lists, at::sequence_number::peek());
    return std::exchange(region_, {lists, node.get()});
  }

  void leave(const OpListRegion& outer) {
    region_ = outer;
    note(current(), at::sequence_number::peek());
  }

 private:
  void note(int64_t lists, uint64_t begin) {
    made_under().note(this_thread(), begin, lists);
    tell_guards(lists);
    noted_ = lists;
  }

  // A checkpoint within the recomputed one may be the thread's last node, and begin with the op
  // that asks. Nodes that are made after the backward pass are no part of this.
  void note_recomputation(int64_t lists) {
    const uint64_t next = at::sequence_number::peek();
    note(lists, next ? next - 1 : 0);
    torch::autograd::Engine::get_default_engine().queue_callback([this, thread = this_thread()] {
      if (this_thread() == thread) note(region_.lists, at::sequence_number::peek());
    });
  }

  OpListRegion region_;
  int64_t noted_ = 0;
};

thread_local ThreadLists thread_lists;

// ---- the kernel ---------------------------------------------------------------------------------

using Replaced = std::optional<c10::SafeKernelFunction>;  // none where autocast has none for the op

// The listed ops, and what their kernels have replaced.
struct ListedOps {
  std::shared_mutex mutex;
  std::set<std::string> ops;
  std::vector<std::unique_ptr<torch::Library>> libraries;
  std::unordered_map<std::string, Replaced> replaced;  // by key and overload
};

ListedOps& listed_ops() {
  static auto* const ops = new ListedOps;  // never destroyed: the dispatcher may be before
  return *ops;
}

constexpr std::array kDevices{c10::DeviceType::CPU, c10::DeviceType::CUDA};

std::string entry_of(c10::DeviceType device, const c10::OperatorName& name) {
  return c10::toString(name) + '@' + c10::DeviceTypeName(device);
}

Replaced replaced_by(const c10::OperatorHandle& op, c10::DeviceType device) {
  ListedOps& all = listed_ops();
  const std::shared_lock<std::shared_mutex> lock(all.mutex);
  return all.replaced.at(entry_of(device, op.operator_name()));
}

bool is_traced(const at::Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  const pybind11::gil_scoped_acquire gil;
  const std::string_view name = Py_TYPE(object_of(tensor).ptr())->tp_name;
  return name == "FakeTensor" || name == "FunctionalTensor";
}

at::Tensor cast(const c10::OperatorHandle& op, const at::Tensor& tensor, at::ScalarType type,
                c10::DeviceType device) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK(!is_traced(tensor), "amp_ext.autocast: torch.compile and torch.export do not take ",
              "custom_fp16_ops and custom_fp32_ops, which list ", op.operator_name().name,
              ": compile parts without listed ops, or leave the region out of the compiled call");
  const bool casts = at::autocast::is_eligible(tensor, device) && tensor.scalar_type() != type;
  return casts ? tensor.to(type) : tensor;
}

void cast_arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack, at::ScalarType type,
                    c10::DeviceType device) {
  for (auto at = stack.end() - op.schema().arguments().size(); at != stack.end(); ++at) {
    c10::IValue& value = *at;
    if (value.isTensor()) {
      value = cast(op, value.toTensor(), type, device);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = cast(op, tensor, type, device);
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional(cast(op, *tensor, type, device)) : std::nullopt);
      value = std::move(tensors);
    }
  }
}

// Whether a region runs the op in its type as it is. Products that run on gemm have to go on to
// their own kernels.
bool is_low_anyway(const std::string& name) {
  static const std::set<std::string> names{
      "aten::linear",    "aten::mm",     "aten::bmm",          "aten::addmm",
      "aten::baddbmm",   "aten::matmul", "aten::conv2d",       "aten::einsum",
      "aten::tensordot", "aten::inner",  "aten::chain_matmul", "aten::linalg_multi_dot"};
  return names.count(name) > 0;
}

template <c10::DeviceType kDevice>
void run_listed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(kDevice);
  const std::string& name = op.operator_name().name;
  const Lists& lists = known_lists()[thread_lists.current()];
  const auto listed = lists.find(name);
  if (listed == lists.end() || (listed->second == Type::low && is_low_anyway(name))) {
    const Replaced replaced = replaced_by(op, kDevice);
    if (replaced) return replaced->callBoxed(op, keys, stack);
    return op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key),
                              stack);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const at::ScalarType type =
      listed->second == Type::fp32 ? at::kFloat : at::autocast::get_autocast_dtype(kDevice);
  cast_arguments(op, *stack, type, kDevice);
  op.callBoxed(stack);
}

// ---- registration -------------------------------------------------------------------------------

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type.rfind("Tensor", 0) == 0) return true;
  }
  return false;
}

bool is_functional(const c10::FunctionSchema& schema) {
  // (Schemas do not say that statistics of batches are written.)
  const auto aliases = [](const auto& arguments) {
    return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& a) {
      return a.alias_info() != nullptr || a.name() == "running_mean";
    });
  };
  return !aliases(schema.arguments()) && !aliases(schema.returns());
}

bool converts(const std::string& name) {
  return name == "aten::_to_copy" || name.rfind("aten::_cast_", 0) == 0 ||
         name == "aten::_autocast_to_reduced_precision" ||
         name == "aten::_autocast_to_full_precision";
}

std::vector<c10::OperatorHandle> overloads(const std::string& name) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  for (const c10::OperatorName& op : dispatcher.getAllOpNames()) {
    if (op.name != name) continue;
    const auto handle = dispatcher.findSchema(op);
    if (handle) found.push_back(*handle);
  }
  return found;
}

bool is_listable(const c10::OperatorHandle& op) {
  return takes_tensors(op.schema()) && is_functional(op.schema()) &&
         !converts(op.operator_name().name);
}

void register_kernels(ListedOps& all, const std::string& name) {
  for (const c10::OperatorHandle& op : overloads(name)) {
    if (!is_listable(op)) continue;
    const size_t colons = name.find("::");
    std::string local = name.substr(colons + 2);
    const std::string& overload = op.operator_name().overload_name;
    if (!overload.empty()) local += '.' + overload;
    for (const c10::DeviceType device : kDevices) {
      const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
      Replaced replaced;
      if (op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key))
        replaced = op.getComputedKernelForDispatchKey(key);
      all.replaced.insert_or_assign(entry_of(device, op.operator_name()), replaced);
      auto library = std::make_unique<torch::Library>(torch::Library::IMPL, name.substr(0, colons),
                                                      key, __FILE__, __LINE__);
      library->impl(
          local.c_str(),
          device == c10::DeviceType::CPU
              ? torch::CppFunction::makeFromBoxedFunction<&run_listed<c10::DeviceType::CPU>>()
              : torch::CppFunction::makeFromBoxedFunction<&run_listed<c10::DeviceType::CUDA>>());
      all.libraries.push_back(std::move(library));
    }
  }
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void list_ops(const Lists& lists) {
  ListedOps& all = listed_ops();
  {
    const std::shared_lock<std::shared_mutex> lock(all.mutex);
    if (std::all_of(lists.begin(), lists.end(),
                    [&](const auto& listed) { return all.ops.count(listed.first) > 0; }))
      return;
  }
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  const std::unique_lock<std::shared_mutex> lock(all.mutex);
  for (const auto& [name, type] : lists) {
    if (all.ops.insert(name).second) register_kernels(all, name);
  }
}

}  // namespace

std::string why_not_listable(const std::string& name) {
  const auto ops = overloads(name);
  if (ops.empty()) return "is no op";
  if (converts(name)) return "converts types itself";
  if (std::any_of(ops.begin(), ops.end(), is_listable)) return "";
  const bool writes = std::none_of(ops.begin(), ops.end(),
                                   [](const auto& op) { return is_functional(op.schema()); });
  return writes
             ? "writes to its argument or returns a view of it, which a cast copy cannot stand for"
             : "takes no tensor";
}

std::vector<std::string> listable_ops() {
  constexpr std::string_view torchs = "aten::";
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::set<std::string> names;
  for (const c10::OperatorName& op : dispatcher.getAllOpNames()) {
    if (op.name.rfind(torchs, 0) != 0) continue;
    const auto handle = dispatcher.findSchema(op);
    if (handle && is_listable(*handle)) names.insert(op.name.substr(torchs.size()));
  }
  return {names.begin(), names.end()};
}

OpListRegion enter_op_lists(const std::vector<std::string>& low_ops,
                            const std::vector<std::string>& fp32_ops) {
  Lists lists = known_lists()[thread_lists.current()];
  for (const std::string& name : low_ops) lists[name] = Type::low;
  for (const std::string& name : fp32_ops) lists[name] = Type::fp32;
  const int64_t number = known_lists().number(lists);
  list_ops(lists);
  return thread_lists.enter(number);
}

void leave_op_lists(const OpListRegion& outer) { thread_lists.leave(outer); }

void while_unlisted(const std::function<void()>& change) {
  ListedOps& all = listed_ops();
  const std::unique_lock<std::shared_mutex> lock(all.mutex);
  all.libraries.clear();
  all.replaced.clear();
  change();
  for (const std::string& name : all.ops) register_kernels(all, name);
}

}  // namespace amp_ext
