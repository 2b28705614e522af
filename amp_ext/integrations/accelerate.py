"""Put the scaler into Accelerate: ``with_scaler(Accelerator(mixed_precision="fp16"))``."""

from collections.abc import Callable, Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from amp_ext.integrations import Guard, check_alone, has_gradients_of
from amp_ext.scaler import GradScaler
from amp_ext.scaler.loss_scale import Arriving

__all__ = ["with_scaler"]


def with_scaler(accelerator: Accelerator, **options: Any) -> Accelerator:
    """Put :class:`amp_ext.GradScaler` into an accelerator, and return it.

    ``clip_grad_norm_`` becomes the scaler's, and ``step_was_skipped`` is right for optimizers that
    skip in their own step. The scaler of "fp16" also has the options of ``GradScalerKwargs``. The
    scaler of any other precision scales nothing, and skips steps with gradients that are not
    finite.

    Args:
        accelerator: an accelerator that has prepared no optimizer.
        options: options of :class:`amp_ext.GradScaler`.

    Raises:
        ValueError: ``accelerator`` has prepared an optimizer; is for "fp16" on a CPU, where it does
            not scale; or scales by its own means, as for FSDP and DeepSpeed.
    """
    engine, fp16 = accelerator.distributed_type.value, accelerator.mixed_precision == "fp16"
    for is_refused, expected in (
        (accelerator._optimizers, "one that has prepared no optimizer yet"),
        (engine != "NO" and not engine.startswith("MULTI_"), f"no {engine}, which scales itself"),
        (fp16 and accelerator.scaler is None, f'a GPU or "bf16", got {accelerator.device}'),
    ):
        if is_refused:
            raise ValueError(f"with_scaler: accelerator: expected {expected}.")
    handler, device = accelerator.scaler_handler, accelerator.device.type
    if fp16:
        scaler = GradScaler(device, **(handler.to_kwargs() if handler else {}) | options)
    else:
        scaler = Guard(device, init_scale=1.0, dynamic=False, **options)
    accelerator.scaler = scaler
    kind = type(accelerator)  # may be the user's
    accelerator.__class__ = type(kind.__name__, (_ClipsByScaler, kind), {})
    return accelerator


class _ClipsByScaler:
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        parameters = list(parameters)
        for prepared in self._optimizers if self.sync_gradients and norm_type == 2 else ():
            if has_gradients_of(prepared.optimizer, parameters):
                return self.scaler.clip_grad_norm_(prepared.optimizer, max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Optimizer:
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if prepared.scaler is self.scaler:
            prepared.__class__ = _Optimizer
        return prepared


class _Optimizer(AcceleratedOptimizer):
    _skipped: Arriving | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        ends = self.gradient_state.sync_gradients
        if ends:
            check_alone(self.scaler, self.optimizer)
            # The scaler would wait for the device before a step with any other wrapper.
            self._optimizer_patched_step_method.__wrapped__ = self._optimizer_original_step_method
        super().step(closure)
        if ends:
            self._skipped = self.scaler._skip_of(self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        """Synchronises with the device."""
        self.scaler._check_skips()
        return super().step_was_skipped or (self._skipped is not None and self._skipped.read() != 0)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_skipped": None}
