"""Test the last barrier of an optimizer's kernel: without it, the PTX executor finds a race."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cudasim import cuda

TESTS = Path(__file__).resolve().parents[1]
UPDATE = TESTS.parent / "csrc/kernels/optim/update.cuh"

pytestmark = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing())

# Drops the barrier of a line, and updates tensors with different steps. The shares of the four
# blocks begin within tensors.
PROGRAM = """
import os, sys
import torch
sys.path[:0] = [".", "support"]
from cudasim.mutants import Case, Kernels, Mutant
from mutants.cases import F32, case, state

kernels, line = Kernels(os.environ["FAKE_CUDA_KERNELS"]), sys.argv[1]
given = state("adam_", (70_000,) * 5, (F32,) * 4, decoupled=True)
given["steps"] = [torch.tensor(3.0 * i) for i in range(5)]
update = case("", "adam_", **given)
found = [
    Mutant(kernel, number, "drop", text, "nop", 0, source)
    for kernel, number, _, source, text in kernels.watch(update)
    if text.startswith("bar.sync") and f"update.cuh:{line}" in source
]
for mutant in found:
    kernels.apply(mutant)
print(len(found), "barriers")
try:
    update.run()
except Exception:
    print(kernels.fault())
"""


def line_of(text: str, occurrence: int = 0) -> int:
    lines = [i for i, line in enumerate(UPDATE.read_text().splitlines(), 1) if text in line]
    return lines[occurrence]


@pytest.mark.full
def test_update_without_its_last_barrier_is_a_race_cuda() -> None:
    """The report names the read of a step and its increment."""
    barrier = line_of("if (!is_last_block(tickets") - 1
    command = [sys.executable, "fake_cuda/run.py", "--capability", "80"]
    command += ["--multiprocessors", "1", "-c", PROGRAM, str(barrier)]
    of_runtime = "LD_PRELOAD|PYTEST_PLUGINS|TRITON_LIBCUDA_PATH|FAKE_CUDA_|CUDASIM_"
    environment = {name: v for name, v in os.environ.items() if not re.match(of_runtime, name)}
    done = subprocess.run(
        command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False
    )
    assert re.search(r"[1-9]\d* barriers", done.stdout), done.stdout + done.stderr
    assert "race: " in done.stdout, done.stdout + done.stderr
    assert f"update.cuh:{line_of('step += 1.0f')}" in done.stdout
    reads = [line_of("*entry.step != shared.step"), line_of("shared.step = step ?")]
    assert any(f"update.cuh:{line}" in done.stdout for line in reads)
