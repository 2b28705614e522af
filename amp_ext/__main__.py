"""The doctor: ``python -m amp_ext`` says what is installed and in use here, and whether it works.

``python -m amp_ext verify`` verifies all GPU kernels again (verify.py), and ``python -m amp_ext
tune SCRIPT`` measures the products of a script (tune.py). Exit status 1 when something is broken.
"""

import argparse
import importlib
import itertools
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import amp_ext
from amp_ext._table import cpu_name
from amp_ext._triton import triton_version
from amp_ext.testing import arguments

DIFFERENTIABLE = ("gemm", "gemm_with_aux", "linear", "mlp", "gated_mlp")
Check = tuple[str, Callable[[], None]]


def main() -> int:
    print_versions()
    try:
        for module in ("_library", "backend"):
            importlib.import_module(f"amp_ext.{module}")
    except ImportError as error:
        print(f"\nFAIL  {error}")
        return 1
    print_devices()
    print_backends()
    print_measured()
    print_verification()
    print_autocast()

    print("\nchecks")
    results = [passed(name, check) for name, check in all_checks()]
    if refused := refused_tensor_maps():
        print(f"\n{refused} products were left to torch's library: the driver refused tensor maps")
    failed = results.count(False)
    print(f"\n{failed} of {len(results)} checks FAILED" if failed else "\nall is well")
    return int(failed > 0)


# ---- what is here ------------------------------------------------------------------------------


def print_versions() -> None:
    try:
        from amp_ext._build_info import CUDA_VERSION, TORCH_VERSION
    except ImportError:
        built = "nothing yet"
    else:
        built = f"torch {TORCH_VERSION}, {f'CUDA {CUDA_VERSION}' if CUDA_VERSION else 'no CUDA'}"
    print(f"amp_ext {amp_ext.__version__}")
    print(f"  built for  {built}")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    print(f"  running    torch {torch.__version__}, {cuda}, Python {platform.python_version()}")
    triton = triton_version()
    print(f"             {f'Triton {triton}' if triton else 'no Triton'}")


