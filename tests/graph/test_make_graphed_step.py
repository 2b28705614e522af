"""Compare amp_ext.graph.make_graphed_step with steps without a graph, bit for bit.

On the CPU, each call runs the step, with the same checks. The fake CUDA runtime of tests/fake_cuda
captures and replays; it does not replay random numbers.
"""

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amp_ext
import amp_ext.optim
from amp_ext.graph import make_graphed_step
from amp_ext.optim.lr_scheduler import SkipAware
from fake_cuda.recorder import recorded
from twins import CUDA, plain

every_device = pytest.mark.parametrize("device", ["cpu", *CUDA])
on_cuda = pytest.mark.parametrize("device", CUDA)
WARMUP = 2
STEPS = 10
LR = 2.0**-7  # exact in float32


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """Fail on warnings, except torch's of capturable optimizers outside of a capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*capturable=True.*")
        yield


class Training:
    """A network with statistics of batches, two optimizers and a scaler.

    A function `at_the_end` is called in each step, with the training and the loss.
    """

    def __init__(
        self,
        device: str,
        make: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        scaler_class: type[torch.amp.GradScaler] | None = amp_ext.GradScaler,
        max_norm: float | None = 1.0,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.max_norm = device, max_norm
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
        self.model = nn.Sequential(*layers).to(device)
        params = list(self.model.parameters())
        make = make or OPTIMIZERS["AdamW"]
        self.optimizers = [make(params[:2]), make(params[2:])]
        options = {"init_scale": 2.0**10, "growth_interval": 3, "enabled": scaler_class is not None}
        if scaler_class is amp_ext.GradScaler:
            options |= {"hysteresis": 2, "max_consecutive_skips": 100}
        self.scaler = (scaler_class or amp_ext.GradScaler)(device, **options)
        self.at_the_end: Callable[[Training, Tensor], object] | None = None

    def step_fn(self, inputs: Tensor, targets: Tensor, weight: float = 1.0) -> tuple[Tensor, ...]:
        dtype = torch.float16 if self.device == "cuda" else torch.bfloat16
        with amp_ext.autocast(self.device, dtype):
            loss = nn.functional.mse_loss(self.model(inputs).float(), targets) * weight
        self.scaler.scale(loss).backward()
        norms = []
        for optimizer in self.optimizers:
            if self.max_norm is not None:
                norms.append(self.scaler.clip_grad_norm_(optimizer, self.max_norm))
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.at_the_end is not None:
            self.at_the_end(self, loss)
        return loss, *norms

    def graphed(self, **options: Any) -> Any:
        parts = {"modules": self.model, "optimizers": self.optimizers, "scaler": self.scaler}
        return make_graphed_step(self.step_fn, **parts, **{"warmup": WARMUP, **options})

    def eager(self, *args: Any) -> tuple[Tensor, ...]:
        """A step as a user takes it."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return tuple(result.detach() for result in self.step_fn(*args))

    def state(self) -> Any:
        """Return the bits of everything a step writes."""
        grads = [p.grad for o in self.optimizers for g in o.param_groups for p in g["params"]]
        written = {
            "model": self.model.state_dict(),
            "state": [optimizer.state_dict()["state"] for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "grads": grads,
        }
        if isinstance(self.scaler, amp_ext.GradScaler):
            in_a_row = getattr(self.scaler._numbers, "consecutive_skips", None)
            counts = self.scaler.get_skipped_steps(), self.scaler.step_was_skipped
            written["skips"] = [*counts, in_a_row]
        return plain(written)


def batch(device: str, number: int, size: int = 8, overflow: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(size, 4, generator=generator)
    if overflow:
        inputs[0, 0] = math.inf
    return inputs.to(device), torch.randn(size, 2, generator=generator).to(device)


def started(device: str) -> tuple[Training, Any]:
    """Return a training with replays for its last step and the next one."""
    training = Training(device)
    step = training.graphed()
    for number in range(WARMUP + 1):
        step(*batch(device, number))
    return training, step


def assert_same_steps(
    eager: Training, graphed: Training, step: Callable[..., Any], *batches: tuple[Tensor, ...]
) -> None:
    """Take steps with and without a graph, and compare their results and all that they write."""
    for data in batches:
        expected, got = eager.eager(*data), step(*data)
        assert plain(got) == plain(expected)
        assert graphed.state() == eager.state()


def capturable(make: Callable[..., Any], **options: Any) -> Callable[[list[Tensor]], Any]:
    """Return a function that makes an optimizer of torch's with the option for a capture."""
    return lambda params: make(params, lr=LR, capturable=params[0].is_cuda, **options)


def with_groups(params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": params[:1], "lr": 2 * LR}, {"params": params[1:]}]
    return torch.optim.Adam(groups, **options)


BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
TENSOR_BETAS = torch.tensor(0.9), torch.tensor(0.99)

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "ours": partial(amp_ext.optim.AdamW, lr=LR, amsgrad=True),
    "our SGD": partial(amp_ext.optim.SGD, lr=LR, momentum=0.9, dampening=0.5),
    "bfloat16": partial(amp_ext.optim.Adam, lr=LR, stochastic_rounding=True, **BF16_MOMENTS),
    "AdamW": capturable(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=LR, momentum=0.9, fused=True),
    "betas that kernels do not serve": capturable(
        amp_ext.optim.AdamW, betas=TENSOR_BETAS, fused=True
    ),
    "groups": capturable(with_groups, fused=True),
}


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    lr = torch.tensor(LR, device=params[0].device)
    return torch.optim.Adam(params, lr=lr, capturable=lr.is_cuda)


TRAININGS: dict[str, dict[str, Any]] = {
    **{name: {"make": make} for name, make in OPTIMIZERS.items()},
    "ours, not clipped": {"make": OPTIMIZERS["ours"], "max_norm": None},
    "AdamW, not clipped": {"max_norm": None},
    "torch's scaler": {"scaler_class": torch.amp.GradScaler, "max_norm": None},
    "no scaler": {"make": adam, "scaler_class": None, "max_norm": None},
}


@every_device
@pytest.mark.parametrize("name", TRAININGS)
def test_same_bits(device: str, name: str) -> None:
    """Graphed steps write the bits of eager steps, with overflows and a scheduler."""
    eager, graphed = (Training(device, **TRAININGS[name]) for _ in range(2))
    step = graphed.graphed()
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for training in (eager, graphed)
        for optimizer in training.optimizers
    ]
    bad = (0, WARMUP, 6, 7) if eager.scaler.is_enabled() else ()
    for number in range(STEPS):
        assert_same_steps(eager, graphed, step, batch(device, number, overflow=number in bad))
        for scheduler in schedulers:
            scheduler.step()
    if isinstance(eager.scaler, amp_ext.GradScaler):
        assert eager.scaler.get_skipped_steps() == len(bad)
    assert (step.graph is not None) == (device == "cuda")


@every_device
@pytest.mark.parametrize("seed", range(4))
def test_any_program(device: str, seed: int) -> None:
    """Replays go on after eager steps, calls of step_fn, cleared gradients and another scale.

    SkipAware counts the steps of replays.
    """
    chance = random.Random(seed)
    trainings = eager, graphed = Training(device), Training(device)
    schedulers = []
    for training in trainings:
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizers[0], 2, gamma=0.5)
        schedulers.append(SkipAware(schedule, training.scaler, exact=True))
    step = graphed.graphed()
    for number in range(24):
        ways = (step, 8), (step, 8), (step.eager, 5), (graphed.eager, 8)
        take_step, size = chance.choice(ways)
        data = batch(device, number, size, overflow=chance.random() < 0.3)
        assert_same_steps(eager, graphed, take_step, data)
        for scheduler in schedulers:
            scheduler.step()
        rates = [training.optimizers[0].param_groups[0]["lr"] for training in trainings]
        assert rates[0] == rates[1]
        change = chance.randrange(4)
        for scaler in (eager.scaler, graphed.scaler):
            if change == 0:
                scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
            if change == 1:
                scaler._scale.fill_(64.0)
        for optimizer in graphed.optimizers if change == 2 else ():
            optimizer.zero_grad(set_to_none=number % 2 == 0)


