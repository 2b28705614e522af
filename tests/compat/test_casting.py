"""Test casts around forward, by amp.initialize and apply_policy, and the policies of Keras."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import amp_ext
from amp_ext.compat.apex import amp
from amp_ext.compat.keras import apply_policy
from cases import assert_same, through_a_file

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.dtypes = [x.dtype, y.dtype]
        return y


GIVERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "O1": lambda model: amp.initialize(model, verbosity=0),
    "mixed_float16": lambda model: apply_policy(model, "mixed_float16"),
}
by_both = pytest.mark.parametrize("give", GIVERS.values(), ids=GIVERS)


@by_both
def test_copies_and_pickles_cast(give: Callable[..., Any]) -> None:
    """A copy computes with its own weights, and has the state dict of the plain module."""
    model = give(Net())
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        through_a_file(model, weights_only=False),
        copy.copy(model),  # it shares the layer
    ):
        assert torch.equal(copied(X), model(X))
        assert copied.dtypes == [FP32, FP16]
        nn.init.zeros_(copied[0].weight)
        assert torch.equal(copied(X), model(X)) == (copied[0] is model[0])
        assert type(copied).__name__ == "Net" and isinstance(copied, Net)
        Net().load_state_dict(copied.state_dict())


@by_both
def test_wrappers_cast(give: Callable[..., Any]) -> None:
    """Wrappers that call the module, its forward, or a replica of it cast."""
    model = give(Net())
    for call in (
        nn.DataParallel(model),
        model.forward,
        model._replicate_for_data_parallel(),
        lambda x: torch.func.functional_call(model, dict(model.named_parameters()), x),
    ):
        model.dtypes = []
        call(X)
        assert model.dtypes in ([FP32, FP16], [])  # a replica has attributes of its own


@by_both
def test_compiled_modules_cast(give: Callable[..., Any]) -> None:
    """A compiled module computes the same as the module, in one graph."""
    torch._dynamo.reset()
    model = give(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(compiled(X), model(X))
    compiled(X).sum().backward()
    assert model[0].weight.grad.dtype == FP32


@by_both
@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda model: torch.compile(model, backend="eager"), TypeError, "a forward that stay"),
        (torch.jit.script, TypeError, "a forward that stay"),
        (torch.fx.symbolic_trace, TypeError, "a forward that stay"),
        (lambda model: nn.LazyLinear(2), TypeError, "got a LazyLinear"),
        (
            lambda model: parametrize.register_parametrization(model, "weight", nn.Identity()),
            TypeError,
            "no parametrizations, got a ParametrizedLinear",
        ),
        (lambda model: model.half(), ValueError, r"weight: expected torch.float32, got .*float16"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_modules_that_cannot_cast(
    give: Callable[..., Any], spoil: Callable[..., Any], error: type[Exception], text: str
) -> None:
    """A module with a replaced forward, parametrizations or 16-bit parameters is refused."""
    with pytest.raises(error, match=text):
        give(spoil(nn.Linear(2, 2)))


def test_a_class_that_is_put_on_casts_stays() -> None:
    """A second policy changes the casts below a class that was put on the module, and only them."""
    layer = apply_policy(nn.Linear(8, 4), "float32")
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    apply_policy(layer, "mixed_bfloat16")
    assert parametrize.is_parametrized(layer) and layer(X).dtype == BF16
    parametrize.remove_parametrizations(layer, "weight")
    assert apply_policy(layer, "mixed_float16")(X).dtype == FP16


def test_nested_arguments_and_results_are_cast() -> None:
    """Tensors in containers and keywords are cast; integers and other objects stay."""

    class Body(nn.Linear):
        def forward(self, pair: Any, *, more: Tensor) -> Any:
            self.dtypes = [pair[0].dtype, pair[1]["ids"].dtype, more.dtype]
            y = super().forward(more)
            return OrderedDict(y=y, several=[y, (y.double(), 3, "x")])

    model = amp.initialize(Body(8, 4), opt_level="O2", verbosity=0)
    result = model((X, {"ids": torch.arange(3)}), more=X.double())
    assert model.dtypes == [FP16, torch.int64, FP16]
    y, (double, *rest) = result["several"]
    assert isinstance(result, OrderedDict) and rest == [3, "x"]
    assert [result["y"].dtype, y.dtype, double.dtype] == [FP32, FP32, FP32]
    model = apply_policy(Body(8, 4), "float32")
    model((X.bfloat16(), {"ids": torch.arange(3)}), more=X)
    assert model.dtypes == [FP32, torch.int64, FP32]


def test_fused_layers_call_modules_with_casts() -> None:
    """Layers that compute from parameters call a module that casts."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0).eval()
    x = torch.ones(1, 1, 4)
    apply_policy(layer.linear2, "mixed_float16")
    with torch.no_grad():
        low = layer(x)
        apply_policy(layer.linear2, "float32")
        assert not torch.equal(low, layer(x))


# ---- policies of Keras ---------------------------------------------------------------------------


def types(model: nn.Module) -> list[torch.dtype]:
    """Return the dtypes of the layers' results, without a region and in one of bfloat16."""
    x = torch.ones(2, 4)
    seen = []
    hooks = [layer.register_forward_hook(lambda *a: seen.append(a[2].dtype)) for layer in model]
    model(x)
    with amp_ext.autocast("cpu", BF16):
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_modules_own_policy_wins() -> None:
    """A submodule's policy replaces the outer one, and both replace the caller's region."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert types(model) == [FP32, FP32, BF16, BF16]
    apply_policy(model, "mixed_float16")
    assert types(model) == [FP16, FP16, FP16, FP16]
    apply_policy(model[1], "float32")
    assert types(model) == [FP16, FP32, FP16, FP32]
    assert model[1].dtype_policy == "float32"
    apply_policy(model, "float32", only=nn.Linear)
    assert types(model) == [FP32] * 4
    assert isinstance(model[0], nn.Linear)


def test_refused_policies() -> None:
    """Nothing of a model changes where a name is no policy's, or a module cannot have it."""
    attention, fp16 = nn.MultiheadAttention(4, 2), "mixed_float16"
    names = "one of 'float32', 'mixed_float16', 'mixed_bfloat16', got torch.float16"
    for module, policy, error, text, options in (
        (nn.ReLU(), "float16", ValueError, "policy: .*Variables stay float32: write", {}),
        (nn.ReLU(), FP16, ValueError, f"policy: expected {names}", {}),
        (3, fp16, TypeError, "expected a torch.nn.Module, got 3", {}),
        (attention, fp16, ValueError, "reads the parameters of out_proj", {"only": nn.Linear}),
        (nn.ReLU(), fp16, ValueError, "has no module of only=", {"only": nn.Conv2d}),
    ):
        with pytest.raises(error, match=f"apply_policy: .*{text}"):
            apply_policy(module, policy, **options)
    model = nn.Sequential(nn.Linear(4, 4), attention)
    with pytest.raises(ValueError, match="out_proj"):
        apply_policy(model, fp16, only=nn.Linear)
    assert type(model[0]) is nn.Linear
