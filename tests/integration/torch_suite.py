"""Run PyTorch's own GradScaler tests on the CPU with amp_ext.GradScaler in place of torch's.

    python tests/integration/torch_suite.py PATH/TO/test_torch.py
    python tests/integration/torch_suite.py PATH/TO/test_torch.py --baseline    # torch's own scaler
    python tests/integration/torch_suite.py PATH/TO/test_torch.py --ptx    # on the CUDA kernels

The file is test/test_torch.py of a PyTorch source tree, not of this project; it needs the packages
expecttest and numpy. A file of an older PyTorch than the installed one may import test helpers that
are gone. Decorators without effect replace them, and the output names them.

Prints every test with its outcome and the count; the exit status is 0 only when all have passed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HELPERS = "torch.testing._internal"
PREFIXES = (
    "test_grad_scaling_",
    "test_grad_scaler_",
    "test_grad_scale_will_not_overflow",
    "test_pickle_gradscaler",
    "test_params_invalidated_with_grads_invalidated_between_unscale_and_step",
)


def no_op_decorator(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Stand in for a missing decorator, whether it is applied bare or with arguments."""
    bare = len(args) == 1 and callable(args[0]) and not kwargs
    return args[0] if bare else no_op_decorator


def imported_helpers(source: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that `source` imports from torch's test helpers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HELPERS):
            for alias in node.names:
                yield node.module, alias.name


def replace_missing_helpers(source: str) -> list[str]:
    """Add the names that `source` imports and this torch lacks to torch's helper modules."""
    replaced = []
    for module_name, name in imported_helpers(source):
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            setattr(module, name, no_op_decorator)
            replaced.append(f"{module_name}.{name}")
    return replaced


def load(path: Path) -> ModuleType:
    """Import the test file as the module `test_torch`."""
    spec = importlib.util.spec_from_file_location("test_torch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def put_in_place(scaler: type) -> None:
    """Make `scaler` the GradScaler under each of torch's three names."""
    import torch

    for owner in (torch, torch.amp, torch.amp.grad_scaler):
        owner.GradScaler = scaler


def run_on_ptx() -> None:
    """Make the CUDA kernels, on the CPU, the backend of CPU tensors."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from amp_ext import _C
    from ptx_backend.backend import ptx

    ptx()
    _C.use_backend("cpu", "ptx")


def scaler_tests(module: ModuleType) -> unittest.TestSuite:
    """Return the GradScaler tests that the file has instantiated for the CPU."""
    case = module.TestTorchDeviceTypeCPU
    names = [n for n in unittest.TestLoader().getTestCaseNames(case) if n.startswith(PREFIXES)]
    return unittest.TestSuite(map(case, names))


def run(suite: unittest.TestSuite) -> bool:
    """Run `suite`, print its outcome, and return whether every test has passed."""
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    missed = len(result.skipped) + len(result.expectedFailures)
    print(f"{result.testsRun - failed - missed} passed, {failed} failed, {missed} skipped")
    return result.testsRun > 0 and failed + missed == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="test/test_torch.py of a PyTorch source tree")
    parser.add_argument("--baseline", action="store_true", help="keep torch's own GradScaler")
    parser.add_argument("--ptx", action="store_true", help="run amp_ext's on its CUDA kernels")
    args = parser.parse_args()

    sys.argv[1:] = []  # torch's test helpers parse the command line too
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu"
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import torch

    replaced = replace_missing_helpers(args.file.read_text(encoding="utf-8"))
    if not args.baseline:
        import amp_ext

        put_in_place(amp_ext.GradScaler)
    if args.ptx:
        run_on_ptx()
    scaler = torch.amp.GradScaler
    print(f"torch {torch.__version__}, scaler {scaler.__module__}.{scaler.__qualname__}")
    for name in replaced:
        print(f"replaced by a decorator that does nothing: {name}")
    return 0 if run(scaler_tests(load(args.file))) else 1


if __name__ == "__main__":
    sys.exit(main())