def small(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2, device=device)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, fused=True)


@every_device
def test_an_eager_step_waits_for_its_inputs(device: str) -> None:
    """A step on another stream sees writes of the current stream."""
    model, optimizer = small(device)
    step = make_graphed_step(lambda x: x.sum().item(), modules=model, optimizers=optimizer)
    inputs = torch.ones(4, device=device)
    assert step(inputs.mul_(3.0)) == 12.0


@every_device
def test_arguments_of_any_structure(device: str) -> None:
    """Tensors come to the device from nested arguments; constants stay constants.

    Results are copies without gradients, and later calls leave them as they are. A tensor that
    requires a gradient is refused, except without the graph.
    """
    model, optimizer = small(device)
    count = torch.zeros((), device=device)

    def step_fn(data: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
        assert data["x"].device.type == device
        loss = model(data["x"]).sum() * scale
        return {"loss": loss, "scale": scale, "count": count.add_(1)}

    step = make_graphed_step(step_fn, modules=model, optimizers=optimizer, warmup=1)
    losses, counts = [], []
    for _ in range(4):
        x = torch.randn(8, 2)
        leaf = x.clone().requires_grad_()
        for data, scale in ((leaf, 2.0), (x, leaf)):
            with pytest.raises(ValueError, match="expected tensors with requires_grad=False"):
                step({"x": data}, scale=scale)
        result = step({"x": x}, scale=2.0)
        assert result["scale"] == 2.0
        counts.append(result["count"])
        losses.append((result["loss"], model(x.to(device)).sum().detach() * 2.0))
    assert counts == [1, 2, 3, 4]
    for actual, expected in losses:
        assert not actual.requires_grad
        torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match=r"captured .*2\.0\).*, got .*3\.0\).*\.eager"):
        step({"x": x}, scale=3.0)
    with pytest.raises(ValueError, match="arguments: expected the captured"):
        step(x, scale=2.0)
    step.eager({"x": leaf}, scale=2.0)


