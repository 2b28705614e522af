// adam_.
#include "op.h"
#include "optim/call.h"

namespace amp_ext {

namespace {

void adam_op(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
             at::TensorList exp_avg_sqs, at::TensorList steps, double lr, double beta1,
             double beta2, double eps, double weight_decay, bool decoupled,
             OptionalTensors max_exp_avg_sqs, OptionalTensors copies, bool maximize,
             bool stochastic_rounding, const OptionalTensor& tensor_lr,
             const OptionalTensor& found_inf, const OptionalTensor& inv_scale,
             const OptionalTensor& norm, std::optional<double> max_norm) {
  const UpdateCall<Adam> call{
      {params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs.value_or(at::TensorList()),
       copies.value_or(at::TensorList()), steps},
      {tensor_lr, found_inf, inv_scale, norm, max_norm}};
  call.check_lengths({kMaxExpAvgSq, kCopy});
  for (const auto& [name, beta] : {std::pair("beta1", beta1), std::pair("beta2", beta2)})
    TORCH_CHECK_VALUE(beta >= 0 && beta < 1, Adam::kOp, ": ", name,
                      " must be at least 0 and below 1, got ", beta);
  call.run({lr, beta1, beta2, eps, weight_decay, decoupled, maximize, stochastic_rounding});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "adam_", TORCH_FN(adam_op)); }

}  // namespace amp_ext
