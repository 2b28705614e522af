"""Print versions, devices and backends, and check that they work: the doctor.

``python -m amp_ext verify`` verifies all GPU kernels again (verify.py), and ``python -m amp_ext
tune SCRIPT`` measures the products of a script (tune.py). The exit status is 1 if something is
broken.
"""

import argparse
import importlib
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

import amp_ext
from amp_ext._cache import device_name, devices
from amp_ext._triton import triton_version

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
    print_products()
    print_verification()
    is_installed = "in effect" if amp_ext.is_installed() else "not in effect"
    print(f"\nautocast\n  amp_ext.install() is {is_installed}")

    print("\nchecks")
    results = [passed(name, check) for name, check in all_checks()]
    for failure in failed_verifications():
        print(f"  FAIL  {failure}")
        results.append(False)
    failed = results.count(False)
    print(f"\n{failed} of {len(results)} checks FAILED" if failed else "\nall is well")
    return int(failed > 0)


# ---- the installation --------------------------------------------------------------------------


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
    from amp_ext.backend import backend_for

    print("\nbackends of ops on lists")
    for device_type in ("cpu", "cuda"):
        name, reason = backend_for(device_type)
        if device_type == "cuda" and not torch.version.cuda:
            name, reason = "none", "torch is a CPU build: for a GPU, install a CUDA build of torch"
        print(f"  {device_type:<9}{name:<9}{reason}")


def print_products() -> None:
    from amp_ext._library import _C
    from amp_ext.backend import product_choices
    from amp_ext.tune import load_table

    print(f"\nproducts, AMP_EXT_GEMM={_C.gemm_mode()}")
    for device in devices():
        try:
            for operands, (name, reason) in product_choices(device):
                print(f"  {device:<9}{operands:<24}{name:<9}{reason}")
            if measured := len(load_table(device)):
                print(f"  {device:<9}{measured} products as amp_ext.tune() has measured them")
        except (AssertionError, RuntimeError) as error:  # a GPU that cannot be used
            print(f"  {device:<9}{first_line(error)}")
    if refused := _C.refused_tensor_maps():
        print(f"  {refused} products were left to torch's library: the driver refused tensor maps")


def print_verification() -> None:
    from amp_ext import verify

    print("\nself-verification")
    if not verify.is_on():
        print("  off: AMP_EXT_VERIFY is 0")
    backends = list(verify.verified_backends())
    for backend, device, families in backends:
        by_state: dict[str, list[str]] = {}
        for family in families:
            result = verify.known(device).get(f"{backend} {family}")
            state = "not yet verified"
            if result is not None:
                state = f"{'FAILED' if result.failure else 'verified'} on {result.day}"
            by_state.setdefault(state, []).append(family)
        for state, those in by_state.items():
            print(f"  {device:<9}{backend:<9}{state}: {' '.join(those)}")
    if not backends:
        print("  no GPU kernels are in use here")


# ---- the checks --------------------------------------------------------------------------------


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
    from amp_ext.backend import backend_for

    for device in devices():
        has_lists = backend_for(device.partition(":")[0]).name != "none"
        for op in (*(amp_ext.ops.LIST_OPS if has_lists else ()), *amp_ext.ops.GEMM_OPS):
            yield f"{op} on {device}", lambda op=op, device=device: check_op(op, device)
        if has_lists:
            yield f"training step on {device}", lambda device=device: check_training(device)


def failed_verifications() -> list[str]:
    """Return the failures of kernels. The checks pass, since references run in their place."""
    from amp_ext import verify

    return [
        f"{backend} kernels of {name.partition(' ')[2]} on {device}: {result.failure}"
        for backend, device, _ in verify.verified_backends()
        for name, result in verify.known(device).items()
        if result.failure and name.startswith(f"{backend} ")
    ]


def check_op(name: str, device: str) -> None:
    """Compare the example of an op with the reference, bit by bit."""
    from amp_ext import verify

    verify.compare(next(getattr(amp_ext.ops, name).cases())._replace(op=name), torch.device(device))


def check_training(device: str) -> None:
    """Compare the gradients of a step in mixed precision with those of a step in FP32.

    FP16 represents every activation and its gradient; the gradients of the parameters need FP32.
    """
    gradients = [unscaled_gradients(device, enabled) for enabled in (True, False)]
    if not all(map(torch.equal, *gradients)):
        raise ValueError("the result differs from a step in FP32")


def unscaled_gradients(device: str, enabled: bool) -> list[Tensor]:
    """Return the gradients of one step, in mixed precision if ``enabled``."""
    linear = torch.nn.functional.linear
    generator = torch.Generator().manual_seed(0)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(-limit, limit + 1, shape, generator=generator).float().to(device)

    inputs, targets = integers(8, 8, 4), integers(100, 8, 1)
    params = [integers(2, 6, 4), integers(2, 6), integers(2, 1, 6), integers(2, 1)]
    params = [param.requires_grad_() for param in params]
    device_type = device.partition(":")[0]
    scaler = amp_ext.GradScaler(device_type, init_scale=64.0, enabled=enabled)
    # An optimizer of torch would import the compiler, and take a second.
    optimizer = SimpleNamespace(param_groups=[{"params": params}], step=lambda: None)
    with amp_ext.autocast(device_type, dtype=torch.float16, enabled=enabled):
        hidden = linear(inputs, *params[:2]).relu()
        outputs = linear(hidden, *params[2:])
        loss = torch.nn.functional.mse_loss(outputs.float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [param.grad for param in params]


def command(*arguments: str) -> object:
    """Run the doctor or a command, and return the argument of sys.exit."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext",
        description="Print which backend runs each op here, and check every op. verify: verify "
        "all GPU kernels again. tune SCRIPT: measure the matrix products of a script.",
    )
    parser.add_argument("command", nargs="?", choices=["verify", "tune"])
    name = parser.parse_args(arguments[: 2 if arguments[:1] == ("verify",) else 1]).command
    if name == "tune":
        return importlib.import_module("amp_ext.tune").main(arguments[1:])
    if name == "verify":
        return importlib.import_module("amp_ext.verify").main()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may close the pipe
    return main()


if __name__ == "__main__":
    sys.exit(command(*sys.argv[1:]))