@every_device
def test_masters_follow_writes_between_replays(device: str) -> None:
    """A replay starts from the value that a user has written to a weight with a master."""

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return amp_ext.optim.AdamW(params, lr=LR, master_weights=True)

    trainings = eager, graphed = Training(device, make), Training(device, make)
    for training in trainings:
        training.model[0].bfloat16()
    step = graphed.graphed()
    for number in range(STEPS):
        data = batch(device, number, size=5 if number == 6 else 8, overflow=number == 7)
        assert_same_steps(eager, graphed, step.eager if number == 6 else step, data)
    weight = graphed.model[0].weight
    written = weight.detach().mul(2.0)
    for training in trainings:
        training.model[0].weight.data.mul_(2.0)
    for _ in range(2):
        assert_same_steps(eager, graphed, step, data)
        torch.testing.assert_close(weight.detach(), written, rtol=2.0**-4, atol=16 * LR)


# ---- refusals ----------------------------------------------------------------------------------


WEIGHT = "Linear._parameters['weight']"
CHANGES: list[tuple[str, Callable[[Training], Any]]] = [
    (WEIGHT, lambda t: setattr(t.model[0].weight, "data", t.model[0].weight.data.clone())),
    (WEIGHT, lambda t: t.model[0].weight.requires_grad_(False)),
    ("AdamW.param_groups", lambda t: t.optimizers[1].load_state_dict(t.optimizers[1].state_dict())),
    (
        "AdamW.state['exp_avg']",
        lambda t: t.optimizers[0].state[t.model[0].weight].update(exp_avg=torch.zeros(8, 4)),
    ),
    (
        "AdamW.param_groups[0]['betas']",
        lambda t: t.optimizers[0].param_groups[0].update(betas=(0.5, 0.99)),
    ),
    (
        "AdamW.param_groups",
        lambda t: t.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    ),
    ("GradScaler['_growth_interval']", lambda t: t.scaler.set_growth_interval(7)),
    ("GradScaler['_scale']", lambda t: setattr(t.scaler, "_scale", t.scaler._scale.clone())),
    ("Sequential.training", lambda t: t.model.eval()),
    ("Sequential._modules['2']", lambda t: setattr(t.model, "2", nn.GELU())),
    (
        "BatchNorm1d._buffers['running_mean']",
        lambda t: setattr(t.model[1], "running_mean", torch.zeros(8)),
    ),
]


@every_device
@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_a_replay_would_not_see(
    device: str, name: str, change: Callable[[Training], Any]
) -> None:
    """A replay names the change since the capture, and changes nothing itself."""
    training, step = started(device)
    with torch.device(device):
        change(training)
    before = training.state()
    text = f"make_graphed_step: {re.escape(name)} has changed since the c"
    with pytest.raises(RuntimeError, match=text):
        step(*batch(device, 0))
    assert training.state() == before
    step.eager(*batch(device, 0))
    assert training.state() != before


@every_device
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x, y: (x[:5], y[:5]), ValueError, r"float32, .*Size\(\[8, .*, got .*Size\(\[5, "),
        (lambda x, y: (x.double(), y), ValueError, r"float32, .*, got .*float64, "),
        (lambda x, y: (x, 1.0), ValueError, r"captured .*, got .*1\.0\)"),
        (lambda x, y: (x, np.ones(2)), TypeError, "got a ndarray, which may change"),
    ],
    ids=["shape", "dtype", "number", "array"],
)
def test_other_inputs(
    device: str, change: Callable[..., Any], error: type[Exception], text: str
) -> None:
    """Arguments of another kind, and constants that may change, are errors; nothing changes."""
    training, step = started(device)
    before = training.state()
    with pytest.raises(error, match=text):
        step(*change(*batch(device, 0)))
    assert training.state() == before


