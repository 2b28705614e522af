"""Test that hostile calls of every op, made from a seed, are right or refused.

A call is right if it computes what the same op computes from plain copies of the arguments, and all
memory around its arguments is as before. It is also right if it raises an ordinary exception and no
argument has changed by a bit. Either way the thread's state of autograd and the dispatcher is as
before.

Run as a program, this makes calls of one seed, here 100 from the 200th, and prints the wrong ones.
Each call is printed to stderr before it is made: after a crash, it is the last line there.

    python tests/integration/test_hostile_calls.py 1 200 100
"""

import contextlib
import functools
import random
import signal
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import amp_ext
import reference
from amp_ext import ops
from amp_ext.ops import GEMM_OPS, LIST_OPS
from cases import FLOATS, raw, written

SECONDS_OF_A_CALL = 20
SPECIAL = (-0.0, 1e-45, 65504.0, 3e38, torch.inf, -torch.inf, torch.nan)
Values = dict[str, Any]


# ---- good arguments ----------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, ...]] = {
    "bool": (False, True),
    "float": (0.5, 1e-3, 0.0),
    "int": (1, 2, 6, 2000),
    "ScalarType": FLOATS,
}
"""Good values of options by type; together they may be refused, as nesterov without momentum is."""


def schema_of(op: str) -> list[torch.Argument]:
    return getattr(torch.ops.amp_ext, op).default._schema.arguments


def type_of(argument: torch.Argument) -> str:
    return str(argument.type).removeprefix("Optional[").rstrip("]")


def good(rng: random.Random, op: str) -> Values:
    """Return an example's arguments with another length of lists, and other options."""
    values = tree_map_only(Tensor, Tensor.clone, reference.arguments(op))
    lists = [value for value in values.values() if isinstance(value, list)]
    count = rng.choice([0, 1, 2, 3, 3, 40])
    for value in lists:  # of one length: each tensor is another one's copy
        value[:] = [value[i % len(value)].clone() for i in range(count)]
    for argument in schema_of(op):
        kind = type_of(argument)
        if kind in OPTIONS and rng.random() < 0.2:
            values[argument.name] = rng.choice(OPTIONS[kind])
        if argument.has_default_value() and argument.default_value is None and rng.random() < 0.4:
            values[argument.name] = None
    return values


# ---- hostile tensors ---------------------------------------------------------------------------


class Plain(Tensor):
    """A subclass by name only."""


class Wrapper(Tensor):
    """A subclass that holds another tensor and hands every op on to it."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapper":
        self = Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype)
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(held, args), **tree_map(held, kwargs or {}))

    def __repr__(self) -> str:
        """Return the class: where torch's own repr fails, it leaves functorch disabled."""
        return "Wrapper"


def held(value: Any) -> Any:
    return value.held if isinstance(value, Wrapper) else value


def resized(t: Tensor, size: int) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(max(0, size))
    return t


