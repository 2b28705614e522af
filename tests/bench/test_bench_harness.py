"""bench/harness: who is timed when, copies of lists, backends, torch.compile, another commit."""

from __future__ import annotations

import contextlib
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import amp_ext
import run
from bench_program import BENCH, quiet, record, run_quick  # noqa: F401  (a fixture)
from harness import base, ledger, lists, providers, registry, timing
from harness.registry import BF16, FP16
from ops import unscale
from workloads.gradients import gradients

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# ---- timing ------------------------------------------------------------------------------------


def test_quantiles_are_of_the_samples():
    quantiles = timing.Quantiles.of([float(i) for i in range(101)])
    assert (quantiles.p20, quantiles.p50, quantiles.p80) == (20.0, 50.0, 80.0)


def test_providers_take_turns_and_excluded_time_is_subtracted(monkeypatch):
    calls: list[str] = []
    clock = iter(range(0, 10**9, 5000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))

    @contextlib.contextmanager
    def around():
        calls.append("enter b")
        yield
        calls.append("leave b")

    made = [
        registry.Provider("a", lambda: calls.append("a"), lambda: calls.append("prepare a")),
        registry.Provider("b", lambda: calls.append("b"), excluded_ns=lambda: 2000, around=around),
    ]
    times = timing.interleaved(made, timing.Budget(seconds=0.0, samples=4, sample_us=1.0))
    assert times["a"].p50 == 5.0
    assert times["b"].p50 == 3.0
    a, b = ["prepare a", "a"], ["enter b", "b", "leave b"]
    assert calls[-20:] == 2 * (a + b + b + a)


def test_a_slow_provider_sits_rounds_out(monkeypatch):
    now = 0

    def takes(us: float):
        def launch() -> None:
            nonlocal now
            now += int(us * 1e3)
            calls.append(us)

        return launch

    calls: list[float] = []
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now)
    speeds = (100.0, 150e3, 600e3)
    made = [registry.Provider(str(us), takes(us)) for us in speeds]
    times = timing.interleaved(made, timing.Budget(seconds=0.0, samples=25, sample_us=1.0))
    assert [times[str(us)].p50 for us in speeds] == list(speeds)
    warm_up = 3  # rounds, of which a slow one takes part in the first
    assert [calls.count(us) for us in speeds] == [warm_up + 25, warm_up + 25, 1 + 5]


# ---- lists -------------------------------------------------------------------------------------


def test_different_counts_tensors_whose_bits_differ() -> None:
    """NaNs are alike: torch's product of a BF16 NaN and 1 is another NaN."""
    tensors = gradients([3, 4, 5], BF16)
    others = lists.clones(tensors)
    nans = torch.tensor([0x7FC0, 0x7FFF], dtype=torch.int16).view(BF16)
    tensors[0][0], others[0][0] = nans
    assert lists.different(tensors, others) == 0
    others[1][-1] *= -1
    others[2][0] = torch.nan
    assert lists.different(tensors, others) == 2
    assert lists.different([torch.zeros(1)], [-torch.zeros(1)]) == 1


def test_sets_exceed_a_gpus_cache(monkeypatch) -> None:
    properties = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    grads = lists.GradientList("", 3 * [50], [FP16]).gradients(CPU)
    sets = lists.rotated(grads, grads.bytes, lists.Gradients.clone, CUDA)
    assert len(sets) == 11
    assert sets[0] is grads
    assert len(lists.rotated(grads, grads.bytes, lists.Gradients.clone, CPU)) == 1


# ---- providers ---------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, object]]:
    """What is chosen of backends and kernels of products, as on a machine with both."""
    calls: list[tuple[str | None, object]] = []
    monkeypatch.setattr(providers._C, "cuda_built", lambda: True)
    monkeypatch.setattr(amp_ext, "set_backend", lambda name: calls.append(("backend", name)))
    mode = lambda name: calls.append(("products", name))  # noqa: E731
    monkeypatch.setattr(providers._C, "set_gemm_mode", mode)
    monkeypatch.setattr("amp_ext._triton.triton_version", lambda: "3.9")
    return calls


def test_a_line_for_each_backend_of_a_gpu(chosen) -> None:
    assert list(providers.ours(CPU)) == ["cpu"]
    assert list(providers.ours(CUDA)) == ["cuda", "triton"]
    lines = providers.ours(CUDA, products=True)
    assert lines.keys() <= ledger.OURS
    before = [("backend", amp_ext.get_backend()), ("products", providers._C.gemm_mode())]
    expected = {
        "cuda": [("backend", "cuda"), ("products", "kernel")],
        "triton": [("backend", "triton"), ("products", "kernel")],
        "library": [("backend", None), ("products", "library")],
    }
    for name, line in lines.items():
        with contextlib.suppress(ZeroDivisionError), line():
            assert chosen == expected[name]
            raise ZeroDivisionError
        assert chosen == expected[name] + before
        chosen.clear()


def test_backends_that_are_not_there_have_no_line(chosen, monkeypatch) -> None:
    monkeypatch.setattr("amp_ext._triton.triton_version", lambda: None)
    assert list(providers.ours(CUDA)) == ["cuda"]
    monkeypatch.setattr(providers._C, "cuda_built", lambda: False)
    assert list(providers.ours(CUDA, products=True)) == ["library"]


def test_tf32_is_off_for_a_while() -> None:
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    with pytest.raises(ZeroDivisionError), providers.without_tf32():
        assert not any(switch.allow_tf32 for switch in switches)
        raise ZeroDivisionError
    assert [switch.allow_tf32 for switch in switches] == before


def eager(function, dynamic):
    """Stands for torch.compile, which takes seconds."""
    return lambda *arguments: function(*arguments)


