"""Test the step of an ordinary optimizer: changes between steps, hooks, schedulers, closures.

It also covers tensor learning rates, versions, shared memory and errors.
"""

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import amp_ext
import optim_cases
from amp_ext import optim
from amp_ext.optim._step import StepScalars
from cases import unwritten
from executors import Executor, against_oracle
from optim_cases import assert_same_bits, params, params_of, set_grads, tolerance, train
from twins import plain

LR = 0.01


def test_gradient_without_memory() -> None:
    """A gradient without memory, as autograd's zeros are, is a zero."""
    weight = torch.ones(4).requires_grad_()
    weight.grad = torch._efficientzerotensor(4)
    optim.SGD([weight], lr=1.0, weight_decay=0.5).step()
    assert weight.tolist() == [0.5] * 4


def test_parameters_of_a_transform() -> None:
    """A step refuses tensors without storage, as in torch.func's transforms.

    An empty tensor comes first: it does not show the missing storage.
    """

    def step(x: Tensor) -> None:
        params = [x[:0], x.clone()]
        for param in params:
            param.grad = torch.ones_like(param)
        optim.SGD(params, lr=1.0).step()

    with pytest.raises(NotImplementedError, match="storage"):
        torch.func.vmap(step)(torch.ones(2, 3))


def change_in_turn(optimizer: Any) -> Iterator[None]:
    """Change an optimizer; yield after each change."""
    (group,) = optimizer.param_groups
    yield
    for state in optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items()})
    yield
    del optimizer.state[group["params"][1]]
    yield
    group["params"][0].data = group["params"][0].data.t().contiguous().t()  # moments stay
    yield
    group["params"][2] = nn.Parameter(torch.tensor(3.0))
    yield
    group["amsgrad"] = True
    for param, state in optimizer.state.items():
        state["max_exp_avg_sq"] = torch.zeros_like(param)
    yield
    for param in group["params"]:
        param.data = param.data.clone() * 2
    yield
    optimizer.add_param_group({"params": params_of([(3, 3)], seed=5), "lr": 0.1, "amsgrad": True})
    group.update(lr=0.1, betas=(0.5, 0.5), eps=0.1, weight_decay=0.1)
    yield
    del optimizer.state[group["params"][1]]  # both groups have a state to make or to convert
    added = optimizer.param_groups[1]["params"][0]
    added.data = added.data.t().contiguous().t()
    yield


def test_changes_between_steps() -> None:
    """State, parameters and options may change between any two steps."""
    optimizers = optim.AdamW(params_of(), lr=LR), torch.optim.AdamW(params_of(), lr=LR)
    for change, _ in enumerate(zip(*map(change_in_turn, optimizers), strict=True)):
        for optimizer in optimizers:
            train(optimizer, range(2 * change, 2 * change + 2))
        # Numbers grow to twice theirs, learning rates to tenfold.
        optim_cases.assert_close(*map(params, optimizers), tolerance(2 * change + 2, 0.1))
        counts = [[o.state[p]["step"].item() for p in params(o)] for o in optimizers]
        assert counts[0] == counts[1]


