"""Tries a release as its users do: pip, without a compiler, for each Python and torch at hand.

Prints for each how long pip took. Fails where pip, `import amp_ext` or the doctor does, where the
results are not the same everywhere to the bit, and where another torch's wheel is not refused.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import environments

# What the libraries compute, from numbers that are the same for every torch.
RESULTS = """
import hashlib, torch, amp_ext
digest = hashlib.sha256()
def numbers(*shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 0.754877666 % 1 - 0.5).reshape(shape)
def add(*tensors):
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    grads = [numbers(n).to(dtype) for n in (1, 1000, 70001)]
    found_inf = torch.zeros(1)
    add(amp_ext.ops.grad_norm(grads, found_inf))
    amp_ext.ops.unscale_(grads, found_inf, torch.full((1,), 0.37))
    add(*grads, found_inf)
few = numbers(3, 512).half(), numbers(512, 64).half()
add(amp_ext.ops.gemm(*few))
for make in (amp_ext.optim.AdamW, amp_ext.optim.SGD):
    weight = torch.nn.Parameter(numbers(1000).float())
    optimizer = make([weight], lr=0.01)
    for _ in range(3):
        weight.grad = weight.detach() * 0.3
        optimizer.step()
    add(weight)
print(digest.hexdigest()[:16])
"""


def new_environment(torch: environments.Torch, folder: Path) -> tuple[Path, dict[str, str]]:
    """An environment over that of the torch, and variables with which there is no compiler."""
    subprocess.run([torch.python, "-m", "venv", "--without-pip", folder], check=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ask = [torch.python, "-c", purelib]
    theirs = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    (ours,) = folder.glob("lib/python*/site-packages")
    (ours / "torch.pth").write_text(theirs)
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return folder / "bin/python", {**kept, "PATH": str(folder / "bin")}


def run(command: list[str | Path], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def check(torch: environments.Torch, dist: Path, folder: Path) -> tuple[str, str]:
    """What went wrong, if anything, and the digest of the results."""
    python, environment = new_environment(torch, folder)
    pip = [python, "-m", "pip", "install", "-v", "--no-cache-dir", "--no-index"]
    started = time.perf_counter()
    done = run([*pip, "--find-links", dist, "amp-ext"], environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        return "pip fails:\n" + done.stdout[-2000:] + done.stderr[-2000:], ""
    if "installed from the ready wheel" not in done.stdout + done.stderr:
        return "pip has not found the wheel", ""
    doctor = run([python, "-m", "amp_ext"], environment)
    if doctor.returncode:
        return "python -m amp_ext fails:\n" + doctor.stdout + doctor.stderr, ""
    results = run([python, "-c", RESULTS], environment)
    if results.returncode:
        return "a computation fails:\n" + results.stderr, ""
    digest = results.stdout.strip()
    print(f"{torch}: installed in {seconds:.1f} s; results {digest}", flush=True)
    for other in sorted(dist.glob(f"wheels/*/amp_ext-*-{torch.tag}-*.whl")):
        if f"torch{'.'.join(torch.version.split('.')[:2])}-" in str(other):
            continue
        if run([*pip, "--no-deps", "--force-reinstall", other], environment).returncode:
            return f"pip does not install {other}", ""
        refused = run([python, "-c", "import amp_ext"], environment).stderr.strip()
        if not re.search(r"ImportError: .* was built against torch .* is installed; .*$", refused):
            return f"{other.relative_to(dist)} is not refused: {refused[-500:]}", ""
        print(f"  {other.parent.name}: {refused.splitlines()[-1]}")
    return "", digest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_arguments(parser)
    options = parser.parse_args()
    digests, failed = set(), False
    for torch in environments.torches(options):
        with tempfile.TemporaryDirectory() as folder:
            wrong, digest = check(torch, options.dist.resolve(), Path(folder, "env"))
        if wrong:
            failed = True
            print(f"{torch}: {wrong}")
        else:
            digests.add(digest)
    if len(digests) != 1:
        print(f"the results differ: {digests}")
    return int(failed or len(digests) != 1)


if __name__ == "__main__":
    sys.exit(main())