@every_device
def test_a_step_that_fails_is_none_of_the_warm_up(device: str) -> None:
    """A capture follows as many complete steps as the warm-up has."""
    training = Training(device)
    step = training.graphed(warmup=1)
    x, y = batch(device, 0)
    with pytest.raises(RuntimeError, match="shape"):
        step(x[:, :2], y)
    step(x, y)  # a capture here would make states
    step(x, y)
    assert (step.graph is not None) == (device == "cuda")


@every_device
def test_autocast_around_it(device: str) -> None:
    """A step within a region is an error."""
    _, step = started(device)
    with amp_ext.autocast(device, torch.bfloat16):
        for call in (step, step.eager):
            with pytest.raises(RuntimeError, match="enter autocast within step_fn"):
                call(*batch(device, 0))


def test_no_optimizer() -> None:
    """The optimizers show the device."""
    with pytest.raises(ValueError, match="optimizers: expected parameters on one device, got none"):
        make_graphed_step(print, modules=[], optimizers=[])


# ---- captures ----------------------------------------------------------------------------------


def counts(training: Training, loss: Tensor) -> None:
    """Count steps in a group, as some optimizers do."""
    group = training.optimizers[0].param_groups[0]
    group["count"] = group.get("count", 0) + 1


def counts_on_the_host(training: Training, loss: Tensor) -> None:
    """Count steps on the host, as torch.optim.Adagrad does."""
    state = training.optimizers[0].state[training.model[0].weight]
    state.setdefault("count", torch.zeros(())).add_(1)


def schedules(training: Training, loss: Tensor) -> None:
    """Change a learning rate, as schedulers change tensors."""
    training.optimizers[0].param_groups[0]["lr"].fill_(LR / 2)


def adds_state(training: Training, loss: Tensor) -> None:
    training.optimizers[0].state[training.model[0].weight]["more"] = loss


@on_cuda
@pytest.mark.parametrize(
    ("does", "text"),
    [
        (lambda training, loss: loss.item(), "step_fn cannot be captured: .*"),
        (lambda training, loss: 1 / 0, "step_fn cannot be captured: division by zero"),
        (adds_state, r"AdamW\.state has changed during the capture"),
        (counts, r"AdamW\.param_groups\[0\]\['count'\] has changed during the capture"),
        (schedules, "a learning rate, which schedulers change after .* during the capture"),
        (counts_on_the_host, r"AdamW\.state\['count'\] is on the CPU"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_capture_that_fails(
    device: str, does: Callable[[Training, Tensor], None], text: str
) -> None:
    """A capture that fails clears gradients, changes nothing else, and eager steps go on."""
    eager, graphed = Training(device), Training(device)
    step = graphed.graphed()
    is_counter = does in (counts, counts_on_the_host)
    graphed.at_the_end = does if is_counter else None
    for number in range(WARMUP):
        step(*batch(device, number))
        eager.eager(*batch(device, number))
    graphed.at_the_end = does
    before, stream = graphed.state(), torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match=text):
        step(*batch(device, 50))
    assert torch.cuda.current_stream() == stream
    assert graphed.state() | {"grads": None} == before | {"grads": None}
    assert graphed.optimizers[0].param_groups[0].get("count") in (None, WARMUP)
    if not is_counter:
        graphed.at_the_end = None
        assert_same_steps(eager, graphed, step.eager, *(batch(device, n) for n in range(50, 53)))


def test_a_scripted_model() -> None:
    """A scripted model is trained, and refused after eval()."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step_fn(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    step = make_graphed_step(step_fn, modules=model, optimizers=optimizer, warmup=1)
    for _ in range(3):
        step(torch.ones(4, 2))
    model.eval()
    with pytest.raises(RuntimeError, match=r"RecursiveScriptModule\.training has changed"):
        step(torch.ones(4, 2))


@pytest.mark.fake_cuda
@on_cuda
def test_what_a_replay_asks_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay launches the graph and copies arguments and results, without a wait."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    training, step = started(device)
    data = batch(device, 0)
    step(*data)
    torch.cuda.synchronize()
    with recorded() as calls:
        results = step(*data)
    counts = calls.counts()
    assert counts["graph"] == 1
    assert counts["wait"] == counts["malloc"] == counts["host"] == 0
    assert counts["launch"] + counts["copy"] == len(data) + len(results), calls.all
    for optimizer in training.optimizers:
        optimizer.param_groups[0]["lr"] = 0.5
    with recorded() as calls:
        step(*data)
    more = calls.counts()
    assert more["launch"] + more["copy"] == counts["launch"] + counts["copy"] + 2
    assert more["wait"] == 0
