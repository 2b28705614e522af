"""Print versions, devices and backends, and check that they work: the doctor.

The exit status is 1 if something is broken. ``python -m amp_ext tune SCRIPT`` measures the products
of a script (tune.py).
"""

import importlib
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

import amp_ext
from amp_ext._cache import device_name, devices
from amp_ext._triton import triton_version

import_error: ImportError | None = None
try:
    from amp_ext import verify
    from amp_ext._library import _C
    from amp_ext.backend import backend_for, product_choices
    from amp_ext.ops._numbers import integers
    from amp_ext.tune import load_table
except ImportError as error:
    import_error = error

Check = tuple[str, Callable[[], None]]


def main() -> int:
    print_versions()
    if import_error is not None:
        print(f"\nFAIL  {import_error}")
        return 1
    print_devices()
    print_backends()
    print_products()
    print("\nchecks")
    results = [passed(name, check) for name, check in all_checks()]
    failed = results.count(False)
    print(f"\n{failed} of {len(results)} checks FAILED" if failed else "\nall is well")
    return int(failed > 0)


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
    print(f"  cpu      {device_name('cpu')}, {threads}, {torch.backends.cpu.get_cpu_capability()}")
    for device in devices()[1:]:
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        print(f"  {device:<9}{device_name(device)}, {memory:.0f} GiB")
    if len(devices()) == 1:
        print(f"  cuda     {'no GPU is visible' if torch.version.cuda else 'torch is a CPU build'}")


def print_backends() -> None:
    print("\nbackends of ops on lists")
    for device_type in ("cpu", "cuda"):
        name, reason = backend_for(device_type)
        if device_type == "cuda" and not torch.version.cuda:
            name, reason = "none", "torch is a CPU build: for a GPU, install a CUDA build of torch"
        print(f"  {device_type:<9}{name:<9}{reason}")


def print_products() -> None:
    print(f"\nproducts, AMP_EXT_GEMM={_C.gemm_mode()}")
    for device in devices():
        try:
            for operands, (name, reason) in product_choices(device):
                print(f"  {device:<9}{operands:<24}{name:<9}{reason}")
            if measured := load_table(device):
                print(f"  {device:<9}{measured} products as amp_ext.tune() has measured them")
        except (AssertionError, RuntimeError) as error:  # a GPU that cannot be used
            print(f"  {device:<9}{first_line(error)}")


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def passed(name: str, check: Callable[[], None]) -> bool:
    """Run a check, print its line, and return whether it has passed."""
    try:
        check()
    except Exception as error:  # any error: the other checks still run
        print(f"  FAIL  {name}: {first_line(error)}")
        return False
    print(f"  ok    {name}")
    return True


def all_checks() -> Iterator[Check]:
    for backend, device, families in verify.verified_backends():
        for family in families:
            name = f"{backend} kernels of {family} on {device}"
            yield name, partial(check_kernels, backend, family, device)
    # Later, since other kernels run in the place of kernels that are wrong.
    for device in devices():
        for op in (*amp_ext.ops.LIST_OPS, *amp_ext.ops.GEMM_OPS):
            yield f"{op} on {device}", partial(check_op, op, device)
        yield f"training step on {device}", partial(check_training, device)


def check_kernels(backend: str, family: str, device: str) -> None:
    result = verify.verify_family(backend, family, device)
    if result is None:
        raise RuntimeError("not verified: too little memory, or an error has ended this device")
    if result.failure:
        raise verify.WrongResult(result.failure)


def check_op(name: str, device: str) -> None:
    """Compare the example of an op with the reference, bit by bit."""
    verify.compare(next(getattr(amp_ext.ops, name).cases()), torch.device(device))


def check_training(device: str) -> None:
    """Compare the gradients of a step in mixed precision with those of a step in FP32.

    FP16 represents all activations and their gradients; the gradients of parameters need FP32.
    """
    device_type = device.partition(":")[0]

    def gradients(enabled: bool) -> list[Tensor]:
        inputs, targets, *params = (
            integers(*shape, limit=limit).float().to(device)
            for shape, limit in (((16, 4), 8), ((16, 8), 100), ((8, 4), 2), ((8,), 2))
        )
        params = [param.requires_grad_() for param in params]
        # An optimizer of torch would import the compiler, and take a second.
        optimizer = SimpleNamespace(param_groups=[{"params": params}], step=lambda: None)
        scaler = amp_ext.GradScaler(device_type, init_scale=64.0, enabled=enabled)
        with amp_ext.autocast(device_type, torch.float16, enabled):
            outputs = torch.nn.functional.linear(inputs, *params)
        scaler.scale(torch.nn.functional.mse_loss(outputs.float(), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        return [param.grad for param in params]

    if not all(map(torch.equal, gradients(True), gradients(False))):
        raise ValueError("the result differs from a step in FP32")


def command(*arguments: str) -> object:
    """Run the doctor or :func:`amp_ext.tune`, and return the argument of sys.exit."""
    if arguments[:1] == ("tune",) and len(arguments) > 1 and not arguments[1].startswith("-"):
        return importlib.import_module("amp_ext.tune").main(*arguments[1:])
    if arguments:
        usage = "usage: python -m amp_ext [tune SCRIPT [ARGUMENTS]]"
        return print(usage) if arguments[-1] in ("-h", "--help") else usage
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may close the pipe
    return main()


if __name__ == "__main__":
    sys.exit(command(*sys.argv[1:]))
