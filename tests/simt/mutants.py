"""Break the CUDA kernels, one edit at a time, and see that their tests on the executor fail.

    python tests/simt/mutants.py [part of a name...]

Prints a table. The exit status is 1 when a mutant survives, an edit does not apply or a mutant does
not compile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simt.build import HERE, KERNELS, build, preload

TIMEOUT_S = 120


@dataclass(frozen=True)
class Mutant:
    """One edit of a kernel's text.

    Attributes:
        name: what is wrong with it.
        file: in csrc/kernels.
        old: occurs once in the file.
        new: replaces it.
        op: the tests of this op must fail.
        tests: which of them; all when empty.
        variant: of build.VARIANTS.
    """

    name: str
    file: str
    old: str
    new: str
    op: str
    tests: str = ""
    variant: str = "plain"


FOREACH, NORM, CHECK, UNSCALE, UPDATE, REDUCE, PACK = (
    *("foreach.cuh", "grad_norm.cu", "check_finite.cu", "unscale.cu", "update_scale.cu"),
    *("reduce.cuh", "pack.cuh"),
)
FIRST_CHUNK = "entries[middle].first_chunk <= chunk"
LAST_TICKET = "gridDim.x - 1) == gridDim.x - 1"
SHUFFLE = (  # the first of the two: it ends in a store
    "for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);\n"
    "  if (threadIdx.x % 32"
)
STORE = "ptx::store_any(found_inf, 1.0f)"
RELEASE = "= partial;\n    ptx::device_fence();"
ACQUIRE = f"{LAST_TICKET};\n    ptx::device_fence();"
RACE = {"tests": "small_exact or found_inf", "variant": "tsan"}

MUTANTS = (
    Mutant("owner of a first chunk", FOREACH, FIRST_CHUNK, f"{FIRST_CHUNK} + 1", "unscale"),
    Mutant(
        "the last chunks of a share",
        FOREACH,
        "begin + share + (blockIdx.x < rest)",
        "begin + share",
        "unscale",
    ),
    Mutant(
        "empty tensors are not passed",
        FOREACH,
        "while (i + 1 < table.size &&",
        "if (i + 1 < table.size &&",
        "unscale",
    ),
    Mutant(
        "past the end of a tensor",
        FOREACH,
        "left < kChunkElements ? left : kChunkElements",
        "kChunkElements",
        "unscale",
    ),
    Mutant("no head", FOREACH, "misaligned ? (n <", "false ? (n <", "unscale"),
    Mutant(
        "head of a short tensor",
        FOREACH,
        "(n < kPack - misaligned ? n : kPack - misaligned)",
        "(kPack - misaligned)",
        "unscale",
    ),
    Mutant("no tail", FOREACH, "if (tail + thread < n)", "if (false)", "check_finite"),
    Mutant(
        "unrolled loop runs too far",
        FOREACH,
        "i + (kPacksInFlight - 1) * kForeachThreads < packs",
        "i < packs",
        "unscale",
    ),
    Mutant(
        "a pack too few", FOREACH, "for (; i < packs; i", "for (; i < packs - 1; i", "check_finite"
    ),
    Mutant("no barrier in block_sum", REDUCE, "  ptx::block_sync();\n", "", "grad_norm"),
    Mutant(
        "no barrier in block_sum, race", REDUCE, "  ptx::block_sync();\n", "", "grad_norm", **RACE
    ),
    Mutant("a shuffle too few", REDUCE, SHUFFLE, SHUFFLE.replace("16", "8", 1), "grad_norm"),
    Mutant("no barrier behind the ticket", NORM, "  ptx::block_sync();\n", "", "grad_norm"),
    Mutant(
        "the last block but one adds up",
        NORM,
        LAST_TICKET,
        "gridDim.x - 1) + 2 == gridDim.x",
        "grad_norm",
    ),
    Mutant(
        "one partial sum too few", NORM, "i < gridDim.x; i", "i + 1 < gridDim.x; i", "grad_norm"
    ),
    Mutant("no fence before the ticket", NORM, RELEASE, "= partial;", "grad_norm", **RACE),
    Mutant("no fence behind the ticket", NORM, ACQUIRE, f"{LAST_TICKET};", "grad_norm", **RACE),
    Mutant(
        "plain stores of found_inf",
        UNSCALE,
        STORE,
        "*found_inf = 1.0f",
        "unscale",
        "random_bit_patterns and float32",
        "tsan",
    ),
    Mutant("only thread 0 is asked", UNSCALE, "ptx::block_any(body.bad)", "body.bad", "unscale"),
    Mutant("the product is not judged", UNSCALE, "!E::finite(product)", "!E::finite(x)", "unscale"),
    Mutant("the last element decides", CHECK, "bad |= !", "bad = !", "check_finite"),
    Mutant(
        "index of the last tensor",
        CHECK,
        "if (bad) bad_tensor = tensor",
        "bad_tensor = bad ? tensor : -1",
        "check_finite",
    ),
    Mutant(
        "infinity is finite", PACK, "& 0x7fffu) < 0x7c00u", "& 0x7fffu) <= 0x7c00u", "check_finite"
    ),
    Mutant("every second found_inf", UPDATE, "i += 32", "i += 64", "update_scale"),
    Mutant("lane 0 decides", UPDATE, "overflow = ptx::warp_any(overflow);", "", "update_scale"),
)


def applies(mutant: Mutant) -> bool:
    return (KERNELS / mutant.file).read_text().count(mutant.old) == 1 and mutant.old != mutant.new


def judge(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Return whether the mutant was caught, and how."""
    if not applies(mutant):
        return False, "THE EDIT DOES NOT APPLY"
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (KERNELS / mutant.file).read_text()
    (kernels / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    try:
        library = build(mutant.variant, kernels=kernels, into=folder)
    except RuntimeError as error:
        return False, f"DOES NOT COMPILE: {error}"
    tests = f"simt and ({mutant.tests})" if mutant.tests else "simt"
    test = HERE.parent / f"test_{mutant.op}.py"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-xqsp", "no:cacheprovider", "-k", tests, str(test)],
            env=os.environ
            | {"AMP_EXT_SIMT_LIBRARY": str(library), "LD_PRELOAD": preload(mutant.variant)}
            | {"TSAN_OPTIONS": "halt_on_error=1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return True, f"hangs for {TIMEOUT_S} s"
    output = done.stdout + done.stderr
    if done.returncode < 0:
        return True, f"ends by signal {-done.returncode}"
    if done.returncode == 0 or not ("1 failed" in output or "data race" in output):
        return False, f"SURVIVES (exit status {done.returncode})"
    for line in output.splitlines():
        if line.startswith(("E   ", "WARNING: ThreadSanitizer")):
            return True, line.removeprefix("E").strip()
    return True, f"exit status {done.returncode}"


def main(names: list[str]) -> int:
    survivors = 0
    for mutant in MUTANTS:
        if names and not any(name in mutant.name for name in names):
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            caught, verdict = judge(mutant, Path(folder))
        survivors += not caught
        seconds = time.monotonic() - start
        print(f"{mutant.file:16} {mutant.name:32} {seconds:4.0f} s  {verdict[:90]}", flush=True)
    print(f"{survivors} were not caught" if survivors else "all were caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
