"""What is done with models before and after amp.initialize, and casts around functions."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_ext
from amp_ext.apex import amp
from apex_program import Net, assert_same, batches, loss_of, new, train_apex


@pytest.fixture
def o1() -> Iterator[Net]:
    model, _ = amp.initialize(*new(), opt_level="O1", verbosity=0)
    return model


X = next(batches())[0]


def test_copies_and_pickles_are_models_of_their_own(o1: Net) -> None:
    """Such as an average of the weights. A forward bound to the first model would compute its."""
    o1.eval()
    expected = o1(X)
    file = io.BytesIO()
    torch.save(o1, file)
    file.seek(0)
    for other in (copy.deepcopy(o1), copy.copy(o1), torch.load(file, weights_only=False)):
        assert torch.equal(other(X), expected)
        assert other.dtypes == [torch.float32, torch.float16, torch.float16]
    other = copy.deepcopy(o1)
    nn.init.zeros_(other.fc2.weight)
    assert not torch.equal(other(X), expected) and torch.equal(o1(X), expected)


class Wrapper(nn.Module):
    """As those of peft and of torch's data parallelism in turn call a model."""

    def __init__(self, model: nn.Module, by_name: bool) -> None:
        super().__init__()
        self.model = model
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        return self.model.forward(x) if self.by_name else self.model(x)


@pytest.mark.parametrize("by_name", [True, False])
def test_wrapped_models_are_autocast(o1: Net, by_name: bool) -> None:
    result = Wrapper(o1, by_name)(X)
    assert o1.dtypes[1] == torch.float16 and result.dtype == torch.float32
    replica = o1._replicate_for_data_parallel()
    assert type(replica).forward is type(o1).forward and "forward" not in vars(replica)


