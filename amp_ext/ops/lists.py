"""The ops on lists of gradients and weights, one launch each."""

from collections.abc import Sequence

from torch import Tensor

from amp_ext.ops._op import op

__all__ = ["unscale_", "check_finite", "grad_norm", "update_scale_", "cast_"]  # noqa: RUF022


@op
def unscale_(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    *,
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Multiplies gradients by ``inv_scale`` in place and looks for infinities and NaNs.

    With a ``norm`` it clips too: products are multiplied by ``min(1, max_norm / (norm + 1e-6))`` as
    ``torch.nn.utils.clip_grads_with_norm_`` does. That coefficient is computed on the device in
    float32, each operation rounded: the sum, its reciprocal, times ``max_norm``.

    Args:
        grads: the gradients. Views with holes are fine, also interleaved ones, and negated views;
            memory that overlaps, within a tensor or between two, is an error. (Between two, a view
            with holes counts by its first element alone.)
        found_inf: float32, 1 element. Set to 1.0 if a product, rounded to its gradient's dtype, is
            not finite; never cleared.
        inv_scale: float32, 1 element. A factor of exactly 1 leaves every bit as it is.
        norm: float32, 1 element: the L2 norm of ``grads * inv_scale``, as :func:`grad_norm` returns
            it. Not finite, it sets ``found_inf`` to 1.0. Then, and when both factors are exactly 1,
            gradients are not changed; ``found_inf`` itself is not looked at.
        max_norm: what the norm is clipped to, rounded to float32; None stands for no limit.

    float16 and bfloat16 are multiplied in float32, by one factor after the other, and rounded to
    their dtype at the end; float64 is multiplied in float64.

    Raises:
        ValueError: ``max_norm`` is negative or NaN, or is given without a ``norm``.
    """


@op
def check_finite(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    """Looks for infinities and NaNs without writing to the gradients.

    Args:
        grads: the gradients.
        found_inf: float32, 1 element. Set to 1.0 if an element is not finite; never cleared.
    """


@op
def grad_norm(
    grads: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor | None = None,
    *,
    norms: Tensor | None = None,
) -> Tensor:
    """The L2 norm of ``grads * inv_scale`` over the whole list, and the check, in one read.

    Args:
        grads: the gradients; they are not written.
        found_inf: float32, 1 element. Set to 1.0 if a product or the norm is not finite; never
            cleared.
        inv_scale: float32, 1 element; 1 when it is None. The product is float32, or float64 for
            float64 gradients.
        norms: float32, shape [len(grads)], contiguous. Receives the norm of each tensor alone.

    Returns:
        The norm, a 0-dim float32 tensor on the gradients' device: sqrt(sum of squares), squared
        and summed in float64 in a fixed order, so that it is bitwise the same in every run and for
        any number of threads. Not finite when a gradient is not.
    """


@op
def cast_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Copies each input into the output of the same index, rounded to the output's dtype.

    One launch on a GPU for any number of tensors and any mix of dtypes. Not differentiable: weights
    that require gradients are refreshed under ``torch.no_grad()``.

    Args:
        outputs: strided tensors on one device, of any mix of float16, bfloat16, float32 and
            float64; any shape, alignment and number. Views with holes are fine.
        inputs: as many, likewise, each of the shape of its output and on the same device. They may
            be expanded.

    The result is that of ``output.copy_(input)``: rounded to nearest even, subnormal numbers kept,
    infinite beyond the range of the output's dtype; from float64 to float16 and bfloat16, as there,
    rounded to float32 first. Equal dtypes are copied bit by bit, NaN payloads too; otherwise a NaN
    becomes some NaN. A tensor given as its own input is left alone.

    Raises:
        RuntimeError: lists of different length, shapes or devices that differ, an output whose
            elements share memory or that is a negated view, two outputs that overlap, an input
            whose memory, from its first element to its last, overlaps that of an output.
        NotImplementedError: a tensor that is not strided, or another dtype than the above.
    """


@op
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
    skipped_steps: Tensor | None = None,
    next_step: Tensor | None = None,
) -> None:
    """Moves the loss scale: backoff after an overflow, growth after enough steps without one.

    A step overflowed when any of ``found_infs`` is not 0. Factors are applied in float64 and
    rounded to float32 once, as ``torch._amp_update_scale_`` does, so that scales are bitwise equal.

    Args:
        scale: float32, 1 element, in place.
        growth_tracker: int32, 1 element, in place: steps without overflow since the last change.
        found_infs: float32 tensors of 1 element, at least one.
        growth_factor: multiplies the scale once the tracker has reached ``growth_interval``, unless
            the result is infinite.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: number of steps.
        min_scale: a backoff stops here; the smallest normal float32 (2**-126) when None.
        max_scale: a growth stops here; no limit when None.
        hysteresis: how many consecutive overflows it takes before the scale backs off; each
            overflow that follows backs off again.
        hysteresis_tracker: int32, 1 element, in place, needed when ``hysteresis`` is above 1:
            starts at ``hysteresis``, counts overflows down, is reset by a step without one.
        skipped_steps: int64, 1 element, in place: counts overflows.
        next_step: float32, shape [3], contiguous, in place: what the next step reads. Receives 1 /
            ``scale`` as it is now; 0, the next step's found_inf; and what that was before. The
            found_inf may be one of ``found_infs``.
    """