def test_each_parameter_is_updated_as_if_alone() -> None:
    """Each parameter is updated as if alone, though dtypes and shapes alternate."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    kinds = [((4,), f32), ((3, 2), bf16), ((4,), f32), ((2, 3), f16), ((6,), f16), ((4,), bf16)]
    params = [param for shape, dtype in kinds for param in params_of([shape], dtype)]
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    together, *each = (optim.AdamW(group, lr=LR) for group in (params, *([p] for p in alone)))
    for i in range(3):
        set_grads(params, i)
        for param, same in zip(params, alone, strict=True):
            same.grad = param.grad.clone()
        for optimizer in (together, *each):
            optimizer.step()
    for param, same, optimizer in zip(params, alone, each, strict=True):
        assert_same_bits(param.detach(), same.detach())
        assert_same_bits(together.state[param], optimizer.state[same])


def test_rounding_does_not_depend_on_other_gradients() -> None:
    """Replicas round dense parameters alike, whichever experts have gradients."""
    found = []
    for grad in (None, torch.ones(4, dtype=torch.bfloat16)):
        expert, dense = (torch.ones(n, dtype=torch.bfloat16) for n in (4, 1000))
        expert.grad, dense.grad = grad, torch.full_like(dense, 2.0**-9)
        optim.SGD([expert, dense], lr=1.0, stochastic_rounding=True).step()
        found.append(dense)
    assert len(found[0].unique()) == 2
    assert_same_bits(*found)


# ---- fallback to torch's optimizer -------------------------------------------------------------


class Labelled(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def sparse() -> Tensor:
    param = nn.Parameter(torch.ones(4, 2))
    param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))
    return param


def with_grad(value: Tensor) -> Tensor:
    param = value.requires_grad_()
    param.grad = torch.ones_like(param)
    return param


REFUSED: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    r"the gradient of param_groups\[0\]\['params'\]\[0\] is not strided": (sparse, {}),
    "is not float32, float16 or bfloat16": (
        lambda: with_grad(torch.ones(3, dtype=torch.complex64)),
        {},
    ),
    "is a tensor subclass": (lambda: with_grad(torch.ones(3).as_subclass(Labelled)), {}),
    "has holes in memory": (lambda: with_grad(torch.ones(3, 2)[:, 0]), {}),
    "weight_decay is a tensor": (
        lambda: with_grad(torch.ones(3)),
        {"weight_decay": torch.tensor(0.5)},
    ),
    "differentiable=True": (lambda: with_grad(torch.ones(3)), {"differentiable": True}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_left_to_torch(why: str) -> None:
    make, options = REFUSED[why]
    ours, torchs = (cls([make()], lr=LR, **options) for cls in (optim.SGD, torch.optim.SGD))
    for optimizer in (ours, torchs) if "differentiable" in options else ():
        optimizer.param_groups[0]["params"][0].requires_grad_(False)
    assert re.search(why, ours._why_not())
    calls = []
    ours.register_step_post_hook(lambda *_: calls.append(1))
    for optimizer in (ours, torchs):
        optimizer.step()
    assert calls == [1]
    assert_same_bits(params(ours), params(torchs))

    ours._step_scalars = StepScalars(torch.tensor(0.0))
    with pytest.raises(RuntimeError, match=f"SGD.step: clip_grad_norm_.*{why}"):
        ours.step()
    own = optim.SGD([make()], lr=LR, master_weights=True, **options)
    with pytest.raises(RuntimeError, match=f"SGD.step: kernels cannot.*master weights.*{why}"):
        own.step()


def test_several_devices_are_left_to_torch() -> None:
    here, there = params_of([(3,)]) + params_of([(3,)], device="meta")
    optimizer = optim.SGD([{"params": [here]}, {"params": [there]}], lr=0.5)
    here.grad, there.grad = torch.ones(3), torch.ones(3, device="meta")
    expected = here.detach() - 0.5
    assert "another device" in optimizer._why_not()
    optimizer.step()
    assert_same_bits(here.detach(), expected)


# ---- parameters with shared memory, which torch's step updates -----------------------------------


def tied() -> list[Tensor]:
    """Return an embedding and a head that is tied to it by `.data`, apart in the list."""
    embedding, between, head = (nn.Parameter(torch.randn(4, 3)) for _ in range(3))
    head.data = embedding.data
    return [embedding, between, head]


def parts() -> list[Tensor]:
    """Return two parameters that share one row of a buffer."""
    buffer = torch.randn(6, 3)
    return [nn.Parameter(buffer[:3]), nn.Parameter(buffer[2:])]


def twice() -> list[Tensor]:
    """Return one parameter twice, which torch updates twice, with a warning."""
    return 2 * [nn.Parameter(torch.randn(4, 3))]


SHARED: list[Callable[[], list[Tensor]]] = [tied, parts, twice]
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AdamW": {},
    "SGD": {"momentum": 0.5, "dampening": 0.25},
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_trains_as_torch(share: Callable[[], list[Tensor]], name: str) -> None:
    found = []
    for module in (optim, torch.optim):
        torch.manual_seed(0)
        optimizer = getattr(module, name)(share(), lr=0.1, **OPTIONS[name])
        train(optimizer, range(3))
        found.append(optimizer)
    assert "shares memory" in found[0]._why_not()
    assert plain(params(found[0])) == plain(params(found[1]))


def test_groups_share_memory() -> None:
    """Groups are updated one after the other."""
    first = nn.Parameter(torch.ones(4))
    groups = [{"params": [first]}, {"params": [nn.Parameter(first.data)]}]
    optimizer = optim.SGD(groups, lr=0.25)
    for param in params(optimizer):
        param.grad = torch.ones(4)
    optimizer.step()
    assert first.tolist() == [0.5] * 4


def test_weights_tied_between_steps() -> None:
    """A tie made between steps is found. Kernels serve the weights again once it is gone."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer, memory = optim.SGD(params, lr=0.5), params[1].data
    for tie, expected in ((memory, 0.5), (params[0].data, -0.5), (memory, -0.0)):
        params[1].data = tie
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
        assert params[1].tolist() == [expected] * 4


def test_storage_that_torch_does_not_know() -> None:
    params = tied()
    optimizer = optim.AdamW(params, exp_avg_dtype=torch.bfloat16)
    before = plain([param.detach() for param in params])
    for param in params:
        param.grad = torch.ones_like(param)
    text = r"param_groups\[0\]\['params'\]\[0\] shares memory with .*\[2\]"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert plain([param.detach() for param in params]) == before


# ---- an ordinary optimizer ---------------------------------------------------------------------


