"""Break the choice of a backend, one edit at a time, and see that its tests fail.

    python tests/backends/choose_mutants.py

Each edit is built in a copy of csrc, with the objects of the files that it does not concern. Prints
a table. The exit status is 1 when a mutant survives or an edit does not apply.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHOOSE, GEMM = "csrc/bindings/backends/choose.cpp", "csrc/bindings/gemm/gemm.cpp"
TABLE = "csrc/bindings/backends/table.cpp"
VERIFIED, LISTS = "csrc/bindings/backends/verified.cpp", "csrc/bindings/lists"
TESTS = ("test_choose.py", "test_tune.py", "test_verify.py")

# What is wrong; the file; a text that occurs once in it; what replaces it.
Mutant = tuple[str, str, str, str]
MUTANTS: tuple[Mutant, ...] = (
    (
        "kernels without being asked for",
        CHOOSE,
        "if (mode == GemmMode::kernel) {",
        "if (mode != GemmMode::library) {",
    ),
    (
        "kernels for what they cannot compute",
        CHOOSE,
        "if (!obstacle && kernels != &cpu_backend()) {",
        "if (kernels != &cpu_backend()) {",
    ),
    (
        "the CPU's kernels for FP64",
        CHOOSE,
        "  if (const char* const obstacle = cpu_backend().why_not(g)) return",
        "  if (const char* const obstacle = nullptr) return",
    ),
    (
        "the library for everything",
        CHOOSE,
        'return {&cpu_backend(), "16-bit',
        'return {&torch_library(), "16-bit',
    ),
    ("never the kernels", CHOOSE, "kernels != &cpu_backend()", "kernels == &cpu_backend()"),
    (
        "a measured backend for what it cannot compute",
        CHOOSE,
        "if (found && !obstacle_of(*found->backend, device, args)) {",
        "if (found && is_allowed(*found->backend, device.type())) {",
    ),
    (
        "another backend than the chosen one",
        CHOOSE,
        "if (!is_allowed(backend, device.type())) return",
        "if (false) return",
    ),
    (
        "what TMA cannot load by the kernel for sm_80",
        CHOOSE,
        "if (!obstacle) obstacle = why_slow(*kernels, device, args);",
        "",
    ),
    ("the table in every mode", CHOOSE, "mode == GemmMode::automatic ? find", "true ? find"),
    (
        "torch's 16-bit product for an odd k",
        CHOOSE,
        "return g.k % 2 == 0 && is_same(g.b)",
        "return is_same(g.b)",
    ),
    ("a backend without its variant", CHOOSE, "args.variant = found->variant;", ""),
    ("a key without the bias", TABLE, "type(g.bias)", "0"),
    (
        "products that are not verified",
        CHOOSE,
        "kernels->sm80 && is_verified(backend, family_of_sm80(g), device)",
        "kernels->sm80",
    ),
    (
        "products of sm90 that are not verified",
        CHOOSE,
        "kernels->sm90 && is_verified(backend, family_of_sm90(g), device)",
        "kernels->sm90",
    ),
    ("kernels that a GPU has not", CHOOSE, "if (!kernels->sm80 && !kernels->sm90)", "if (false)"),
    (
        "a library's products for those under test",
        "csrc/bindings/backends/run.cpp",
        "== Status::no_tensor_map && !is_under_test()",
        "== Status::no_tensor_map",
    ),
    ("wrong kernels", VERIFIED, "= found.cast<bool>()", "= true"),
    (
        "lack of memory is kept",
        VERIFIED,
        "found.is_none()) return",
        "found.is_none()) return answers[question(backend, family, device)] =",
    ),
    (
        "gradients may be freed",
        VERIFIED,
        "needs_none(backend, device) || answers",
        "true || answers",
    ),
    (
        "torch.compile traces it",
        "csrc/bindings/backends/python.h",
        "before_ = set()(pybind11::none())",
        "before_ = pybind11::none()",
    ),
    (
        "torch's ops see no overflow",
        f"{LISTS}/unscale.cpp",
        "call.check_finite(grads, args.found_inf);",
        "",
    ),
    (
        "torch's ops have no floor",
        f"{LISTS}/update_scale.cpp",
        "at::maximum(scale, floor)",
        "scale",
    ),
    (
        "a copy before the choice",
        GEMM,
        "copies_.push_back({&matrix, tensor})",
        "copies_.push_back({&matrix, tensor.clone(at::MemoryFormat::Contiguous)})",
    ),
)


def copy_of_the_project(folder: Path) -> None:
    built = ("simt", "lib.*", "base", "rehearsal", "bench", "wheels")
    others = ("*-cuda*", "*-module", "cuda[0-9]*")
    ignored = shutil.ignore_patterns(*built, *others, "__pycache__")
    for name in ("csrc", "amp_ext", "triton_kernels", "build"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "build_backend.py", "pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder)


def build(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def fails(folder: Path) -> bool:
    options = ["-xq", "-knot a_script", "-pno:cacheprovider", "-c", ROOT / "pyproject.toml"]
    tests = [ROOT / "tests" / "backends" / name for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,  # where Python finds amp_ext first
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == 1


def result_of(mutant: Mutant, folder: Path) -> str:
    _, file, old, new = mutant
    path = folder / file
    text = path.read_text()
    if text.count(old) != 1:
        return "THE EDIT DOES NOT APPLY"
    path.write_text(text.replace(old, new))
    build(folder)
    result = "caught" if fails(folder) else "SURVIVES"
    path.write_text(text)
    return result


def main() -> int:
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def work(mutant: Mutant) -> str:
        folder = folders.get()
        try:
            return result_of(mutant, folder)
        finally:
            folders.put(folder)

    survivors = 0
    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        first = Path(name, "0")
        copy_of_the_project(first)
        build(first)
        if fails(first):
            raise RuntimeError("the tests fail without an edit")
        folders.put(first)
        for other in range(1, jobs):
            folders.put(shutil.copytree(first, Path(name, str(other))))
        with ThreadPoolExecutor(jobs) as pool:
            for (what, file, _, _), result in zip(MUTANTS, pool.map(work, MUTANTS), strict=True):
                survivors += result != "caught"
                print(f"{Path(file).name:12} {what:40} {result}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants were caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
