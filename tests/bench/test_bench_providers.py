"""bench/providers.py: backends, torch.compile, and libraries that are not installed here."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import amp_ext
from ops import linear as bench_linear
from ops import grad_norm as bench_norm
from ops import unscale_ as bench_unscale
from harness import lists
from harness import providers
from harness import registry
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)
from harness.registry import FP16, FP32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# ---- backends ----------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, object]]:
    """What is chosen of backends and kernels of products, as on a machine with both."""
    calls: list[tuple[str | None, object]] = []
    monkeypatch.setattr(providers._C, "cuda_built", lambda: True)
    monkeypatch.setattr(amp_ext, "set_backend", lambda name: calls.append(("backend", name)))
    kernels = lambda on: calls.append(("kernels", on))  # noqa: E731
    monkeypatch.setattr(providers._C, "use_gemm_kernels", kernels)
    monkeypatch.setattr("amp_ext._triton.triton_version", lambda: "3.9")
    return calls


def test_a_line_for_each_backend_of_a_gpu(chosen) -> None:
    assert list(providers.ours(CPU)) == ["cpu"]
    assert list(providers.ours(CUDA)) == ["cuda", "triton"]
    lines = providers.ours(CUDA, products=True)
    assert list(lines) == ["cuda", "triton", "library"]
    assert not chosen
    before = [("backend", amp_ext.get_backend()), ("kernels", providers._C.uses_gemm_kernels())]
    expected = {
        "cuda": [("backend", "cuda"), ("kernels", True)],
        "triton": [("backend", "triton"), ("kernels", True)],
        "library": [("backend", None), ("kernels", False)],
    }
    for name, line in lines.items():
        with line():
            assert chosen == expected[name]
        assert chosen == expected[name] + before
        chosen.clear()


def test_backends_that_are_not_there_have_no_line(chosen, monkeypatch) -> None:
    monkeypatch.setattr("amp_ext._triton.triton_version", lambda: None)
    assert list(providers.ours(CUDA)) == ["cuda"]
    monkeypatch.setattr(providers._C, "cuda_built", lambda: False)
    assert list(providers.ours(CUDA, products=True)) == ["library"]


def test_what_was_chosen_comes_back_after_an_error(chosen) -> None:
    with pytest.raises(ZeroDivisionError), providers.ours(CUDA)["cuda"]():
        raise ZeroDivisionError
    assert len(chosen) == 4


def test_lines_are_amp_exts_and_torchs(chosen) -> None:
    def mine(): ...

    def theirs(): ...

    lines = providers.lines(mine, theirs, CUDA, products=True)
    assert {name: line.launch for name, line in lines.items()} == {
        **dict.fromkeys(("cuda", "triton", "library"), mine),
        "torch": theirs,
    }
    assert lines["torch"].around is nullcontext
    with lines["cuda"].around():
        assert chosen == [("backend", "cuda"), ("kernels", True)]


def test_a_provider_that_cannot_be_made_fails_when_it_is_launched() -> None:
    def no_memory():
        raise MemoryError("4 GB")

    failing = providers.guarded("torch", no_memory)
    assert failing.name == "torch"
    for _ in range(2):
        with pytest.raises(MemoryError, match="4 GB"):
            failing.launch()
    able = registry.Provider("torch", no_memory)
    assert providers.guarded("torch", lambda: able) is able


def test_tf32_is_off_for_a_while(monkeypatch) -> None:
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    assert torch.backends.cudnn.allow_tf32, "torch's default"
    with providers.without_tf32():
        assert not any(switch.allow_tf32 for switch in switches)
    with pytest.raises(ZeroDivisionError), providers.without_tf32():
        raise ZeroDivisionError
    assert [switch.allow_tf32 for switch in switches] == before


# ---- torch.compile -----------------------------------------------------------------------------


def fake_compile(function, dynamic):
    """Stands for torch.compile, which takes seconds."""
    assert dynamic is False
    return lambda *arguments: function(*arguments)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("unscale", "16 x 64 Ki"),
        ("check", "16 x 64 Ki"),
        ("norm", "16 x 64 Ki"),
        ("linear", "fp16 linear+GELU"),
        ("train", "digits"),
    ],
)
def test_compiled(tmp_path, capsys, monkeypatch, op, text) -> None:
    """What is compiled does the same work: its results pass the check."""
    monkeypatch.setattr(torch, "compile", fake_compile)
    options = (op, "--filter", text, "--compile")
    status, records = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 0, capsys.readouterr().out
    assert sum(record["provider"] == "compile" for record in records) == len(
        {record["case"] for record in records[1:]}
    )


def test_where_nothing_compiles_the_line_is_missing(tmp_path, capsys, monkeypatch) -> None:
    def fails(function, dynamic):
        def program(*arguments):
            raise RuntimeError("no C++ compiler\nand more")

        return program

    monkeypatch.setattr(torch, "compile", fails)
    options = ("unscale", "--filter", "16 x 64 Ki", "--compile")
    status, records = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 0
    assert [record["provider"] for record in records[1:]] == ["cpu", "torch"]
    words = "compile is left out: RuntimeError: no C++ compiler\n"
    assert words in capsys.readouterr().err


def test_wrong_compiled_program_gets_no_ratio(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(bench_unscale, "composed", lambda grads, flag, factor: None)
    options = ("unscale", "--filter", "16 x 64 Ki", "--compile")
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 1
    assert {record["provider"]: record["error"] for record in records} == {
        "cpu": None,
        "torch": None,
        "compile": "CheckError: values are wrong in 16 of 16 tensors",
    }


# ---- Apex --------------------------------------------------------------------------------------


class FakeApex:
    """amp_C and its applier, as their documentation has them: chunk size, flag, lists, options."""

    CHUNK = 2048 * 32

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        kernels = types.ModuleType("amp_C")
        kernels.multi_tensor_scale, kernels.multi_tensor_l2norm = self.scale, self.l2norm
        applying = types.ModuleType("apex.multi_tensor_apply")
        applying.multi_tensor_applier = self.apply
        modules = {"amp_C": kernels, "apex": types.ModuleType("apex")}
        for name, module in {**modules, applying.__name__: applying}.items():
            monkeypatch.setitem(sys.modules, name, module)

    def apply(self, kernel, flag, tensor_lists, *options):
        return kernel(self.CHUNK, flag, tensor_lists, *options)

    def check(self, flag, tensor_lists) -> None:
        assert (flag.dtype, flag.numel()) == (torch.int32, 1)
        assert len({len(tensors) for tensors in tensor_lists}) == 1
        assert all(len({t.dtype for t in tensors}) == 1 for tensors in tensor_lists)

    def scale(self, chunk, flag, tensor_lists, factor: float) -> None:
        self.check(flag, tensor_lists)
        assert isinstance(factor, float)
        self.calls.append("scale")
        for source, target in zip(*tensor_lists, strict=True):
            target.copy_(source.float() * torch.tensor(factor))
            if not target.isfinite().all():
                flag.fill_(1)

    def l2norm(self, chunk, flag, tensor_lists, per_tensor: bool):
        self.check(flag, tensor_lists)
        assert per_tensor is False
        self.calls.append("l2norm")
        norm = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]]).norm()
        if not norm.isfinite():
            flag.fill_(1)
        return norm.view(1), torch.empty(0)


def test_apex(monkeypatch) -> None:
    """Its lines take part in the check like any other: one launch a dtype."""
    assert providers.apex(CPU) is None
    fake = FakeApex(monkeypatch)
    library = providers.apex(CUDA)
    monkeypatch.setattr(providers, "apex", lambda device: library)
    setup, case = registry.Setup(CPU), lists.GradientList("mixed", 7 * [30], (FP32, FP16))
    for module, name in ((bench_unscale, "scale"), (bench_norm, "l2norm")):
        trial = module.build(case, setup)
        (line,) = (p for p in trial.providers if p.name == "apex")
        line.launch()
        assert fake.calls == [name, name]
        assert trial.verify(["cpu", "torch", "apex"]) == {}
        fake.calls.clear()


def test_wrong_apex_is_found(monkeypatch) -> None:
    FakeApex(monkeypatch).scale = None
    library = providers.apex(CUDA)
    library.kernels.multi_tensor_scale = lambda *_: None
    monkeypatch.setattr(providers, "apex", lambda device: library)
    case = lists.GradientList("some", 3 * [30], [FP32])
    trial = bench_unscale.build(case, registry.Setup(CPU))
    found = trial.verify(["cpu", "torch", "apex"])
    assert found == {"apex": "CheckError: values are wrong in 3 of 3 tensors"}


# ---- TransformerEngine -------------------------------------------------------------------------


class FakeLinear(nn.Linear):
    """Takes what transformer_engine.pytorch.Linear is given here."""

    def __init__(self, in_features, out_features, bias, params_dtype) -> None:
        super().__init__(in_features, out_features, bias, dtype=params_dtype)


class FakeNormMLP(nn.Module):
    """Takes what transformer_engine.pytorch.LayerNormMLP is given here; its parameters' names."""

    def __init__(
        self, hidden_size, ffn_hidden_size, *, eps, bias, activation, params_dtype
    ) -> None:
        super().__init__()
        assert (bias, activation) == (True, "gelu")
        self.eps = eps
        shapes = {
            "layer_norm_weight": (hidden_size,),
            "layer_norm_bias": (hidden_size,),
            "fc1_weight": (ffn_hidden_size, hidden_size),
            "fc1_bias": (ffn_hidden_size,),
            "fc2_weight": (hidden_size, ffn_hidden_size),
            "fc2_bias": (hidden_size,),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.full(shape, torch.nan, dtype=params_dtype)))

    def forward(self, x):
        width = x.shape[-1:]
        x = nn.functional.layer_norm(
            x, width, self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        x = nn.functional.linear(x, self.fc1_weight, self.fc1_bias)
        x = nn.functional.gelu(x, approximate="tanh")
        return nn.functional.linear(x, self.fc2_weight, self.fc2_bias)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    layers = types.ModuleType("transformer_engine.pytorch")
    layers.Linear, layers.LayerNormMLP = FakeLinear, FakeNormMLP
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    library = providers.transformer_engine(CUDA)
    monkeypatch.setattr(providers, "transformer_engine", lambda device: library)
    return layers


@pytest.mark.parametrize("backward", [False, True])
def test_transformer_engine(engine, backward) -> None:
    """Where it has a layer its line passes the check, with parameters of torch's values."""
    setup = registry.Setup(CPU)
    for kind, here in (("linear+GELU", True), ("MLP", False), ("norm+MLP", True)):
        block = bench_linear.Block(kind, tokens=8, width=24, hidden=40)
        trial = bench_linear.build(block, FP16, backward, setup)
        names = [provider.name for provider in trial.providers]
        assert names == (["cpu", "torch", "te"] if here else ["cpu", "torch"])
        for provider in trial.providers:
            provider.launch()
        assert trial.verify(names) == {}


def test_transformer_engine_that_fails_leaves_the_others(engine) -> None:
    engine.LayerNormMLP = None
    block = bench_linear.Block("norm+MLP", tokens=8, width=24, hidden=40)
    trial = bench_linear.build(block, FP16, True, registry.Setup(CPU))
    *_, line = trial.providers
    with pytest.raises(TypeError, match="not callable"):
        line.launch()
    assert line.name == "te"
    assert trial.verify(["cpu", "torch"]) == {}


def test_wrong_gradient_through_the_norm_is_found(engine) -> None:
    layers = bench_linear.Layers(bench_linear.Block("norm+MLP", 8, 24, 40), FP16, CPU)
    x, grad = torch.randn(8, 24).half().requires_grad_(), torch.randn(8, 24).half()
    expected = bench_linear.Expected(layers, x, grad)
    variant = bench_linear.Variant(layers, list(layers.parameters()))
    results = bench_linear.Pass(variant, x, grad).run()
    expected.compare("torch", results)
    for place in range(len(results)):
        wrong = [result.detach().clone() for result in results]
        wrong[place].view(-1)[-1] += 1.0
        with pytest.raises(registry.CheckError, match="torch's"):
            expected.compare("torch", wrong)


def test_libraries_that_are_broken_or_missing_are_left_out(monkeypatch) -> None:
    assert providers.transformer_engine(CPU) is None
    for name in ("amp_C", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    assert providers.apex(CUDA) is None
    assert providers.transformer_engine(CUDA) is None
    setup = registry.Setup(CPU)
    trial = bench_linear.build(bench_linear.Block("MLP", 4, 8, 16), FP16, False, setup)
    assert [provider.around for provider in trial.providers] == [nullcontext, nullcontext]
