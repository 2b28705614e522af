"""A whole training step as one CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from amp_ext._library import _C
from amp_ext.optim._step import COPY, MASTER, KernelStep
from amp_ext.scaler.optimizers import Handover, handover_of

_NUMBERS = (bool, int, float)


def make_graphed_step(
    step_fn: Callable[..., Any],
    *,
    modules: nn.Module | Iterable[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    warmup: int = 3,
    pool: Any = None,
) -> GraphedStep:
    """Make a function that does what ``step_fn`` does, replayed as one CUDA graph: forward,
    backward, check, clipping, the optimizers' steps and the scaler's update, without a wait of the
    host and without Python between the kernels::

        def step_fn(inputs, targets):
            with amp_ext.autocast("cuda", torch.float16):
                loss = loss_of(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        step = make_graphed_step(step_fn, modules=model, optimizers=optimizer, scaler=scaler)
        for inputs, targets in batches:
            loss = step(inputs, targets)
            scheduler.step()

    Every call is one step. The first ``warmup`` calls run ``step_fn`` on a stream of its own, the
    next one captures it, which computes nothing, and replays it, as do those that follow. So
    parameters, optimizer states, statistics of batches, random numbers and the scale are those of
    as many steps without a graph.

    Arguments are tensors and constants, and lists, tuples and dicts of them. Tensors are copied to
    memory of the graph, those on the CPU too (without waiting where they are pinned, so that they
    must not be overwritten), and have the shape and dtype of the first capture's. What ``step_fn``
    returns is returned detached, and copied out of the graph.

    Gradients are cleared before each step, not by ``step_fn``, and are the graph's own: ``.grad``
    of a parameter holds that of the last step. A number as learning rate is passed to the step in a
    float32 tensor, so that ``param_groups`` and schedulers, which step outside of ``step_fn``, work
    as ever. ``capturable`` is set to True where an optimizer of torch has it.

    All else in Python is as it was when captured: hooks, counters, conditions, hyperparameters but
    for the learning rate. A replay is refused where these have changed: parameters, buffers,
    training mode and numbers among the attributes of the modules and their children; parameters,
    state and hyperparameters of the optimizers, and the values of parameters that have masters or
    copies; memory and options of the scaler.

    On devices other than CUDA, every step runs ``step_fn``, with the same checks.

    Args:
        step_fn: one training step. It must not wait for the device. The optimizers of a scaler
            that is enabled are of :mod:`amp_ext.optim`, without hooks or wrappers of their step, or
            take ``found_inf`` (``fused=True``).
        modules: those that it trains or evaluates.
        optimizers: those whose steps it takes; their parameters are on one device.
        scaler: the one it uses.
        warmup: how many steps run before the capture, at least 1; for DistributedDataParallel at
            least 11, as torch's documentation says.
        pool: of memory, as of ``torch.cuda.graph``.

    Raises:
        TypeError, ValueError: an argument is none of the above.
    """
    modules = [modules] if isinstance(modules, nn.Module) else list(modules)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for name, values, kind in (
        ("modules", modules, nn.Module),
        ("optimizers", optimizers, Optimizer),
    ):
        if not values or not all(isinstance(value, kind) for value in values):
            got = ", ".join(type(value).__name__ for value in values) or "none"
            raise TypeError(
                f"make_graphed_step: {name} must be one or more {kind.__name__}s, got {got}"
            )
    if not isinstance(warmup, int) or warmup < 1:
        raise ValueError(
            f"make_graphed_step: warmup must be an integer of at least 1, got {warmup!r}: states "
            "and kernels that a first step makes cannot be captured"
        )
    devices = {
        p.device for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
    }
    if len(devices) != 1:
        got = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(
            f"make_graphed_step: the parameters of optimizers must be on one device, got {got}"
        )
    if scaler is not None and scaler.is_enabled():
        for optimizer in optimizers:
            if handover_of(optimizer) is Handover.HOST:
                raise ValueError(
                    "make_graphed_step: a scaler waits for the device before the step of this "
                    f"{type(optimizer).__name__}, which cannot be captured: take one of "
                    "amp_ext.optim, without hooks or wrappers of its step, make it with "
                    "fused=True, or train without a scaler"
                )
    return GraphedStep(step_fn, modules, optimizers, scaler, warmup, pool, devices.pop())


class GraphedStep:
    """What :func:`make_graphed_step` makes. It is called with the arguments of ``step_fn``.

    Attributes:
        graph: the ``torch.cuda.CUDAGraph``; None before the capture, and on other devices.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        warmup: int,
        pool: Any,
        device: torch.device,
    ) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self._step_fn = step_fn
        self._modules = {child: None for module in modules for child in module.modules()}
        self._optimizers = optimizers
        self._scaler = scaler
        self._warmup = warmup
        self._pool = pool
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._groups: list[dict[str, Any]] = []
        self._find_groups()
        self._snapshot: _C.Snapshot | None = None
        self._doubles: list[Tensor] = []  # parameters that have a master or a copy
        self._written = 0  # how often they have been written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._warmup > 0:
            outputs = self.eager(*args, **kwargs)
            self._warmup -= 1
            return outputs
        self._refuse_autocast()
        leaves, spec = tree_flatten((args, kwargs))
        if self._snapshot is None:
            self._capture(leaves, spec)
        self._check_inputs(leaves, spec)
        self._check_captured()
        if getattr(self._scaler, "_numbers", None) is not None:
            self._scaler._step_numbers()  # the scale may have been written
        if self.graph is None:
            return self.eager(*args, **kwargs)
        for leaf, static in zip(leaves, self._inputs, strict=True):
            if isinstance(static, Tensor) and leaf is not static:
                static.copy_(leaf, non_blocking=True)
        self._send_lrs()
        self.graph.replay()
        _C.set_grads(self._params, self._grads)
        if self._last_step is not None:
            vars(self._scaler).update(self._last_step)
        for optimizer in self._optimizers:  # a schedule may count its steps
            for hook in optimizer._optimizer_step_post_hooks.values():
                if getattr(hook, "_counts_steps", False):
                    hook(optimizer, (), {})
        outputs = [out.clone() if isinstance(out, Tensor) else out for out in self._outputs]
        return tree_unflatten(outputs, self._output_spec)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """A step without the graph, such as that of a last batch of another shape. It works on the
        same parameters, states and scale; the next call may replay again."""
        self._refuse_autocast()
        self._find_groups()
        leaves, spec = tree_flatten((args, kwargs))
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._send_lrs()
        with self._on_stream():
            outputs, spec = self._run([self._on_device(leaf) for leaf in leaves], spec)
        self._written = _C.sum_of_versions(self._doubles)
        return tree_unflatten(outputs, spec)

    # ---- the step ------------------------------------------------------------------------------

    def _find_groups(self) -> None:
        """load_state_dict of an optimizer makes new groups, and add_param_group adds one."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if list(map(id, groups)) == list(map(id, self._groups)):
            return
        self._groups = groups
        # Learning rates that are numbers to the optimizer's owner, and tensors to its step.
        self._lr_groups = [g for g in groups if "lr" in g and not _is_on_device(g["lr"])]
        self._lrs = [float(group["lr"]) for group in self._lr_groups]
        kind = {"dtype": torch.float32, "device": self._device}
        self._lr_tensors = [torch.full((), lr, **kind) for lr in self._lrs]
        if self._is_cuda:
            for optimizer in self._optimizers:
                if not isinstance(optimizer, KernelStep) or optimizer._why_not() is not None:
                    _make_capturable(optimizer)

    def _run(self, leaves: Sequence[Any], spec: TreeSpec) -> tuple[list[Any], TreeSpec]:
        """Call step_fn, with tensors as learning rates. Returns its outputs, flattened."""
        args, kwargs = tree_unflatten(leaves, spec)
        before = [tensor._version for tensor in self._lr_tensors]
        numbers = [group["lr"] for group in self._lr_groups]
        if self._is_cuda:
            for group, tensor in zip(self._lr_groups, self._lr_tensors, strict=True):
                group["lr"] = tensor
        try:
            result = self._step_fn(*args, **kwargs)
            given = [group["lr"] for group in self._lr_groups]
        finally:
            for group, number in zip(self._lr_groups, numbers, strict=True):
                group["lr"] = number
        expected = self._lr_tensors if self._is_cuda else numbers
        if before != [tensor._version for tensor in self._lr_tensors] or any(
            lr is not other for lr, other in zip(given, expected, strict=True)
        ):
            raise RuntimeError(
                "make_graphed_step: step_fn changes a learning rate, which a replay would not do: "
                "let the scheduler step after the call"
            )
        outputs, out_spec = tree_flatten(result)
        return [out.detach() if isinstance(out, Tensor) else out for out in outputs], out_spec

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _on_device(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device != self._device:
            return leaf.to(self._device, non_blocking=True)
        return leaf

    def _send_lrs(self) -> None:
        lrs = [float(group["lr"]) for group in self._lr_groups]
        if lrs == self._lrs:
            return
        if len(lrs) == 1:
            self._lr_tensors[0].fill_(lrs[0])
        else:  # two launches for any number of groups
            torch._foreach_zero_(self._lr_tensors)
            torch._foreach_add_(self._lr_tensors, lrs)
        self._lrs = lrs

    # ---- the capture ---------------------------------------------------------------------------

    def _capture(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        for leaf in leaves:
            if hasattr(leaf, "__array__") and not isinstance(leaf, Tensor):
                raise TypeError(
                    f"make_graphed_step: an argument is a {type(leaf).__name__}, which the graph "
                    "would have as a constant: make it a tensor"
                )
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    "make_graphed_step: a tensor among the arguments requires a gradient, which "
                    "would not leave the graph: detach it, or make it a parameter"
                )
        self._inputs = [
            torch.empty_like(leaf, device=self._device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        self._spec = spec
        self._find_groups()
        if self._is_cuda:
            graph = torch.cuda.CUDAGraph()
            with self._undone_on_error():
                for optimizer in self._optimizers:
                    optimizer.zero_grad(set_to_none=True)
                torch.clear_autocast_cache()
                before = self._content_of_optimizers() + self._content_of_scaler()
                unchanged = _C.Snapshot((container, keys) for container, keys, _ in before)
                self._outputs, self._output_spec = self._captured(graph)
                self._refuse_change(before, unchanged.first_change(), "during the capture")
            params = [param for group in self._groups for param in group["params"]]
            self._params = [param for param in params if param.grad is not None]
            self._grads = [param.grad for param in self._params]
            known = vars(self._scaler) if self._scaler is not None else {}
            names = [name for name in ("_last_states", "_last_optimizers") if name in known]
            self._last_step = {name: known[name] for name in names} or None
            self.graph = graph
        self._doubles = [
            param
            for optimizer in self._optimizers
            for param, state in optimizer.state.items()
            if isinstance(state, dict) and not state.keys().isdisjoint((COPY, MASTER))
        ]
        self._written = _C.sum_of_versions(self._doubles)
        self._content = (
            self._content_of_optimizers() + self._content_of_scaler() + self._content_of_modules()
        )
        self._snapshot = _C.Snapshot((container, keys) for container, keys, _ in self._content)

    def _captured(self, graph: torch.cuda.CUDAGraph) -> tuple[list[Any], TreeSpec]:
        cause = None
        try:
            # The stream by itself, since a capture that fails does not leave it. Other threads,
            # such as one that pins batches, may go on.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    return self._run(self._inputs, self._spec)
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            _abandoned.append(graph)
            with (
                suppress(Exception),
                torch.cuda.stream(self._stream),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream),
            ):
                torch.zeros((), dtype=torch.float32, device=self._device)
            cause = cause or error
            raise RuntimeError(
                f"make_graphed_step: step_fn cannot be captured: {cause}\nNothing has changed. A "
                "step that waits for the device (.item(), .cpu(), print, an `if` on a tensor) "
                "cannot be captured; .eager() runs it."
            ) from cause

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """What a capture changes in Python; memory outside of the graph it does not write."""
        params = [param for group in self._groups for param in group["params"]]
        grads = [param.grad for param in params]
        states = [
            {param: (state, dict(state)) for param, state in optimizer.state.items()}
            for optimizer in self._optimizers
        ]
        kept = [
            (known, {k: copy.copy(v) if isinstance(v, dict) else v for k, v in known.items()})
            for known in self._states_of_scaler()
        ]
        try:
            yield
        except Exception:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            for optimizer, before in zip(self._optimizers, states, strict=True):
                if isinstance(optimizer, KernelStep):
                    optimizer.forget_written()
                optimizer.state.clear()
                for param, (state, content) in before.items():
                    state.clear()
                    state.update(content)
                    optimizer.state[param] = state
            for known, content in kept:
                known.clear()
                known.update(content)
            raise

    # ---- the checks ----------------------------------------------------------------------------

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self._device.type):
            raise RuntimeError(
                "make_graphed_step: a step within an autocast region, whose copies of weights "
                "outlive it: enter autocast within step_fn"
            )

    def _check_inputs(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        if spec != self._spec:
            raise ValueError(
                f"make_graphed_step: arguments of the structure {self._spec} were captured, got "
                f"{spec}"
            )
        for number, (leaf, static) in enumerate(zip(leaves, self._inputs, strict=True)):
            if isinstance(static, Tensor):
                if (
                    isinstance(leaf, Tensor)
                    and leaf.shape == static.shape
                    and leaf.dtype == static.dtype
                    and (leaf.device == static.device or leaf.is_cpu)
                ):
                    continue
            elif type(leaf) is type(static) and leaf == static:
                continue
            raise ValueError(
                f"make_graphed_step: argument {number} was captured as {_described(static)}, got "
                f"{_described(leaf)}: call .eager() for a step of its own, or make another "
                "graphed step"
            )

    def _check_captured(self) -> None:
        self._refuse_change(self._content, self._snapshot.first_change(), "since the capture")
        if _C.sum_of_versions(self._doubles) != self._written:
            raise RuntimeError(
                "make_graphed_step: a parameter that has a master weight, or a copy for autocast, "
                "has been written since the last step, which a replay would not see: call "
                ".eager(), which makes these anew, and make_graphed_step again"
            )

    def _refuse_change(
        self, content: Sequence[_Content], change: tuple[int, int] | None, when: str
    ) -> None:
        if change is None:
            return
        container, keys, what = content[change[0]]
        keys = list(container) if keys is None and isinstance(container, dict) else keys
        if keys is None:
            keys = range(len(container))
        key = keys[change[1]] if change[1] < len(keys) else None
        entry = f"[{key!r}]" if isinstance(key, (str, int)) else ""
        raise RuntimeError(
            f"make_graphed_step: {what}{entry} has changed {when}: another value or memory, or "
            "another requires_grad. A replay would not see it: call make_graphed_step again, or "
            ".eager()"
        )

    def _content_of_optimizers(self) -> list[_Content]:
        content: list[_Content] = []
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            content.append((vars(optimizer), ["param_groups", "state"], name))
            content.append((optimizer.param_groups, None, f"{name}.param_groups"))
            for number, group in enumerate(optimizer.param_groups):
                what = f"{name}.param_groups[{number}]"
                keys = [key for key in optimizer.defaults if key in group]
                if "lr" in keys and not _is_on_device(group["lr"]):
                    keys.remove("lr")
                content.append((group, ["params", *keys], what))
                content.append((group["params"], None, f"{what}['params']"))
            content.append((optimizer.state, None, f"{name}.state"))
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    content.append((state, None, f"the {name}.state of a parameter"))
        return content

    def _states_of_scaler(self) -> list[dict[str, Any]]:
        numbers = getattr(self._scaler, "_numbers", None)  # amp_ext.GradScaler's
        return [vars(part) for part in (self._scaler, numbers) if part is not None]

    def _content_of_scaler(self) -> list[_Content]:
        return [
            (
                known,
                [
                    key
                    for key, value in known.items()
                    if isinstance(value, (Tensor, *_NUMBERS)) and not key.startswith("_init_")
                ],
                type(self._scaler).__name__,
            )
            for known in self._states_of_scaler()
        ]

    def _content_of_modules(self) -> list[_Content]:
        content: list[_Content] = []
        for module in self._modules:
            known, name = vars(module), type(module).__name__
            content.append((known, [k for k, v in known.items() if isinstance(v, _NUMBERS)], name))
            for part in ("_parameters", "_buffers"):
                if known.get(part):
                    content.append((known[part], None, f"{name}.{part}"))
        return content


# Captures that CUDA has ended with an error: torch's allocator goes on asking them which streams
# they capture, and torch 2.11's generator counts as captured until another capture ends.
_abandoned: list[torch.cuda.CUDAGraph] = []

_Content = tuple[Any, list[str] | None, str]
"""A dict or list, which of its keys count (None: all), and what errors call it."""


def _is_on_device(lr: Any) -> bool:
    """Whether a learning rate is one that its owner writes in place, as a graph can read it."""
    return isinstance(lr, Tensor) and not lr.is_cpu


def _make_capturable(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            for param in group["params"]:
                step = optimizer.state.get(param, {}).get("step")
                if isinstance(step, Tensor) and step.is_cpu:
                    optimizer.state[param]["step"] = step.to(param.device)
    optimizer._warned_capturable_if_run_uncaptured = True  # torch would warn of the warm-up


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    return repr(value)
