// sgd_.
#include "op.h"
#include "optim/call.h"

namespace amp_ext {

namespace {

void sgd_op(at::TensorList params, at::TensorList grads, OptionalTensors momentum_buffers,
            OptionalTensors steps, double lr, double momentum, double dampening, bool nesterov,
            double weight_decay, OptionalTensors copies, bool maximize, bool stochastic_rounding,
            const OptionalTensor& tensor_lr, const OptionalTensor& found_inf,
            const OptionalTensor& inv_scale, const OptionalTensor& norm,
            std::optional<double> max_norm) {
  const at::TensorList buffers = momentum_buffers.value_or(at::TensorList());
  const UpdateCall<Sgd> call{{params,
                              grads,
                              buffers,
                              {},
                              {},
                              copies.value_or(at::TensorList()),
                              steps.value_or(at::TensorList())},
                             {tensor_lr, found_inf, inv_scale, norm, max_norm}};
  call.check_lengths({kExpAvg, kCopy, kStep});
  const bool has_params = !params.empty(), moves = momentum != 0;
  TORCH_CHECK_VALUE(!has_params || buffers.empty() == !moves, Sgd::kOp,
                    ": momentum_buffers are for a momentum other than 0, got ", buffers.size(),
                    " of them with momentum = ", momentum);
  const bool counts = stochastic_rounding || (moves && dampening != 0);
  TORCH_CHECK_VALUE(!has_params || !counts || !call.lists[kStep].empty(), Sgd::kOp,
                    ": dampening and stochastic_rounding need steps, got none");
  TORCH_CHECK_VALUE(!nesterov || (moves && dampening == 0), Sgd::kOp,
                    ": nesterov needs a momentum and no dampening, got momentum = ", momentum,
                    ", dampening = ", dampening);
  call.run({lr, momentum, dampening, weight_decay, nesterov, maximize, stochastic_rounding});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "sgd_", TORCH_FN(sgd_op)); }

}  // namespace amp_ext
