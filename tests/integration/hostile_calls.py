"""Make hostile calls of every op from a seed, and check their effects.

A call is right if it computes what the same op computes from plain copies of the arguments, and all
memory around its arguments is as before. It is also right if it raises an ordinary exception and no
argument has changed by a bit. Either way the thread's state of autograd and the dispatcher is as
before.

Run as a program, this makes calls of one seed and prints the wrong ones. Each call is printed to
stderr before it is made: after a crash, it is the last line there.

    python tests/integration/hostile_calls.py --seed 1 --first 200 --count 100
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import amp_ext
import reference
from amp_ext import ops
from amp_ext.ops import GEMM_OPS, LIST_OPS
from cases import ACTIVATIONS, FLOATS, raw, written

SECONDS_OF_A_CALL = 20
SPECIAL = (-0.0, 1e-45, 65504.0, 3e38, torch.inf, -torch.inf, torch.nan)
Random = random.Random
Values = dict[str, Any]


# ---- good arguments ----------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation": tuple(ACTIVATIONS),
    "alpha": (1.0, -1.0, 0.5),
    "backoff_factor": (0.5, 1 / 3, 1e-30, 1.0),
    "beta": (1.0, 0.0, -2.0),
    "dampening": (0.0, 0.3),
    "growth_factor": (2.0, 1.5, 1e30, 1.0),
    "growth_interval": (1, 2, 6, 2000),
    "hysteresis": (1, 2, 3),
    "lr": (0.1, 1e-3, 0.0, 1e30),
    "max_norm": (1.0, 0.0, 1e30),
    "max_scale": (4.0, 2.0**24),
    "min_scale": (0.0, 1.0),
    "momentum": (0.9, 0.0),
    "out_dtype": (None, *FLOATS),
    "weight_decay": (0.0, 0.01),
    **dict.fromkeys(
        ("decoupled", "maximize", "nesterov", "stochastic_rounding", "sum_batch"), (False, True)
    ),
}
"""Good values of options; together they may be refused, as a max_norm without a norm is."""


def good(rng: Random, op: str) -> Values:
    """Return an example's arguments with other options, lengths and shapes."""
    values = good_product(rng, op) if op in GEMM_OPS else reference.arguments(op)
    lists = [value for value in values.values() if isinstance(value, list)]
    count = rng.choice([0, 1, 2, 3, 3, 40])
    for value in lists:  # of one length: each tensor is another one's copy
        value[:] = [value[i % len(value)].clone() for i in range(count)]
    for argument in getattr(torch.ops.amp_ext, op).default._schema.arguments:
        if argument.name in OPTIONS and rng.random() < 0.5:
            values[argument.name] = rng.choice(OPTIONS[argument.name])
        if argument.has_default_value() and argument.default_value is None and rng.random() < 0.4:
            values[argument.name] = None
    return values


def good_product(rng: Random, op: str) -> Values:
    """Return small integers as operands: their sums are exact in any order."""
    m, n, k = (rng.choice([0, 1, 2, 3, 8, 17]) for _ in range(3))
    dtypes = rng.choice([(torch.float16,), (torch.bfloat16,), (torch.float32,), FLOATS])
    batch = rng.choice([(), (), (2,), (3, 2)])

    def make(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape).to(rng.choice(dtypes))

    if op in ("linear", "mlp", "gated_mlp"):
        x = make(*rng.choice([(k,), (m, k), (2, m, k)]))
        if op == "linear":
            return {"x": x, "weight": make(n, k), "bias": make(n)}
        if op == "gated_mlp":
            gate = {"gate_weight": make(n, k), "gate_bias": make(n), "up_weight": make(n, k)}
            rest = {"up_bias": make(n), "down_weight": make(m, n), "down_bias": make(m)}
            return {"x": x, **gate, **rest}
        layers = {"weight1": make(n, k), "bias1": make(n), "weight2": make(m, n)}
        return {"x": x, **layers, "bias2": make(m)}
    trans_a, trans_b, shared = (rng.random() < 0.4 for _ in range(3))
    values: Values = {
        "a": make(*batch, *((k, m) if trans_a else (m, k))),
        "b": make(*(() if shared else batch), *((n, k) if trans_b else (k, n))),
        "trans_a": trans_a,
        "trans_b": trans_b,
    }
    if op == "gemm_times_derivative":
        return {**values, "aux": make(*batch, m, n)}
    if op == "gemm_accumulate_":
        return {"c": torch.randint(-3, 4, (*batch, m, n)).float(), **values}
    return {**values, "c": make(*rng.choice([(*batch, m, n), (m, 1), (n,), ()])), "bias": make(n)}


