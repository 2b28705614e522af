"""Test programs that name torch: install() and uninstall(), and torch's names in amp_ext."""

import concurrent.futures
import copy
import functools
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler  # as a library does, long before install()
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

import amp_ext
from autocast_cases import Seen, routed
from programs import run

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.cuda.amp.GradScaler is enabled"
)
LOW = torch.float16
FP16 = {"device_type": "cpu", "dtype": LOW}


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    assert not amp_ext.is_installed()
    init = torch.amp.GradScaler.__init__
    yield
    amp_ext.uninstall()
    assert torch.amp.GradScaler.__init__ is init


def routes(region: Any = torch.autocast) -> bool:
    with region(**FP16):
        return routed()


def test_install_and_uninstall_can_be_repeated() -> None:
    """While installed, regions of torch route; regions of amp_ext always do, and nothing else.

    Scalers are amp_ext's from install(scaler=True) to uninstall().
    """
    with_scaler = functools.partial(amp_ext.install, scaler=True)
    for change, on, scaler in (
        (amp_ext.uninstall, False, False),
        (amp_ext.install, True, False),
        (with_scaler, True, True),
        (with_scaler, True, True),
        (amp_ext.install, True, True),
        (amp_ext.uninstall, False, False),
        (amp_ext.uninstall, False, False),
        (amp_ext.install, True, False),
        (amp_ext.uninstall, False, False),
        (with_scaler, True, True),
    ):
        assert change() is None
        assert (amp_ext.is_installed(), routes()) == (on, on)
        assert isinstance(torch.amp.GradScaler("cpu"), amp_ext.GradScaler) == scaler
        assert routes(amp_ext.autocast)
        assert not routes(functools.partial(torch.autocast, enabled=False))
        assert not routed()


def test_while_other_threads_work() -> None:
    """Products, regions and scalers of other threads stay right."""
    done = threading.Event()
    a = torch.randint(-3, 4, (8, 8)).float()
    expected = (a @ a).half()

    def work(region: Any) -> int:
        count = 0
        while not done.is_set() or count < 20:
            with region(**FP16), Seen() as seen:
                assert (a @ a).equal(expected)
                assert F.linear(a, a.t()).equal(expected)
            assert region is torch.autocast or seen.gemms == 2
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            assert type(scaler) in (torch.amp.GradScaler, amp_ext.GradScaler)
            assert scaler.state_dict()["scale"] == 8.0
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        works = [pool.submit(work, r) for r in 2 * (amp_ext.autocast, torch.autocast)]
        for _ in range(2000):
            amp_ext.install(scaler=True)
            amp_ext.uninstall()
        done.set()
        assert all(work.result() >= 20 for work in works)


PROGRAM = """
import torch

def names():
    spaces = (torch, torch.amp, torch.amp.grad_scaler, torch.amp.autocast_mode, torch.optim)
    return [dict(vars(space)) for space in spaces]

ops = torch._C._dispatch_get_all_op_names()
before, names_before = list(map(torch._C._dispatch_dump, ops)), names()
import amp_ext

def is_as_before():
    return list(map(torch._C._dispatch_dump, ops)) == before and names() == names_before

def product(region):
    with region("cpu", dtype=torch.float16):
        torch.ones(2, 4) @ torch.ones(4, 4)
    return is_as_before()

assert is_as_before()
for _ in range(3):
    assert not product(amp_ext.autocast)
    amp_ext.install()
    assert not product(torch.autocast)
    amp_ext.uninstall()
    assert product(torch.autocast)
"""


def test_importing_and_uninstall_leave_torch_as_it_was() -> None:
    """Torch has its own names and kernels after the import and after uninstall(), unwarned.

    The dispatcher would print warnings of its own.
    """
    done = run("-W", "error", "-c", PROGRAM)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_cache_is_not_mixed_with_torchs() -> None:
    """Changes take effect at once within a region of torch. Neither uses the other's copies."""
    weight = torch.ones(3, 4, requires_grad=True)

    def gradient(result: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(result, weight, torch.full_like(result, 61440.0))
        return grad[0, 0]

    with torch.autocast(**FP16):
        gradients = []
        for change in (amp_ext.uninstall, amp_ext.install, amp_ext.uninstall, amp_ext.install):
            change()
            gradients.append(gradient(F.linear(torch.ones(2, 4), weight)).item())
    assert gradients == 2 * [float("inf"), 122880.0]


# ---- scalers -------------------------------------------------------------------------------------

LOOKUPS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "torch.amp": lambda: torch.amp.GradScaler(device="cpu", init_scale=8.0),
    "imported before": lambda: GradScaler("cpu", init_scale=8.0),
    "torch.cuda.amp": lambda: torch.cuda.amp.GradScaler(8.0),
    "torch.cpu.amp": lambda: torch.cpu.amp.GradScaler(8.0),
}


@pytest.mark.parametrize("make", LOOKUPS.values(), ids=LOOKUPS)
def test_every_way_to_make_one(make: Callable[[], torch.amp.GradScaler]) -> None:
    """New scalers are amp_ext's and instances of torch's class, under any name of it."""
    before = make()
    torchs = type(before)
    amp_ext.install()
    assert type(make()) is torchs
    amp_ext.install(scaler=True)
    assert torch.amp.GradScaler("cpu", hysteresis=2)._hysteresis == 2
    ours = make()
    for _ in range(2):
        assert isinstance(ours, amp_ext.GradScaler)
        assert isinstance(ours, torchs)
        assert type(before) is torchs
        assert ours.state_dict() == before.state_dict()
        amp_ext.uninstall()
    assert type(make()) is torchs


