// cast_.
#include "backends/triton.h"
#include "lists/cast_pairs.h"
#include "lists/lists.h"
#include "lists/run.h"
#include "op.h"

namespace amp_ext {
namespace {

void cast_op(at::TensorList outputs, at::TensorList inputs) {
  const size_t n = outputs.size();
  check_cast_lengths(n, inputs.size());
  if (n == 0) return;
  const at::Device device = outputs[0].device();
  CastPairs pairs(device);
  pairs.reserve(n);
  for (size_t i = 0; i < n; ++i) pairs.add(outputs[i], inputs[i]);
  pairs.close();
  run(kCast, device, &Backend::cast, CastArgs{pairs.args()});
  pairs.finish_writes();
}

void cast_fake(at::TensorList outputs, at::TensorList inputs) {
  check_cast_lengths(outputs.size(), inputs.size());
  if (outputs.empty()) return;
  check_devices(kCast, outputs[0].device(), "outputs", outputs, "inputs", inputs);
  for (size_t i = 0; i < outputs.size(); ++i)
    check_cast_shapes(i, outputs[i].sym_sizes(), inputs[i].sym_sizes());
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
  static TritonFunction function("lists.cast", "cast_");
  return launch_list(function, a.casts, services, false);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  implement(m, "cast_", TORCH_FN(cast_op), TORCH_FN(cast_fake));
  // Empty lists name no device: they come here.
  m.impl("cast_", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(cast_op)));
}

}  // namespace amp_ext
