"""The updates of parameters by optimizers, one launch each."""

from collections.abc import Sequence

from torch import Tensor

from amp_ext.ops._op import op

__all__ = ["adam_", "sgd_"]


@op
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    copies: Sequence[Tensor] | None = None,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    tensor_lr: Tensor | None = None,
    found_inf: Tensor | None = None,
    inv_scale: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """One update of every parameter by Adam, AdamW or AMSGrad, as in ``torch.optim``.

    The gradient that is used is ``grad * inv_scale``, clipped to ``max_norm`` as :func:`unscale_`
    clips, and not rounded to the gradient's dtype before it is used; the gradients themselves are
    only read. The formulas are those of ``torch/optim/adam.py``, in float32 without fused
    multiply-adds; bias corrections are computed in float64, once for each tensor. Results are
    bitwise the same on every backend.

    Args:
        params: float32, float16 or bfloat16, dense in memory, in any order of dimensions.
        grads: as many, of the same shapes; float32, float16 or bfloat16. One whose elements lie in
            another order than its parameter's is copied first.
        exp_avgs: the first moments, with the shapes and strides of params; float32, bfloat16 or
            float16.
        exp_avg_sqs: the second moments, likewise, of dtypes of their own.
        steps: float32 tensors of 1 element: how many updates the parameter has had. Advanced by 1.
        lr: the learning rate, rounded to float32 after division by the bias correction.
        beta1: decay rate of the first moments, at least 0 and below 1.
        beta2: that of the second moments.
        eps: added to the denominator.
        weight_decay: a factor.
        decoupled: parameters are multiplied by ``1 - lr * weight_decay`` first, as by AdamW;
            otherwise ``weight_decay * param`` is added to the gradient.
        max_exp_avg_sqs: the largest second moments so far, of the dtypes of exp_avg_sqs: AMSGrad.
        copies: float16 or bfloat16 tensors with the shapes and strides of params, which are
            float32: each receives the updated parameter, rounded to nearest.
        maximize: ascend.
        stochastic_rounding: round bfloat16 parameters and moments up or down at random, with the
            probabilities that make the expected result exact. The random bits are a function of the
            step, the index of the tensor and that of the element.
        tensor_lr: float32, 1 element: replaces ``lr``.
        found_inf: float32, 1 element. Not 0: nothing at all is written. Set to 1.0 if the norm is
            not finite.
        inv_scale: float32, 1 element; 1 when it is None.
        norm: float32, 1 element: the L2 norm of ``grads * inv_scale``. Not finite: nothing but
            ``found_inf`` is written.
        max_norm: what the norm is clipped to; None stands for no limit.

    Raises:
        ValueError: a beta is not in its range; ``max_norm`` is negative or NaN, or is given without
            a ``norm``.
        RuntimeError: lists of different length, shapes, strides or devices that differ; what is
            written has holes, is a negated view or overlaps anything else in memory.
    """


@op
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None = None,
    steps: Sequence[Tensor] | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    copies: Sequence[Tensor] | None = None,
    maximize: bool = False,
    stochastic_rounding: bool = False,
    tensor_lr: Tensor | None = None,
    found_inf: Tensor | None = None,
    inv_scale: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """One update of every parameter by gradient descent, as ``torch.optim.SGD`` does it.

    Formulas are those of ``torch/optim/sgd.py``. All that is not said here is as in :func:`adam_`.

    Args:
        params: float32, float16 or bfloat16.
        grads: as many.
        momentum_buffers: with a momentum, and only then; the shapes and strides of params; float32,
            bfloat16 or float16.
        steps: float32 tensors of 1 element: how many updates the parameter has had, advanced by 1.
            Where it is 0 the buffer is set to the gradient, whatever the dampening; without steps
            buffers of zeros give the same if ``dampening`` is 0. Needed with ``dampening`` and with
            ``stochastic_rounding``.
        lr: the learning rate.
        momentum: decay rate of the buffers.
        dampening: the gradient enters the buffer with a factor of ``1 - dampening``.
        nesterov: Nesterov's momentum; needs a momentum and a ``dampening`` of 0.
        weight_decay: ``weight_decay * param`` is added to the gradient.
        copies: as in :func:`adam_`, and so are all that follow.

    Raises:
        ValueError: options that exclude each other, or what they need is missing.
        RuntimeError: as in :func:`adam_`.
    """