# ---- hostile tensors ---------------------------------------------------------------------------


class Plain(Tensor):
    """A subclass by name only."""


class Wrapper(Tensor):
    """A subclass that holds another tensor and hands every op on to it."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = lambda x: x.held if isinstance(x, Wrapper) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(held, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Return the class: where torch's own repr fails, it leaves functorch disabled."""
        return "Wrapper"


def freed(t: Tensor, size: int = 0) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(size)
    return t


def overlapping(t: Tensor) -> Tensor:
    return torch.randint(-3, 4, (t.numel() + 2,)).to(t.dtype).as_strided(t.shape, [1] * t.dim())


def with_special(t: Tensor) -> Tensor:
    """Return the same numbers, every second one special; factors and scales are special alone."""
    t = t.clone()
    t.view(-1)[::2] = torch.tensor(SPECIAL).repeat(t.numel())[: (t.numel() + 1) // 2].to(t.dtype)
    return t


def with_holes(t: Tensor) -> Tensor:
    return t.new_empty(*t.shape, 2)[..., 1].copy_(t)


def in_rows(t: Tensor) -> Tensor:
    return t.new_empty(*t.shape[:-1], t.shape[-1] + 2)[..., :-2].copy_(t)


def misaligned(t: Tensor) -> Tensor:
    memory = bytearray(t.nbytes + 1)
    return torch.frombuffer(memory, dtype=t.dtype, offset=1, count=t.numel()).view(t.shape).copy_(t)


def inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


# Otherwise its errors print values, also of freed tensors.
FAKE = FakeTensorMode(allow_non_fake_inputs=True)

HOSTILE: dict[str, Callable[[Tensor], Any]] = {
    **{
        str(dtype): lambda t, dtype=dtype: t.to(dtype)
        for dtype in (
            *FLOATS,
            *(torch.int8, torch.int32, torch.int64, torch.bool),
            *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
        )
    },
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
    "inference": inference,
    "freed": freed,
    "shrunk": lambda t: freed(t, max(0, t.nbytes - 1)),
    "grown": lambda t: freed(t, t.nbytes + 5),
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
    "holes": with_holes,
    "rows": in_rows,
    "offset": lambda t: t.new_empty(t.numel() + 3)[3:].view_as(t).copy_(t),
    "permuted": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[..., :1].expand_as(t),
    "one-element": lambda t: t.new_ones(1).expand_as(t),
    "overlapping": overlapping,
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
    "str": ("", "RELU", "tanh", None, 3, "gelu\0", "relu " * 100),
    "ScalarType": (torch.int32, torch.complex64, torch.float8_e4m3fn, "float32", 6, 99, None),
}


class Place:
    """A tensor among the arguments: an argument, or an element of a list."""

    def __init__(self, values: Values, name: str, index: int | None) -> None:
        self.values, self.name, self.index = values, name, index

    def __repr__(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    @property
    def tensor(self) -> Any:
        value = self.values[self.name]
        return value if self.index is None else value[self.index]

    def put(self, value: Any) -> None:
        if self.index is None:
            self.values[self.name] = value
        else:
            self.values[self.name][self.index] = value


def places(values: Values) -> list[Place]:
    found = []
    for name, value in values.items():
        if isinstance(value, Tensor):
            found.append(Place(values, name, None))
        elif isinstance(value, list):
            tensors = (i for i, item in enumerate(value) if isinstance(item, Tensor))
            found += [Place(values, name, i) for i in tensors]
    return found


def share(rng: Random, one: Place, other: Place) -> str:
    """Let two tensors share memory, overlap in it, or lie side by side."""
    first, second = one.tensor, other.tensor
    kind = rng.choice(["same", "part", "part", "beside", "view", "list"])
    if kind == "same":
        one.put(second)
    elif kind == "list" and other.index is not None:
        other.values[other.name].append(first)
    elif kind == "view":
        one.put(second.detach().reshape(-1)[: first.numel()].view(first.dtype).view(first.shape))
    else:
        size = max(first.element_size(), second.element_size())
        end = -(-first.nbytes // size)
        start = end if kind == "beside" else rng.randint(0, max(0, end - 1))
        memory = torch.zeros((start + 1) * size + first.nbytes + second.nbytes, dtype=torch.uint8)
        for place, value, at in ((one, first, 0), (other, second, start * size)):
            made = torch.empty(0, dtype=value.dtype).set_(
                memory.untyped_storage(), at // value.element_size(), value.shape
            )
            place.put(made.copy_(value))
    return f"{one!r} and {other!r}: {kind}"


def schema_types(op: str) -> dict[str, str]:
    schema = getattr(torch.ops.amp_ext, op).default._schema
    return {a.name: str(a.type).removeprefix("Optional[").rstrip("]") for a in schema.arguments}


def spoil_once(rng: Random, op: str, values: Values) -> str:
    """Make the arguments worse in one place; return a description."""
    found = [place for place in places(values) if is_readable(place.tensor)]
    kind = rng.random()
    if found and kind < 0.6:
        place, name = rng.choice(found), rng.choice(list(HOSTILE))
        place.put(HOSTILE[name](place.tensor))
        return f"{place!r}: {name}"
    if len(found) > 1 and kind < 0.8:
        one, other = rng.sample(found, 2)
        # A found_inf may be next_step's, and is then cleared.
        if {one.name, other.name} != {"next_step", "found_infs"}:
            return share(rng, one, other)
    types = {n: t for n, t in schema_types(op).items() if t in SCALARS and n in values}
    if types and kind < 0.95:
        name = rng.choice(list(types))
        values[name] = rng.choice(SCALARS[types[name]])
        return f"{name}: {values[name]!r}"
    name = rng.choice(list(values))
    if rng.random() < 0.5:
        del values[name]
        return f"without {name}"
    values[name] = rng.choice([None, "text", [], [[]], 1.5, (), {}, [None], [1, 2], object()])
    return f"{name}: {values[name]!r}"


def spoil(rng: Random, op: str, values: Values) -> list[str]:
    done = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        with contextlib.suppress(Exception):  # changes refused by torch itself are left out
            done.append(spoil_once(rng, op, values))
    for value in values.values():
        if isinstance(value, list) and any(isinstance(t, Tensor) and is_freed(t) for t in value):
            # torch's error for another type than the op's would print the freed ones.
            tensors = [item for item in value if isinstance(item, Tensor)]
            value[:] = tensors if op in LIST_OPS else [t for t in tensors if not is_freed(t)]
    return done


# ---- calls and their checks --------------------------------------------------------------------

CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "our autocast": lambda: amp_ext.autocast("cpu", torch.bfloat16),
    "FakeTensorMode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


def described(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"
    if not isinstance(value, Tensor):
        return repr(value)
    said = f"{type(value).__name__}({value.dtype}, {value.device}"
    with contextlib.suppress(Exception):  # nested tensors have neither
        said += f", {tuple(value.shape)}, strides {value.stride()}, offset {value.storage_offset()}"
    return said + ")"


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


def has_no_values(t: Tensor) -> bool:
    return t.is_meta or isinstance(t, FakeTensor) or torch._is_functional_tensor(t)


def is_readable(t: Tensor) -> bool:
    """Return whether all elements lie in the tensor's storage."""
    if not has_memory(t):
        return False
    if t.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    held = t.untyped_storage().nbytes()
    return (t.storage_offset() + last + 1) * t.element_size() <= held


def is_freed(t: Tensor) -> bool:
    return has_memory(t) and not is_readable(t)


def flattened(values: Values) -> Iterator[tuple[str, Any]]:
    """Iterate over arguments and elements of lists, without wrappers."""
    for name, value in values.items():
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            yield name if index is None else f"{name}[{index}]", held(item)


def held(value: Any) -> Any:
    return value.held if isinstance(value, Wrapper) else value


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


class Snapshot:
    """Keep the arguments' memory, and plain copies."""

    def __init__(self, values: Values) -> None:
        self.tensors = [(name, t) for name, t in flattened(values) if has_memory(t)]
        self.memory = [raw(t.detach()).clone() for _, t in self.tensors]
        self.metadata = self.metadata_now()
        self.copies = plain_copies(values)
        self.before = dict(flattened(plain_copies(values)))

    def metadata_now(self) -> list[Any]:
        return [
            (t.shape, t.stride(), t.storage_offset(), t.is_neg(), t.dtype, t.requires_grad)
            + (() if t.is_inference() else (t._version,))
            for _, t in self.tensors
        ]

    def assert_unchanged(self) -> None:
        assert self.metadata_now() == self.metadata
        self.assert_memory_unchanged()

    def assert_memory_unchanged(self) -> None:
        for (name, t), memory in zip(self.tensors, self.memory, strict=True):
            assert torch.equal(raw(t.detach()), memory), f"{name}'s memory has been written"

    @torch.inference_mode()  # it may write every tensor
    def assert_as(self, op: str, expected: Any, result: Any) -> None:
        """Assert that results and written elements are those of the plain copies."""
        same = functools.partial(torch.testing.assert_close, equal_nan=True, check_stride=False)
        same(result, expected)
        copied = dict(flattened(self.copies))
        changed = [(n, t) for n, t in self.tensors if n.split("[")[0] in written(op)]
        for name, t in changed:
            same(t.detach().resolve_neg(), copied[name])
        for name, t in changed:
            t.detach().copy_(self.before[name])
        self.assert_memory_unchanged()


def plain_copies(values: Values) -> Values:
    return {name: plain(value) for name, value in values.items()}


def thread_state() -> tuple[Any, ...]:
    """Return the state of autograd and of the dispatcher, with autocast and inference mode."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch.is_grad_enabled(), str(included), str(excluded)


ORDINARY = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, OverflowError)


def is_ordinary(error: Exception) -> bool:
    """Return whether an op may raise this error: assertions only of torch, as of fake tensors."""
    innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
    is_torchs = innermost.f_globals.get("__name__", "").startswith("torch.")
    return isinstance(error, ORDINARY) or (isinstance(error, AssertionError) and is_torchs)


class Call:
    """Hold a call and its arguments."""

    def __init__(self, seed: int, index: int) -> None:
        rng = Random(f"{seed} {index}")
        torch.manual_seed(rng.getrandbits(32))
        self.op = rng.choice(LIST_OPS + GEMM_OPS)
        self.values = good(rng, self.op)
        self.done = spoil(rng, self.op, self.values)
        self.context = rng.choice([*[""] * 6, *CONTEXTS])
        self.ops = rng.choice([ops, torch.ops.amp_ext])

    def __str__(self) -> str:
        arguments = ", ".join(f"{n}={described(v)}" for n, v in self.values.items())
        function = f"{self.ops.__name__}.{self.op}"
        return f"[{self.context}] {'; '.join(self.done)}: {function}({arguments})"

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
        snapshot, result = Snapshot(self.values), self.outcome()
        if isinstance(result, Exception):
            assert is_ordinary(result), f"{type(result).__name__}: {result}"
            assert "INTERNAL ASSERT" not in str(result), result
            snapshot.assert_unchanged()
            return "raised"
        tensors = [(name, t) for name, t in flattened(self.values) if isinstance(t, Tensor)]
        if self.context == "FakeTensorMode" or any(has_no_values(t) for _, t in tensors):
            return "accepted"
        for name, t in tensors:
            assert is_readable(t) or t._is_zerotensor(), f"{name} was accepted"
        with CONTEXTS[self.context]():
            expected = getattr(ops, self.op)(**snapshot.copies)
        snapshot.assert_as(self.op, expected, result)
        return "right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    outcomes: Counter[str] = Counter()
    for index in range(options.first, options.first + options.count):
        call = Call(options.seed, index)
        print(index, call, file=sys.stderr, flush=True)
        signal.alarm(SECONDS_OF_A_CALL)
        try:
            outcomes[call.check()] += 1
        except Exception as error:
            outcomes["wrong"] += 1
            print(f"WRONG seed {options.seed} call {index} {call}\n  {error!r}", flush=True)
        signal.alarm(0)
    print(dict(outcomes))
    return int(outcomes["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
