"""Test that install() changes every region of torch and uninstall() leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import amp_ext
from autocast_cases import Seen, routed
from programs import run

FP16 = {"device_type": "cpu", "dtype": torch.float16}


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    assert not amp_ext.is_installed()
    yield
    amp_ext.uninstall()


def routes(region: Any = torch.autocast) -> bool:
    with region(**FP16):
        return routed()


def test_install_and_uninstall_can_be_repeated() -> None:
    """Regions of torch route while installed, regions of amp_ext always, and nothing else does."""
    states = []
    for change in (
        *(amp_ext.uninstall, amp_ext.install, amp_ext.install, amp_ext.uninstall),
        *(amp_ext.uninstall, amp_ext.install, amp_ext.uninstall),
    ):
        assert change() is None
        states.append((amp_ext.is_installed(), routes()))
        assert routes(amp_ext.autocast)
        assert not routes(functools.partial(torch.autocast, enabled=False))
        assert not routed()
    assert states == [(on, on) for on in (False, True, True, False, False, True, False)]


def test_while_other_threads_work() -> None:
    """Products, regions and scalers of other threads stay right."""
    done = threading.Event()
    a = torch.randint(-3, 4, (8, 8)).float()
    expected = (a @ a).half()

    def products(region: Any) -> int:
        count = 0
        while not done.is_set() or count < 20:
            with region(**FP16), Seen() as seen:
                assert (a @ a).equal(expected)
                assert F.linear(a, a.t()).equal(expected)
            assert region is torch.autocast or seen.gemms == 2
            count += 1
        return count

    def scalers() -> int:
        count = 0
        while not done.is_set() or count < 20:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            assert type(scaler) in (torch.amp.GradScaler, amp_ext.GradScaler)
            assert scaler.state_dict()["scale"] == 8.0
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        regions = (amp_ext.autocast, torch.autocast, amp_ext.autocast, torch.autocast)
        works = [pool.submit(products, region) for region in regions]
        works += [pool.submit(scalers) for _ in range(2)]
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
