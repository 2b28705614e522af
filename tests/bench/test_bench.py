"""Test bench/run.py: every op has measurements, and a wrong result has no ratio."""

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import amp_ext
import run
from cases import threads
from harness import ledger, providers, registry, timing
from harness.bounds import compare
from ops import autocast, gemm, train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPS = {name: getattr(amp_ext.ops, name) for name in amp_ext.ops.__all__}
CASES = {
    **dict.fromkeys(registry.OPS, ""),
    **dict.fromkeys(("unscale", "check_finite", "grad_norm"), "16 x"),
    "step": "4000 x 4, clipped",
    "gemm": "fp16 64",
    "linear": "fp16",
    "scaler": "40 parameters",
    "autocast": "mm",
    "cast": "16",
    "train": "MLP",
}
"""Some cases of each op."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take few samples on one thread."""
    monkeypatch.setattr(train, "pixels", lambda setup: 8)
    monkeypatch.setitem(timing.QUICK, "cpu", timing.Budget(0.0, 3, 20.0))
    with threads(1):
        yield


def run_quick(folder: Path, *options: str) -> tuple[int, list[dict]]:
    """Return the exit status of a quick run on the CPU, and its records after the limit's."""
    file = folder / "out.jsonl"
    status = run.main([*options, "--device", "cpu", "--quick", "--json", str(file)])
    limit, *records = map(json.loads, file.read_text().splitlines())
    assert limit["limit"] and not any(each["limit"] for each in records)
    return status, records


# ---- the command -------------------------------------------------------------------------------


def test_cases_have_names_of_their_own() -> None:
    """Cases of a GPU are listed without one, and a case has one name."""
    for name in registry.OPS:
        for setup in (registry.Setup(CUDA), registry.Setup(CPU), registry.Setup(CPU, quick=True)):
            names = [case.name for case in registry.load(name).cases(setup)]
            assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", CASES)
def test_every_op_has_a_table_and_lines(tmp_path: Path, capsys, op: str) -> None:
    status, records = run_quick(tmp_path, op, "--filter", CASES[op])
    printed = capsys.readouterr().out
    assert status == 0, printed
    for each in records:
        assert each.keys() == ledger.Record.__annotations__.keys()
        assert 0 < each["p20_us"] <= each["p50_us"] <= each["p80_us"]
        assert (each["op"], each["driver"], each["error"]) == (op, None, None)
        assert (each["ratio"] is None) == (each["provider"] == "torch")
    for case in {each["case"] for each in records}:
        assert {"cpu", "torch"} <= {each["provider"] for each in records if each["case"] == case}
    assert printed.index("\nlimit: ") < printed.index("\ngeometric mean of ")


def test_lists_of_given_sizes_by_given_providers(tmp_path: Path) -> None:
    """Lists of given sizes are timed by the given providers; a CSV file has the same lines."""
    table = tmp_path / "out.csv"
    chosen = ("--sizes", "40x100,1x64Ki", "--providers", "cpu", "--csv", str(table))
    status, records = run_quick(tmp_path, "unscale", *chosen)
    assert status == 0
    assert [each["provider"] for each in records] == 2 * ["cpu"]
    assert [each["case"].split(" fp32")[0] for each in records] == ["40 x 100", "1 x 64 Ki"]
    assert not any(each["ratio"] for each in records), "the baseline did not take part"
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["case"] for row in rows[1:]] == [each["case"] for each in records]


# ---- timing ------------------------------------------------------------------------------------


def test_a_sample_prepares_inputs_and_excludes_time(monkeypatch) -> None:
    calls: list[str] = []
    clock = iter(range(0, 10**9, 5000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))
    launch, prepare = (partial(calls.append, word) for word in ("launch", "prepare"))
    provider = registry.Provider("it", launch, prepare, excluded_ns=lambda: 2000)
    times = timing.interleaved([provider], timing.Budget(0.0, samples=4, sample_us=1.0), {})
    assert times["it"].p50 == 3.0
    assert calls[-4:] == 2 * ["prepare", "launch"]
    # A first launch that compiles takes 1 s; the provider is not slow for that.
    calls.clear()
    slow = registry.Provider("slow", launch, excluded_ns=iter([-(10**9), *9 * [0]]).__next__)
    timing.interleaved([slow], timing.Budget(0.0, samples=4, sample_us=1.0), {})
    assert len(calls) == timing.WARM_UPS + 4


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


# ---- wrong results -----------------------------------------------------------------------------


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.view(-1)[-1] += 1.0
    return tensor


def nudge(tensor: torch.Tensor) -> torch.Tensor:
    """Move the last element, in place, by a few units."""
    tensor.view(-1)[-1] *= 1 + 8 * torch.finfo(tensor.dtype).eps
    return tensor


def wrong_op(name: str, change: Callable = nudge) -> Callable:
    """Return an op that changes its result, or its first argument."""

    def wrong(*arguments, **options):
        result = OPS[name](*arguments, **options)
        changed = arguments[0] if result is None else result
        change(changed[-1] if isinstance(changed, list) else changed)
        return result

    return wrong


def product_with_a_wrong_gradient(x, weight, **options):
    weight = weight.view_as(weight)
    weight.register_hook(lambda grad: spoil(grad.clone()))
    return OPS["gemm"](x, weight, **options)


