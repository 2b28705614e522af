"""The PEP 517 build backend: a ready wheel where there is one, or else setuptools.

amp_ext._C is made for one torch and one Python. From a release's sources pip gets the wheel that
fits the installed torch, as `make wheels` compiles them. It is looked up on a page of links, each
with the file's SHA-256:

    AMP_EXT_WHEELS   a folder with an index.html, or the page's URL; empty: compile. By default the
                     place that is named in wheels.url, which release/wheels.py writes into the
                     sources

Where no wheel fits, amp_ext is compiled against the torch that is installed.

pip builds in an environment of its own that hides the installed packages. A torch downloaded
into it could differ from the one that the extension will meet, so the hooks here look up where
the interpreter finds its packages outside of that environment. Nothing is required before it is
known that something must be compiled: a ready wheel needs the standard library alone.
"""

import hashlib
import html.parser
import http.client
import importlib.machinery
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
SETUPTOOLS = "setuptools>=65"
TORCH = "torch>=2.11"
# They ask for another build than the ready one.
BUILD_VARIABLES = ("FORCE_CPU", "TORCH_CUDA_ARCH_LIST", "DEBUG", "AMP_EXT_LINEINFO")


def env_flag(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def version() -> str:
    text = (ROOT / "amp_ext/__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)[1]


# ---- the installed torch -----------------------------------------------------------------------


def _installed_path() -> list[str]:
    """The sys.path that this interpreter has without pip's changes to the environment."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")
    }
    script = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.check_output([sys.executable, "-c", script], env=env))


def _find_torch() -> Path | None:
    """The folder of the installed torch, which is not imported: that takes seconds."""
    found = importlib.machinery.PathFinder.find_spec("torch", sys.path + _installed_path())
    return Path(found.origin).parent if found and found.origin else None


def flavour(torch_version: str) -> str:
    """The builds of torch that one amp_ext._C serves, as amp_ext._library compares them:
    torch2.11-cu130, torch2.13-cpu.
    """
    interface = re.sub(r"^(\d+\.\d+)\.\d+(?=$|\+(cpu$|cu\d+$))", r"\1", torch_version)
    return "torch" + interface.replace("+", "-")


def wheel_name(torch_version: str) -> str:
    """Where the wheel for this Python and a torch lies, as seen from the page."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    name = f"amp_ext-{version()}-{python}-{python}{sys.abiflags}-{platform}.whl"
    return f"{flavour(torch_version)}/{name}"


# ---- a ready wheel -----------------------------------------------------------------------------


class _Links(html.parser.HTMLParser):
    """The targets of a page's links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


class ReadyWheel(NamedTuple):
    url: str
    sha256: str

    @property
    def name(self) -> str:
        return urllib.parse.unquote(self.url.rpartition("/")[2])

    def fetch(self, folder: Path) -> Path:
        """The verified file, in `folder`. Exits where it is not the one that the page promises."""
        try:
            data, _ = _read(self.url)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            sys.exit(
                f"amp_ext: the wheel {self.url} cannot be read ({reason}); try again, or "
                "set AMP_EXT_WHEELS= (empty) to compile amp_ext"
            )
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            sys.exit(
                f"amp_ext: the wheel {self.url} is damaged or not the published one: its SHA-256 "
                f"is {found}, but its page says {self.sha256 or 'none'}; get it again, or set "
                "AMP_EXT_WHEELS= (empty) to compile amp_ext"
            )
        folder.joinpath(self.name).write_bytes(data)
        return folder / self.name


def _read(url: str) -> tuple[bytes, str]:
    """What lies there, and the URL that it came from in the end."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read(), response.url


def place_of_wheels() -> tuple[str | None, bool]:
    """The URL of the page of wheels, if any, and whether the user asked for it."""
    asked = os.environ.get("AMP_EXT_WHEELS")
    if asked is None:
        published = ROOT / "wheels.url"
        return (published.read_text().strip() if published.is_file() else None), False
    if not asked or "://" in asked:
        return asked or None, True
    return (Path(asked).resolve() / "index.html").as_uri(), True


def find_wheel() -> ReadyWheel | str:
    """The wheel for this Python and the installed torch, or why there is none.

    Exits where the user named a place that cannot be read.
    """
    place, asked = place_of_wheels()
    if place is None:
        return "AMP_EXT_WHEELS is empty" if asked else "these sources name no place of wheels"
    if variable := next(filter(env_flag, BUILD_VARIABLES), None):
        return f"{variable} is set"
    torch = _find_torch()
    if torch is None:
        return "torch is not installed"
    built = runpy.run_path(str(torch / "version.py"))
    if env_flag("FORCE_CUDA") and not built["cuda"]:
        return "FORCE_CUDA is set"
    wanted = wheel_name(built["__version__"])
    try:
        page, base = _read(place)
        links = _Links(page.decode()).found
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = f"{place} cannot be read ({getattr(error, 'reason', error)})"
        if asked:
            sys.exit(
                f"amp_ext: AMP_EXT_WHEELS: {reason}; it must be a folder with an index.html, as "
                "`make wheels` leaves it in dist/wheels, or the URL of such a page"
            )
        return reason
    for link in links:
        url, _, fragment = urllib.parse.urljoin(base, link).partition("#")
        if urllib.parse.unquote(url).endswith("/" + wanted):
            return ReadyWheel(url, fragment.removeprefix("sha256="))
    return f"{place} has no {wanted}"


# ---- hooks -------------------------------------------------------------------------------------


def _requirements() -> list[str]:
    """What a build from source needs."""
    return [SETUPTOOLS, "ninja", *([] if _find_torch() else [TORCH])]


def _setuptools():
    """setuptools' own backend, which sees the installed torch."""
    try:
        from setuptools import build_meta
    except ImportError:
        # With --no-build-isolation, or because the ready wheel that was found at first is gone.
        sys.exit(
            "amp_ext: a build from source needs setuptools, which is not installed here: "
            f"pip install '{SETUPTOOLS}' ninja, or try again without --no-build-isolation"
        )
    sys.path.extend(path for path in _installed_path() if path not in sys.path)
    return build_meta


def get_requires_for_build_sdist(config_settings=None):
    return [SETUPTOOLS]


def get_requires_for_build_wheel(config_settings=None):
    if isinstance(find_wheel(), ReadyWheel):
        return []
    return _requirements()


def get_requires_for_build_editable(config_settings=None):
    return _requirements()


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    found = find_wheel()
    if not isinstance(found, ReadyWheel):
        return _setuptools().prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    wheel = found.fetch(Path(metadata_directory))
    with zipfile.ZipFile(wheel) as archive:
        info = [name for name in archive.namelist() if name.split("/")[0].endswith(".dist-info")]
        archive.extractall(metadata_directory, info)
    wheel.unlink()
    return info[0].split("/")[0]


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return _setuptools().prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    found = find_wheel()
    if isinstance(found, ReadyWheel):
        print(f"amp_ext: installed from the ready wheel {found.url}")
        return found.fetch(Path(wheel_directory)).name
    print(f"amp_ext: built from source, because {found}", flush=True)
    return _setuptools().build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _setuptools().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    return _setuptools().build_sdist(sdist_directory, config_settings)