class Adapted(nn.Module):
    """A LoRA's forward: a frozen layer and a product of two small ones, by checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.dtypes: list[torch.dtype] = []

    def block(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.dtypes.append(hidden.dtype)
        return self.base(x) + self.b(hidden)

    def forward(self, x: Tensor, by_checkpoint: bool = True) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if by_checkpoint else self.block(x)


def test_checkpoints_compute_again_what_they_computed() -> None:
    torch.manual_seed(0)
    model = Adapted()
    params = [model.a.weight, model.b.weight]
    optimizer = torch.optim.SGD(params, lr=0.1)
    amp.initialize(model, optimizer, verbosity=0)
    grads = []
    for by_checkpoint in (True, False):
        optimizer.zero_grad()
        with amp.scale_loss(model(X, by_checkpoint).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        grads.append([param.grad for param in params])
    assert model.dtypes == [torch.float16] * 3  # forward, again, and without a checkpoint
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_models_compile_afterwards(opt_level: str) -> None:
    plain, torchs = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    losses = train_apex(plain, torchs, batches(), overflow=1)
    model, optimizer = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert train_apex(compiled, optimizer, batches(), overflow=1) == losses
    assert_same(model, plain)


def test_results_in_containers() -> None:
    class Outputs(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return OrderedDict(y=y, several=[y, (y.double(), 3, "x")])

    result = amp.initialize(Outputs(8, 4), verbosity=0)(X)
    y, (double, *rest) = result["several"]
    assert isinstance(result, OrderedDict) and rest == [3, "x"]
    assert (result["y"].dtype, y.dtype, double.dtype) == (
        torch.float32,
        torch.float32,
        torch.float64,
    )


def test_inputs_that_know_how_to_cast_themselves() -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, dtype: torch.dtype) -> Batch:
            return Batch(self.x.to(dtype))

    class Sum(nn.Linear):
        def forward(self, batch: Batch, ids: Tensor, *, more: dict[str, Tensor]) -> Tensor:
            assert (batch.x.dtype, ids.dtype, more["x"].dtype) == (
                torch.float16,
                torch.int64,
                torch.float16,
            )
            return super().forward(batch.x + more["x"])

    model = amp.initialize(Sum(8, 4), opt_level="O2", verbosity=0)
    assert model(Batch(X), torch.arange(3), more={"x": X}).dtype == torch.float32


def test_casts_can_be_disabled(o1: Net) -> None:
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        o1(X)
        assert o1.dtypes == [torch.float32] * 3
        with amp_ext.autocast("cpu", torch.float16), amp.disable_casts():
            assert (X @ X.T).dtype == torch.float32
        1 / 0  # noqa: B018
    o1(X)
    assert o1.dtypes[1] == torch.float16


def test_a_state_dict_is_float32_in_every_module() -> None:
    model, _ = amp.initialize(*new(), opt_level="O3", verbosity=0)
    expected = model.fc1.weight.float()
    for state, key in ((model.state_dict(), "fc1.weight"), (model.fc1.state_dict(), "weight")):
        assert torch.equal(state[key], expected) and state[key].dtype == torch.float32
    assert model.state_dict()["norm.num_batches_tracked"].dtype == torch.int64


# ---- single functions ----------------------------------------------------------------------------


def dtypes_of(*tensors: Any, other: Tensor | None = None) -> list[torch.dtype]:
    given = [*tensors, other]
    return [value.dtype for value in given if isinstance(value, Tensor)]


HALF, SINGLE = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("half", [torch.float16, torch.float16, torch.int64, torch.float16]),
        ("float", [torch.float32, torch.float32, torch.int64, torch.float32]),
        ("promote", [torch.float32, torch.float32, torch.int64, torch.float32]),
    ],
)
def test_functions_cast_under_o1_alone(kind: str, expected: list[torch.dtype]) -> None:
    function = getattr(amp, f"{kind}_function")(dtypes_of)
    arguments = HALF, SINGLE, torch.arange(2), "x"
    given = [torch.float16, torch.float32, torch.int64, torch.float16]
    amp.initialize(*new(), opt_level="O2", verbosity=0)
    assert function(*arguments, other=HALF) == given
    amp.initialize(*new(), opt_level="O1", verbosity=0)
    assert function(*arguments, other=HALF) == expected
    with amp.disable_casts():
        assert function(*arguments, other=HALF) == given
    assert function.__name__ == "dtypes_of"


def test_promotion_is_to_the_widest() -> None:
    amp.initialize(*new(), opt_level="O1", verbosity=0)
    promoted = amp.promote_function(dtypes_of)
    assert promoted(HALF, HALF) == [torch.float16] * 2
    assert promoted(HALF, HALF.bfloat16()) == [torch.float32] * 2
    assert promoted(HALF, SINGLE.double()) == [torch.float64] * 2


class Ops:
    """Stands for a module of functions; autocast would decide otherwise about each."""

    product = staticmethod(torch.mm)
    all_together = staticmethod(torch.prod)


def test_registered_functions_compute_as_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("product", "all_together"):
        monkeypatch.setattr(Ops, name, getattr(Ops, name))  # restored afterwards
    amp.register_half_function(Ops, "product")
    amp.register_float_function(Ops, "product")  # the last one counts
    amp.register_half_function(Ops, "all_together")
    amp.initialize(*new(), opt_level="O1", verbosity=0)
    with amp_ext.autocast("cpu", torch.float16):
        assert torch.mm(SINGLE, SINGLE).dtype == torch.float16
        assert Ops.product(SINGLE, HALF).dtype == torch.float32
        assert torch.prod(HALF).dtype == torch.float32
        assert Ops.all_together(SINGLE).dtype == torch.float16


def test_losses_outside_are_those_of_the_region() -> None:
    """Since outputs are float32."""
    model, _ = amp.initialize(*new(), opt_level="O1", verbosity=0)
    x, y = next(batches())
    outside = loss_of(model, x, y)
    other, _ = new()
    with amp_ext.autocast("cpu", torch.float16):
        within = loss_of(other, x, y)
    assert torch.equal(outside, within)