COMPILED = {"unscale": "16 x 64 Ki", "linear": "fp16 linear+GELU", "train": "digits"}


@pytest.mark.parametrize("op", COMPILED)
def test_compiled(tmp_path, monkeypatch, op) -> None:
    """What is compiled does the same work: its results pass the check."""
    monkeypatch.setattr(torch, "compile", eager)
    options = (op, "--filter", COMPILED[op], "--compile")
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 0
    cases = {record["case"] for record in records}
    assert sum(record["provider"] == "compile" for record in records) == len(cases)


def test_where_nothing_compiles_the_line_is_missing(capsys, monkeypatch) -> None:
    def fails(program):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", eager)
    assert providers.compiled(unscale.composed, fails) is None
    words = "compile is left out: RuntimeError: no C++ compiler\n"
    assert words in capsys.readouterr().err


# ---- another commit ----------------------------------------------------------------------------


def timed(p20: float, **more: object) -> ledger.Record:
    return record(p20_us=p20, **more)


def test_base_lines() -> None:
    """Ratios of rounds, the middle one, and the geometric mean over the cases that count."""
    good, bad = timed(5.0, case="b"), timed(5.0, case="b", error="CheckError: wrong")
    others = [timed(1.0, provider="copy", limit=True, error="wrong"), timed(1.0, provider="torch")]
    lines, status = base.compared(
        [timed(8.0), good, timed(2.0), bad, timed(5.0), good, *others],
        [timed(2.0), good, timed(2.0), good, timed(2.0), good, timed(2.0, case="c"), *others],
    )
    assert status == 1
    assert " ".join(lines[1].split()) == "unscale 7 x 7 cpu 5.00 2.00 2.50 1.00..4.00"
    assert lines[2].endswith("NO RATIO, the base: CheckError: wrong")
    assert lines[3].endswith("NO RATIO, the base cannot run it")
    assert " ".join(lines[4].split()) == "geometric mean of 1 ratios base / now cpu 2.50"
    assert all(len(line) <= 100 for line in lines)


def repository(folder: Path) -> Path:
    """With one commit: an amp_ext whose module "builds" by a copy."""
    (folder / "amp_ext").mkdir(parents=True)
    (folder / "csrc").mkdir()
    (folder / "amp_ext/__init__.py").write_text("")
    (folder / "csrc/a.cpp").write_text("1")
    (folder / "triton_kernels").mkdir()
    (folder / "triton_kernels/gemm.py").write_text("1")
    (folder / "setup.py").write_text("open('amp_ext/_C.so', 'w').write(open('csrc/a.cpp').read())")
    (folder / ".gitignore").write_text("/build/\n*.so\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, *command], cwd=folder, check=True)
    return folder


def test_base_is_built_from_its_own_sources(tmp_path: Path) -> None:
    root = repository(tmp_path / "repository")
    tree = root / "build/base"
    (root / "csrc/a.cpp").write_text("2")
    (root / "triton_kernels/gemm.py").write_text("2")
    for _ in range(2):  # the worktree is there the second time
        assert base.base_package("HEAD", root) == tree
        assert (tree / "amp_ext/_C.so").read_text() == "1"
        assert (tree / "amp_ext/triton_kernels/gemm.py").read_text() == "1"
    (root / "setup.py").write_text("raise SystemExit(1)")
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "second"]
    subprocess.run(commit, cwd=root, check=True)
    (root / "csrc/a.cpp").write_text("3")
    with pytest.raises(base.BuildError, match="HEAD does not build"):
        base.base_package("HEAD", root)


def test_both_sides_run_in_turn(tmp_path: Path, monkeypatch) -> None:
    """Each on its own amp_ext; of the same sources, the base takes the present module."""
    root = repository(tmp_path / "repository")
    monkeypatch.setattr(base, "base_package", partial(base.base_package, root=root))
    ran: list[tuple[str, str]] = []

    def pretend(package: Path, arguments, file: Path) -> None:
        side = "base" if package == root / "build/base" else "now"
        ran.append((arguments[0], side))
        ledger.append(file, [timed(4.0 if side == "base" else 2.0)])

    monkeypatch.setattr(base, "run_apart", pretend)
    before, now = base.measure_both("HEAD", ["unscale", "cast"], ["--quick"])
    assert list((root / "build/base/amp_ext").glob("_C.*"))
    assert ran == [(op, s) for op in ("unscale", "cast") for s in 3 * ("base", "now")]
    assert [record["p20_us"] for record in before] == 6 * [4.0]
    assert [record["p20_us"] for record in now] == 6 * [2.0]


@pytest.mark.full
def test_base_of_the_program(tmp_path: Path, capsys, monkeypatch) -> None:
    """The present amp_ext as its own base; an op without the cases leaves the others."""
    here = Path(base.amp_ext.__file__).parents[1]
    monkeypatch.setattr(base, "base_package", lambda revision: here)
    monkeypatch.setattr(base, "ROUNDS", 1)
    options = ("--filter", "1 found_inf, scale moved", "--base", "HEAD", "--seconds", "0")
    status, records = run_quick(tmp_path / "out.jsonl", "update_scale", "cast", *options)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert [r["provider"] for r in records] == 2 * ["torch", "cpu"]
    assert "amp_ext of HEAD over that of this tree" in printed
    assert printed.splitlines()[-1].split()[:3] == ["geometric", "mean", "of"]


def test_no_such_base(capsys) -> None:
    assert run.main(["update_scale", "--device", "cpu", "--base", "no-such-commit"]) == 2
    assert "--base no-such-commit: git rev-parse" in capsys.readouterr().err
