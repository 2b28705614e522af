"""Test bench/run.py: its measurements, and the comparison with another commit."""

from __future__ import annotations

import contextlib
import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import run
from bench_program import BENCH, quiet, record, run_quick  # noqa: F401  (a fixture)
from harness import base, ledger, measure, providers, registry, table, timing
from ops import gemm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROVIDERS = {**dict.fromkeys(registry.OPS, 2), "check_finite": 3, "gemm": 3, "train": 3}
FEWER = {
    **dict.fromkeys(("unscale", "check_finite", "grad_norm"), "16 x"),
    "step": "4000 x 4, clipped",
    "gemm": "fp16 64",
    "linear": "fp16 MLP",
    "scaler": "40 parameters",
    "autocast": "mm",
    "cast": "16",
    "train": "MLP",
}


# ---- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", PROVIDERS)
def test_every_op_has_a_table_and_lines(tmp_path: Path, capsys, op: str) -> None:
    chosen = ["--filter", FEWER[op]] if op in FEWER else []
    status, records = run_quick(tmp_path / "out.jsonl", op, *chosen)
    printed = capsys.readouterr().out
    assert status == 0, printed
    limit, *measured = records
    assert limit["limit"]
    assert not any(each["limit"] for each in measured)
    assert len(measured) == PROVIDERS[op] * len({each["case"] for each in measured})
    for each in records:
        assert each.keys() == ledger.Record.__annotations__.keys()
        assert 0 < each["p20_us"] <= each["p50_us"] <= each["p80_us"]
        assert f"python bench/run.py {op} " in each["command"]
        assert (each["op"], each["driver"], each["error"]) == (op, None, None)
    for each in measured:
        assert (each["ratio"] is None) == (each["provider"] == "torch")
    lines = printed.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("case"))
    assert lines[heading].split()[2:4] == ["median", "us"]
    first = next(line for line in lines[heading + 1 :] if not line.startswith("-"))
    assert first.startswith("limit: ")
    assert lines[-1].startswith("geometric mean of ")


def test_a_product_of_given_sizes(tmp_path: Path) -> None:
    sizes = ("--m", "48", "--n", "40", "--k", "24", "--layout", "TT", "--dtype", "fp16")
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", "gemm", *sizes)
    assert status == 0
    assert {each["case"] for each in records} == {"fp16 48x40x24 TT"}
    assert {each["flops"] for each in records} == {2 * 48 * 40 * 24}


@pytest.mark.parametrize("op", ["unscale", "cast"])
def test_lists_of_given_sizes_by_given_providers(tmp_path: Path, op: str) -> None:
    """Lists of given sizes are timed by the given providers; a CSV file has the same lines."""
    file, table_file = tmp_path / "out.jsonl", tmp_path / "out.csv"
    chosen = ("--sizes", "40x100,1x64Ki", "--providers", "cpu", "--csv", str(table_file))
    status, (_, *records) = run_quick(file, op, *chosen)
    assert status == 0
    assert [each["provider"] for each in records] == 2 * ["cpu"]
    assert [each["case"].split(" fp32")[0] for each in records] == ["40 x 100", "1 x 64 Ki"]
    assert not any(each["ratio"] for each in records), "the baseline did not take part"
    with table_file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["case"] for row in rows[1:]] == [each["case"] for each in records]


