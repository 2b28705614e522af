"""One script through amp_ext.GradScaler and torch.amp.GradScaler, and the two outcomes compared."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import amp_ext
import amp_ext.optim
import reference
from cases import bits

ScalerClass = type[torch.amp.GradScaler]
OURS: ScalerClass = amp_ext.GradScaler
THEIRS: ScalerClass = torch.amp.GradScaler

CUDA = ["cuda"] if torch.cuda.is_available() and amp_ext._C.cuda_built() else []
DEVICES = ["cpu", *CUDA]

# Errors of torch with a longer text here that helps.
SAYS_MORE = (
    "Attempting to unscale FP16 gradients.",
    "No inf checks were recorded for this optimizer.",
)


def plain(value: Any) -> Any:
    """Return `value` with tensors as (dtype, shape, bit patterns), so that == compares everything.

    NaNs of any payload count as equal.
    """
    if isinstance(value, Tensor):
        if value.is_sparse:
            return "sparse", value.is_coalesced(), plain(value._indices()), plain(value._values())
        value = torch.where(value.isnan(), torch.nan, value) if value.is_floating_point() else value
        return str(value.dtype), tuple(value.shape), bits(value).tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def outcome(script: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the script's result, or the type and text of torch's error."""
    try:
        return "returned", plain(script())
    except Exception as error:  # a test compares it
        said = str(error)
        torchs = [sentence for sentence in SAYS_MORE if said.startswith(sentence)]
        return "raised", type(error), *(torchs or [said])


def same_outcome(script: Callable[[ScalerClass], Any]) -> tuple[Any, ...]:
    """Run `script` with both classes from the same random state; assert and return one outcome."""
    state = torch.get_rng_state()
    theirs = outcome(lambda: script(THEIRS))
    torch.set_rng_state(state)
    ours = outcome(lambda: script(OURS))
    assert ours == theirs
    return ours


def leaf(grad: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Return a parameter of ones that has this gradient."""
    grad = torch.as_tensor(grad, dtype=dtype, device=device)
    param = torch.ones_like(grad)
    param.grad = grad
    return param


def sparse_leaf(dtype: torch.dtype, values: Any = (1.0, 2.0, 4.0)) -> Tensor:
    """Return a parameter with a sparse gradient that is not coalesced."""
    param = torch.ones(5, dtype=dtype)
    indices = [[0, 2, 2]]
    param.grad = torch.sparse_coo_tensor(indices, values, (5,), dtype=dtype)
    return param


class Wrapped(Tensor):
    """A tensor subclass around a plain tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, args)
        result = func(*unwrapped, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapped, result)


def sgd(*params: Tensor) -> Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def started(scaler_class: ScalerClass, scale: float = 4.0, **options: Any) -> Any:
    """Return a scaler with its scale on the device, as after the first loss of training."""
    device = options.pop("device", "cpu")
    scaler = scaler_class(device, init_scale=scale, **options)
    scaler.scale(torch.ones((), device=device))
    return scaler


def finish(scaler: Any, *optimizers: Optimizer) -> None:
    """Step the optimizers, and update the scale."""
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


class StepsByScalars(amp_ext.optim.SGD):
    """Unscale, clip and skip in plain torch, without momentum.

    Attributes:
        seen: the last StepScalars.
    """

    def _why_not(self) -> None:
        """Serve every dtype."""

    @torch.no_grad()
    def _launch(self) -> None:
        self.seen = found_inf, inv_scale, norm, max_norm = self._step_scalars
        if found_inf != 0:
            return
        for param in params(self):
            if param.grad is not None:
                grad = param.grad.clone() if inv_scale is None else param.grad * inv_scale
                if norm is not None:
                    grad *= reference.clip_coefficient(norm, max_norm)
                param.add_(grad, alpha=-self.param_groups[0]["lr"])


KINDS: dict[str, Callable[..., Optimizer]] = {
    "host": torch.optim.SGD,
    "fused": partial(torch.optim.SGD, fused=True),
    "scalars": StepsByScalars,
    "amp_ext.optim": amp_ext.optim.SGD,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def grads(optimizer: Optimizer) -> list[Tensor | None]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def state_of(scaler: Any, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the visible state of a scaler and its optimizers as plain values.

    The states of a step have more keys than torch's.
    """
    optimizers, keys = list(optimizers), ("stage", "found_inf_per_device")
    states = [scaler._per_optimizer_states.get(id(optimizer)) for optimizer in optimizers]
    seen = {
        "scale": scaler.get_scale(),
        "tracker": scaler._get_growth_tracker(),
        "states": [state and {key: state[key] for key in keys} for state in states],
        "params": [params(optimizer) for optimizer in optimizers],
        "grads": [grads(optimizer) for optimizer in optimizers],
        "optimizers": [list(optimizer.state.values()) for optimizer in optimizers],
    }
    return plain(seen)


clip_as_torch = torch.nn.utils.clip_grad_norm_
Clip = Callable[[Any, Optimizer, float], Tensor]


def at_once(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    return scaler.clip_grad_norm_(optimizer, max_norm)


def after_unscale(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    scaler.unscale_(optimizer)
    return scaler.clip_grad_norm_(optimizer, max_norm)


def torchs_recipe(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    scaler.unscale_(optimizer)
    return clip_as_torch(params(optimizer), max_norm)


def by_parameters(scaler: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
    return scaler.clip_grad_norm_(iter(params(optimizer)), max_norm)


with_parameters = pytest.mark.parametrize("clip", [at_once, after_unscale, by_parameters])
