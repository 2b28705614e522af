"""Print the GPU work of one training step with torch.amp and with amp_ext.

    python tests/fake_cuda/count.py            # prints the table
    python tests/fake_cuda/count.py --check    # fails where docs/measuring.md has another
    python tests/fake_cuda/count.py --write    # writes it there

The fake CUDA runtime counts launches, copies, memsets and waits of the host in the fourth step, and
in its part after the backward pass. torch's library computes products. An operator of torch counts
as one launch, however many kernels it has.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import amp_ext
import amp_ext.optim
from fake_cuda.recorder import is_running, recorded
from harness.page import PAGE, replaced
from workloads import checkerboard, digits, regression
from workloads.common import Trainer
from workloads.networks import GPT2

CUDA = torch.device("cuda")
BEGIN = "<!-- counts: written by `python tests/fake_cuda/count.py --write`, not by hand -->"
END = "<!-- end of counts -->"
STEPS = 4
TORCH = SimpleNamespace(autocast=torch.autocast, GradScaler=torch.amp.GradScaler, optim=torch.optim)
SMALL = GPT2(layers=4, width=96, heads=12, vocabulary=6282, positions=128, batch=1)

Workload = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]


def of(trainer: Trainer) -> Workload:
    return trainer.network, trainer.loss, next(trainer.batches)


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(64, digits.SIDE, digits.SIDE, device=CUDA), torch.arange(64, device=CUDA) % 10


def perceptron() -> Workload:
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Linear(64, 64)).to(CUDA)
    return network, nn.functional.mse_loss, (torch.rand(64, 64, device=CUDA),) * 2


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "checkerboard": lambda: of(checkerboard.training("none", CUDA, 16)),
    "regression": lambda: of(regression.training("none", CUDA, regression.batches())),
    "digits": lambda: of(digits.training("none", CUDA, [images()])),
    "MLP, 6 layers": perceptron,
    "GPT-2, 4 layers": lambda: (SMALL.network().to(CUDA), SMALL.loss, SMALL.data(CUDA)),
}
OPTIMIZERS: dict[str, Callable[[Any, Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda package, parameters: torch.optim.SGD(parameters, lr=1e-3),
    "fused AdamW": lambda package, parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW": lambda package, parameters: package.optim.AdamW(parameters),
}

Counts = tuple[int, int, int]  # launches, copies and memsets, waits


def count(package: Any, workload: str, optimizer_name: str, clips: bool) -> tuple[Counts, Counts]:
    """Count a whole step, and its part after the backward pass."""
    torch.manual_seed(0)
    network, loss_of, (inputs, targets) = WORKLOADS[workload]()
    optimizer = OPTIMIZERS[optimizer_name](package, network.parameters())
    scaler = package.GradScaler("cuda")

    def backward() -> None:
        optimizer.zero_grad()
        with package.autocast("cuda", torch.float16):
            loss = loss_of(network(inputs), targets)
        scaler.scale(loss).backward()

    def step() -> None:
        if clips and package is amp_ext:
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(STEPS - 1):
        backward()
        step()
    torch.cuda.synchronize()
    first, second = (counted(part) for part in (backward, step))
    return tuple(map(sum, zip(first, second, strict=True))), second


def counted(part: Callable[[], None]) -> Counts:
    with recorded() as calls:
        part()
    kinds = calls.counts()
    return kinds["launch"], kinds["copy"] + kinds["memset"], kinds["wait"]


def table() -> str:
    heads = "torch.amp", "amp_ext", "torch.amp after backward", "amp_ext after backward"
    rows = [("workload", "optimizer", "clipping", *heads), ("---",) * 7]
    for workload, optimizer, clips in product(WORKLOADS, OPTIMIZERS, (False, True)):
        theirs, ours = (count(package, workload, optimizer, clips) for package in (TORCH, amp_ext))
        pairs = zip(sum(theirs, ()), sum(ours, ()), strict=True)
        if any(mine > other for other, mine in pairs):
            sys.exit(f"{workload}, {optimizer}: amp_ext {ours} asks for more than {theirs}")
        counts = (theirs[0], ours[0], theirs[1], ours[1])
        cells = (", ".join(map(str, numbers)) for numbers in counts)
        rows.append((workload, optimizer, "yes" if clips else "no", *cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    if not is_running():
        os.environ["AMP_EXT_GEMM"] = "library"
        run = str(Path(__file__).with_name("run.py"))
        os.execv(sys.executable, [sys.executable, run, *sys.argv])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare it with docs/measuring.md")
    parser.add_argument("--write", action="store_true", help="write it into docs/measuring.md")
    options = parser.parse_args()
    text, counts = PAGE.read_text(), table()
    print(counts)
    page = replaced(text, counts, BEGIN, END)
    if options.write:
        PAGE.write_text(page)
    elif options.check and page != text:
        sys.exit("docs/measuring.md has other counts: run this with --write")


main()
