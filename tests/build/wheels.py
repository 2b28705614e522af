"""Build a wheel of amp_ext for each Python and torch, and try each without a compiler.

python tests/build/wheels.py DIST 2.13.0 2.11.0

DIST/torch2.13-cu130/amp_ext-0.1.0-cp311-cp311-linux_x86_64.whl
DIST/torch2.13-cu130.html    pip install amp-ext -f URL/torch2.13-cu130.html
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
NAME = """
import torch
cuda = torch.version.cuda
print("torch" + ".".join(torch.__version__.split(".")[:2]), "cu" + cuda.replace(".", "") if cuda
      else "cpu", sep="-")
"""


def run(*command: str | Path, **options: object) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def environment(python: str, torch: str) -> Path:
    """Make a virtual environment with that torch; return its interpreter."""
    folder = ROOT / "build/wheels" / f"{python}-torch{torch}"
    made = folder / "bin/python"
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        pip = (made, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
        run(*pip, f"torch=={torch}", "setuptools", "wheel", "cmake", "ninja", "numpy")
        (folder / "made").touch()
    return made


def write_page(folder: Path) -> Path:
    """Write the page of the wheels in a folder, beside that folder."""
    links = []
    for wheel in sorted(folder.glob("*.whl")):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        links.append(f'<a href="{folder.name}/{wheel.name}#sha256={digest}">{wheel.name}</a><br>\n')
    page = folder.with_name(f"{folder.name}.html")
    page.write_text(f"<!DOCTYPE html>\n<title>amp_ext: {folder.name}</title>\n{''.join(links)}")
    return page


def try_page(page: Path, python: Path) -> None:
    """Install from a page beside the torch of `python`, without a compiler; run the doctor."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", "--without-pip", folder)
        packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (site,) = Path(folder).glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(packages)
        ours = Path(folder, "bin/python")
        alone = {"cwd": folder, "env": {"PATH": str(ours.parent), "HOME": folder}}
        pip = (python, "-m", "pip", "--python", ours, "install", "--quiet", "--no-index")
        run(*pip, "-f", page, "amp-ext", **alone)
        run(ours, "-m", "amp_ext", **alone)


def main() -> None:
    dist, *torches = sys.argv[1:]
    for name in filter(shutil.which, PYTHONS):
        for torch in torches:
            try:
                python = environment(name, torch)
            except subprocess.CalledProcessError:  # its own words are above
                print(f"torch {torch} for {name}: left out, since it does not install", flush=True)
                continue
            folder = Path(dist).resolve() / run(python, "-c", NAME).strip()
            force = {"FORCE_CPU" if folder.name.endswith("-cpu") else "FORCE_CUDA": "1"}
            pip = (python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
            run(*pip, "-w", folder, ROOT, env={**os.environ, **force})
            try_page(write_page(folder), python)
            print(f"{folder.name} for {name}: built, installed and checked", flush=True)


if __name__ == "__main__":
    main()
