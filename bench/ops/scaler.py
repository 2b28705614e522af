"""The host's cost of a scaler's step: unscale_ + step + update, less the optimizer's own step."""

from __future__ import annotations

import functools
import time
from functools import partial

import torch

import amp_ext
from harness import providers
from harness.providers import Line
from harness.registry import BASELINE, FP32, Case, Op, Provider, Setup, Trial, Work, check
from workloads.gradients import gradients, parameters

ELEMENTS = 4
MAX_NORM = 0.1
INIT_SCALE = 65536.0


class Model:
    """Parameters of 4 elements and the scaled gradients that a backward pass gives them."""

    def __init__(self, count: int, device: torch.device) -> None:
        torch.manual_seed(0)
        grads = gradients(count * [ELEMENTS], device=device)
        self.parameters = parameters(grads)
        self.scaled = torch._foreach_mul(grads, INIT_SCALE)

    def write_gradients(self) -> None:
        torch._foreach_copy_([leaf.grad for leaf in self.parameters], self.scaled)


class TimedStep:
    """Puts a stopwatch into an optimizer's step.

    Args:
        optimizer: whose `step` is replaced, by one of the same signature.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.ns = 0  # of the last step
        step = optimizer.step

        @functools.wraps(step)
        def timed(*args, **kwargs):
            start = time.perf_counter_ns()
            result = step(*args, **kwargs)
            self.ns = time.perf_counter_ns() - start
            return result

        optimizer.step = timed


class Loop:
    """A scaler and an SGD optimizer of a model."""

    rtol = 0.0  # of gradients and parameters that count as torch's

    def __init__(self, scaler_class: type, model: Model, fused: bool, device: torch.device) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters, lr=1e-4, fused=fused)
        self.step = TimedStep(self.optimizer)
        self.scaler = scaler_class(device.type, init_scale=INIT_SCALE)
        self.scaler.scale(torch.zeros((), device=device))

    def prepare(self) -> None:
        self.model.write_gradients()

    def run(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ClippingLoop(Loop):
    """Clips in the place of unscale_, or after it where the scaler cannot.

    The norms differ by their rounding, in float32 with torch: of n elements by n / 2 * 2**-24.
    """

    rtol = 4000 * ELEMENTS / 2 * 2.0**-24

    def run(self) -> None:
        if hasattr(self.scaler, "clip_grad_norm_"):
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        else:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def build(kind: type[Loop], count: int, fused: bool, device: torch.device) -> Trial:
    """All scalers have one model, as big in the caches as a user's."""
    model = Model(count, device)
    lines = providers.lines(amp_ext.GradScaler, torch.amp.GradScaler, device)

    def loop(line: Line, model: Model) -> Loop:
        return kind(line.launch, model, fused, device)

    def timed(name: str, line: Line) -> Provider:
        """Without the time of the optimizer."""
        own = loop(line, model)
        return Provider(name, own.run, own.prepare, lambda: own.step.ns, line.around)

    def verify_line(name: str, line: Line) -> None:
        verify(*(loop(each, Model(count, device)) for each in (line, lines[BASELINE])))

    return providers.trial(lines, timed, verify_line, Work(parameters=count), [BASELINE])


def verify(mine: Loop, theirs: Loop) -> None:
    """Parameters and scale are torch's, on two new models, with an overflow between."""
    for name, poison in (("a step", None), ("an overflow", torch.inf), ("another step", None)):
        for loop in (mine, theirs):
            loop.prepare()
            if poison is not None:
                loop.model.parameters[-1].grad[-1] = poison
            loop.run()
        compare(mine, theirs, name, gradients=poison is None)


def compare(mine: Loop, theirs: Loop, when: str, gradients: bool) -> None:
    """Gradients too, but after an overflow: clipping leaves them alone, where torch spoils them."""
    parameters = mine.model.parameters, theirs.model.parameters
    compared = {"parameters": parameters}
    if gradients:
        compared["gradients"] = [[leaf.grad for leaf in leaves] for leaves in parameters]
    for what, tensors in compared.items():
        near = torch.isclose(*map(torch.stack, tensors), rtol=mine.rtol, atol=0.0)
        wrong = int((~near).any(1).sum())
        check(wrong == 0, f"after {when} {wrong} {what} differ from torch's")
    scales = mine.scaler.get_scale(), theirs.scaler.get_scale()
    check(scales[0] == scales[1], f"after {when} the scale is {scales[0]}, torch's {scales[1]}")


def limit(setup: Setup) -> Case:
    """The least that Python can do: a list of all gradients."""
    count = 400 if setup.quick else 4000

    def build_walk() -> Trial:
        model = Model(count, setup.device)
        groups = torch.optim.SGD(model.parameters, lr=1e-4).param_groups

        def walk() -> list[torch.Tensor]:
            return [leaf.grad for group in groups for leaf in group["params"]]

        return Trial(
            (Provider("python", walk, model.write_gradients),), work=Work(parameters=count)
        )

    return Case(f"list comprehension, {count}", build_walk, limit=True)


def cases(setup: Setup) -> list[Case]:
    if not setup.dtypes(FP32):
        return []
    counts = (400, 40) if setup.quick else (4000, 400)
    return [
        Case(
            f"{count} parameters, {word}{'fused ' if fused else ''}SGD",
            partial(build, kind, count, fused, setup.device),
        )
        for kind, word in ((Loop, ""), (ClippingLoop, "clipped "))
        for count in counts
        for fused in (False, True)
    ]


OP = Op(
    name="scaler",
    notes=(
        f"Host time of unscale_ + step + update, where clipped with clip_grad_norm_; parameters of "
        f"{ELEMENTS} fp32 elements. Gradients are written anew before every step, untimed; the "
        "time inside optimizer.step is measured in the same step and subtracted.",
    ),
    rate="us/param",
    host=True,
    limit=limit,
    cases=cases,
)
