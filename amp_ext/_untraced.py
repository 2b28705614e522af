"""Code that torch.compile is to call, not to trace."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import torch


def call_untraced(package: str) -> None:
    """Has torch.compile call the functions and methods of a package's modules, which have been
    imported, in one graph break each, and go on with what they call that is not of this package, as
    it does for ``torch.amp.grad_scaler``.

    So does ``torch.compiler.disable(recursive=False)``, which wraps each function, though, and
    imports the compiler.
    """
    with suppress(AttributeError):  # of a torch that has it elsewhere: there are more graph breaks
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        for function in functions_of(package):
            frames.set_code_exec_strategy(function.__code__, skip)
            function._torchdynamo_disable = True
            function._torchdynamo_disable_msg = "as with torch.amp.grad_scaler"


def functions_of(package: str) -> list[FunctionType]:
    """All of a package's modules but those that are wrapped."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    return [
        function
        for module in modules
        for function in _functions_of(module, module)
        if function.__code__.co_filename == module.__file__
    ]


def _functions_of(owner: Any, module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(owner).values():
        value = getattr(value, "fget", getattr(value, "__func__", value))
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type):
            yield from _functions_of(value, module)
