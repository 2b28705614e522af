"""Kernels are verified before their first use, and torch's ops run in place of wrong ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import amp_ext
from amp_ext import _C, _cache, ops, verify
from amp_ext import __main__ as doctor
from amp_ext._verify_cases import FAMILIES, cases
from amp_ext.ops import LIST_OPS
from cases import bits
from executors import CPU
from simt.backend import Simt
from simt.build import KERNELS, all_sources, build

Load = Callable[..., Simt]
pytestmark = pytest.mark.simt


@pytest.fixture
def load(simt: Simt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads simt as a process that starts would: nothing but the record is known of its kernels."""
    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verify, "_warned", set())
    original = simt.functions._name

    def load(library: str | Path = original) -> Simt:
        monkeypatch.setattr(verify, "_records", {})
        copy = shutil.copy(library, tmp_path / f"{len(list(tmp_path.glob('*.so')))}.so")
        loaded = Simt(str(copy))
        _C.use_backend("cpu", "simt")
        return loaded

    yield load
    _C.load_backend(original)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose unscale_ finds no overflow."""
    folder = tmp_path_factory.mktemp("broken")
    kernels = shutil.copytree(KERNELS, folder / "kernels")
    file = kernels / "lists" / "unscale.cu"
    text = file.read_text()
    assert text.count("bad |= !E::finite(product);") == 1
    file.write_text(text.replace("bad |= !E::finite(product);", ""))
    return build("plain", "ops", all_sources(kernels), kernels, folder)


def update_scale() -> Tensor:
    """An op whose family is verified in a few milliseconds; what has to come out."""
    scale = torch.tensor(4.0)
    ops.update_scale_(scale, torch.tensor(0, dtype=torch.int32), [torch.tensor(1.0)], 2.0, 0.5, 9)
    assert scale.item() == 2.0
    return scale


CASES = len(list(cases("update_scale", "simt", False)))


# ---- the comparison ----------------------------------------------------------------------------


def test_every_op_on_lists_has_cases() -> None:
    lists = {family for family in FAMILIES if not family.startswith("gemm")}
    assert lists == {op.removesuffix("_") for op in LIST_OPS}


@pytest.mark.parametrize("family", FAMILIES)
def test_right_kernels_pass(load: Load, family: str) -> None:
    load()
    assert verify.verify_family("simt", family, "cpu").failure == ""


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.startswith("gemm")])
def test_right_kernels_for_sm90_pass(load: Load, family: str) -> None:
    load().set_sm90(True)
    assert verify.verify_family("simt", family, "cpu").failure == ""


def test_modes_of_the_caller_do_not_matter(load: Load) -> None:
    load()
    grads, found_inf, inv_scale = [torch.ones(3)], torch.zeros(()), torch.tensor(0.5)
    random = torch.get_rng_state()
    torch.set_flush_denormal(True)
    try:
        with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
            ops.unscale_(grads, found_inf, inv_scale)
    finally:
        torch.set_flush_denormal(False)
    assert grads[0].tolist() == [0.5] * 3
    assert verify.results("simt", "cpu")["unscale"].failure == ""
    assert torch.equal(torch.get_rng_state(), random)


def train(scaler_class: type[torch.amp.GradScaler]) -> list[Tensor]:
    """Parameters and scale after some steps, one of them with an overflow."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_class("cpu", init_scale=2.0**10)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 7)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return [bits(x.detach()) for x in (*model.parameters(), torch.tensor(scaler.get_scale()))]


def test_torch_runs_in_place_of_a_wrong_kernel(
    load: Load, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = load(broken)
    with pytest.warns(RuntimeWarning) as warned:
        ours = train(amp_ext.GradScaler)
    assert all(map(torch.equal, ours, train(torch.amp.GradScaler)))
    (warning,) = {str(warning.message) for warning in warned}
    for words in ("simt kernels of unscale", "on cpu", "unscale_, ", "python -m amp_ext verify"):
        assert words in warning
    calls = library.calls("unscale")
    assert calls <= len(list(cases("unscale", "simt", False)))
    train(amp_ext.GradScaler)
    assert library.calls("unscale") == calls
    assert library.calls("update_scale") == CASES + 6  # right, and so in use

    doctor.print_verification()
    assert re.search("  cpu     simt    FAILED at .*: unscale\n", capsys.readouterr().out)
    assert [name for name, _ in doctor.failed_verifications()] == ["simt kernels of unscale on cpu"]
    assert verify.main() == 1
    said = capsys.readouterr().out
    assert said.count("FAIL") == 1
    assert said.count("  ok\n") == len(FAMILIES) - 1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family[:4] != "gemm"])
def test_the_ops_that_run_instead(load: Load, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load()
    monkeypatch.setattr(verify, "is_right", lambda *arguments: None)
    for case in cases(family, "simt", False):
        verify._compare(case, CPU)
    assert library.calls(family) == 0


# ---- the record --------------------------------------------------------------------------------


def record() -> Path:
    (file,) = _cache.folder().glob("*.json")
    return file


def test_a_record_is_read_instead(load: Load) -> None:
    library = load()
    for calls in (CASES + 1, CASES + 2):
        update_scale()
        assert library.calls("update_scale") == calls
    library = load()
    update_scale()
    assert library.calls("update_scale") == 1


def test_a_failure_is_remembered(load: Load) -> None:
    load()
    update_scale()
    content = json.loads(record().read_text())
    failed = {"failure": "it is off", "time": "yesterday"}
    content["results"] = {"update_scale": failed, "gemm_f16": failed}
    record().write_text(json.dumps(content))
    library = load()
    with pytest.warns(RuntimeWarning, match="update_scale .*it is off"):
        update_scale()
    half = torch.zeros(4, 4, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="gemm_f16 .*it is off"):
        assert _C.gemm_choice(half, half)[0] == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_scale()
    assert library.calls("update_scale") == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: '{"identity": 3}',
        lambda text: json.dumps({**json.loads(text), "results": [1]}),
        lambda text: text.replace(torch.__version__, "1.0"),
        lambda text: text.replace("failure", "verdict"),
    ],
)
def test_a_corrupt_or_foreign_record_is_ignored(load: Load, spoil: Callable[[str], str]) -> None:
    load()
    update_scale()
    good = record().read_text()
    assert spoil(good) != good
    record().write_text(spoil(good))
    library = load()
    update_scale()
    assert library.calls("update_scale") == CASES + 1
    assert json.loads(record().read_text())["identity"] == json.loads(good)["identity"]


@pytest.mark.parametrize(
    ("variable", "value", "calls"),
    [("XDG_CACHE_HOME", "/dev/null", CASES + 1), ("AMP_EXT_VERIFY", "0", 1)],
)
def test_neither_folder_nor_verification_is_needed(
    load: Load, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, calls: int
) -> None:
    library = load()
    monkeypatch.setenv(variable, value)
    update_scale()
    assert library.calls("update_scale") == calls


# ---- on a GPU ----------------------------------------------------------------------------------

CAPTURE = """if True:
    import torch
    from amp_ext import ops, verify
    grad, found_inf, inv_scale = (torch.full((), x, device="cuda") for x in (8.0, 0.0, 0.5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.unscale_([grad], found_inf, inv_scale)
    assert not verify._records
    graph.replay()
    assert grad.item() == 4.0
    ops.unscale_([grad], found_inf, inv_scale)
    assert grad.item() == 2.0
    assert all("unscale" in results for results in verify._records.values()), verify._records
    """


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a CUDA device")
def test_nothing_is_verified_in_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subprocess.run([sys.executable, "-c", CAPTURE], check=True)
