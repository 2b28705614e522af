"""Replay a whole training step as one CUDA graph."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

__all__ = ["make_graphed_step"]

_BY_VALUE = (bool, int, float, str, tuple)
_version = attrgetter("_version")
# torch's allocator goes on reading captures that CUDA has ended with an error.
_abandoned: list[torch.cuda.CUDAGraph] = []

_Entry = tuple[str, Callable[[Any], Any], Any, Any]
"""A name in errors, a function that reads an entry, its argument, and the result."""


def make_graphed_step(
    step_fn: Callable[..., Any],
    *,
    modules: nn.Module | Iterable[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    warmup: int = 3,
    pool: Any = None,
) -> "GraphedStep":
    """Return a function that replays a training step as one CUDA graph.

    Every call is one step. The first ``warmup`` calls run ``step_fn``. The next call captures
    ``step_fn``, without computing anything, and replays the capture; so do all later calls::

        step = make_graphed_step(step_fn, modules=model, optimizers=optimizer, scaler=scaler)
        for inputs, targets in batches:
            loss = step(inputs, targets)
            scheduler.step()

    Arguments are tensors and constants, in lists, tuples and dicts. Results are detached copies.
    Copies from pinned memory do not wait: do not overwrite such memory. Each call clears the
    gradients first, and leaves the step's gradients in ``.grad``. docs/graphs.md lists everything
    that a replay reads anew, refuses or cannot see.

    Args:
        step_fn: one training step. It neither waits for the device nor clears gradients.
        modules: the modules that the step trains or evaluates.
        optimizers: the optimizers that the step calls, with parameters on one device. They are of
            :mod:`amp_ext.optim`, or of torch with ``capturable=True``, with a scaler also
            ``fused=True``.
        scaler: the scaler that the step uses.
        warmup: the number of steps before the capture. They make states and kernels.
            DistributedDataParallel needs at least 11, as torch's documentation says.
        pool: a memory pool, as for ``torch.cuda.graph``.

    Raises:
        ValueError: ``optimizers`` have parameters on several devices, or none.
    """
    modules = [modules] if isinstance(modules, nn.Module) else list(modules)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    devices = {p.device for o in optimizers for g in o.param_groups for p in g["params"]}
    if len(devices) != 1:
        got = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(
            f"make_graphed_step: optimizers: expected parameters on one device, got {got}."
        )
    return GraphedStep(step_fn, modules, optimizers, scaler, warmup, pool, devices.pop())


@dataclass(eq=False, repr=False)
class GraphedStep:
    """The result of :func:`make_graphed_step`, called with the arguments of ``step_fn``.

    Attributes:
        graph: the ``torch.cuda.CUDAGraph``; None before the capture, and on other devices.
    """

    _step_fn: Callable[..., Any]
    _modules: list[nn.Module]
    _optimizers: list[Optimizer]
    _scaler: torch.amp.GradScaler | None
    _warmup: int
    _pool: Any
    _device: torch.device
    graph: torch.cuda.CUDAGraph | None = None

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._entries: list[_Entry] | None = None
        self._lr_tensors: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = self._flattened(args, kwargs)
        arguments = [_kind(leaf) for leaf in leaves], spec
        if self._warmup > 0:
            results = self.eager(*args, **kwargs)
            self._warmup -= 1
            return results
        if self._entries is None:
            self._capture(leaves, spec)
            self._arguments = arguments
        if self._arguments != arguments:
            expected, got = (tree_unflatten(*kinds) for kinds in (self._arguments, arguments))
            raise ValueError(
                f"make_graphed_step: arguments: expected the captured {expected}, got {got}. Call "
                ".eager() for a step of its own, or make another graphed step."
            )
        _refuse_change(self._entries, "since the capture")
        if getattr(self._scaler, "_numbers", None) is not None:
            self._scaler._step_numbers()  # the scale may have been written
        if self.graph is None:
            return self.eager(*args, **kwargs)
        for leaf, static in zip(leaves, self._inputs, strict=True):
            if isinstance(static, Tensor) and leaf is not static:
                static.copy_(leaf, non_blocking=True)
        lrs = [float(group["lr"]) for group in self._lr_groups]
        if lrs != self._lrs:  # two launches for any number of groups
            torch._foreach_zero_(self._lr_tensors)
            torch._foreach_add_(self._lr_tensors, lrs)
            self._lrs = lrs
        self.graph.replay()
        for param, grad in self._grads:
            if param.grad is not grad:
                param.grad = grad
        if self._scaler is not None:
            vars(self._scaler).update(self._last_step)
        for optimizer in self._optimizers:
            for hook in optimizer._optimizer_step_post_hooks.values():
                if getattr(hook, "_counts_steps", False):
                    hook(optimizer, (), {})
        return tree_map_only(Tensor, torch.clone, self._results)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step without the graph, for example with a smaller last batch.

        The step works on the same parameters, states and scale. The next call may replay again.
        """
        leaves, spec = self._flattened(args, kwargs)
        self._clear_grads()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            leaves = [
                leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
            results = tree_map_only(Tensor, torch.clone, self._run(leaves, spec))
        if self._stream is not None:
            current.wait_stream(self._stream)
        return results

    def _flattened(self, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec]:
        if torch.is_autocast_enabled(self._device.type):
            raise RuntimeError(
                "make_graphed_step: a step within an autocast region, whose copies of weights "
                "outlive it: enter autocast within step_fn"
            )
        return tree_flatten((args, kwargs))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _clear_grads(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _run(self, leaves: list[Any], spec: TreeSpec) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        return tree_map_only(Tensor, Tensor.detach, self._step_fn(*args, **kwargs))

    # ---- the capture ---------------------------------------------------------------------------

    def _capture(self, leaves: list[Any], spec: TreeSpec) -> None:
        self._inputs = [
            torch.empty_like(leaf, device=self._device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        if self._stream is not None:
            self._capture_graph(spec)
        self._entries = [*self._entries_of_modules(), *self._entries_of_step()]

    def _capture_graph(self, spec: TreeSpec) -> None:
        """Capture a step, or restore all that the capture has changed in Python."""
        self._clear_grads()
        states = [optimizer.state for optimizer in self._optimizers]
        dicts = [*self._groups(), *states, *self._dicts_of_scaler()]
        dicts += [value for outer in dicts for value in outer.values() if isinstance(value, dict)]
        contents = [dict(content) for content in dicts]
        try:
            groups = [group for group in self._groups() if "lr" in group]
            self._lr_groups = [group for group in groups if not _is_on_device(group["lr"])]
            numbers = [group["lr"] for group in self._lr_groups]
            self._lrs = [float(lr) for lr in numbers]
            kind = {"dtype": torch.float32, "device": self._device}
            self._lr_tensors = [torch.tensor(lr, **kind) for lr in self._lrs]
            for group, tensor in zip(self._lr_groups, self._lr_tensors, strict=True):
                group["lr"] = tensor
            name = "a learning rate, which schedulers change after the call,"
            entries = [(name, _version, g["lr"], g["lr"]._version) for g in groups]
            entries += self._entries_of_step()
            for name, _, _, value in entries:
                if isinstance(value, Tensor) and value.is_cpu:
                    raise RuntimeError(
                        f"make_graphed_step: {name} is on the CPU, where a replay does not write. "
                        "Take an optimizer that counts steps on the device, or .eager()."
                    )
            graph = self._captured(spec)
            _refuse_change(entries, "during the capture")
            for group, number in zip(self._lr_groups, numbers, strict=True):
                group["lr"] = number
        except BaseException:
            self._clear_grads()  # they are memory of the graph
            for current, content in zip(dicts, contents, strict=True):
                current.clear()
                current.update(content)
            raise
        params = [param for group in self._groups() for param in group["params"]]
        self._grads = [(param, param.grad) for param in params if param.grad is not None]
        known = vars(self._scaler) if self._scaler is not None else {}
        self._last_step = {name: known[name] for name in known if name.startswith("_last_")}
        self.graph = graph

    def _captured(self, spec: TreeSpec) -> torch.cuda.CUDAGraph:
        """Return a graph of ``step_fn``, with the results in ``_results``."""
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that pins batches, may go on.
        capture = torch.cuda.graph(
            graph, self._pool, self._stream, capture_error_mode="thread_local"
        )
        cause = None
        try:
            with torch.cuda.stream(self._stream), capture:  # a capture that fails keeps its stream
                try:
                    self._results = self._run(self._inputs, spec)
                except Exception as error:
                    cause = error  # the end of the capture fails then too
                    raise
        except Exception as error:
            _abandoned.append(graph)
            raise RuntimeError(
                f"make_graphed_step: step_fn cannot be captured: {cause or error}\nNothing has "
                "changed. A step that waits for the device (.item(), .cpu(), print, an `if` on a "
                "tensor, a scaler with an optimizer that is not fused) cannot be captured; "
                ".eager() runs it."
            ) from cause or error
        return graph

    # ---- the refusals --------------------------------------------------------------------------

    def _entries_of_step(self) -> Iterator[_Entry]:
        for optimizer in self._optimizers:
            for part in ("param_groups", "state"):
                name, value = f"{type(optimizer).__name__}.{part}", getattr(optimizer, part)
                yield name, partial(getattr, optimizer), part, value
                yield from _entries_of(name, value)
        for known in self._dicts_of_scaler():
            keys = [k for k, v in known.items() if isinstance(v, (Tensor, bool, int, float))]
            keys = [key for key in keys if not key.startswith("_init_")]
            yield from _entries_of(type(self._scaler).__name__, known, keys)

    def _entries_of_modules(self) -> Iterator[_Entry]:
        for module in dict.fromkeys(child for m in self._modules for child in m.modules()):
            name = type(module).__name__
            yield f"{name}.training", partial(getattr, module), "training", module.training
            for part in ("_parameters", "_buffers", "_modules"):
                content = vars(module).get(part)
                if isinstance(content, dict):  # TorchScript keeps tensors elsewhere
                    yield from _entries_of(f"{name}.{part}", content)

    def _dicts_of_scaler(self) -> list[dict[str, Any]]:
        parts = (self._scaler, getattr(self._scaler, "_numbers", None))
        return [vars(part) for part in parts if part is not None]


def _entries_of(
    name: str, container: dict[Any, Any] | list[Any], keys: Iterable[Any] | None = None
) -> Iterator[_Entry]:
    """Yield the lengths and entries of nested dicts and lists."""
    is_dict = isinstance(container, dict)
    is_group = is_dict and "params" in container
    get = container.get if is_dict else container.__getitem__
    if keys is None:
        keys = container if is_dict else range(len(container))
        if not is_group:  # schedulers add entries to groups
            yield name, len, container, len(container)
    for key in keys:
        value = get(key)
        if is_group and key == "lr" and not _is_on_device(value):
            continue
        entry = f"{name}[{key!r}]" if isinstance(key, (int, str)) else name
        yield entry, get, key, value
        if isinstance(value, Tensor):
            yield entry, _memory, value, _memory(value)
        elif isinstance(value, (dict, list)):
            yield from _entries_of(entry, value)


def _refuse_change(entries: Iterable[_Entry], when: str) -> None:
    """Compare numbers and tuples by value, and all else by identity."""
    for name, read, argument, value in entries:
        now = read(argument)
        if now is value:
            continue
        if type(now) is not type(value) or not isinstance(value, _BY_VALUE) or now != value:
            raise RuntimeError(
                f"make_graphed_step: {name} has changed {when}: expected the same value, memory "
                "and requires_grad. Call make_graphed_step again, or .eager()."
            )


def _memory(tensor: Tensor) -> tuple[int | None, bool]:
    address = tensor.data_ptr() if tensor.layout == torch.strided else None
    return address, tensor.requires_grad


def _is_on_device(lr: Any) -> bool:
    return isinstance(lr, Tensor) and not lr.is_cpu


def _kind(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of a tensor, or the type and value of a constant."""
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise ValueError(
                "make_graphed_step: arguments: expected tensors with requires_grad=False, since a "
                "replay fills no gradients of arguments. Pass .detach(), or call .eager()."
            )
        return leaf.dtype, leaf.shape
    if type(leaf).__hash__ is None:
        raise TypeError(
            f"make_graphed_step: arguments: expected tensors and constants, got a "
            f"{type(leaf).__name__}, which may change. Make it a tensor."
        )
    return type(leaf), leaf