def test_a_case_without_the_given_providers_has_an_error(tmp_path: Path) -> None:
    chosen = ("--sizes", "2x10", "--providers", "cuda")
    status, (_, missing) = run_quick(tmp_path / "out.jsonl", "unscale", *chosen)
    assert status == 1
    assert missing["error"] == "ValueError: --providers: expected some of cpu, torch, got cuda"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gemm", "--m", "4"], "a product needs --m, --n and --k"),
        (["gemm", "--m", "0"], "expected a positive integer"),
        (["unscale", "--m", "4", "--n", "4", "--k", "4"], "--m, --n, --k: not for unscale"),
        (["gemm", "--sizes", "4x4"], "--sizes: not for gemm"),
        (["unscale", "--sizes", "4x"], "expected COUNTxSIZE such as 16x4Mi, got '4x'"),
        (["cast", "--json", "a.jsonl", "--results", "here"], "--results names a file of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit):
        run.main([*arguments, "--device", "cpu"])
    assert words in capsys.readouterr().err


def test_results_have_a_file_of_their_own(tmp_path: Path, capsys) -> None:
    options = ["--filter", "1 found_inf, scale moved", "--results", str(tmp_path)]
    assert run.main(["update_scale", "--device", "cpu", "--quick", *options]) == 0
    (file,) = tmp_path.glob("*/*.jsonl")
    assert file.parent.name.startswith("cpu-")
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {file}"
    assert len(ledger.read(tmp_path)) == 3


def test_an_op_without_a_case_leaves_the_others() -> None:
    """An op without a case leaves the others; the default device is the best one."""
    command = [sys.executable, str(BENCH / "run.py"), "unscale", "cast", "--quick"]
    options = ["--filter", "2 x 10 fp32 to", "--seconds", "0"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "no case of unscale has '2 x 10 fp32 to' in its name" in ran.stderr
    assert f"cast on {'cuda' if torch.cuda.is_available() else 'cpu'}" in ran.stdout


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_every_op_has_the_cases_of_a_dtype_or_none(dtype: str) -> None:
    setup = registry.Setup(CPU, quick=True, dtype=registry.DTYPES[dtype])
    lacking = {name for name in registry.OPS if not registry.load(name).cases(setup)}
    fp32, halves = {"train", "gemm", "autocast"}, {"update_scale", "scaler", "step"}
    assert lacking == (fp32 if dtype == "fp32" else halves)


def test_networks_on_a_gpu_are_whole_and_names_are_unique() -> None:
    """Cases of a GPU are listed without one, and names on a CPU show the scaled sizes."""
    for name in registry.OPS:
        for setup in (registry.Setup(CUDA), registry.Setup(CPU), registry.Setup(CPU, quick=True)):
            names = [case.name for case in registry.load(name).cases(setup)]
            assert len(set(names)) == len(names)
            assert not (setup.on_gpu and any(" at 1/" in name for name in names))
    cases = gemm.cases(registry.Setup(CUDA))
    assert all((c.baseline, c.counted) == ("cublaslt", True) for c in cases)


# ---- one case ----------------------------------------------------------------------------------


def fails() -> None:
    raise RuntimeError("no such kernel")


def measured(verify: Callable = lambda provider: None, **launches: Callable) -> list[dict]:
    """Return the lines of a case with these providers."""
    made = tuple(registry.Provider(name, launch) for name, launch in launches.items())
    trial = registry.Trial(made, verify, registry.Work(bytes=8))
    op = registry.Op("unscale", "", "GB/s", False, limit=None, cases=None)
    case = registry.Case("a", lambda: trial)
    return measure.measure(case, op, registry.Setup(CPU), timing.Budget(0.0, 3, 1.0), {})


def found(records: list[dict]) -> dict[str, tuple[bool, bool, str | None]]:
    """Return by provider whether it has a time and a ratio, and its error."""
    return {r["provider"]: (bool(r["p20_us"]), bool(r["ratio"]), r["error"]) for r in records}


def test_a_provider_that_fails_or_is_wrong_leaves_the_others_their_ratios() -> None:
    calls = iter(range(4))
    records = measured(
        lambda provider: registry.check(provider.name != "library", "wrong"),
        **{"torch": lambda: 0, "cpu": lambda: 0, "triton": fails, "library": lambda: 0},
        cuda=lambda: next(calls),
    )
    assert found(records) == {
        "torch": (True, False, None),
        "cpu": (True, True, None),
        "library": (True, False, "CheckError: wrong"),
        "triton": (False, False, "RuntimeError: no such kernel"),
        "cuda": (False, False, "StopIteration: "),
    }
    _, rows = table.table(records, "GB/s")
    ratios = {row[1]: row[-1] for row in rows[:5]}
    assert [name for name, text in ratios.items() if text == "NO RATIO"] == [
        *("library", "triton", "cuda")
    ]


def test_without_its_baseline_a_case_has_times_alone() -> None:
    records = measured(torch=fails, cuda=lambda: 0)
    error = "RuntimeError: no such kernel"
    assert found(records) == {"cuda": (True, False, None), "torch": (False, False, error)}


def test_the_mean_is_geometric_over_the_counted_cases() -> None:
    base = {"limit": False, "counted": True, "provider": "cpu"}
    records = [
        {**base, "case": "a", "ratio": 8.0},
        {**base, "case": "b", "ratio": 2.0},
        {**base, "case": "c", "ratio": 0.01, "counted": False},
        {**base, "case": "d", "ratio": None},
    ]
    assert table.means(records) == [("geometric mean of 2 of 3 ratios", "cpu", "4.00")]


# ---- timing ------------------------------------------------------------------------------------


def test_providers_take_turns_and_excluded_time_is_subtracted(monkeypatch) -> None:
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
    times = timing.interleaved(made, timing.Budget(seconds=0.0, samples=4, sample_us=1.0), {})
    assert (times["a"].p50, times["b"].p50) == (5.0, 3.0)
    a, b = ["prepare a", "a"], ["enter b", "b", "leave b"]
    assert calls[-20:] == 2 * (a + b + b + a)


def test_a_slow_provider_sits_rounds_out(monkeypatch) -> None:
    now, calls = 0, []

    def takes(us: float) -> Callable[[], None]:
        def launch() -> None:
            nonlocal now
            now += int(us * 1e3)
            calls.append(us)

        return launch

    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now)
    made = [registry.Provider(str(us), takes(us)) for us in (100.0, 600e3)]
    timing.interleaved(made, timing.Budget(seconds=0.0, samples=25, sample_us=1.0), {})
    warm_up = 3  # rounds, the first with the slow one
    assert [calls.count(us) for us in (100.0, 600e3)] == [warm_up + 25, 1 + 5]


def test_triton_times_what_it_can_on_a_gpu(monkeypatch) -> None:
    """No graph captures Triton's launch of this op, and no timed launch uses `prepare`."""
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(testing, "do_bench", lambda launch, return_mode: 0.5)
    monkeypatch.setattr(testing, "do_bench_cudagraph", lambda launch, return_mode: fails())
    times = timing.by_triton(registry.Provider("a", lambda: None))
    assert times == {"do_bench_us": 500.0, "cudagraph_us": None}
    prepared = registry.Provider("a", lambda: None, prepare=lambda: None)
    assert set(timing.by_triton(prepared).values()) == {None}


# ---- providers ---------------------------------------------------------------------------------


def test_each_backend_of_a_gpu_has_a_line_of_its_own(monkeypatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(providers._C, "cuda_built", lambda: True)
    monkeypatch.setattr(providers.amp_ext, "set_backend", chosen.append)
    monkeypatch.setattr(providers._C, "set_gemm_mode", chosen.append)
    monkeypatch.setattr("amp_ext._triton.triton_version", lambda: "3.9")
    assert list(providers.ours(CPU)) == ["cpu"]
    lines = providers.ours(CUDA, products=True)
    expected = {
        "cuda": ["cuda", "kernel"],
        "triton": ["triton", "kernel"],
        "library": [None, "library"],
    }
    assert lines.keys() == expected.keys() < {*ledger.OURS}
    before = [providers.amp_ext.get_backend(), providers._C.gemm_mode()]
    for name, line in lines.items():
        chosen.clear()
        with contextlib.suppress(ZeroDivisionError), line():
            raise ZeroDivisionError
        assert chosen == expected[name] + before


# ---- another commit ----------------------------------------------------------------------------


def timed(p20: float, **more: object) -> ledger.Record:
    return record(p20_us=p20, **more)


def test_ratios_to_the_base_are_medians_of_rounds() -> None:
    good, bad = timed(5.0, case="b"), timed(5.0, case="b", error="CheckError: wrong")
    others = [timed(1.0, provider="copy", limit=True, error="wrong"), timed(1.0, provider="torch")]
    _, rows, reasons = base.compared(
        [timed(8.0), good, timed(2.0), bad, timed(5.0), good, *others],
        [timed(2.0), good, timed(2.0), good, timed(2.0), good, timed(2.0, case="c"), *others],
    )
    assert rows[0] == ["7 x 7", "cpu", "unscale", "5.00", "2.00", "2.50", "1.00..4.00"]
    assert rows[1][:2] == ["geometric mean of 1 ratios base / now", "cpu"]
    assert reasons == [
        "NO RATIO for unscale, b, cpu: the base: CheckError: wrong",
        "NO RATIO for unscale, c, cpu: the base cannot run it",
    ]


def test_the_base_is_built_from_its_own_sources(tmp_path: Path) -> None:
    for name in ("amp_ext", "csrc", "triton_kernels"):
        (tmp_path / name).mkdir()
    source = tmp_path / "csrc/a.cpp"
    source.write_text("1")
    (tmp_path / "amp_ext/__init__.py").write_text("")
    (tmp_path / "triton_kernels/gemm.py").write_text("1")
    build = "open('amp_ext/_C.so', 'w').write(open('csrc/a.cpp').read())"
    (tmp_path / "setup.py").write_text(build)
    (tmp_path / ".gitignore").write_text("/build/\n*.so\n")

    def git(*command: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, *command], cwd=tmp_path, check=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    source.write_text("2")
    (tmp_path / "triton_kernels/gemm.py").write_text("2")
    for _ in range(2):  # the worktree is there the second time
        tree = base.base_package("HEAD", tmp_path)
        assert (tree / "amp_ext/_C.so").read_text() == "1"
        assert (tree / "amp_ext/triton_kernels/gemm.py").read_text() == "1"
    (tmp_path / "setup.py").write_text("raise SystemExit(1)")
    git("commit", "-qam", "second")
    source.write_text("3")
    with pytest.raises(base.BuildError, match="HEAD does not build"):
        base.base_package("HEAD", tmp_path)


def test_both_sides_run_in_turn(tmp_path: Path, capsys, monkeypatch) -> None:
    """An op without cases leaves the others; the options reach both commits."""
    here, ran = Path(base.amp_ext.__file__).parents[1], []
    monkeypatch.setattr(base, "base_package", lambda revision: tmp_path)
    apart = base.run_apart

    def on_this_tree(package: Path, arguments: list[str], file: Path) -> None:
        ran.append("now" if package == here else "base")
        apart(here, arguments, file)

    monkeypatch.setattr(base, "run_apart", on_this_tree)
    monkeypatch.setattr(base, "ROUNDS", 1)
    options = ("--sizes", "3x64Ki", "--dtype", "fp16", "--base", "HEAD", "--seconds", "0")
    status, records = run_quick(tmp_path / "out.jsonl", "unscale", "cast", *options)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert ran == ["base", "now"]
    assert {r["case"] for r in records if not r["limit"]} == {
        *("3 x 64 Ki fp16", "3 x 64 Ki fp32 to fp16")
    }
    assert "amp_ext of HEAD over that of this tree" in printed


def test_a_base_that_is_no_commit_is_an_error(capsys) -> None:
    assert run.main(["update_scale", "--device", "cpu", "--base", "no-such-commit"]) == 2
    assert "--base no-such-commit: git rev-parse" in capsys.readouterr().err