def test_other_scalers_stay_as_they_are() -> None:
    """Scalers of subclasses are what they were, and so are copies of earlier scalers."""

    class Own(torch.amp.GradScaler):
        pass

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    text = pickle.dumps(scaler)
    amp_ext.install(scaler=True)
    for kind in (Own, ShardedGradScaler, amp_ext.GradScaler):
        assert type(kind("cpu")) is kind
    for again in (pickle.loads(text), copy.copy(scaler), copy.deepcopy(scaler)):
        assert type(again) is torch.amp.GradScaler
        assert again.get_scale() == 8.0


@pytest.mark.parametrize("keeps", [True, False], ids=["wraps ours", "replaces ours"])
def test_what_somebody_has_put_in_its_place_stays(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    torchs = torch.amp.GradScaler.__init__
    amp_ext.install(scaler=True)
    inner = torch.amp.GradScaler.__init__ if keeps else torchs

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "__init__", theirs)
        assert isinstance(torch.amp.GradScaler("cpu"), amp_ext.GradScaler) == keeps
        amp_ext.uninstall()
        assert torch.amp.GradScaler.__init__ is theirs
        assert type(torch.amp.GradScaler("cpu")) is torch.amp.GradScaler
        amp_ext.install(scaler=True)
        assert isinstance(torch.amp.GradScaler("cpu"), amp_ext.GradScaler)
        amp_ext.uninstall()
        assert torch.amp.GradScaler.__init__ is theirs
    torch.amp.GradScaler.__init__ = torchs  # another patch restores the original it saved


# ---- amp_ext.cuda.amp and amp_ext.cpu.amp --------------------------------------------------------

PAIRS = {"cuda": (amp_ext.cuda.amp, torch.cuda.amp), "cpu": (amp_ext.cpu.amp, torch.cpu.amp)}
every_pair = pytest.mark.parametrize(("ours", "torchs"), PAIRS.values(), ids=PAIRS)


def assert_same_interface(ours: Callable[..., Any], torchs: Callable[..., Any]) -> None:
    """Assert the same name and arguments, apart from our options."""
    assert ours.__name__ == torchs.__name__
    mine, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (ours, torchs)
    )
    assert mine[: len(expected)] == expected
    assert {kind for _, kind, _ in mine[len(expected) :]} <= {inspect.Parameter.KEYWORD_ONLY}


@every_pair
def test_names_and_arguments(ours: Any, torchs: Any) -> None:
    """The names and arguments are torch's."""
    names = set(getattr(torchs, "__all__", ["GradScaler", "autocast"]))
    assert set(ours.__all__) == names
    for name in names:
        assert_same_interface(getattr(ours, name), getattr(torchs, name))


def test_interface_of_autocast() -> None:
    """amp_ext.autocast has the arguments and errors of torch.autocast, and torch's functions."""
    assert_same_interface(amp_ext.autocast, torch.autocast)
    for function in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        assert getattr(amp_ext, function) is getattr(torch.amp, function)
    with pytest.raises(RuntimeError, match=r"device type.*: nonsense"):
        amp_ext.autocast("nonsense")


@every_pair
def test_disable_themselves_as_torchs(ours: Any, torchs: Any) -> None:
    """Regions and scalers have torch's states and warnings: "cuda" is disabled without a GPU."""
    results = []
    for package in (ours, torchs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler, region = package.GradScaler(4.0), package.autocast(True, torch.bfloat16, False)
            with region:
                enabled = [torch.is_autocast_enabled(device_type) for device_type in PAIRS]
                assert routed() == (package is amp_ext.cpu.amp)
        said = {(w.category, str(w.message)) for w in caught if w.category is not FutureWarning}
        attributes = region.device, region.fast_dtype, region._enabled, region._cache_enabled
        results.append((said, scaler.is_enabled(), enabled, attributes, hasattr(region, "other")))
    assert results[0] == results[1]


def test_decorators_of_autograd_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are torch.amp's for "cuda"."""
    for name in ("custom_fwd", "custom_bwd"):
        monkeypatch.setattr(torch.amp, name, lambda *args, **options: (args, options))
    fwd, bwd = amp_ext.cuda.amp.custom_fwd, amp_ext.cuda.amp.custom_bwd
    wide = {"device_type": "cuda", "cast_inputs": torch.float32}
    assert fwd(print) == ((print,), {"device_type": "cuda", "cast_inputs": None})
    assert fwd(cast_inputs=torch.float32) == ((None,), wide)
    assert bwd(print) == ((print,), {"device_type": "cuda"})


@every_pair
def test_scaler(ours: Any, torchs: Any) -> None:
    """The scaler has amp_ext's options, is an instance of torch's class, and survives a pickle.

    It is made without torch's warning that the name is deprecated.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        scaler = ours.GradScaler(4.0, growth_interval=7, hysteresis=3)
    assert isinstance(scaler, amp_ext.GradScaler) and isinstance(scaler, torchs.GradScaler)
    again = pickle.loads(pickle.dumps(scaler))
    assert type(again) is ours.GradScaler
    assert again.state_dict() == torchs.GradScaler(4.0, growth_interval=7).state_dict()
    assert again._hysteresis == 3
    with pytest.raises(TypeError, match="histeresis"):
        ours.GradScaler(histeresis=3)
