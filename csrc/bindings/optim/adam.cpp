// adam_.
#include "lists/run.h"
#include "op.h"
#include "optim/call.h"

namespace amp_ext {

void adam_(at::Device device, const AdamArgs& args) { run(kAdam, device, &Backend::adam, args); }

namespace {

// The arguments in the order of the schema.
struct AdamCall {
  static constexpr auto kOp = kAdam;
  static constexpr const RoleNames& kNames = kAdamNames;
  static constexpr auto launch = adam_;
  static constexpr size_t kArguments = 20;

  explicit AdamCall(Values a)
      : lists{list_of(a[0]),  list_of(a[1]),  list_of(a[2]), list_of(a[3]),
              list_of(a[11]), list_of(a[12]), list_of(a[4])},
        options{a[5].toDouble(), a[6].toDouble(), a[7].toDouble(), a[8].toDouble(),
                a[9].toDouble(), a[10].toBool(),  a[13].toBool(),  a[14].toBool()},
        scalars{a[15].toOptional<at::Tensor>(), a[16].toOptional<at::Tensor>(),
                a[17].toOptional<at::Tensor>(), a[18].toOptional<at::Tensor>(),
                a[19].toOptional<double>()} {
    check_lengths(kAdam, kAdamNames, lists, {kMaxExpAvgSq, kCopy});
    for (const double beta : {options.beta1, options.beta2}) {
      TORCH_CHECK_VALUE(beta >= 0 && beta < 1, kAdam, ": ",
                        beta == options.beta1 ? "beta1" : "beta2",
                        " must be at least 0 and below 1, got ", beta);
    }
  }

  RoleLists lists;
  AdamOptions options;
  ScalarTensors scalars;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  define(m, "lists",
         "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
         "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, *, float lr, float beta1, float beta2, "
         "float eps, float weight_decay, bool decoupled, Tensor(e!)[]? max_exp_avg_sqs=None, "
         "Tensor(f!)[]? copies=None, bool maximize=False, bool stochastic_rounding=False, "
         "Tensor? tensor_lr=None, Tensor(g!)? found_inf=None, Tensor? inv_scale=None, "
         "Tensor? norm=None, float? max_norm=None) -> ()",
         Boxed<update_op<AdamCall>>{}, Boxed<update_fake<AdamCall>>{});
  // Empty lists name no device: they come here.
  m.impl("adam_", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                  as_function(Boxed<update_op<AdamCall>>{})));
}

}  // namespace amp_ext