def test_an_overridden_init_group_is_called() -> None:
    """torch's code makes the step of a subclass that changes what is stepped."""

    class Signs(optim.SGD):
        def _init_group(self, group: Any, params: Any, grads: Any, *states: Any) -> Any:
            result = super()._init_group(group, params, grads, *states)
            grads[:] = [grad.sign() for grad in grads]
            return result

    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), 5.0)
    Signs([param], lr=1.0).step()
    assert param.tolist() == [0.0, 0.0]


def test_hooks_closure_and_profiler() -> None:
    optimizer = optim.AdamW(params_of())
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda _, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda _, args, kwargs: calls.append("post"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        set_grads(optimizer.param_groups[0]["params"], 0)
        calls.append("closure")
        return 3.0

    with profile(activities=[ProfilerActivity.CPU]) as prof:
        assert optimizer.step(closure) == 3.0
    assert calls == ["pre", "closure", "post"]
    names = [event.name for event in prof.events()]
    assert "Optimizer.step#AdamW.step" in names
    assert "amp_ext::adam_" in names


@against_oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tensor_lr_and_scheduler(executor: Executor, dtype: torch.dtype) -> None:
    """A scheduler writes the tensor learning rate; its steps equal steps by a number."""
    tensor, number = (
        optim.AdamW(params_of(device=executor.device), lr=lr)
        for lr in (executor.scalar(0.25, dtype), 0.25)
    )
    for optimizer in (tensor, number):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for i in range(3):
            train(optimizer, [i])
            scheduler.step()
    assert isinstance(tensor.param_groups[0]["lr"], Tensor)
    assert number.param_groups[0]["lr"] == tensor.param_groups[0]["lr"] == 0.25 / 8
    assert_same_bits(params(tensor), params(number))


def test_a_step_is_seen_by_autograd_and_autocast() -> None:
    layer = nn.Linear(4, 4)
    optimizer = optim.SGD(layer.parameters(), lr=1.0)
    x = torch.ones(1, 4)
    with amp_ext.autocast("cpu", dtype=torch.float16):
        before = layer(x)
        before.sum().backward()
        loss = layer.weight.square().sum()
        optimizer.step()
        assert not torch.equal(layer(x), before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Errors, and how to provoke them in the second group. The op's tests cover the checks of tensors.
BAD: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    r"adam_: grads\[0\] needs a storage of 16 bytes": (
        lambda _, params: params[0].grad.untyped_storage().resize_(0)
    ),
    r"must have the shape of params\[2\], \[3, 2\], got \[2, 3": (
        lambda optimizer, params: optimizer.state[params[2]].update(exp_avg=torch.ones(2, 3))
    ),
    r"params\[1\] and grads\[0\] overlap in memory": (
        lambda _, params: setattr(params[0], "grad", params[1].detach()[:4])
    ),
    r"(found_inf and params\[1\]|params\[1\] and found_inf) overlap in memory": (
        lambda optimizer, params: setattr(
            optimizer, "_step_scalars", StepScalars(params[1].detach()[0])
        )
    ),
    r"found_inf and grads\[1\] overlap in memory": (
        lambda optimizer, params: setattr(
            optimizer, "_step_scalars", StepScalars(params[1].grad[0])
        )
    ),
    r"exp_avgs\[1\] and grads\[0\] overlap in memory": (
        lambda optimizer, params: setattr(params[0], "grad", optimizer.state[params[1]]["exp_avg"])
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_an_error_changes_nothing(message: str) -> None:
    """An error of a second group after good steps changes nothing."""
    good, *others = params_of([(3,), (4,), (4,), (3, 2)])
    optimizer = optim.AdamW([{"params": [good]}, {"params": others}])
    train(optimizer, range(2))
    set_grads([good, *others], 2)
    BAD[message](optimizer, others)

    def written() -> list[Tensor]:
        return [*optimizer.state, *(t for s in optimizer.state.values() for t in s.values())]

    before = written()
    with unwritten(before), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert all(tensor is other for tensor, other in zip(written(), before, strict=True))


def test_keeps_nothing_alive() -> None:
    """The optimizer keeps neither replaced state nor removed parameters alive."""
    optimizer = optim.AdamW(params_of())
    train(optimizer, range(2))
    (state, *_), params = optimizer.state.values(), optimizer.param_groups[0]["params"]
    gone = weakref.ref(state["exp_avg"]), weakref.ref(params[0]), weakref.ref(params[0].grad)
    del state
    optimizer.state.clear()
    params.clear()
    assert [each() for each in gone] == [None, None, None]


def test_states_of_an_empty_parameter_in_another_order() -> None:
    param = torch.nn.Parameter(torch.empty(0, 3))
    param.grad, optimizer = torch.empty(0, 3), amp_ext.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = torch.empty(3, 0).t()
    optimizer.step()
