// The updates by torch's own ops, to the bit as the kernels compute them. No op waits for a device.
#include <ATen/ops/arange.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "lists/run.h"
#include "optim/optim.h"

namespace amp_ext {
namespace {

// mixed() of optim.h, of 32-bit numbers in int64.
at::Tensor mixed(at::Tensor x) {
  constexpr int64_t kMask = 0xffffffff;
  x = x & kMask;
  x = (x.bitwise_xor(x.bitwise_right_shift(16)) * 0x85ebca6b) & kMask;
  x = (x.bitwise_xor(x.bitwise_right_shift(13)) * 0xc2b2ae35) & kMask;
  return x.bitwise_xor(x.bitwise_right_shift(16));
}

// What the updates of a call have in common.
class TorchUpdate {
 public:
  TorchUpdate(Services& services, const UpdateList& list, const StepScalars& s, double lr,
              bool maximize, bool by_chance)
      : call_(services), list_(list), by_chance_(by_chance) {
    const auto options = at::TensorOptions(at::kFloat).device(device_of(services));
    const at::Tensor one = at::full({}, 1.0f, options);
    at::Tensor coefficient = one;
    if (s.norm) {
      const at::Tensor norm = call_.scalar(s.norm);
      skip_ = at::isfinite(norm).logical_not();
      coefficient = at::clamp((norm + 1e-6).reciprocal() * s.max_norm, std::nullopt, 1);
    }
    if (s.found_inf) {
      const at::Tensor found_inf = call_.scalar(s.found_inf);
      if (s.norm) found_inf.masked_fill_(skip_, 1);
      skip_ = found_inf.ne(0);
    }
    inv_scale_ = s.inv_scale ? call_.scalar(s.inv_scale) : one;
    coefficient_ = maximize ? coefficient.neg() : coefficient;
    lr_ = s.lr ? call_.scalar(s.lr).to(at::kDouble) : at::full({}, lr, options.dtype(at::kDouble));
    if (!has_steps(list)) {
      numbers_ = at::full({list.size}, 0, options.dtype(at::kLong));
      return;
    }
    std::vector<at::Tensor> steps;
    for (int64_t i = 0; i < list.size; ++i) steps.push_back(call_.scalar(list.refs[i].step));
    const at::Tensor all = at::stack(steps);
    numbers_ = at::where(all > 0, at::clamp(all, 0, 1 << 30).to(at::kLong) + 1, 1);
  }

  const at::Tensor& lr() const { return lr_; }
  // Of the update of each tensor.
  const at::Tensor& numbers() const { return numbers_; }

  // base^number of each tensor's update, fp64.
  at::Tensor powers(double base) const {
    at::Tensor result = at::ones_like(numbers_, at::kDouble);
    for (int bit = 0; bit < 31; ++bit, base *= base)
      result =
          at::where(numbers_.bitwise_right_shift(bit).bitwise_and(1).ne(0), result * base, result);
    return result;
  }

  at::Tensor flat(const void* data, DType dtype, int64_t i) const {
    return call_.flat(data, dtype, list_.refs[i].numel);
  }

  at::Tensor gradient(int64_t i, const at::Tensor& param, double l2) const {
    const UpdateRef& u = list_.refs[i];
    const at::Tensor grad = flat(u.grad, u.grad_dtype, i).to(at::kFloat);
    const at::Tensor unscaled = grad * inv_scale_ * coefficient_;
    return static_cast<float>(l2) == 0 ? unscaled : unscaled + param * l2;
  }

  // Unless the step is skipped.
  void write(const at::Tensor& to, const at::Tensor& value) const {
    to.copy_(skip_.defined() ? at::where(skip_, to, value) : value);
  }

  void write_state(int64_t i, const at::Tensor& to, const at::Tensor& value, int pair,
                   int shift) const {
    write(to, by_chance_ && to.scalar_type() == at::kBFloat16 ? rounded(i, value, pair, shift)
                                                              : value.to(to.scalar_type()));
  }

  void write_param(int64_t i, const at::Tensor& param, const at::Tensor& value) const {
    const UpdateRef& u = list_.refs[i];
    write_state(i, param, value, 0, 0);
    if (u.copy) {
      const at::Tensor copy = flat(u.copy, u.copy_dtype, i);
      write(copy, value.to(copy.scalar_type()));
    }
    if (u.step) {
      const at::Tensor step = call_.scalar(u.step);
      write(step, step + 1);
    }
  }

