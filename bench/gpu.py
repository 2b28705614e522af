"""One run of everything that wants a GPU, with the torch at hand and without downloads.

    python bench/gpu.py [RESULTS]

Builds amp_ext for the GPU that is present, runs the tests, the probe of what tests/simt assumes, a
memory check where compute-sanitizer is installed, and the benchmarks, which append to
RESULTS/<gpu>/<utc date>-<commit>.jsonl. A stage that fails leaves the others running; the summary
is printed last, and the exit status is 1 when a stage has failed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT / "build/gpu"
PYTHON = sys.executable
BUDGET_S = 570  # for all stages: the most wanted come first


@dataclass
class Stage:
    """A command and the seconds it may take."""

    name: str
    command: list[str]
    limit: int
    cwd: Path = ROOT

    def run(self, env: dict[str, str], left: float) -> str:
        """Run it in the seconds that are left; return "ok" or what went wrong, and the time."""
        if left <= 0:
            return "left out, no time"
        print(f"== {self.name}: {' '.join(self.command)}", flush=True)
        start = time.monotonic()
        run = subprocess.Popen(self.command, cwd=self.cwd, env=env, start_new_session=True)
        try:
            status = run.wait(min(self.limit, left))
            result = f"FAILED, exit status {status}" if status else "ok"
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # its children too: they would hold the GPU
            run.wait()
            result = "FAILED, out of time"
        result += f" ({time.monotonic() - start:.0f} s)"
        print(f"== {self.name}: {result}", flush=True)
        return result


def arch_list(capability: tuple[int, int]) -> str:
    """The GPU's own architecture, and 8.0 for the kernels that are written for all of them."""
    major, minor = capability
    own = f"{major}.{minor}{'a' if major >= 9 else ''}"
    return own if own == "8.0" else f"8.0;{own}"


def ledger(results: Path, gpu: str) -> Path:
    """The file for this run's measurements."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    folder = results / re.sub(r"\W+", "-", gpu).strip("-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.now(timezone.utc):%Y-%m-%d}-{commit}.jsonl"


def stages(results: Path) -> Iterator[Stage]:
    yield Stage("build", [PYTHON, "setup.py", "build", "--build-lib", str(LIB)], 240)
    yield Stage("doctor", [PYTHON, "-m", "amp_ext"], 60, ROOT / "tests")
    pytest = [PYTHON, "-m", "pytest", "-o", "faulthandler_timeout=60", "-k", "cuda"]
    kernels = "test_simt_kernels.py"  # apart: they may hang, or spoil the process for the others
    yield Stage("tests", [*pytest, "-q", "--ignore", kernels, "."], 240, ROOT / "tests")
    file = ledger(results, torch.cuda.get_device_name())
    probe = [PYTHON, str(ROOT / "bench/probe.py"), "--save", str(file.with_suffix(".probe.txt"))]
    yield Stage("probe", probe, 150)
    yield Stage("demonstrations", [*pytest, "-v", "-x", kernels], 90, ROOT / "tests")
    if sanitizer := shutil.which("compute-sanitizer"):
        small = [PYTHON, str(ROOT / "bench/gpu.py"), "--small-case"]
        yield Stage("memcheck", [sanitizer, "--error-exitcode", "1", *small], 120)
    else:
        print("== memcheck: left out, compute-sanitizer is not installed", flush=True)
    for op in ("train", "unscale", "cast", "scaler", "gemm", "autocast"):
        run = [PYTHON, "bench/run.py", op, "--device", "cuda", "--json", str(file)]
        yield Stage(f"bench {op}", run, 150)


def small_products() -> None:
    """gemm's kernels on ones: tails, misaligned operands, splits; on Hopper every tile."""
    from amp_ext import _C, ops

    _C.set_gemm_source(_C.GemmSource.kernel)
    ones = functools.partial(torch.ones, dtype=torch.float16, device="cuda")

    def multiply(m: int, n: int, k: int, offset: int = 0) -> None:
        a, b = ones(m * k + offset)[offset:].view(m, k), ones(n, k)
        assert bool((ops.gemm(a, b, trans_b=True, out_dtype=torch.float32) == k).all())

    for shape in ((1, 8, 16), (65, 33, 129, 1), (128, 256, 512), (16, 16, 8192)):
        multiply(*shape)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for tile in range(len(_C.gemm_tiles()["gemm_sm90_kernel"]) if hopper else 0):
        for cluster, splits in (((1, 1), 1), ((2, 1), 2), ((1, 2), 1)):
            _C.force_gemm_plan(tile, cluster, splits)
            multiply(264, 520, 1032)
    _C.force_gemm_plan(None)


def small_case() -> None:
    """Every op on short lists of all dtypes, sizes around the vector width, misaligned views."""
    import amp_ext

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((), dtype=dtype, device="cuda")

    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    sizes = (0, 1, 7, 8, 9, 4095, 65537)
    found_inf, inv_scale = zeros(torch.float32), zeros(torch.float32) + 0.5
    for repeats in (1, 40):
        grads = [
            torch.ones(offset + n, dtype=dtype, device="cuda")[offset:]
            for dtype, n, offset in itertools.product(dtypes, sizes * repeats, (0, 1))
        ]
        amp_ext.ops.unscale_(grads, found_inf, inv_scale)
        halves = [torch.empty_like(grad, dtype=torch.float16) for grad in grads]
        amp_ext.ops.cast_(halves, grads)
        amp_ext.ops.check_finite(grads, found_inf, zeros(torch.int64))
        amp_ext.ops.grad_norm(grads, found_inf, inv_scale)
    scale, tracker = zeros(torch.float32) + 4.0, zeros(torch.int32)
    amp_ext.ops.update_scale_(scale, tracker, [found_inf], 2.0, 0.5, 1)
    small_products()
    torch.cuda.synchronize()
    assert found_inf.item() == 0.0
    assert scale.item() == 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "bench/results")
    parser.add_argument("--small-case", action="store_true", help="only what memcheck looks at")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu: torch {torch.__version__} of {PYTHON} sees no GPU", file=sys.stderr)
        return 1
    if options.small_case:
        small_case()
        return 0

    arches = arch_list(torch.cuda.get_device_capability())
    path = os.pathsep.join(filter(None, [str(LIB), os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        "FORCE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": arches,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }
    end = time.monotonic() + BUDGET_S
    results = {
        stage.name: stage.run(env, end - time.monotonic())
        for stage in stages(options.results.resolve())
    }
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, built for {arches}")
    for name, result in results.items():
        print(f"{name:<16}{result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