def with_special(t: Tensor) -> Tensor:
    """Return the same numbers, every second one special; factors and scales are special alone."""
    t = t.clone()
    t.view(-1)[::2] = torch.tensor(SPECIAL).repeat(t.numel())[: (t.numel() + 1) // 2].to(t.dtype)
    return t


def misaligned(t: Tensor) -> Tensor:
    memory = bytearray(t.nbytes + 1)
    return torch.frombuffer(memory, dtype=t.dtype, offset=1, count=t.numel()).view(t.shape).copy_(t)


# Otherwise its errors print values, also of freed tensors.
FAKE = FakeTensorMode(allow_non_fake_inputs=True)

DTYPES = (
    *(*FLOATS, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
HOSTILE: dict[str, Callable[[Tensor], Any]] = {
    **{str(dtype): functools.partial(Tensor.to, dtype=dtype) for dtype in DTYPES},
    "meta": lambda t: t.to("meta"),
    "fake": lambda t: FAKE.from_tensor(t),
    "functional": torch._to_functional_tensor,
    "sparse": lambda t: t.to_sparse(),
    "uncoalesced": lambda t: torch.sparse_coo_tensor([[0, 0]], t.new_ones(2), (3,)),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "subclass": lambda t: t.as_subclass(Plain),
    "wrapper": Wrapper,
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "leaf": lambda t: t.clone().requires_grad_(),
    "non-leaf": lambda t: t.clone().requires_grad_() * 1,
    "inference": torch.inference_mode()(Tensor.clone),
    "freed": lambda t: resized(t, 0),
    "shrunk": lambda t: resized(t, t.nbytes - 1),
    "grown": lambda t: resized(t, t.nbytes + 5),
    "negated": lambda t: torch._neg_view(t.clone()),
    "imaginary": lambda t: torch.complex(t, t).conj().imag,
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "lazy": torch._lazy_clone,
    "numpy": lambda t: torch.from_numpy(t.numpy().copy()),
    "misaligned": misaligned,
    "shared": lambda t: t.clone().share_memory_(),
    "named": lambda t: t.refine_names(*"abcdefg"[: t.dim()]),
    "special": with_special,
    "holes": lambda t: torch.stack([t, t], -1)[..., 1],
    "rows": lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 2)[..., :-2].copy_(t),
    "offset": lambda t: t.new_empty(t.numel() + 3)[3:].view_as(t).copy_(t),
    "permuted": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[..., :1].expand_as(t),
    "one-element": lambda t: t.new_ones(1).expand_as(t),
    "overlapping": lambda t: t.flatten().repeat(2).as_strided(t.shape, [1] * t.dim()),
    "channels-last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "flat": lambda t: t.reshape(-1),
    "zero-dim": lambda t: t.new_ones(()),
    "more-dims": lambda t: t[None],
    "transposed": lambda t: t.mT,
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[:0],
    "longer": lambda t: torch.cat([t, t]),
    "None": lambda t: None,
    "text": lambda t: "tensor",
    "number": lambda t: 1.5,
    # t itself is not in the list: torch's error shows the list, and cannot show every tensor.
    "list": lambda t: [torch.zeros(t.shape)],
    "lists": lambda t: [[torch.zeros(t.shape)]],
    "array": lambda t: t.detach().numpy(),
}
SCALARS = {
    "float": (
        *(1e39, -1e39, 1e-39, 0.0, -0.0, 1e308, torch.inf, -torch.inf, torch.nan),
        *(None, "1", True, 3, [1.0]),
    ),
    "int": (0, 1, -1, 2, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63), 2**64, 1.5, None, "1", True),
    "bool": (None, 2, "True", 0.5),
    "ScalarType": (torch.int32, torch.complex64, torch.float8_e4m3fn, "float32", 6, 99, None),
}


def spoil(rng: random.Random, op: str, values: Values) -> str:
    """Make the arguments worse in one place; return a description."""
    found: list[tuple[Any, Any]] = [(values, name) for name in values]
    found += [(x, i) for x in values.values() if isinstance(x, list) for i in range(len(x))]
    found = [place for place in found if is_readable(place[0][place[1]])]
    options = [a for a in schema_of(op) if type_of(a) in SCALARS and a.name in values]
    kind = rng.random()
    if found and kind < 0.7:
        (container, key), name = rng.choice(found), rng.choice(list(HOSTILE))
        said = next((n for n, x in values.items() if x is container), "")
        container[key] = HOSTILE[name](container[key])
        return f"{said} {key}: {name}"
    if options and kind < 0.95:
        option = rng.choice(options)
        name, value = option.name, rng.choice(SCALARS[type_of(option)])
    else:
        name = rng.choice(list(values))
        value = rng.choice([None, "text", [], [[]], 1.5, (), {}, [None], [1, 2], object()])
    values[name] = value
    return f"{name}: {value!r}"


def without_freed(op: str, values: Values) -> None:
    """Leave freed tensors out of lists of another type than the op's: torch would print them."""
    for value in values.values():
        if isinstance(value, list) and any(has_memory(t) and not is_readable(t) for t in value):
            value[:] = [t for t in value if is_readable(t) or (has_memory(t) and op in LIST_OPS)]


# ---- calls and their checks --------------------------------------------------------------------

CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "our autocast": lambda: amp_ext.autocast("cpu", torch.bfloat16),
    "FakeTensorMode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


def has_memory(t: Any) -> bool:
    """Return whether a tensor has readable memory: strided, on the CPU, no wrapper."""
    return (
        isinstance(t, Tensor)
        and type(t) in (Tensor, Plain, torch.nn.Parameter)
        and t.layout == torch.strided
        and t.device.type == "cpu"
        and not t.is_nested
        and not t.is_quantized
        and not t._is_zerotensor()
        and not torch._is_functional_tensor(t)
    )


def is_readable(t: Tensor) -> bool:
    """Return whether all elements lie in the tensor's storage."""
    if not has_memory(t):
        return False
    if t.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    held = t.untyped_storage().nbytes()
    return (t.storage_offset() + last + 1) * t.element_size() <= held


def flattened(values: Values) -> Iterator[tuple[str, Any]]:
    """Iterate over arguments and elements of lists, without wrappers."""
    for name, value in values.items():
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            yield name if index is None else f"{name}[{index}]", held(item)


def plain(value: Any) -> Any:
    """Return a copy that shares no memory, with its elements in the usual order."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    value = held(value)
    if not isinstance(value, Tensor):
        return value
    if value._is_zerotensor():
        return torch.zeros(value.shape, dtype=value.dtype)
    if not is_readable(value) or (value.is_neg() and value.element_size() == 1):
        return value  # torch negates no float8
    return value.detach().resolve_neg().clone().contiguous()


def metadata(t: Tensor) -> tuple[Any, ...]:
    version = None if t.is_inference() else t._version
    layout = t.shape, t.stride(), t.storage_offset()
    return *layout, t.is_neg(), t.dtype, t.requires_grad, version


@torch.inference_mode()  # it may write every tensor
def assert_as(expected: Any, result: Any, changed: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Assert that a result and written tensors are as expected; make the tensors as before."""
    same = functools.partial(torch.testing.assert_close, equal_nan=True, check_stride=False)
    same(result, expected)
    for tensor, copied, _ in changed:
        same(tensor.detach().resolve_neg(), copied)
    for tensor, _, before in changed:
        tensor.detach().copy_(before)


def thread_state() -> tuple[Any, ...]:
    """Return the state of autograd and of the dispatcher, with autocast and inference mode."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch.is_grad_enabled(), str(included), str(excluded)


def is_ordinary(error: Exception) -> bool:
    """Return whether an op may raise this error.

    Assertions and missing attributes may be torch's alone, as of fake tensors.
    """
    if isinstance(error, (AssertionError, AttributeError)):
        innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
        return innermost.f_globals.get("__name__", "").startswith("torch.")
    return isinstance(error, (RuntimeError, TypeError, ValueError, IndexError, OverflowError))


class Call:
    def __init__(self, seed: int, index: int) -> None:
        rng = random.Random(f"{seed} {index}")
        torch.manual_seed(rng.getrandbits(32))
        self.op = rng.choice(LIST_OPS + GEMM_OPS)
        self.values = good(rng, self.op)
        self.done: list[str] = []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            with contextlib.suppress(Exception):  # changes refused by torch itself are left out
                self.done.append(spoil(rng, self.op, self.values))
        without_freed(self.op, self.values)
        self.context = rng.choice([*[""] * 6, *CONTEXTS])
        self.ops = rng.choice([ops, torch.ops.amp_ext])

    def __str__(self) -> str:
        return f"[{self.context}] {self.ops.__name__}.{self.op}: {'; '.join(self.done)}"

    def outcome(self) -> Any:
        """Make the call; return its result or its exception."""
        with CONTEXTS[self.context]():
            state = thread_state()
            try:
                return getattr(self.ops, self.op)(**self.values)
            except Exception as error:
                return error
            finally:
                assert thread_state() == state, f"{thread_state()} was {state}"

    def check(self) -> str:
        """Make the call; return "raised", "right" or, without values to compare, "accepted"."""
        tensors = [(name, t) for name, t in flattened(self.values) if has_memory(t)]
        memory = [raw(t.detach()).clone() for _, t in tensors]
        layouts = [metadata(t) for _, t in tensors]
        copies, before = ({n: plain(v) for n, v in self.values.items()} for _ in range(2))
        result = self.outcome()
        if isinstance(result, Exception):
            assert is_ordinary(result), f"{type(result).__name__}: {result}"
            assert "INTERNAL ASSERT" not in str(result), result
            assert [metadata(t) for _, t in tensors] == layouts
        elif self.context == "FakeTensorMode" or any(map(has_no_values, self.given())):
            return "accepted"
        else:
            assert all(is_readable(t) or t._is_zerotensor() for t in self.given())
            with CONTEXTS[self.context]():
                expected = getattr(ops, self.op)(**copies)
            copied, was = dict(flattened(copies)), dict(flattened(before))
            names = [n for n, _ in tensors if n.split("[")[0] in written(self.op)]
            assert_as(expected, result, [(dict(tensors)[n], copied[n], was[n]) for n in names])
        for (name, t), old in zip(tensors, memory, strict=True):
            assert torch.equal(raw(t.detach()), old), f"{name}'s memory has been written"
        return "raised" if isinstance(result, Exception) else "right"

    def given(self) -> list[Tensor]:
        return [t for _, t in flattened(self.values) if isinstance(t, Tensor)]


def has_no_values(t: Tensor) -> bool:
    return t.is_meta or isinstance(t, FakeTensor) or torch._is_functional_tensor(t)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_hostile_calls(seed: int, request: pytest.FixtureRequest) -> None:
    """Hostile calls are right or refused; `make hostile` makes 15,000 calls.

    The calls run in a child process, because one may crash.
    """
    count = request.config.getoption("--hostile-calls")
    command = [sys.executable, __file__, str(seed), "0", str(count)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=30 + count)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr[-3000:]}\n{' '.join(command)}"


def main() -> int:
    seed, first, count = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    outcomes: Counter[str] = Counter()
    for index in range(first, first + count):
        call = Call(seed, index)
        print(index, call, file=sys.stderr, flush=True)
        signal.alarm(SECONDS_OF_A_CALL)
        try:
            outcomes[call.check()] += 1
        except Exception as error:
            outcomes["wrong"] += 1
            print(f"WRONG seed {seed} call {index} {call}\n  {error!r}", flush=True)
        signal.alarm(0)
    print(dict(outcomes))
    return int(outcomes["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