 private:
  // To bf16, by chance.
  at::Tensor rounded(int64_t i, const at::Tensor& value, int pair, int shift) const {
    const at::Tensor index = at::arange(value.numel(), numbers_.options());
    const at::Tensor chunk = index.floor_divide(kChunkElements);
    const at::Tensor place = ((index - chunk * kChunkElements) * 2 + pair) * 0x9e3779b9;
    const at::Tensor key = mixed(mixed(mixed(numbers_[i]) + i) + chunk);
    const at::Tensor random_bits =
        mixed(key + place).bitwise_right_shift(shift).bitwise_and(0xffff);
    const at::Tensor bits = value.contiguous().view(at::kInt).to(at::kLong).bitwise_and(0xffffffff);
    const at::Tensor upper = (bits + random_bits).bitwise_right_shift(16);
    const at::Tensor pattern = at::where(upper < 0x8000, upper, upper - 0x10000).to(at::kShort);
    return at::where(at::isfinite(value), pattern.view(at::kBFloat16), value.to(at::kBFloat16));
  }

  TorchCall call_;
  const UpdateList& list_;
  bool by_chance_;
  at::Tensor skip_;  // undefined where no step is skipped
  at::Tensor inv_scale_, coefficient_, lr_, numbers_;
};

}  // namespace

Status TorchLists::adam(const AdamArgs& args, Services& services) const {
  const AdamOptions& o = args.options;
  const TorchUpdate update(services, args.list, args.scalars, o.lr, o.maximize,
                           o.stochastic_rounding);
  const at::Tensor inv_roots = (1 - update.powers(o.beta2)).sqrt().reciprocal().to(at::kFloat);
  const at::Tensor step_sizes = (update.lr() / (1 - update.powers(o.beta1))).to(at::kFloat);
  const at::Tensor keep = (1 - update.lr() * (o.decoupled ? o.weight_decay : 0)).to(at::kFloat);
  for (int64_t i = 0; i < args.list.size; ++i) {
    const UpdateRef& u = args.list.refs[i];
    const at::Tensor param = update.flat(u.param, u.param_dtype, i), p = param.to(at::kFloat);
    const at::Tensor exp_avg = update.flat(u.exp_avg, u.exp_avg_dtype, i);
    const at::Tensor exp_avg_sq = update.flat(u.exp_avg_sq, u.exp_avg_sq_dtype, i);
    const at::Tensor g = update.gradient(i, p, o.decoupled ? 0 : o.weight_decay);
    const at::Tensor first = exp_avg.to(at::kFloat) * o.beta1 + g * (1 - o.beta1);
    at::Tensor second = exp_avg_sq.to(at::kFloat) * o.beta2 + g * (1 - o.beta2) * g;
    update.write_state(i, exp_avg, first, 0, 16);
    update.write_state(i, exp_avg_sq, second, 1, 0);
    if (u.max_exp_avg_sq) {
      const at::Tensor largest = update.flat(u.max_exp_avg_sq, u.exp_avg_sq_dtype, i);
      second = at::maximum(largest.to(at::kFloat), second);
      update.write_state(i, largest, second, 1, 16);
    }
    // A root in fp32 may be off by one unit.
    const at::Tensor root = second.to(at::kDouble).sqrt().to(at::kFloat);
    const at::Tensor ratio = first / (root * inv_roots[i] + o.eps);
    update.write_param(i, param, p * keep - step_sizes[i] * ratio);
  }
  return Status::ok;
}

Status TorchLists::sgd(const SgdArgs& args, Services& services) const {
  const SgdOptions& o = args.options;
  const TorchUpdate update(services, args.list, args.scalars, o.lr, o.maximize,
                           o.stochastic_rounding);
  const at::Tensor lr = update.lr().to(at::kFloat), is_first = update.numbers().eq(1);
  for (int64_t i = 0; i < args.list.size; ++i) {
    const UpdateRef& u = args.list.refs[i];
    const at::Tensor param = update.flat(u.param, u.param_dtype, i), p = param.to(at::kFloat);
    at::Tensor g = update.gradient(i, p, o.weight_decay);
    if (u.exp_avg) {
      const at::Tensor buffer = update.flat(u.exp_avg, u.exp_avg_dtype, i);
      const at::Tensor moved = buffer.to(at::kFloat) * o.momentum + g * (1 - o.dampening);
      const at::Tensor momentum = at::where(is_first[i], g, moved);
      update.write_state(i, buffer, momentum, 0, 16);
      g = o.nesterov ? g + momentum * o.momentum : momentum;
    }
    update.write_param(i, param, p - lr * g);
  }
  return Status::ok;
}

}  // namespace amp_ext