def print_devices() -> None:
    print("\ndevices")
    threads = f"{torch.get_num_threads()} threads"
    print(f"  cpu      {cpu_name()}, {threads}, {torch.backends.cpu.get_cpu_capability()}")
    for index in range(cuda_devices()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        print(f"  cuda:{index}   {gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}")
    if not cuda_devices():
        print(f"  cuda     {'no GPU is visible' if torch.version.cuda else 'torch is a CPU build'}")


def cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def print_backends() -> None:
    from amp_ext.backend import OPS, backend_for

    print("\nbackends")
    for device_type in ("cpu", "cuda") if torch.version.cuda else ("cpu",):
        by_backend = itertools.groupby(OPS, lambda op, device=device_type: backend_for(device, op))
        for backend, ops in by_backend:
            print(f"  {device_type:<5}{backend.name:<9}{backend.reason}")
            print(f"       {' '.join(ops)}")
    if not torch.version.cuda:
        print("  cuda none     torch is a CPU build: for a GPU, install a CUDA build of torch")


def print_verification() -> None:
    from amp_ext import verify

    print("\nself-verification")
    if not verify.is_on():
        print("  off: AMP_EXT_VERIFY is 0")
    for backend, device, families in verify.verified_backends():
        by_state: dict[str, list[str]] = {}
        for family in families:
            by_state.setdefault(verify.state(backend, family, device), []).append(family)
        for state, those in by_state.items():
            print(f"  {device:<8}{backend:<8}{state}: {' '.join(those)}")
    if not any(verify.verified_backends()):
        print("  no GPU kernels are in use here")


def print_measured() -> None:
    from amp_ext._table import read

    for device in ("cpu", *(f"cuda:{index}" for index in range(cuda_devices()))):
        if entries := read(torch.device(device)):
            print(f"  {device:<9}{len(entries)} products as amp_ext.tune() has measured them")


def print_autocast() -> None:
    print("\nautocast")
    if amp_ext.is_installed():
        print("  amp_ext.install() is in effect: torch.autocast regions use amp_ext's products")
    else:
        print("  amp_ext.install() is not in effect: torch.autocast regions are torch's own")


# ---- whether it works --------------------------------------------------------------------------


def passed(name: str, check: Callable[[], None]) -> bool:
    """Runs a check, prints its line, and tells whether it has passed."""
    try:
        check()
    except Exception as error:  # whatever it is, the other checks are still wanted
        reason = str(error).partition("\n")[0] or type(error).__name__
        print(f"  FAIL  {name}: {reason}")
        return False
    print(f"  ok    {name}")
    return True


def all_checks() -> Iterator[Check]:
    from amp_ext.backend import OPS, backend_for

    for device in ("cpu", *(f"cuda:{index}" for index in range(cuda_devices()))):
        supported = [op for op in OPS if backend_for(device.partition(":")[0], op).name != "none"]
        for op in supported:
            yield f"{op} on {device}", lambda op=op, device=device: check_op(op, device)
        if len(supported) == len(OPS):
            yield f"training step on {device}", lambda device=device: check_training(device)
    yield from failed_verifications()


def failed_verifications() -> Iterator[Check]:
    """What the checks do not see, since torch's ops run in place of what has failed."""
    from amp_ext import verify

    def check(failure: str) -> None:
        raise ValueError(failure)

    for backend, device, _ in verify.verified_backends():
        for family, result in verify.results(backend, device).items():
            if result.failure:
                name = f"{backend} kernels of {family} on {device}"
                yield name, lambda failure=result.failure: check(failure)


def refused_tensor_maps() -> int:
    from amp_ext._library import _C

    return _C.refused_tensor_maps()


def expect_equal(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    for one, other in zip(actual, expected, strict=True):
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise ValueError(f"the result differs from {what}")


def check_op(op: str, device: str) -> None:
    """The op against the oracle, bit by bit, and its gradients where it is differentiable."""
    from amp_ext import reference

    def run(module: Any) -> list[Tensor]:
        values = arguments(op, device)
        for value in values.values() if op in DIFFERENTIABLE else ():
            if isinstance(value, Tensor):
                value.requires_grad_()
        return run_op(getattr(module, op), values)

    ours, theirs = run(amp_ext.ops), run(reference)
    expect_equal(ours, theirs, f"amp_ext.reference.{op}")


def run_op(function: Callable[..., Any], values: dict[str, Any]) -> list[Tensor]:
    """Calls an op; returns its result, what it has written, and gradients."""
    result = function(**values)
    results = [
        tensor
        for tensor in (result if isinstance(result, tuple) else (result,))
        if tensor is not None
    ]
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    lists = [value for value in values.values() if isinstance(value, list)]
    gradients: tuple[Tensor, ...] = ()
    if results and results[0].requires_grad:
        gradients = torch.autograd.grad(results[0].sum(), tensors)
    return [*results, *tensors, *itertools.chain(*lists), *gradients]


class PlainSGD:
    """Gradient descent. torch.optim would import the compiler, which takes a second."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]

    def step(self) -> None:
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad, alpha=2.0**-10)


def check_training(device: str) -> None:
    """A step in mixed precision against one in FP32.

    FP16 represents every activation and its gradient; the gradients of the parameters need FP32.
    """
    parameters = [train_once(device, enabled) for enabled in (True, False)]
    expect_equal(*parameters, "a step in FP32")


def train_once(device: str, enabled: bool) -> list[Tensor]:
    """The parameters after one step, in mixed precision if that is enabled."""
    linear = torch.nn.functional.linear

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(-limit, limit + 1, shape, generator=generator).float().to(device)

    generator = torch.Generator().manual_seed(0)
    inputs, targets = integers(8, 8, 4), integers(100, 8, 1)
    params = [integers(2, 6, 4), integers(2, 6), integers(2, 1, 6), integers(2, 1)]
    params = [param.requires_grad_() for param in params]
    device_type = device.partition(":")[0]
    scaler = amp_ext.GradScaler(device_type, init_scale=64.0, enabled=enabled)
    optimizer = PlainSGD(params)
    with amp_ext.autocast(device_type, dtype=torch.float16, enabled=enabled):
        hidden = linear(inputs, *params[:2]).relu()
        outputs = linear(hidden, *params[2:])
        loss = torch.nn.functional.mse_loss(outputs.float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [param.detach() for param in params]


def verify_all(arguments: list[str]) -> int:
    from amp_ext import verify

    description = "Verify all GPU kernels again; exit status 1 when one is wrong."
    argparse.ArgumentParser("python -m amp_ext verify", description=description).parse_args(
        arguments
    )
    return verify.main()


def tune(arguments: list[str]) -> object:
    from amp_ext.tune import main

    return main(arguments)


COMMANDS = {"verify": verify_all, "tune": tune}


def command(*arguments: str) -> object:
    """Run the doctor or a command; return what sys.exit takes."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext",
        description="Print which backend runs each op here, and check every op. verify: verify "
        "all GPU kernels again. tune SCRIPT: measure the matrix products of a script.",
    )
    parser.add_argument("command", nargs="?", choices=[*COMMANDS])
    name = parser.parse_args(arguments[:1]).command
    if name:
        return COMMANDS[name](list(arguments[1:]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may close the pipe
    return main()


if __name__ == "__main__":
    sys.exit(command(*sys.argv[1:]))
