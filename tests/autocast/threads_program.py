"""Run threads that share weights and copies of weights; a watchdog ends a hanging process.

python tests/autocast/threads_program.py COUNT
"""

import faulthandler
import random
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
from amp_ext.optim import SGD, AdamW

FP16 = torch.float16


def progress() -> None:
    """End the process unless there is progress again."""
    faulthandler.dump_traceback_later(200.0, exit=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 1))


def run(net: nn.Sequential, low: torch.dtype = FP16) -> Tensor:
    with amp_ext.autocast("cpu", dtype=low):
        return net[1](net[0](torch.ones(2, 4, dtype=low))[..., None, None]).sum()


class InCasts(TorchDispatchMode):
    """Call a function in each conversion, and another when a result is freed."""

    def __init__(self, call: Callable[[], object], freed: Callable[[], object]) -> None:
        super().__init__()
        self.call, self.freed = call, freed
        self.finalizers: list[weakref.finalize[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.call()
            self.finalizers.append(weakref.finalize(result, self.freed))
        return result

    def detach(self) -> None:
        """Make no call for the remaining copies: torch frees them under a lock of its own."""
        for finalizer in self.finalizers:
            finalizer.detach()


def reentry() -> None:
    """Python code within a cast, or while a copy is freed, may use the same weight."""
    weight, x, calls = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4, dtype=FP16), []

    def use() -> None:
        calls.append(1)
        with torch.no_grad(), amp_ext.autocast("cpu", dtype=FP16):
            F.linear(x, weight)

    casts = InCasts(use, use)
    with amp_ext.autocast("cpu", dtype=FP16):
        for _ in range(3):
            with casts:
                F.linear(x, weight)
            with torch.no_grad():
                weight.add_(1)  # the next cast frees this copy
        casts.detach()
    assert len(calls) == 5, calls


def interleaving(seed: int) -> None:
    """Three threads train, evaluate, copy, free and clear at random."""
    progress()
    chance = random.Random(seed)
    nets = [network() for _ in range(2)]
    sys.setswitchinterval(chance.choice([1e-6, 1e-5, 5e-3]))

    def work() -> None:
        net = chance.choice(nets)
        optimizer = chance.choice([SGD, AdamW])(net.parameters(), lr=1e-3)
        own = network()
        own_optimizer = SGD(own.parameters(), lr=1e-3, momentum=0.5)
        for _ in range(30):
            match chance.randrange(9):
                case 0 | 1:
                    run(own).backward()
                    own_optimizer.step()
                case 2:
                    with torch.no_grad():
                        run(net)
                case 3:
                    for param in net.parameters():
                        param.grad = torch.ones_like(param)
                    optimizer.step()
                case 4:
                    torch.clear_autocast_cache()
                case 5:
                    run(net, torch.bfloat16)
                case 6:
                    own[0].weight.data = own[0].weight.data + 1
                case 7:
                    own_optimizer.state.clear()
                case 8:
                    with InCasts(lambda: run(own), lambda: time.sleep(1e-6)), torch.no_grad():
                        run(own)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for _ in range(3)]:
            done.result()


def interleavings(count: int) -> None:
    # Resolve torch's overloads. Threads that resolve one at once would each make one, and torch may
    # keep a pointer to a freed one.
    with InCasts(int, int), torch.no_grad():
        for low in (FP16, torch.bfloat16):
            run(network(), low)
    for seed in range(count):
        interleaving(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-6)
    progress()
    reentry()
    interleavings(int(sys.argv[1]))
