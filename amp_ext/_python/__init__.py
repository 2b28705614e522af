"""The package without its extension module: the names of amp_ext._C that the rest of it uses, of
torch's ops and of the Triton kernels. amp_ext._library chooses between the two.

What only the extension module does is refused where it is asked for (_library.need_extension).
"""

from amp_ext._python.autocast import (
    REGION_MARK,
    cast_weights_together,
    enter_region,
    exit_region,
    install,
    is_installed,
    uninstall,
)
from amp_ext._python.choice import (
    choose,
    cuda_built,
    gemm_mode,
    multiplies_bf16,
    put_under_test,
    set_gemm_mode,
    use_backend,
)
from amp_ext._python.ops import op_caller
from amp_ext._python.optimizer_step import OptimizerStep
from amp_ext._python.scaler import (
    check_grads,
    clip_grads,
    unscale_grads,
    unscale_grads_by,
    update_scale,
)

__all__ = [
    "REGION_MARK",
    "OptimizerStep",
    "cast_weights_together",
    "check_grads",
    "choose",
    "clip_grads",
    "cuda_built",
    "enter_region",
    "exit_region",
    "gemm_mode",
    "install",
    "is_installed",
    "multiplies_bf16",
    "op_caller",
    "put_under_test",
    "set_gemm_mode",
    "uninstall",
    "unscale_grads",
    "unscale_grads_by",
    "update_scale",
    "use_backend",
]
