// sgd_.
#include "lists/run.h"
#include "op.h"
#include "optim/call.h"

namespace amp_ext {

void sgd_(at::Device device, const SgdArgs& args) { run(kSgd, device, &Backend::sgd, args); }

namespace {

// The arguments in the order of the schema.
struct SgdCall {
  static constexpr auto kOp = kSgd;
  static constexpr const RoleNames& kNames = kSgdNames;
  static constexpr auto launch = sgd_;
  static constexpr size_t kArguments = 17;

  explicit SgdCall(Values a)
      : lists{list_of(a[0]), list_of(a[1]), list_of(a[2]), {}, {}, list_of(a[9]), list_of(a[3])},
        options{a[4].toDouble(), a[5].toDouble(), a[6].toDouble(), a[8].toDouble(),
                a[7].toBool(),   a[10].toBool(),  a[11].toBool()},
        scalars{a[12].toOptional<at::Tensor>(), a[13].toOptional<at::Tensor>(),
                a[14].toOptional<at::Tensor>(), a[15].toOptional<at::Tensor>(),
                a[16].toOptional<double>()} {
    check_lengths(kSgd, kSgdNames, lists, {kExpAvg, kCopy, kStep});
    const bool has_params = !lists[kParam].empty(), moves = options.momentum != 0;
    TORCH_CHECK_VALUE(!has_params || lists[kExpAvg].empty() == !moves, kSgd,
                      ": momentum_buffers are for a momentum other than 0, got ",
                      lists[kExpAvg].size(), " of them with momentum = ", options.momentum);
    const bool counts = options.stochastic_rounding || (moves && options.dampening != 0);
    TORCH_CHECK_VALUE(!has_params || !counts || !lists[kStep].empty(), kSgd,
                      ": dampening and stochastic_rounding need steps, got none");
    TORCH_CHECK_VALUE(!options.nesterov || (moves && options.dampening == 0), kSgd,
                      ": nesterov needs a momentum and no dampening, got momentum = ",
                      options.momentum, ", dampening = ", options.dampening);
  }

  RoleLists lists;
  SgdOptions options;
  ScalarTensors scalars;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  define(m, "lists",
         "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[]? momentum_buffers=None, "
         "Tensor(c!)[]? steps=None, *, float lr, float momentum, float dampening, bool nesterov, "
         "float weight_decay, Tensor(d!)[]? copies=None, bool maximize=False, "
         "bool stochastic_rounding=False, Tensor? tensor_lr=None, Tensor(e!)? found_inf=None, "
         "Tensor? inv_scale=None, Tensor? norm=None, float? max_norm=None) -> ()",
         Boxed<update_op<SgdCall>>{}, Boxed<update_fake<SgdCall>>{});
  // Empty lists name no device: they come here.
  m.impl("sgd_", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                 as_function(Boxed<update_op<SgdCall>>{})));
}

}  // namespace amp_ext