def no_kernel(*arguments, **options):
    raise RuntimeError("no such kernel")


FAULTS = [  # an op, a case that shows the fault, the function of amp_ext.ops, its replacement
    ("unscale", "2 x 10", "unscale_", wrong_op("unscale_")),
    ("unscale", "2 x 10", "unscale_", no_kernel),
    ("check_finite", "2 x 10", "check_finite", wrong_op("check_finite")),
    ("grad_norm", "16 x 64 Ki", "grad_norm", wrong_op("grad_norm")),
    ("update_scale", "8 found_infs, scale unmoved", "update_scale_", wrong_op("update_scale_")),
    ("cast", "2 x 10", "cast_", wrong_op("cast_")),
    ("gemm", "p16 64^3", "gemm", wrong_op("gemm", spoil)),
    ("gemm", "fp16 8B at 1/64 up acc", "gemm_accumulate_", wrong_op("gemm_accumulate_", spoil)),
    ("linear", "fp16 1B at 1/32, fwd+bwd", "gemm", product_with_a_wrong_gradient),
]


@pytest.mark.parametrize(("op", "text", "replaced", "fault"), FAULTS)
def test_a_wrong_backend_gets_no_ratio_and_the_other_has_one(
    tmp_path: Path, capsys, monkeypatch, op: str, text: str, replaced: str, fault: Callable
) -> None:
    @contextlib.contextmanager
    def wrong() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(amp_ext.ops, replaced, fault)
            yield

    backends = {"cpu": contextlib.nullcontext, "triton": wrong}
    monkeypatch.setattr(providers, "ours", lambda device, products=False: backends)
    status, records = run_quick(tmp_path, op, "--filter", text)
    assert status == 1
    assert "NO RATIO for " in capsys.readouterr().out
    for record in records:
        if record["provider"] == "triton":
            words = "RuntimeError: no such kernel" if fault is no_kernel else "CheckError: "
            assert record["error"].startswith(words)
            assert record["ratio"] is None
        else:
            assert record["error"] is None, record
            assert (record["ratio"] is None) == (record["provider"] == record["baseline"])


def their_product(shape, given):
    return spoil(torch.mm(*given.views))


class ClipsToMore(amp_ext.GradScaler):
    def clip_grad_norm_(self, optimizer, max_norm):
        return super().clip_grad_norm_(optimizer, 1.001 * max_norm)


class NeverSteps(amp_ext.GradScaler):
    def _maybe_opt_step(self, *arguments):
        pass


class OtherDtype(torch.autocast):
    def __init__(self, device_type, dtype):
        super().__init__(device_type, torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "text", "place", "name", "fault", "provider"),
    [
        ("gemm", "fp16 64^3 NT", vars(gemm), "theirs", their_product, "torch"),
        ("scaler", "40 parameters, clipped SGD", vars(amp_ext), "GradScaler", ClipsToMore, "cpu"),
        ("scaler", "40 parameters, clipped SGD", vars(amp_ext), "GradScaler", NeverSteps, "cpu"),
        ("train", "regression", vars(amp_ext), "GradScaler", NeverSteps, "cpu"),
        ("autocast", "fp16 mm, forward", autocast.REGIONS, "amp_ext", OtherDtype, "cpu"),
    ],
    ids=["gemm", "clip", "step", "train", "autocast"],
)
def test_the_wrong_side_is_named(
    tmp_path: Path, monkeypatch, op: str, text: str, place: dict, name: str, fault, provider: str
) -> None:
    """A wrong baseline, scaler, training or region leaves our line without a ratio."""
    monkeypatch.setitem(place, name, fault)
    status, records = run_quick(tmp_path, op, "--filter", text)
    assert status == 1
    assert len({record["case"] for record in records}) == 1
    assert "cpu" not in {record["provider"] for record in records if record["ratio"]}
    (error,) = [(each["provider"], each["error"]) for each in records if each["error"]]
    assert error[0] == provider
    assert error[1].startswith("CheckError: ")


@pytest.mark.parametrize("dtype", registry.DTYPES.values(), ids=list(registry.DTYPES))
def test_lost_columns_of_a_long_sum_are_found(dtype: torch.dtype) -> None:
    k = 16384
    a, b = torch.randn(8, k).bfloat16(), torch.randn(k, 16).div(k**0.5).bfloat16()
    exact = a.double() @ b.double()
    compare((a.float() @ b.float()).to(dtype), exact, k, dtype, "the product")
    lost = (a[:, 64:].float() @ b[64:].float()).to(dtype)
    with pytest.raises(registry.CheckError, match="of the product is"):
        compare(lost, exact, k, dtype, "the product")


def test_norms_see_an_error_that_is_small_everywhere() -> None:
    exact = torch.randn(256, 256).double()
    compare(exact.half(), exact, 1, torch.float16, "it")
    off = exact.clone()
    off[128:, :128] *= 1 + 3 * torch.finfo(torch.float16).eps
    for value, words in ((off[0, 0].item(), r"3\.00"), (torch.nan, "nan")):
        off[0, 0] = value
        with pytest.raises(registry.CheckError, match=f"a block of it is {words} times"):
            compare(off, exact, 1, torch.float16, "it")
