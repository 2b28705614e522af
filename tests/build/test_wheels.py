"""build_backend.py: which ready wheel is taken, which is refused, and when amp_ext is compiled.

The wheels hold no code, and nothing is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_package import ROOT, build_backend, tree  # noqa: F401 (tree is a fixture)

MINOR, VERSION, CUDA = "2.99", "2.99.1+cu130", "13.0"
FLAVOUR = "torch2.99-cu130"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AMP_EXT_WHEELS", "FORCE_CUDA", *build_backend.BUILD_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an installed torch of which only version.py is ever read."""
    folder = tmp_path / "site-packages/torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "version.py").write_text(f"__version__ = {VERSION!r}\ncuda = {CUDA!r}\n")
    monkeypatch.setattr(build_backend, "_installed_path", list)
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    return folder


def add_wheel(place: Path, name: str, text: str = "") -> Path:
    """A wheel at `name`, as seen from the page, that the page promises."""
    wheel = place / name
    wheel.parent.mkdir(parents=True, exist_ok=True)
    info = f"amp_ext-{build_backend.version()}.dist-info"
    files = {
        "amp_ext/__init__.py": f"text = {text!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: amp-ext\n"
        f"Version: {build_backend.version()}\nRequires-Python: >=3.10\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
        f"Tag: {'-'.join(wheel.stem.split('-')[2:])}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with open(place / "index.html", "a") as page:
        page.write(f'<a href="{name}#sha256={digest}">{name}</a>\n')
    return wheel


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel that fits, among others, in the place that AMP_EXT_WHEELS names."""
    place = tmp_path / "wheels"
    fits = build_backend.wheel_name(VERSION)
    name = Path(fits).name
    for folder in ("torch2.98-cu130", "torch2.99-cpu", "torch2.99-cu129", "nottorch2.99-cu130"):
        add_wheel(place, f"{folder}/{name}", folder)
    add_wheel(place, f"{FLAVOUR}/{name.replace('-cp', '-cp2')}", "another Python")
    add_wheel(place, f"{FLAVOUR}/{name.replace('linux', 'other')}", "another platform")
    add_wheel(place, f"{FLAVOUR}/{name.replace(build_backend.version(), '0.0.9')}", "older")
    monkeypatch.setenv("AMP_EXT_WHEELS", str(place))
    return add_wheel(place, fits, "fits")


def test_the_wheel_that_fits_is_returned(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wheel.parent.name == FLAVOUR
    assert build_backend.get_requires_for_build_wheel() == []
    info = build_backend.prepare_metadata_for_build_wheel(str(tmp_path))
    assert info.endswith(".dist-info")
    assert sorted(path.name for path in (tmp_path / info).iterdir()) == [
        "METADATA",
        "RECORD",
        "WHEEL",
    ]
    assert not list(tmp_path.glob("*.whl"))
    name = build_backend.build_wheel(str(tmp_path))
    assert (tmp_path / name).read_bytes() == wheel.read_bytes()
    assert capsys.readouterr().out == f"amp_ext: installed from the ready wheel {wheel.as_uri()}\n"


@pytest.mark.parametrize(
    "version", ["2.14.1", "2.14.1+cu130", "2.14.0+cpu", "2.14.0a0+git1", "2.14.0.dev1+cu130"]
)
def test_a_wheel_is_for_the_torches_that_the_import_takes(version: str) -> None:
    from amp_ext._library import _interface

    expected = "torch" + _interface(version).replace("+", "-")
    assert build_backend.flavour(version) == expected


def test_the_page_may_be_on_the_web(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(wheel.parents[2])
    )
    monkeypatch.setattr(handler.func, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/{wheel.parents[1].name}"
        monkeypatch.setenv("AMP_EXT_WHEELS", place)  # which the server redirects to place + "/"
        assert build_backend.build_wheel(str(tmp_path)) == wheel.name
        assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
        monkeypatch.setenv("AMP_EXT_WHEELS", place + "/nothing.html")
        with pytest.raises(SystemExit, match=r"nothing\.html cannot be read \(File not found\)"):
            build_backend.find_wheel()
        server.shutdown()


def cut_off(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])


def another(wheel: Path) -> None:
    """The wheel of another torch, in the place of the right one."""
    wheel.write_bytes((wheel.parents[1] / "torch2.98-cu130" / wheel.name).read_bytes())


def without_hash(wheel: Path) -> None:
    page = wheel.parents[1] / "index.html"
    text = page.read_text()
    page.write_text(text[: text.rindex("#sha256=")] + '">no hash</a>\n')


@pytest.mark.parametrize("damage", [cut_off, another, without_hash], ids=lambda f: f.__name__)
@pytest.mark.parametrize("hook", ["prepare_metadata_for_build_wheel", "build_wheel"])
def test_a_wheel_with_another_hash_is_never_used(
    damage: object, hook: str, wheel: Path, tmp_path: Path
) -> None:
    damage(wheel)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = tmp_path / "made"
    folder.mkdir()
    with pytest.raises(SystemExit) as refused:
        getattr(build_backend, hook)(str(folder))
    assert str(refused.value).startswith(f"amp_ext: the wheel {wheel.as_uri()} is damaged or not")
    assert found in str(refused.value) and "AMP_EXT_WHEELS= (empty)" in str(refused.value)
    assert not list(folder.iterdir())


def test_why_amp_ext_is_compiled(
    wheel: Path, torch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = wheel.parents[1].joinpath("index.html").as_uri()
    version = torch / "version.py"
    text = version.read_text()
    assert isinstance(build_backend.find_wheel(), build_backend.ReadyWheel)

    version.write_text("__version__ = '3.0.0a0+git123'\ncuda = None\n")
    assert build_backend.find_wheel() == f"{page} has no torch3.0.0a0-git123/{wheel.name}"
    assert "ninja" in build_backend.get_requires_for_build_wheel()
    with monkeypatch.context() as patch:
        patch.setenv("FORCE_CUDA", "1")  # which a build from source refuses with this torch
        assert build_backend.find_wheel() == "FORCE_CUDA is set"
    version.write_text(text)

    for variable in build_backend.BUILD_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert build_backend.find_wheel() == f"{variable} is set"
            patch.setenv(variable, "0")
            assert isinstance(build_backend.find_wheel(), build_backend.ReadyWheel)

    monkeypatch.setenv("AMP_EXT_WHEELS", "")
    assert build_backend.find_wheel() == "AMP_EXT_WHEELS is empty"
    monkeypatch.delenv("AMP_EXT_WHEELS")
    assert build_backend.find_wheel() == "these sources name no place of wheels"

    monkeypatch.setattr(build_backend, "ROOT", tmp_path)
    (tmp_path / "amp_ext").mkdir()
    (tmp_path / "amp_ext/__init__.py").write_text((ROOT / "amp_ext/__init__.py").read_text())
    (tmp_path / "wheels.url").write_text(page + "\n")
    assert isinstance(build_backend.find_wheel(), build_backend.ReadyWheel)
    wheel.rename(wheel.with_suffix(".gone"))
    with pytest.raises(SystemExit, match=r"^amp_ext: the wheel file:.* cannot be read \("):
        build_backend.build_wheel(str(tmp_path))
    wheel.parents[1].joinpath("index.html").unlink()  # a place that nobody asked for
    assert build_backend.find_wheel().startswith(f"{page} cannot be read (")

    (torch / "__init__.py").unlink()
    monkeypatch.setattr(sys, "path", [])
    assert build_backend.find_wheel() == "torch is not installed"


def test_a_place_that_was_asked_for_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AMP_EXT_WHEELS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^amp_ext: AMP_EXT_WHEELS: file:.* cannot be read \("):
        build_backend.get_requires_for_build_wheel()


def test_a_page_that_is_gone_at_the_next_hook(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert build_backend.get_requires_for_build_wheel() == []  # pip installs no setuptools
    monkeypatch.setenv("AMP_EXT_WHEELS", "")
    monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(SystemExit, match=r"^amp_ext: a build from source needs setuptools, .*"):
        build_backend.build_wheel(str(tmp_path))


@pytest.fixture
def sources(tree: Path, tmp_path: Path, wheel: Path) -> Iterator[Path]:  # noqa: F811
    """A folder with the sources of a release that name the place of the wheels."""
    dist = tmp_path / "dist"
    dist.mkdir()
    (tree / "MANIFEST.in").write_text("include build_backend.py\n")
    code = "import sys, build_backend; build_backend.build_sdist(sys.argv[1])"
    environment = {**os.environ, "AMP_EXT_WHEELS": str(wheel.parents[1])}
    subprocess.run([sys.executable, "-c", code, dist], cwd=tree, env=environment, check=True)
    assert [path.name for path in dist.iterdir()] == [f"amp_ext-{build_backend.version()}.tar.gz"]
    yield dist


def pip_install(dist: Path, torch: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """As a user does: pip in an environment without setuptools, and without a compiler."""
    venv = target / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (folder,) = venv.glob("lib/python*/site-packages")
    (folder / "torch.pth").write_text(f"{torch.parent}\n")
    command = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "-v"]
    command += ["--no-cache-dir", "--no-index", "--find-links", dist, "amp-ext"]
    environment = {name: value for name, value in os.environ.items() if name != "AMP_EXT_WHEELS"}
    environment |= {"PATH": str(venv / "bin"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=target)


def test_pip_installs_the_wheel(sources: Path, torch: Path, wheel: Path, tmp_path: Path) -> None:
    done = pip_install(sources, torch, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"amp_ext: installed from the ready wheel {wheel.as_uri()}" in said
    (installed,) = tmp_path.glob("venv/lib/python*/site-packages/amp_ext/__init__.py")
    assert installed.read_text() == "text = 'fits'\n"


def test_pip_installs_no_damaged_wheel(
    sources: Path, torch: Path, wheel: Path, tmp_path: Path
) -> None:
    cut_off(wheel)
    done = pip_install(sources, torch, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "is damaged or not the published one" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("venv/lib/python*/site-packages/amp_ext*"))
