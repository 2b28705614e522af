// grad_norm.
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include "lists/lists.h"
#include "lists/run.h"
#include "op.h"

namespace amp_ext {

at::Tensor grad_norm(const GradList& grads, const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms, Others others) {
  const at::Device device = grads.device();
  Arguments arguments(grads.op(), device);
  GradNormArgs args{};
  args.grads = grads.args();
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  args.norms = arguments.write_all("norms", norms, args.grads.size);
  if (others == Others::given) arguments.check_apart_from(grads);
  const at::Tensor norm = at::empty({}, found_inf.options());
  args.norm = norm.mutable_data_ptr<float>();
  run(grads.op(), device, &Backend::grad_norm, args);
  arguments.mark_written();
  return norm;
}

namespace {

at::Tensor grad_norm_op(at::TensorList grads, at::Tensor& found_inf,
                        const std::optional<at::Tensor>& inv_scale,
                        const std::optional<at::Tensor>& norms) {
  const GradList list = checked("amp_ext::grad_norm", Access::read, grads, found_inf.device());
  return grad_norm(list, found_inf, inv_scale, norms, Others::given);
}

at::Tensor grad_norm_fake(at::TensorList grads, at::Tensor& found_inf,
                          const std::optional<at::Tensor>& inv_scale,
                          const std::optional<at::Tensor>& norms) {
  check_devices("amp_ext::grad_norm", found_inf.device(), "grads", grads, "inv_scale", inv_scale,
                "norms", norms);
  return at::empty({}, found_inf.options().dtype(at::kFloat));
}

}  // namespace

Status TorchLists::grad_norm(const GradNormArgs& args, Services& services) const {
  const TorchCall call(services);
  std::vector<at::Tensor> products = call.tensors(args.grads);
  for (at::Tensor& product : products) {
    product = widened(product);
    if (args.inv_scale) product = product * call.scalar(args.inv_scale);
  }
  call.check_finite(products, args.found_inf);
  at::Tensor norm = call.scalar(args.norm);
  const at::Tensor norms = products.empty()
                               ? at::zeros({0}, norm.options().dtype(at::kDouble))
                               : at::stack(at::_foreach_norm(products, 2, at::kDouble));
  norm.copy_(at::linalg_vector_norm(norms));
  call.scalar(args.found_inf).masked_fill_(at::isfinite(norm).logical_not(), 1);
  if (args.norms) call.flat(args.norms, DType::f32, norms.numel()).copy_(norms);
  return Status::ok;
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  define(m, "lists",
         "grad_norm(Tensor[] grads, Tensor(a!) found_inf, Tensor? inv_scale=None, *, "
         "Tensor(b!)? norms=None) -> Tensor",
         TORCH_FN(grad_norm_op), TORCH_FN(grad_norm_fake));
}

}  // namespace amp_ext
