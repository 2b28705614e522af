"""Builds a release into dist: sources, and wheels that are installed without a compiler.

    amp_ext-V.tar.gz                   pip takes these, and build_backend.py the wheel that fits
    amp_ext_kernels_cpu-V-*.whl        the libraries of kernels, for every torch and every Python
    amp_ext_kernels_cu13-V-*.whl       (where there is nvcc)
    wheels/index.html                  a page of the next ones, with their SHA-256
    wheels/torch2.13-cpu/amp_ext-V-cp311-cp311-*.whl
                                       amp_ext with the extension module for one torch and Python

The last ones lie apart: by their names pip would take one that was made for another torch.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import environments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import build_backend  # noqa: E402
import setup  # noqa: E402


def kernels_wheel(target: setup.Target, package: str, dist: Path) -> Path:
    """A wheel with one library, for every Python. Its name ends in its CUDA major version."""
    name = package.replace("-", "_")
    (library,) = setup.make([target], getattr(setup.find_toolkit(), "nvcc", None))
    with tempfile.TemporaryDirectory() as folder:  # one without a pyproject.toml
        shutil.copytree(ROOT / "release/kernels", folder, dirs_exist_ok=True)
        Path(folder, name).mkdir()
        Path(folder, name, "__init__.py").write_text(
            f'"""The library {library.name} of amp_ext."""\n'
        )
        shutil.copy(library, Path(folder, name))
        environment = {**os.environ, "NAME": package, "VERSION": build_backend.version()}
        pip_wheel(Path(sys.executable), Path(folder), dist, environment)
    return next(dist.glob(f"{name}-{build_backend.version()}-*.whl"))


def pip_wheel(python: Path, source: Path, folder: Path, environment: dict[str, str]) -> None:
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, source], env=environment, check=True)


def module_wheel(torch: environments.Torch, wheels: Path) -> Path:
    """The wheel of amp_ext._C for a torch."""
    folder = wheels / build_backend.flavour(torch.version)
    environment = {**os.environ, "AMP_EXT_MODULE_ONLY": "1", "AMP_EXT_WHEELS": ""}
    pip_wheel(torch.python, ROOT, folder, environment)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def write_page(wheels: Path) -> None:
    """The page of all wheels that lie there."""
    lines = ["<!DOCTYPE html>", "<title>amp_ext: wheels</title>"]
    for wheel in sorted(wheels.glob("*/*.whl")):
        name = html.escape(wheel.relative_to(wheels).as_posix())
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f'<a href="{name}#sha256={digest}">{name}</a><br>')
    wheels.joinpath("index.html").write_text("\n".join(lines) + "\n")


def write_sources(dist: Path, url: str) -> None:
    """The sources, which name the page's place."""
    code = "import sys, build_backend; build_backend.build_sdist(sys.argv[1])"
    environment = {**os.environ, "AMP_EXT_WHEELS": url}
    command = [sys.executable, "-c", code, dist]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_arguments(parser)
    parser.add_argument(
        "--url", help="where dist/wheels/index.html will be; by default, where it is"
    )
    options = parser.parse_args()
    dist = options.dist.resolve()
    wheels = dist / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)

    toolkit = setup.find_toolkit()
    made = [kernels_wheel(setup.cpu_library(), "amp-ext-kernels-cpu", dist)]
    if toolkit:
        arches = setup.parse_arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), toolkit.arches)
        package = setup.kernels_packages(toolkit.version)[-1]
        made.append(kernels_wheel(setup.cuda_library(toolkit, arches), package, dist))
    for torch in environments.torches(options):
        if torch.cuda and not any(f"cu{torch.cuda.split('.')[0]}" in path.name for path in made):
            print(f"{torch}: left out, because there is no nvcc of its CUDA version")
            continue
        made.append(module_wheel(torch, wheels))
    write_page(wheels)
    write_sources(dist, options.url or wheels.joinpath("index.html").as_uri())
    for path in made:
        print(f"{path.relative_to(dist)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
