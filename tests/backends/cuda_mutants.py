"""Break what only a CUDA build has of the bindings, and how kernels are launched, one edit at a
time: tests on the fake CUDA runtime must fail.

    python tests/backends/cuda_mutants.py [part of a name...]

The Python is that of tests/fake_cuda/run.py. Each edit is compiled alone and linked with the
objects of the last build. Prints a table; the exit status is 1 when a mutant survives or an edit
does not apply.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
CUDA = "csrc/bindings/backends/cuda.cpp"
LAUNCH = "csrc/kernels/launch.cuh"
# What includes it: two kernels, and kernels that are empty as PTX for 8.0.
SCALE, PRODUCTS = "csrc/kernels/lists/update_scale.cu", "csrc/kernels/gemm/sm90/gemm_f16.cu"
PTX, CODE = "compute_80,code=compute_80", "compute_90a,code=sm_90a"
INSTALLED = Path(sysconfig.get_path("purelib")) / "amp_ext"
LIMIT_S = 120
STREAMS, FAKE = "backends/test_cuda_streams.py", "backends/test_fake_cuda.py"


class Mutant(NamedTuple):
    """One edit.

    Attributes:
        name: what is wrong with it.
        old: occurs once in the file.
        new: replaces it.
        select: the tests that have to fail, for pytest's -k.
        tests: the file in which they are.
        options: of tests/fake_cuda/run.py.
        source: the file that is edited.
        kernels: the file that is compiled anew if that is a header of the kernels.
    """

    name: str
    old: str
    new: str
    select: str
    tests: str = STREAMS
    options: str = ""
    source: str = CUDA
    kernels: str = ""


IF_CAPTURING = "    if (is_capturing(stream_.device())) {\n"
TICKETS, TABLE = "      void* const tickets = scratch", "      void* const memory = scratch"
STAGED = "at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true))"
GUARD = "    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);\n"
BEFORE_FREE = "gone before.\n    cudaStreamCaptureMode mode = cudaStreamCaptureMode"
MUTANTS = (
    Mutant(
        "tickets are not zeroed",
        "    if (kept.size() != before)\n",
        "    if (kept.size() == 0)\n",
        "more_tickets",
    ),
    Mutant(
        "tickets of a graph are not zeroed",
        "      C10_CUDA_CHECK(cudaMemsetAsync(tickets, 0, bytes, stream_.stream()));\n",
        "",
        "test_graph",
    ),
    Mutant(
        "a graph has the thread's tickets",
        IF_CAPTURING + TICKETS,
        "    if (false) {\n" + TICKETS,
        "test_graph",
    ),
    Mutant(
        "a graph has the thread's table",
        IF_CAPTURING + TABLE,
        "    if (false) {\n" + TABLE,
        "test_graph",
    ),
    Mutant(
        "streams share what is kept",
        "states[{stream.device_index(), stream.stream()}]",
        "states[{stream.device_index(), nullptr}]",
        "two_streams",
    ),
    Mutant(
        "devices share what is kept",
        "states[{stream.device_index(), stream.stream()}]",
        "states[{0, stream.stream()}]",
        "lists_in_turn",
        options="--devices 2 --guarded 1",
    ),
    Mutant(
        "another device is the current one",
        "guard_(device)",
        "guard_(c10::Device(at::kCUDA, 0))",
        "lists_in_turn",
        options="--devices 2",
    ),
    Mutant(
        "a table is taken for another of its size",
        " && std::memcmp(sent.bytes.data(), entries, bytes) == 0",
        "",
        "lists_in_turn",
    ),
    Mutant(
        "a table that was not sent is taken for sent",
        "    sent.bytes.clear();",
        "    //",
        "was_not_sent",
        FAKE,
    ),
    Mutant(
        "staged memory is overwritten early",
        f"const at::Tensor staged = {STAGED}",
        "static const at::Tensor all = at::empty({1 << 24}, "
        "at::TensorOptions(at::kByte).pinned_memory(true));\n"
        "    const at::Tensor staged = all.narrow(0, 0, bytes)",
        "lists_in_turn",
    ),
    Mutant(
        "what is sent ends another thread's capture",
        GUARD + "    const auto bytes",
        "    const auto bytes",
        "thread_during",
    ),
    Mutant(
        "what is allocated ends another thread's capture",
        GUARD + "    const size_t size",
        "    const size_t size",
        "thread_during",
    ),
    Mutant(
        "what is freed ends another thread's capture",
        BEFORE_FREE + "Relaxed",
        BEFORE_FREE + "Global",
        "thread_during",
    ),
    Mutant(
        "torch's cache is not emptied when memory is short",
        "      c10::cuda::CUDACachingAllocator::emptyCache();\n",
        "",
        "out_of_memory",
        FAKE,
    ),
    *(
        Mutant(name, old, new, select, FAKE, "", LAUNCH, SCALE)
        for name, old, new, select in (
            ("early in a graph", "status == cudaStreamCaptureStatusNone", "true", "of_a_graph"),
            ("early by any code", "code.ptxVersion >= kSince", "true", "no_other_kernel"),
            ("early by a GPU's", "code.ptxVersion", "code.binaryVersion", "no_other_kernel"),
            ("never early", "if (!waits_for_previous_grid(kernel))", "if (true)", "code_waits"),
            ("long parameters on any driver", "version >= kSince", "true", "on_any_driver"),
        )
    ),
    *(
        Mutant(name, old, new, select, FAKE, "", source, PRODUCTS)
        for name, old, new, select, source in (
            (
                "maps before there is a context",
                "  (void)waits_for_previous_grid(reinterpret_cast<const void*>(kernel));\n",
                "",
                "without_a_context",
                "csrc/kernels/gemm/sm90/gemm.cuh",
            ),
            ("one question for all clusters", "device, cluster}", "device}", "with_some", LAUNCH),
        )
    ),
    Mutant(
        "another device's shared memory",
        "told & bit",
        "told",
        "test_products_in_turn",
        options="--devices 2",
        source=LAUNCH,
        kernels=PRODUCTS,
    ),
)


class Build:
    """The package with another object in the module or a library, from those of the last build.

    Attributes:
        object: of the build's, in the folder csrc.
        file: the module or library that it is in.
        compile: the command that has made the object.
    """

    def __init__(self, folder: Path, source: Path, object: str, built: str) -> None:
        path = max(ROOT.glob(f"build/{built}"), key=lambda path: path.stat().st_mtime)
        self.file = path.name
        self.folder, self.source, self.object = folder, source, object
        self.link = self.command(path)
        self.compile = self.command(path.parent / "csrc" / object)
        self.compile = self.compile[: self.compile.index("-MMD")]

    @staticmethod
    def command(target: Path) -> list[str]:
        """Return the last of those that make a target."""
        last = max(ROOT.glob("build/*-cuda/build.ninja"), key=lambda path: path.stat().st_mtime)
        paths = (path.relative_to(ROOT) for path in (last, target))
        ninja = [sys.executable, "-m", "ninja", "-f", next(paths), "-t", "commands", next(paths)]
        done = subprocess.run(ninja, cwd=ROOT, capture_output=True, text=True, check=True)
        return shlex.split(done.stdout.splitlines()[-1])

    @staticmethod
    def run(command: list[object]) -> None:
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    def objects(self, folder: Path, text: str) -> list[Path]:
        """Compile what replaces the object if the source has the text."""
        raise NotImplementedError

    def package(self, name: str, text: str) -> Path:
        """Return a folder with amp_ext, of which the source has the text."""
        folder = self.folder / name
        ignored = shutil.ignore_patterns(self.file, "__pycache__")
        shutil.copytree(INSTALLED, folder / "amp_ext", ignore=ignored)
        link = [word for word in self.link if not word.endswith(f"/{self.object}")]
        link[link.index("-o") + 1] = str(folder / "amp_ext" / self.file)
        self.run([*link, *self.objects(folder, text)])
        return folder


class BindingsBuild(Build):
    """With another source of a folder of the bindings."""

    def __init__(self, folder: Path, source: Path) -> None:
        module = f"*-torch{torch.__version__}-cuda/_C.*.so"
        super().__init__(folder, source, f"bindings/{source.parent.name}.o", module)
        self.flags = [word for word in self.compile if not word.startswith("-include")]
        self.flags = [word for word in self.flags if word != "-O3"]
        self.rest = folder / "rest.o"
        left_out = (source.stem, "none")
        *before, last = sorted(p for p in source.parent.glob("*.cpp") if p.stem not in left_out)
        included = (f"-include{path}" for path in before)
        self.run([*self.flags, *included, "-c", last, "-o", self.rest])

    def objects(self, folder: Path, text: str) -> list[Path]:
        source, compiled = folder / self.source.name, folder / "mutant.o"
        source.write_text(text)
        self.run([*self.flags, "-c", source, "-o", compiled])
        return [self.rest, compiled]


class KernelsBuild(Build):
    """With another header of the kernels, in one of their files."""

    def __init__(self, folder: Path, source: Path, kernels: Path) -> None:
        self.kernels = kernels.relative_to(ROOT / "csrc")
        super().__init__(folder, source, f"{self.kernels}.o", "cuda[0-9]*/libamp_ext_cuda.so")
        codes = (PTX,) if "gemm" in self.kernels.parts else (PTX, CODE)
        flags = (word for word in self.compile if not word.startswith(("-gencode", "-Icsrc/k")))
        self.flags = [*flags, *(f"-gencode=arch={code}" for code in codes)]

    def objects(self, folder: Path, text: str) -> list[Path]:
        csrc, compiled = folder / "csrc", folder / "mutant.o"
        shutil.copytree(ROOT / "csrc/kernels", csrc / "kernels")
        (csrc / self.source.relative_to(ROOT / "csrc")).write_text(text)
        include = f"-I{csrc / 'kernels'}"
        self.run([*self.flags, include, "-c", csrc / self.kernels, "-o", compiled])
        return [compiled]


def run_tests(mutant: Mutant, folder: Path) -> tuple[int, str]:
    """Return pytest's exit status, that of a process which ended by a signal or hung, and why."""
    options = ["-xq", "--no-header", "-pno:cacheprovider", "-k", mutant.select]
    command = [sys.executable, "fake_cuda/run.py", *mutant.options.split(), "-m", "pytest"]
    try:
        done = subprocess.run(
            [*command, *options, mutant.tests],
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, f"no end within {LIMIT_S} s"
    lines = (done.stdout + done.stderr).splitlines()
    why = next((line for line in lines if line.startswith(("E  ", "fake cuda: "))), lines[-1])
    return done.returncode, why.removeprefix("E").strip()


def is_caught(build: Build, number: int, mutant: Mutant) -> bool:
    """Test a mutant and print its line of the table."""
    start, text = time.monotonic(), build.source.read_text()
    caught = False
    if text.count(mutant.old) != 1:
        how = "THE EDIT DOES NOT APPLY"
    else:
        folder = build.package(str(number), text.replace(mutant.old, mutant.new))
        status, how = run_tests(mutant, folder)
        caught = status == 1 or status < 0
        how = how if caught else f"SURVIVES (exit status {status})"
    seconds = time.monotonic() - start
    print(f"{mutant.name:52} {seconds:4.0f} s  {how[:90]}", flush=True)
    return caught


def all_caught(source: str, kernels: str, chosen: list[Mutant]) -> list[bool]:
    """Test the mutants of one source."""
    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        if kernels:
            build: Build = KernelsBuild(Path(folder), ROOT / source, ROOT / kernels)
        else:
            build = BindingsBuild(Path(folder), ROOT / source)
        unbroken = build.package("unbroken", build.source.read_text())
        distinct = {(m.select, m.tests, m.options): m for m in chosen}.values()
        controls = pool.map(partial(run_tests, folder=unbroken), distinct)
        for mutant, (status, why) in zip(distinct, controls, strict=True):
            if status:
                raise RuntimeError(f"the tests of {mutant.name!r} fail without an edit: {why}")
        return list(pool.map(partial(is_caught, build), range(len(chosen)), chosen))


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    caught = []
    for place in dict.fromkeys((m.source, m.kernels) for m in chosen):
        mutants = [m for m in chosen if (m.source, m.kernels) == place]
        caught += all_caught(*place, mutants)
    print(f"{sum(caught)} of {len(caught)} mutants were caught")
    return int(not all(caught))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
