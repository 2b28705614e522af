"""What torch.compile makes of this package's Python functions."""

import contextlib
from collections.abc import Iterator
from types import FunctionType, ModuleType

import torch


def leave_to_python(*modules: ModuleType) -> None:
    """Has Dynamo run the functions and methods of modules as they are, one graph break each, as it
    does those of torch's scaler; what they call is compiled. Tracing them instead would break at
    each of their calls into C++.

    The same as ``torch._dynamo.skip``, without importing Dynamo, which takes a second.
    """
    for module in modules:
        for function in _functions(module):
            function._torchdynamo_disable = True
            with contextlib.suppress(AttributeError):  # in another version of torch
                frames = torch._C._dynamo.eval_frame
                action = frames._FrameAction
                strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
                frames.set_code_exec_strategy(function.__code__, strategy)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            if isinstance(member, FunctionType) and member.__module__ == module.__name__:
                yield member
